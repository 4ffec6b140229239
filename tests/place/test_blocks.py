"""Contiguous blocks, m-TOPO and the expert's placement."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from made_lists import problem
from placement_scale import layered

from apportion.place.lists.blocks import balanced, contiguous_blocks, device_lists, unit_orders
from apportion.place.lists.chains import forward_edges
from apportion.place.lists.expert_placement import expert_placement
from apportion.place.lists.m_topo import m_topo
from apportion.place.lists.unit_memory import relieved, unit_bytes
from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem


def least_largest(it: PlacementProblem, order: np.ndarray) -> float:
    """Over all positions of the cuts."""
    need, k, best = unit_bytes(it)[order], len(it.devices), np.inf
    took = it.unit_seconds[order]
    for cuts in combinations(range(it.units + k - 1), k - 1):
        ends = [0, *(c - i for i, c in enumerate(cuts)), it.units]
        parts = [slice(a, b) for a, b in pairwise(ends)]
        if all(need[p].sum() <= it.limit[d] for d, p in enumerate(parts)):
            best = min(best, max(took[p, d].sum() for d, p in enumerate(parts)))
    return best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tight", [1.25, None])
def test_blocks_are_the_best_over_all_cuts(seed: int, tight: float | None) -> None:
    it = layered(24, 3, seed, width=4, unequal=True, tight=tight)
    for order, block in unit_orders(it):
        place = balanced(it, order, block, np.arange(3), it.limit)
        loads = [it.unit_seconds[place == d, d].sum() for d in range(3)]
        assert max(loads) == pytest.approx(least_largest(it, order))
        assert (np.diff(place[order]) >= 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_orders_respect_the_forward_pass(seed: int) -> None:
    it = layered(60, 3, seed, width=6)
    edges = forward_edges(it)
    orders = unit_orders(it)
    for order, block in orders:
        rank = np.empty(it.units, int)
        rank[order] = np.arange(it.units)
        assert (rank[edges[:, 0]] < rank[edges[:, 1]]).all()
        assert (np.diff(block) == 1).all()
    assert orders[0][0].tolist() != orders[1][0].tolist()


def test_units_that_depend_on_each_other_both_ways_stay_together() -> None:
    # n0 and n2 are one unit, n1 between them.
    it = problem([4, 1, 4, 4], [(0, 1), (1, 2), (2, 3)], [1, 1, 1, 0], units=[0, 1, 0, 2])
    for order, block in unit_orders(it):
        place = balanced(it, order, block, np.arange(2), it.limit)
        assert place[0] == place[1] != place[2]


def test_fewer_devices_where_that_is_better() -> None:
    it = problem([1, 1, 1, 1], [(0, 1), (1, 2), (2, 3)], [50, 50, 50, 0], devices=4)
    objective = StepObjective(it)
    assert len(set(contiguous_blocks(objective).placement.tolist())) == 1
    assert [len(d) for d in device_lists(it)] == [1, 2, 4]


def test_what_does_not_fit_is_said() -> None:
    it = problem([1, 1], [(0, 1)], [0, 0], resident=[9, 9], limits=[8, 5])
    result = contiguous_blocks(StepObjective(it))
    assert "over the memory limit" in result.notes[-1]


def test_the_expert_of_the_problem_comes_first() -> None:
    it = layered(24, 3, width=4, tight=None)
    known = np.arange(it.units) % 3
    result = expert_placement(StepObjective(replace(it, expert=known)))
    np.testing.assert_array_equal(result.placement, known)
    other = expert_placement(StepObjective(it))
    assert other.placement.tolist() == sorted(other.placement.tolist())
    assert "no expert placement is known" in other.notes[0]


def test_m_topo_fills_one_device_after_the_other() -> None:
    it = problem(
        [1] * 6, [(i, i + 1) for i in range(5)], [0] * 6, resident=[2] * 6, limits=[100, 100]
    )
    # The share is 12 / 2 and the largest unit: 8.
    assert m_topo(StepObjective(it)).placement.tolist() == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("live", [0, 1])
def test_m_topo_keeps_to_the_limits(live: int) -> None:
    it = layered(60, 3, width=6, tight=1.25, live=live)
    objective = StepObjective(it)
    assert objective.evaluate(m_topo(objective).placement).feasible


def test_units_are_moved_off_a_device_that_is_over_its_limit() -> None:
    it = problem([1] * 5, [], [0] * 5, resident=[5, 3, 2, 4, 1], limits=[9, 9], devices=2)
    objective = StepObjective(it)
    # 15 of 9 bytes on d0: the smallest unit that is enough for what is over by 6 does not exist,
    # so the largest goes, then the smallest that is enough for the last one: 1.
    place = relieved(objective, np.zeros(5, np.int64), 10)
    assert place.tolist() == [1, 0, 0, 0, 1]
    assert relieved(objective, np.zeros(5, np.int64), 1).tolist() == [1, 0, 0, 0, 0]
    never = problem([1], [], [0], resident=[50], limits=[9, 9])
    assert relieved(StepObjective(never), np.zeros(1, np.int64), 10).tolist() == [0]


def test_bytes_of_units_are_those_at_the_fullest_moment() -> None:
    # Outputs 5, 7, 1: after n1 12 are held, until n2, which reads both, is done.
    it = problem(
        [1, 1, 1, 1], [(0, 2), (1, 2), (2, 3)], [5, 7, 1, 0], resident=[1, 0, 0, 2], live=1
    )
    assert unit_bytes(it).tolist() == [6, 7, 1, 2]
    quiet = replace(it, links=it.links._replace(live=0))
    assert unit_bytes(quiet).tolist() == [1, 0, 0, 2]
