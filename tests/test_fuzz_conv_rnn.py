"""A share of the fuzz for convolutional and recurrent nets; benchmarks/fuzz.py has the rest."""

from __future__ import annotations

from random import Random

import pytest
from graphs import captured, problem
from test_execute import compare

from apportion.search.data import data
from apportion.search.random import draw
from apportion.search.single import single

MODELS = ["wresnet:tiny", "rnn:tiny"]


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", MODELS)
def test_random_strategies_train_the_same_model(spec: str, devices: int) -> None:
    program, space = captured(spec)
    for seed in range(2):
        strategy = draw(space, devices, Random(1000 * devices + seed))
        found = compare(program, space, strategy, devices, seed=seed)
        assert found.equal, (devices, seed, found)


def test_random_strategies_have_halos() -> None:
    """What makes these models harder than the others does occur."""
    _, space = captured("wresnet:tiny")
    strategy = draw(space, 2, Random(2000))
    splits = [space.split(op, choice.parts) for op, choice in enumerate(strategy.choices)]
    pads = [pad for split in splits for part in split.parts for pad in part.pads]
    partial = [n for split in splits for n in split.terms if n > 1]
    assert len(pads) > 10 and len(partial) > 10


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", MODELS)
def test_data_parallelism_equals_the_single_device(spec: str, devices: int) -> None:
    program, space = captured(spec)
    found = compare(program, space, data(problem(devices, spec)).strategy, devices)
    assert found.equal, found


@pytest.mark.parametrize("spec", MODELS)
def test_the_step_as_it_was_written(spec: str) -> None:
    program, space = captured(spec)
    assert compare(program, space, single(problem(2, spec)).strategy, 2).equal
