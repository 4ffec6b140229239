"""exact: its space and its optimum against trying every set of levels for every class."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest
from graphs import Maker, problem

from apportion.search.levels.exact import certify_levels, exact, solve_jointly, untie_loops
from apportion.search.levels.joint_levels import (
    LevelSets,
    can_all_cut,
    disputed_class,
    domains_of,
    free_sets,
    given_sets,
    joint_energy,
    levels_of,
    levels_on_sites,
    picks_of,
)
from apportion.search.levels.level_grids import strategy_of_levels
from apportion.search.levels.levels import Levels, fewest_bytes, polish, recurse
from apportion.search.levels.sites import Sites, find_sites
from apportion.search.levels.tofu import bytes_moved, partition, tofu
from apportion.search.problem import Progress
from apportion.search.tables.eliminate import minimise_shared
from apportion.split.space import Space
from apportion.split.strategy import space_of, verify_strategy

FOREVER = math.inf
MODULE = import_module("apportion.search.levels.exact")  # the package has a function of that name


def product_of_three(rows: int, inner: int, columns: int, last: int) -> Sites:
    """(a b) + c, then its product with d: four classes, each of the given extent."""
    m = Maker()
    a, b = m.value(rows, inner), m.value(inner, columns)
    c, d = m.value(rows, columns), m.value(columns, last)
    ab = m.op("aten.mm.default", a, b, out=(rows, columns))
    added = m.op("aten.add.Tensor", ab, c, out=(rows, columns))
    m.op("aten.mm.default", added, d, out=(rows, last))
    m.op("aten.neg.default", added, out=(rows, columns))
    return find_sites(Space(m.graph()), shared=False)


def undecided(sites: Sites, factors: tuple[int, ...]) -> Levels:
    return Levels(sites, factors, fewest_bytes(len(factors)))


def tried(sites: Sites, factors: tuple[int, ...]) -> float:
    """The fewest bytes of all partitions: every class with each of its sets, each time solved
    exactly."""
    levels = undecided(sites, factors)
    window = range(len(factors))
    used = sorted({int(g) for g in sites.classes if g >= 0})
    free = free_sets(levels, window)
    least = math.inf
    for some in product(*(free[g] for g in used)):
        sets: list[LevelSets] = [(frozenset(),) for _ in free]
        for group, one in zip(used, some, strict=True):
            sets[group] = (one,)
        shared, domains = joint_energy(levels, window, sets)
        picks, _ = minimise_shared(shared)
        found = levels_of(levels, window, domains, picks)
        assert disputed_class(found, free) is None
        least = min(least, found.bytes_moved)
    return least


@pytest.mark.parametrize(
    ("extent", "rigid", "factors", "whether"),
    [
        (8, False, (2, 2, 2), True),
        (8, False, (2, 2, 2, 2), False),
        (7, False, (2,), True),
        (7, False, (2, 2), False),
        (6, False, (2, 2), True),  # 3 are left for the second, unevenly
        (6, False, (3, 2), True),
        (5, False, (3, 2), False),
        (8, False, (3, 2), True),
        (8, True, (2, 2), False),
        (8, True, (2,), True),
        (2, False, (3,), False),
        (1, False, (), True),
    ],
)
def test_levels_that_can_all_cut_a_class(
    extent: int, rigid: bool, factors: tuple[int, ...], whether: bool
) -> None:
    assert can_all_cut(extent, rigid, factors) == whether


def test_sets_are_the_largest_that_fit() -> None:
    sites = product_of_three(8, 6, 2, 1)
    levels = undecided(sites, (2, 2, 2))
    for extent, sets in zip(sites.extents.tolist(), free_sets(levels, range(3)), strict=True):
        sizes = {1: 0, 2: 1, 6: 2, 8: 3}
        assert {len(some) for some in sets} == {sizes[extent]}
        assert len(sets) == math.comb(3, sizes[extent])
    for sets in free_sets(levels, range(2)):  # a class may be left to the third level
        assert all(some <= {0, 1} for some in sets)
    two = free_sets(levels, range(2))[sites.extents.tolist().index(2)]
    assert set(two) == {frozenset(), frozenset({0}), frozenset({1})}


@pytest.mark.parametrize("factors", [(2,), (2, 2), (3, 2), (2, 2, 2)])
def test_joint_tables_cost_what_levels_do(factors: tuple[int, ...]) -> None:
    levels = polish(recurse(product_of_three(12, 6, 8, 4), factors))
    window = range(len(factors))
    shared, domains = joint_energy(levels, window, given_sets(levels, window))
    picks = picks_of(levels, window, domains)
    again = levels_of(levels, window, domains, picks.tolist())
    assert [c.tolist() for c in again.chosen if c is not None] == [
        c.tolist() for c in levels.chosen if c is not None
    ]
    assert shared.value(picks) == pytest.approx(levels.bytes_moved, abs=0.1)


def test_free_domains_have_every_partition() -> None:
    levels = undecided(product_of_three(2, 6, 2, 4), (2, 2, 2))
    window = range(3)
    free = free_sets(levels, window)
    every = domains_of(levels.sites, window, free)
    outside = 0
    for some in product(*free):
        inside = domains_of(levels.sites, window, [(one,) for one in some])
        assert not (inside & ~every).any()
        outside += bool((every & ~inside).any())
    assert outside


@pytest.mark.parametrize("extents", [(8, 8, 8, 8), (2, 6, 2, 4), (4, 2, 7, 3), (3, 5, 2, 2)])
@pytest.mark.parametrize("factors", [(2,), (2, 2), (3, 2), (2, 2, 2)])
def test_exact_equals_trying_every_set_of_levels(
    extents: tuple[int, int, int, int], factors: tuple[int, ...]
) -> None:
    sites = product_of_three(*extents)
    least = tried(sites, factors)
    start = recurse(sites, factors)
    found = solve_jointly(start, FOREVER)
    assert disputed_class(found.levels, free_sets(start, range(len(factors)))) is None
    assert found.levels.bytes_moved == pytest.approx(least)
    assert found.bound <= least
    assert found.bound == pytest.approx(least, abs=0.1)


def test_some_recursion_is_improved_by_deciding_jointly() -> None:
    m = Maker()
    hidden = m.op("aten.mm.default", m.value(16, 8), m.value(8, 12), out=(16, 12))
    m.op("aten.mm.default", hidden, m.value(12, 24), out=(16, 24))
    sites = find_sites(Space(m.graph()), shared=False)
    start = recurse(sites, (2, 2))
    assert start.bytes_moved == 768 * 4
    found = solve_jointly(start, FOREVER)
    assert found.levels.bytes_moved == tried(sites, (2, 2)) == 704 * 4
    assert found.bound == pytest.approx(704 * 4, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny,layers=1", "rnn:tiny"])
@pytest.mark.parametrize("devices", [2, 4, 6])
def test_exact_is_never_worse_than_tofu_and_never_below_its_bound(spec: str, devices: int) -> None:
    asked = problem(devices, spec)
    found = exact(asked, budget=20)
    assert found.lower_bound is not None
    verify_strategy(space_of(asked.space.source, found.strategy), found.strategy, devices)
    assert bytes_moved(asked, found.strategy) >= found.lower_bound
    assert "bytes moved as modelled, over grids of" in found.bound_of
    assert partition(asked).bytes_moved >= found.lower_bound


@pytest.mark.slow
def test_exact_reports_its_bound_as_it_rises() -> None:
    told: list[Progress] = []
    exact(replace(problem(4), report=told.append), budget=20)
    bounds = [p.bound for p in told if p.what == "exact" and p.bound is not None]
    assert bounds
    assert bounds == sorted(bounds)


def test_out_of_time_it_returns_what_tofu_found() -> None:
    asked = problem(4)
    found = exact(asked, budget=0.0)
    assert bytes_moved(asked, found.strategy) <= bytes_moved(asked, tofu(asked).strategy)
    assert found.lower_bound is not None


@pytest.mark.slow
def test_steps_of_loops_are_free_of_each_other() -> None:
    space = problem(4, "rnn:tiny").space
    tied = find_sites(space, tied=True)
    levels = recurse(tied, (2, 2))
    free = untie_loops(levels)
    assert len(free.sites) > len(tied)
    assert free.bytes_moved == pytest.approx(levels.bytes_moved)
    assert levels_on_sites(free, free.sites).bytes_moved == free.bytes_moved
    assert strategy_of_levels(free).choices == strategy_of_levels(levels).choices


def test_a_certificate_says_how_far_from_the_best_levels_are() -> None:
    sites = product_of_three(8, 8, 8, 8)
    best = solve_jointly(recurse(sites, (2, 2)), FOREVER).levels
    assert certify_levels(best).gap < 1e-3
    worse = recurse(product_of_three(4, 2, 7, 3), (2, 2))
    assert worse.bytes_moved == 220
    assert certify_levels(worse).gap == pytest.approx(1 - 80 / 220, abs=1e-3)


@pytest.mark.slow
def test_too_many_levels_are_decided_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = product_of_three(16, 16, 16, 16)
    start = recurse(sites, (2, 2, 2, 2))
    whole = solve_jointly(start, FOREVER)
    assert whole.depth == 4
    monkeypatch.setattr(MODULE, "ENTRIES", 400)
    parts = solve_jointly(start, FOREVER)
    assert 0 < parts.depth < 4
    assert parts.bound <= whole.bound <= parts.levels.bytes_moved <= start.bytes_moved
    monkeypatch.setattr(MODULE, "ENTRIES", 1)
    assert solve_jointly(start, FOREVER).levels is start
