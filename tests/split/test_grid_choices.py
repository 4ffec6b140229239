"""The grids of axes: all of them, each once, in order."""

from __future__ import annotations

import math
from itertools import product

import pytest

from apportion.split.grid_choices import axes_cut, divisors, one_cut, part_grids


def test_grids_of_small_axes() -> None:
    assert part_grids((4, 3, 1), 6) == [(2, 3, 1), (3, 2, 1)]
    assert part_grids((8, 8), 4) == [(1, 4), (2, 2), (4, 1)]
    assert part_grids((2,), 4) == []
    assert part_grids((), 1) == [()]


@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 6, 8, 12])
def test_grids_are_all_that_there_are(count: int, fewest: int) -> None:
    extents = (4, 3, 6, 2)
    every = product(*(range(fewest, extent + 1) for extent in extents))
    expected = [g for g in every if math.prod(g) == count and axes_cut(g) <= 2]
    assert part_grids(extents, count, fewest=fewest, most_axes=2) == expected


def test_one_cut_and_divisors() -> None:
    assert one_cut(3, 1) == (1, 2, 1)
    assert one_cut(3, 0, 5) == (5, 1, 1)
    assert one_cut(2, -1) == (1, 1)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
