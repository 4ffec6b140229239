"""Levels that cut classes along which Ops must know their place: against the splits themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from graphs import Maker

from apportion.search.levels.level_grids import checked_result
from apportion.search.levels.level_places import even_and_uneven_levels
from apportion.search.levels.levels import Levels, fewest_bytes
from apportion.search.levels.sites import Sites, find_sites
from apportion.split.space import Space

SUM = 2


def two_losses(rows: int, classes: int) -> Space:
    """Two losses, for which the number of a class is a value: one of what is made row by row, one
    of what is made class by class."""
    make = Maker()
    x = make.value(rows, classes)
    labels = make.value(rows, dtype="int64")
    ways = [make.op("aten.cumsum.default", x, d, None, out=(rows, classes)) for d in (1, 0)]
    make.op("aten.add.Tensor", *ways, out=(rows, classes))
    for way in ways:
        make.several("aten.nll_loss_forward.default", way, labels, None, SUM, -100, outs=[(), ()])
    return make.space()


def decided_at_random(sites: Sites, factors: tuple[int, ...], seed: int) -> Levels:
    rng = np.random.default_rng(seed)
    levels = Levels(sites, factors, fewest_bytes(len(factors)))
    for level in range(len(factors)):
        shared, domains = levels.energy([level])
        levels.take([level], domains, rng.integers(0, shared.sizes))
    return levels


@pytest.mark.parametrize("classes", [16, 24, 20])
@pytest.mark.parametrize("factors", [(2, 2, 2), (2, 2, 3), (3, 2, 2)])
def test_what_is_scattered_is_refused(factors: tuple[int, ...], classes: int) -> None:
    sites = find_sites(two_losses(math.prod(factors), classes))
    seen = set()
    for seed in range(60):
        levels = decided_at_random(sites, factors, seed)
        seen.add(levels.scattered)
        assert checked_result(levels)[1] is not levels.scattered
    assert seen == {True, False}


def solved(sites: Sites, factors: tuple[int, ...], joint: bool, seed: int) -> Levels:
    """Levels with any bytes between sites, the first decided at random, the others solved."""
    rng = np.random.default_rng(seed)
    given = replace(sites, nbytes=rng.exponential(1, len(sites.nbytes)) ** 3)
    levels = Levels(given, factors, fewest_bytes(len(factors)))
    shared, domains = levels.energy([0])
    levels.take([0], domains, rng.integers(0, shared.sizes))
    others = range(1, len(factors))
    for some in [others] if joint else [[n] for n in others]:
        levels.solve(some)
    return levels


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("factors", [(2, 2, 2), (3, 2, 2), (2, 3, 2)])
def test_no_solution_is_scattered(
    factors: tuple[int, ...], joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = find_sites(two_losses(math.prod(factors), 24))
    found = [solved(sites, factors, joint, seed) for seed in range(40)]
    assert not any(levels.scattered for levels in found)
    assert all(checked_result(levels)[1] for levels in found)
    monkeypatch.setattr("apportion.search.levels.levels.scatters_parts", lambda *_: False)
    free = [solved(sites, factors, joint, seed) for seed in range(40)]
    monkeypatch.undo()
    assert any(levels.scattered for levels in free)
    for levels, other in zip(found, free, strict=True):
        assert other.scattered or levels.cost == pytest.approx(other.cost)


def test_an_extent_is_divided_evenly_by_all_but_one() -> None:
    for extent in range(2, 70):
        for factors in ((2, 2, 2), (2, 2, 3), (3, 2, 2), (2, 2, 2, 5)):
            for size in range(1, len(factors) + 1):
                for taken in combinations(range(len(factors)), size):
                    even, uneven = even_and_uneven_levels(extent, taken, factors)
                    assert sorted([*even, *uneven]) == list(taken)
                    product = math.prod(factors[n] for n in even)
                    assert extent % product == 0
                    assert all(extent // product % factors[n] for n in uneven[:1])


def test_levels_of_more_sets_come_first() -> None:
    sets = [frozenset[int](), frozenset({2}), frozenset({2, 1})]
    assert even_and_uneven_levels(8, [0, 1, 2], (2, 2, 2), sets) == ([2, 1, 0], [])
    assert even_and_uneven_levels(12, [0, 1, 2], (2, 2, 2), sets) == ([2, 1], [0])
