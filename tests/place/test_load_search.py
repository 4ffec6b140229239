"""Annealing on loads: it keeps to limits, repeats itself, and finds small optima."""

from __future__ import annotations

import numpy as np
import pytest
from made_up_loads import drawn

from apportion.place.loads.exhaustive_placement import alike, exhaustive, placements
from apportion.place.loads.load_search import (
    LoadSearch,
    anneal_loads,
    descend_loads,
    load_search,
    neighbours,
)
from apportion.place.objectives.max_load import (
    ThroughputObjective,
    largest_load,
    load_state,
    memory_over,
)


def rounds(judge, count, seed=0, starts=()):
    search = LoadSearch(judge, seed, starts)
    for _ in range(count):
        search.run_round(np.inf)
    return search


@pytest.mark.slow
def test_finds_the_optimum_of_small_problems():
    for seed in range(60):
        judge = ThroughputObjective(drawn(seed), apart=seed % 4 == 0)
        oracle = exhaustive(judge)
        if oracle.lower_bound is None:
            continue
        search = rounds(judge, 4)
        assert judge.evaluate(search.placement).feasible, seed
        assert search.score == pytest.approx(oracle.lower_bound), seed
        found = load_search(judge, budget=0.0)
        assert found.lower_bound <= oracle.lower_bound + 1e-9


@pytest.mark.slow
def test_repeats_itself():
    judge = ThroughputObjective(drawn(7))
    one, other = rounds(judge, 2, seed=5), rounds(judge, 2, seed=5)
    assert one.placement.tolist() == other.placement.tolist()
    assert one.rng.integers(1 << 30) == other.rng.integers(1 << 30)


@pytest.mark.slow
def test_interpreted_and_compiled_annealing_are_the_same():
    judge = ThroughputObjective(drawn(11))
    c, rng = judge.columns, np.random.default_rng(3)
    start = np.array([int(np.flatnonzero(row)[0]) for row in c.allowed])
    near_start, near = neighbours(c)
    free = np.arange(len(c.resident))
    draws, chances = rng.integers(0, 1 << 31, (300, 4)), np.linspace(3.0, 0.01, 16)
    found = []
    for run in (anneal_loads.plain, anneal_loads.dispatcher):
        state, best = load_state(c, start), start.copy()
        ticks = run(
            c, state, best, 1 << 60, near_start, near, free, draws, chances, 0.05, 0.99
        )  # fmt: skip
        found.append((int(ticks), best.tolist(), state.place.tolist(), state.loads.tolist()))
    assert found[0] == found[1]


def test_descent_ends_where_no_single_move_is_better():
    for seed in range(15):
        judge = ThroughputObjective(drawn(seed))
        c = judge.columns
        start = np.array([int(np.flatnonzero(row)[-1]) for row in c.allowed])
        state = load_state(c, start)
        before = largest_load(c, state)
        over = memory_over(c, state)
        descend_loads(c, state, np.arange(len(start)), 1, 1 << 40)
        assert memory_over(c, state) <= over
        if not over:
            assert largest_load(c, state) <= before
        now = judge.score(state.place)
        for unit in range(len(start)):
            for device in np.flatnonzero(c.allowed[unit]):
                other = state.place.copy()
                other[unit] = device
                assert judge.score(other) >= now - 1e-9


def test_starts_are_never_made_worse():
    judge = ThroughputObjective(drawn(3))
    best = exhaustive(judge).placement
    assert judge.score(load_search(judge, budget=0.0, starts=[best]).placement) == judge.score(best)


def test_refuses_what_it_cannot_keep_to():
    with pytest.raises(ValueError, match="contiguous"):
        load_search(ThroughputObjective(drawn(0), contiguous=True))
    with pytest.raises(ValueError, match="contiguous"):
        load_search(ThroughputObjective(drawn(0)), contiguous=True)


def test_interchangeable_devices_are_tried_once():
    for seed in range(30):
        it = drawn(seed, most=4)
        judge = ThroughputObjective(it)
        k = len(it.devices)
        every = np.stack(np.meshgrid(*[np.arange(k)] * it.units, indexing="ij"), -1)
        every = [
            p for p in every.reshape(-1, it.units) if it.columns.allowed[range(it.units), p].all()
        ]
        some = [p.copy() for p in placements(it)]
        assert len(some) < len(every) or len(set(alike(it))) == k
        assert min(map(judge.score, some)) == min(map(judge.score, every))
