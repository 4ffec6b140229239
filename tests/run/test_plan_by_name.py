"""A cluster may be given to `plan` and `compare` by its name."""

from __future__ import annotations

import pytest
from graphs import captured

import apportion as ap


@pytest.mark.slow
def test_a_name_is_as_good_as_the_cluster() -> None:
    program, _ = captured("mlp:tiny")
    named = ap.plan(program, "4xh100", method="data")
    assert named.strategy == ap.plan(program, ap.cluster("4xh100"), method="data").strategy
    assert [p.method for p in ap.compare(program, "4xh100", ["data", "single"])] == [
        p.method for p in ap.compare(program, ap.cluster("4xh100"), ["data", "single"])
    ]


def test_an_unknown_name_is_said() -> None:
    program, _ = captured("mlp:tiny")
    with pytest.raises(ValueError, match="4xh1000"):
        ap.plan(program, "4xh1000", method="data")
