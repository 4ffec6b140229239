"""The knapsack against all combinations."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from apportion.memory.knapsack import STEPS, Saving, least_seconds


@pytest.mark.parametrize("seed", range(30))
def test_it_is_as_good_as_the_best_of_all_combinations(seed: int) -> None:
    rng = Random(seed)
    items = [
        [Saving(0, 0.0), *(Saving(rng.randint(0, 40), rng.random()) for _ in range(3))]
        for _ in range(5)
    ]
    most = sum(max(option.nbytes for option in options) for options in items)
    wanted = rng.randint(1, min(most, STEPS))
    found = least_seconds(items, wanted)
    assert found is not None
    taken = [options[number] for options, number in zip(items, found, strict=True)]
    assert sum(option.nbytes for option in taken) >= wanted
    best = min(
        sum(option.seconds for option in some)
        for some in product(*items)
        if sum(option.nbytes for option in some) >= wanted
    )
    assert sum(option.seconds for option in taken) == pytest.approx(best)


def test_what_cannot_be_saved_is_not() -> None:
    assert least_seconds([[Saving(0, 0.0), Saving(10, 1.0)]], 11) is None
    assert least_seconds([], 1) is None
    assert least_seconds([[Saving(0, 0.0), Saving(10, 1.0)]], 0) == [0]


def test_large_numbers_are_rounded_to_the_safe_side() -> None:
    items = [[Saving(0, 0.0), Saving(10**9 - 1, 1.0)] for _ in range(8)]
    found = least_seconds(items, 3 * 10**9)
    assert found is not None and sum(found) == 4
