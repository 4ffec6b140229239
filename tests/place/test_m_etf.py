"""m-ETF: hand-worked schedules, and a plain twin that looks at every pair."""

from __future__ import annotations

import numpy as np
import pytest
from made_lists import problem
from placement_scale import layered

from apportion.place.lists.earliest_start import earliest_start
from apportion.place.lists.list_state import list_costs
from apportion.place.lists.m_etf import m_etf
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem


def test_a_diamond_by_hand() -> None:
    # n0 ends at 2 on d0. n1 starts there at 2. n2 could start on d0 at 5, on d1 at 3: d1, until 6.
    # n3 could start on d0 at 7, when n2's output is there, on d1 at 6: d1.
    it = problem([2, 3, 3, 1], [(0, 1), (0, 2), (1, 3), (2, 3)], [1, 1, 1, 0])
    state = earliest_start(it, list_costs(it), np.arange(4), it.limit)
    assert state.place.tolist() == [0, 0, 1, 1]
    assert state.end.tolist() == [2, 5, 6, 7]
    objective = StepObjective(it)
    assert objective.score(m_etf(objective).placement) == 7


def test_equal_starts_go_by_the_order_and_to_the_first_device() -> None:
    it = problem([4, 4, 4], [], [0, 0, 0], devices=2)
    assert earliest_start(it, list_costs(it), np.arange(3), it.limit).place.tolist() == [0, 1, 0]
    other = earliest_start(it, list_costs(it), np.array([2, 0, 1]), it.limit)
    assert other.place.tolist() == [1, 0, 0]


def test_a_unit_follows_its_first_node_and_is_judged_as_a_whole() -> None:
    # On d1 the first node of unit 1 is faster, but its second node is far slower.
    it = problem([[5, 5], [5, 4], [5, 50]], [(0, 2), (1, 2)], [0, 0, 0], units=[0, 1, 1], devices=2)
    state = earliest_start(it, list_costs(it), np.arange(3), it.limit)
    assert state.place[1] == 0


def plain_twin(it: PlacementProblem, order: np.ndarray, room: np.ndarray) -> list[int]:
    """Earliest task first over all pairs of ready nodes and devices, links without queues."""
    c, links, k = it.columns, it.links, len(it.devices)
    costs = list_costs(it)
    place, used = [-1] * it.units, [0] * k
    end, free = [-1] * len(c.unit), [0] * k
    rank = {int(node): i for i, node in enumerate(order)}
    reads: list[list[int]] = [[] for _ in c.unit]
    for output, source in enumerate(c.source):
        for at in range(c.reader_start[output], c.reader_start[output + 1]):
            reads[c.reader[at]].append(output)
            assert source < c.reader[at]

    def ready(node: int, d: int) -> int:
        found = 0
        for output in reads[node]:
            s = int(c.source[output])
            a, t = place[c.unit[s]], end[s]
            if a != d:
                first, last = links.hop_start[a * k + d], links.hop_start[a * k + d + 1]
                hops = [int(np.rint(c.send[output] * p)) for p in links.hop_pace[first:last]]
                t += max(hops, default=0) + int(np.rint(links.lag[a, d]))
            found = max(found, t)
        return found

    while min(end) < 0:
        pairs = []
        for node in range(len(end)):
            if end[node] >= 0 or any(end[c.source[o]] < 0 for o in reads[node]):
                continue
            u = int(c.unit[node])
            for d in range(k):
                if place[u] == d or (place[u] < 0 and used[d] + costs.need[u] <= room[d]):
                    start = max(ready(node, d), free[d])
                    pairs.append((start + int(costs.extra[u, d]), rank[node], d, start))
        _, which, d, start = min(pairs)
        node = int(order[which])
        u = int(c.unit[node])
        if place[u] < 0:
            place[u] = d
            used[d] += int(costs.need[u])
        end[node] = free[d] = start + int(c.duration[node, d])
    return place


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("unequal", [False, True])
def test_heaps_find_what_looking_at_all_pairs_finds(seed: int, unequal: bool) -> None:
    it = layered(40, 3, seed, width=6, unequal=unequal, tight=1.5, lag=7)
    order = np.random.default_rng(seed).permutation(40)
    costs = list_costs(it, contend=False)
    state = earliest_start(it, costs, order, it.limit)
    assert state.place.tolist() == plain_twin(it, order, it.limit)


def test_memory_limits_are_kept() -> None:
    it = layered(60, 4, width=6, tight=1.3, live=1)
    objective = StepObjective(it)
    result = m_etf(objective)
    assert objective.evaluate(result.placement).feasible
    assert len(result.notes) == 1  # which variant it was
    free = StepObjective(layered(60, 4, width=6, tight=None, live=1))
    assert free.score(m_etf(free).placement) <= objective.score(result.placement)


def test_what_fits_nowhere_goes_where_it_does_least_harm_and_is_said() -> None:
    it = problem(
        [3, 3, 3], [(0, 2), (1, 2)], [1, 1, 0], resident=[60, 60, 60], limits=[100, 70], devices=2
    )
    objective = StepObjective(it)
    result = m_etf(objective)
    memory = objective.evaluate(result.placement).memory
    assert memory.tolist() == [120, 60]
    assert result.notes[-1] == "over the memory limit: d0 would hold 120 of 100 bytes"


def test_a_device_that_cannot_run_a_unit_never_gets_it() -> None:
    it = layered(40, 2, width=4, tight=None)
    it.columns.allowed[::2, 1] = False
    place = m_etf(StepObjective(it)).placement
    assert (place[::2] == 0).all()
    assert (place == 1).any()


@pytest.mark.slow
def test_compiled_and_interpreted_agree() -> None:
    from apportion.place.lists import earliest_start as module

    it = layered(80, 3, width=6, live=1, lag=3)
    favourite = np.where(np.arange(80) % 3 == 0, np.minimum(np.arange(80) + 1, 79), -1)
    for child in (None, favourite):
        costs = list_costs(it)
        first = earliest_start(it, costs, np.arange(80), it.limit, child)
        kept, module._schedule.native = module._schedule.native, module._schedule.dispatcher
        try:
            second = earliest_start(it, costs, np.arange(80), it.limit, child)
        finally:
            module._schedule.native = kept
        for one, two in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, two)
