"""List scheduling: legal schedules, the optimum on small problems, and its variants."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from made_lists import problem
from placement_scale import layered

from apportion.place.best_of import Attempt, best_of
from apportion.place.lists.chains import joined_chains
from apportion.place.lists.earliest_start import earliest_start
from apportion.place.lists.list_schedule import (
    VARIANTS,
    ListVariant,
    earliest_finish,
    list_schedule,
    list_variant,
    priority_order,
)
from apportion.place.lists.list_state import ListState, list_costs
from apportion.place.lists.path_levels import levels
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem


def optimum(objective: StepObjective) -> float:
    """Exhaustive search."""
    devices, units = len(objective.problem.devices), objective.problem.units
    return min(objective.score(np.array(p)) for p in product(range(devices), repeat=units))


def check_legal(it: PlacementProblem, state: ListState, contend: bool) -> None:
    """Devices and links serve one at a time, and nothing starts before its inputs are there."""
    c, links, k = it.columns, it.links, len(it.devices)
    device = state.place[c.unit]
    took = c.duration[np.arange(len(device)), device]
    start = state.end - took
    for d in range(k):
        mine = np.flatnonzero(device == d)
        mine = mine[np.argsort(start[mine], kind="stable")]
        assert (start[mine][1:] >= state.end[mine][:-1]).all()
    busy: dict[int, list[tuple[float, float]]] = {}
    for output, source in enumerate(c.source):
        for at in range(c.reader_start[output], c.reader_start[output + 1]):
            reader = c.reader[at]
            a, b = device[source], device[reader]
            arrived = state.end[source] if a == b else state.arrival[output, b]
            assert state.end[source] <= arrived <= start[reader]
        for b in range(k):
            if state.arrival[output, b] >= 0 and b != device[source]:
                wire = c.send[output] * links.hop_pace[links.hop_start[device[source] * k + b]]
                ends = state.arrival[output, b] - links.lag[device[source], b]
                assert ends - wire >= state.end[source]
                busy.setdefault(int(device[source]), []).append((ends - wire, ends))
    for times in busy.values() if contend else ():
        times.sort()
        assert all(one[1] <= two[0] for one, two in pairwise(times))


@pytest.mark.parametrize("name", VARIANTS)
def test_schedules_are_legal(name: str) -> None:
    it, rules = layered(50, 3, 1, width=5, lag=3), VARIANTS[name]
    costs = list_costs(it, None, rules.contend)
    order = priority_order(it, rules.priority)
    if rules.pairs:
        state = earliest_start(it, costs, order, it.limit)
    else:
        state = earliest_finish(it, costs, order, it.limit, rules)
    assert (state.end >= 0).all()
    check_legal(it, state, rules.contend)
    assert (state.used <= it.limit).all()


def test_heft_by_hand() -> None:
    # b-levels with sends of 2: n3 1, n1 1 + 2 + 2 = 5, n2 4 + 2 + 1 = 7, n0 3 + 2 + 7 = 12.
    it = problem([3, 2, 4, 1], [(0, 1), (0, 2), (1, 3), (2, 3)], [2, 2, 2, 0])
    below, above = levels(it)
    assert below.tolist() == [12, 5, 7, 1]
    assert above.tolist() == [0, 5, 5, 11]
    assert levels(it, 0.0)[0].tolist() == [8, 3, 5, 1]
    assert priority_order(it, "bottom").tolist() == [0, 2, 1, 3]
    # n2 stays on d0 until 7; n1 runs on d1 from 5 to 7; n3 on d0 at 9, on d1 at 9: the lighter one.
    state = earliest_finish(it, list_costs(it), np.array([0, 2, 1, 3]), it.limit, VARIANTS["heft"])
    assert state.place.tolist() == [0, 1, 0, 1]
    assert state.end.tolist() == [3, 7, 7, 10]


@pytest.mark.parametrize("seed", range(4))
def test_never_below_the_optimum_and_near_it(seed: int) -> None:
    it = layered(14, 2, seed, width=3, tight=1.4)
    objective = StepObjective(it)
    best = optimum(objective)
    found = list_schedule(objective, budget=1e9)
    assert best <= objective.score(found.placement) <= 1.25 * best


def test_the_best_variant_is_returned() -> None:
    objective = StepObjective(layered(60, 3, 2, width=6))
    result = list_schedule(objective, budget=1e9)
    assert set(result.figures) == set(VARIANTS)
    assert objective.score(result.placement) == min(result.figures.values())
    assert result.curve[-1][2] == min(result.figures.values())
    again = list_schedule(StepObjective(layered(60, 3, 2, width=6)), budget=1e9)
    np.testing.assert_array_equal(result.placement, again.placement)


def test_a_fast_device_gets_more_work() -> None:
    it = layered(80, 2, width=40, train=False, unequal=True, tight=None)  # d1 is half as fast
    objective = StepObjective(it)
    place, _ = list_variant(objective, VARIANTS["heft"], np.arange(it.units))
    count = np.bincount(place, minlength=2)
    assert count[0] > 1.4 * count[1] > 0


def test_no_time_left_means_one_variant() -> None:
    assert len(list_schedule(StepObjective(layered(30, 2, width=4)), budget=0.0).figures) == 1


def test_chains_are_joined_within_a_share_of_the_memory() -> None:
    chain = problem([1] * 6, [(i, i + 1) for i in range(5)], [1] * 6)
    assert joined_chains(chain).tolist() == [0] * 6
    full = problem(
        [1] * 8, [(i, i + 1) for i in range(7)], [1] * 8, resident=[1] * 8, limits=[8, 8]
    )
    assert joined_chains(full).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    fork = problem([9] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)], [1] * 4)
    assert joined_chains(fork).tolist() == [0, 1, 2, 3]


def test_a_chain_follows_the_forward_pass() -> None:
    # n0 -> n1 -> n2 forward, n3 -> n4 -> n5 backward of the units 2, 1, 0.
    it = problem(
        [1] * 6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (1, 4)], [1] * 6,
        units=[0, 1, 2, 2, 1, 0], backward=[0, 0, 0, 1, 1, 1],
    )  # fmt: skip
    assert joined_chains(it).tolist() == [0, 0, 0]


def test_parameters_and_views_of_them_decide_nothing() -> None:
    # n0 is a parameter of unit 1, n2 what is made of it at once; n3, on what n1 makes, decides.
    it = problem(
        [0, 500, 1, 400, 600], [(0, 2), (1, 3), (2, 3)], [1, 90, 1, 0, 0], units=[1, 0, 1, 1, 2]
    )
    costs = list_costs(it)
    assert costs.given.tolist() == [1, 0, 0, 0, 0]
    free = problem([0, 500, 1, 400], [(1, 3), (2, 3)], [1, 90, 1, 0], units=[1, 0, 1, 1])
    assert list_costs(free).given.tolist() == [1, 0, 1, 0]
    alone = problem([0, 5, 5], [(0, 1), (0, 2)], [9, 0, 0])
    state = earliest_finish(alone, list_costs(alone), np.arange(3), alone.limit, VARIANTS["heft"])
    assert list_costs(alone).given.tolist() == [1, 0, 0]
    assert state.place.tolist() == [0, 0, 1]
    kept = problem([0, 5], [(0, 1)], [1, 0], resident=[7, 0])
    assert list_costs(kept).given.tolist() == [0, 0]  # it needs room, so it is placed like others


def test_ties_are_all_messages_of_two_units() -> None:
    # n0 sends forward to n1 and n2, which are one unit; n3 sends back to n4, a part of n0's unit.
    it = problem([1] * 5, [(0, 1), (0, 2), (2, 3), (3, 4)], [5, 0, 6, 7, 0], units=[0, 1, 1, 1, 0])
    costs = list_costs(it)
    assert costs.tie.tolist() == [1, 0]
    assert costs.tie_ticks.tolist() == [12, 12]  # n0's output once, and n3's


def test_what_pulls_keeps_units_together() -> None:
    # n1 could start on d1 at 2 and on d0 at 4, but 9 more ticks would go back and forth.
    it = problem([1, 3, 3, 2], [(0, 1), (0, 2), (2, 3)], [1, 0, 9, 0], units=[0, 1, 2, 0])
    costs = list_costs(it)
    loose = earliest_finish(it, costs, np.arange(4), it.limit, ListVariant("order"))
    tight = earliest_finish(it, costs, np.arange(4), it.limit, ListVariant("order", pull=1.0))
    assert loose.place.tolist() == [0, 0, 1]
    assert tight.place.tolist() == [0, 0, 0]


def test_an_interrupt_returns_what_is_known() -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    objective = StepObjective(layered(20, 2, width=4, tight=None))
    known = objective.problem.units * [0]

    def attempts() -> Iterator[Attempt]:
        yield "first", lambda: (np.array(known), 5.0)
        yield "second", stopped  # type: ignore[misc]

    result = best_of(objective, attempts(), 10.0)
    assert result.interrupted
    assert result.placement.tolist() == known
    with pytest.raises(KeyboardInterrupt):
        best_of(objective, [("first", stopped)], 10.0)  # type: ignore[list-item]
