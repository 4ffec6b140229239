"""Placeto's families, re-created."""

from __future__ import annotations

import pytest

from apportion import zoo
from apportion.learn.families import FAMILY_NAMES, graph_family


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_family_has_32_models_that_the_zoo_knows_and_a_quarter_is_held_out(name: str) -> None:
    family = graph_family(name)
    assert len(family.specs) == len(set(family.specs)) == 32
    assert (len(family.train), len(family.test)) == (24, 8)
    assert family.groups == {"cifar10": 128, "ptb": 128, "nmt": 160}[name]
    assert family == graph_family(name)
    for spec in (family.train[0], family.test[-1]):
        assert zoo.load(spec, meta=True).name == spec


def test_an_unknown_family_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="no family 'vgg' of graphs; there are cifar10, ptb, nmt"):
        graph_family("vgg")
