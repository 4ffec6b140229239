"""Levels of any factors: their cost against lowering and against trying everything; topology; the
memory limit; greedy partitions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from graphs import captured, problem
from soak import kept

from apportion.columns import distinct_rows
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.topology import first_devices
from apportion.search import METHODS
from apportion.search.levels.level_costs import (
    orders,
    primes,
    seconds_per_byte,
    seconds_per_transfer,
)
from apportion.search.levels.level_grids import strategy_of_levels as strategy_of
from apportion.search.levels.levels import (
    Levels,
    Objective,
    fewest_bytes,
    polish,
    recurse,
)
from apportion.search.levels.memory_price import (
    bytes_held,
    bytes_held_by_device,
    search_within_limit,
)
from apportion.search.levels.sites import find_sites
from apportion.search.levels.tofu import bytes_moved
from apportion.search.levels.tofu_seconds import site_seconds
from apportion.search.tables.eliminate import descend
from apportion.simulate.simulate import simulate
from apportion.split.strategy import space_of, verify_strategy

EVEN = "mlp:tiny,width=12,batch=12"  # what 2, 3, 4, 6 and 12 divide


@pytest.mark.parametrize("factors", [(3,), (2, 3), (3, 2), (6,), (4,), (3, 2, 2), (12,)])
@pytest.mark.parametrize("shared", [True, False])
def test_bytes_of_any_factors_are_those_moved(factors: tuple[int, ...], shared: bool) -> None:
    space = captured(EVEN)[1]
    levels = recurse(find_sites(space, shared=shared), factors)
    strategy, devices = strategy_of(levels), math.prod(factors)
    verify_strategy(space.with_digits(strategy.digits), strategy, devices)
    moved = lower(space.with_digits(strategy.digits), strategy, devices).bytes_moved
    if shared:
        assert moved == pytest.approx(levels.bytes_moved)
    else:  # counted once per reader, fetched once
        assert moved <= levels.bytes_moved * (1 + 1e-9)


def weighted(count: int, sites: int, seed: int) -> Objective:
    rng = np.random.default_rng(seed)
    weights = tuple(sorted(rng.uniform(0.5, 3, count), reverse=True))
    return Objective(weights, tuple(rng.uniform(0, 300, count)), rng.uniform(0, 500, sites))


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_a_level_are_its_cost(seed: int) -> None:
    """Whatever is chosen at one level, the sum of its tables is the cost but for a constant."""
    sites = find_sites(captured("mlp:tiny")[1])
    levels = recurse(sites, (2, 2, 2), weighted(3, len(sites), seed))
    rng = np.random.default_rng(seed)
    for level in range(3):
        shared, domains = levels.energy([level])
        differences = []
        for _ in range(6):
            picks = rng.integers(0, shared.sizes)
            other = Levels(sites, (2, 2, 2), levels.objective, list(levels.chosen))
            other.take([level], domains, picks)
            differences.append(other.cost - shared.value(picks))
        assert np.ptp(differences) <= 1e-6 * abs(levels.cost)


@pytest.mark.slow
def test_tables_of_two_levels_are_their_cost() -> None:
    sites = find_sites(captured("mlp:tiny,width=8")[1])
    levels = recurse(sites, (2, 2, 2))
    shared, domains = levels.energy([0, 1])
    rng, differences = np.random.default_rng(0), []
    for _ in range(8):
        picks = rng.integers(0, shared.sizes)
        other = Levels(sites, (2, 2, 2), levels.objective, list(levels.chosen))
        other.take([0, 1], domains, picks)
        differences.append(other.cost - shared.value(picks))
    assert np.ptp(differences) <= 1e-6 * abs(levels.cost)


def test_no_choice_of_one_site_improves_a_level() -> None:
    sites = find_sites(captured("gpt2:tiny")[1])
    levels = polish(recurse(sites, (2, 3), weighted(2, len(sites), 1)))
    shared, _ = levels.energy([0])
    again = Levels(sites, (2, 3), levels.objective, list(levels.chosen))
    again.solve([0])
    picks = np.zeros(len(sites), np.int64)
    energy = shared.energy()
    _, least = descend(energy, picks.tolist())
    assert again.cost <= levels.cost * (1 + 1e-9)
    assert least >= shared.value(_picks(again, shared, 0)) - 1e-6 * abs(least)


def _picks(levels: Levels, shared: object, level: int) -> np.ndarray:
    domains = levels.energy([level])[1]
    chosen = levels.chosen[level]
    assert chosen is not None
    return np.array([domains[n, : chosen[n]].sum() for n in range(len(chosen))], np.int64)


@pytest.mark.slow
def test_a_batch_that_all_levels_cut_is_cut_once() -> None:
    """Digits that every site cuts together are one."""
    given = problem(8, "mlp:tiny,width=8,batch=64")
    for name in ("tofu", "data"):
        strategy = METHODS[name](given).strategy
        assert max((len(factors) for _, factors in strategy.digits), default=0) <= 4
    levels = recurse(find_sites(given.space), (8,))
    assert strategy_of(levels).digits == ()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny,heads=7,width=28", "mlp:tiny,width=7,batch=5"])
@pytest.mark.parametrize("devices", [3, 4, 6])
def test_extents_that_nothing_divides_are_cut(spec: str, devices: int) -> None:
    given = problem(devices, spec)
    for name in ("tofu", "equalchop", "icml18", "allrow-greedy", "spartan"):
        strategy = METHODS[name](given).strategy
        verify_strategy(space_of(given.space.source, strategy), strategy, devices)
        cut = [choice.count for choice in strategy.choices]
        assert max(cut) > 1, name


def test_equal_rows_are_one() -> None:
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [np.inf, 0.0]])
    index, inverse = distinct_rows(rows)
    assert np.array_equal(rows[index[inverse]], rows)
    assert len(index) == 3
    marks = np.array([[True, False] * 5, [False, True] * 5, [True, False] * 5])
    index, inverse = distinct_rows(marks)
    assert len(index) == 2 and np.array_equal(marks[index[inverse]], marks)


# The cluster


def test_primes() -> None:
    for n in range(1, 200):
        found = primes(n)
        assert math.prod(found) == n
        assert found == sorted(found, reverse=True)
        assert all(p % q for p in found for q in range(2, p))


def test_orders_follow_the_hosts() -> None:
    assert orders(cluster("3x4xh100"))[0] == (3, 2, 2)
    assert orders(cluster("2x6xh100"))[:2] == [(2, 3, 2), (3, 2, 2)]
    assert orders(cluster("8xh100")) == [(2, 2, 2), (8,)]
    assert orders(cluster("1xh100")) == [(1,)]
    assert orders(cluster("7xh100")) == [(7,)]
    for name in ("flexflow-k80", "p2.8xlarge", "mixed-a100-v100"):
        place = cluster(name)
        assert all(math.prod(order) == len(place.devices) for order in orders(place))


def test_bytes_between_hosts_are_dearer() -> None:
    place = cluster("2x4xh100")
    per_byte = seconds_per_byte(place, (2, 2, 2))
    assert per_byte[0] > 5 * per_byte[1] > 0
    fixed = seconds_per_transfer(place, (2, 2, 2))
    assert fixed[0] >= fixed[1] >= 0
    shared = cluster("p2.8xlarge")
    for link in shared.links:
        assert link.bandwidth > 0
    assert all(seconds > 0 for seconds in seconds_per_byte(shared, (2, 2, 2)))


def test_seconds_of_all_ops_are_those_of_one_device() -> None:
    given = problem(4, "gpt2:tiny")
    seconds = site_seconds(given, find_sites(given.space))
    tasks = lower(given.space, METHODS["single"](given).strategy, 1)
    line = simulate(tasks, first_devices(given.cluster, 1, "one"), given.cost)
    assert 0 < seconds.sum() <= line.step_seconds * (1 + 1e-6)


# Memory


@pytest.mark.slow
def test_a_price_on_bytes_keeps_within_the_limit() -> None:
    sites = find_sites(captured("mlp:tiny,width=16,batch=512")[1])
    whole = bytes_held(sites)
    least, most = float(whole.sum()) / 4, 0.0

    def search(burden: np.ndarray | None) -> Levels:
        return recurse(sites, (2, 2), replace(fewest_bytes(2), burden=burden))

    free = search(None)
    most = bytes_held_by_device(free, whole)
    assert least < most
    limit = (least + most) / 2
    found, fits = search_within_limit(limit, whole, search)
    assert fits and bytes_held_by_device(found, whole) <= limit
    assert found.bytes_moved >= free.bytes_moved
    assert search_within_limit(most, whole, search)[0].bytes_moved == free.bytes_moved
    assert not search_within_limit(least / 2, whole, search)[1]


@pytest.mark.slow
def test_less_memory_moves_no_fewer_bytes_and_holds_less() -> None:
    given = problem(4, "mlp:tiny,width=64,batch=8")
    free = METHODS["tofu"](given).strategy
    held_free = peak(given, free)
    tight = replace(given, memory_limit=(int(held_free * 0.7),) * 4)
    strategy = METHODS["tofu"](tight).strategy
    assert peak(given, strategy) <= held_free
    assert bytes_moved(given, strategy) >= bytes_moved(given, free)


def peak(given: object, strategy: object) -> int:
    space = space_of(given.space.source, strategy)  # type: ignore[attr-defined, arg-type]
    tasks = lower(space, strategy, given.devices)  # type: ignore[attr-defined, arg-type]
    return max(simulate(tasks, given.cluster, given.cost).peak_bytes)  # type: ignore[attr-defined]


# Other partitions


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    ["mlp:tiny", "gpt2:tiny", "rnn:tiny", pytest.param("wresnet:tiny", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("devices", kept([2, 4, 6, 8], 4, 6))
def test_tofu_moves_no_more_than_other_partitions(spec: str, devices: int) -> None:
    given = problem(devices, spec)
    least = bytes_moved(given, METHODS["tofu"](given).strategy)
    for name in ("allrow-greedy", "spartan", "equalchop", "icml18", "data", "fsdp"):
        assert least <= bytes_moved(given, METHODS[name](given).strategy), name


def test_icml18_leaves_nothing_partial() -> None:
    given = problem(4, "gpt2:tiny")
    strategy = METHODS["icml18"](given).strategy
    space = space_of(given.space.source, strategy)
    for op, choice in enumerate(strategy.choices):
        assert max(space.split(op, choice.parts).terms, default=1) == 1


@pytest.mark.slow
def test_equalchop_cuts_one_axis_into_all_devices() -> None:
    given = problem(8, "mlp:tiny,width=8,batch=16")
    for choice in METHODS["equalchop"](given).strategy.choices:
        assert choice.count in (1, 8)
        assert max(choice.parts, default=1) == choice.count


@pytest.mark.slow
def test_allrow_stores_rows() -> None:
    given = problem(4, "mlp:tiny,width=8,batch=8")
    strategy = METHODS["allrow-greedy"](given).strategy
    graph = given.space.graph
    rows = [v for v, layout in strategy.layouts.items() if len(layout.parts) > 1]
    assert rows
    for value in rows:
        shape = graph.values[value].shape
        assert shape is not None
        expected = 4 if shape[0] >= 4 else 1
        assert strategy.layouts[value].parts[0] == expected


@pytest.mark.slow
def test_a_price_paid_for_memory_is_not_given_back_for_bytes() -> None:
    """Where a limit made it give up bytes, tofu does not take data parallelism for moving fewer."""
    given = problem(4, "mlp:tiny,width=16,batch=512")
    whole = bytes_held(find_sites(given.space))
    tight = replace(given, memory_limit=(int(whole.sum() / 4) + 1,) * 4)
    strategy = METHODS["tofu"](tight).strategy
    for name in ("data", "fsdp"):
        assert strategy.choices != METHODS[name](given).strategy.choices
    assert peak(given, strategy) <= peak(given, METHODS["data"](given).strategy)
    proven = METHODS["exact"](tight, budget=3.0)
    assert proven.strategy.choices == strategy.choices
    assert proven.lower_bound is not None
    assert proven.lower_bound <= bytes_moved(given, METHODS["tofu"](given).strategy)
