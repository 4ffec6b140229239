"""m-SCT: favourite children by hand and by brute force, and devices that wait for them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from made_lists import problem
from placement_scale import layered

from apportion.place.lists.earliest_start import earliest_start
from apportion.place.lists.favourite_children import (
    dearest,
    favourite_children,
    node_edges,
    relaxed,
)
from apportion.place.lists.list_state import list_costs
from apportion.place.lists.m_sct import m_sct
from apportion.place.objective import StepObjective


def test_the_longer_child_is_the_favourite() -> None:
    # Only one of the two edges may be short, and with n1 near n2 would end at 1 + 5 + 20.
    found = favourite_children(problem([1, 4, 20], [(0, 1), (0, 2)], [5, 0, 0]))
    assert found.child.tolist() == [2, -1, -1]
    assert found.value == pytest.approx(21.0)


def test_a_chain_is_all_favourites() -> None:
    it = problem([2, 3, 4], [(0, 1), (1, 2)], [5, 5, 0])
    found = favourite_children(it)
    assert found.child.tolist() == [1, 2, -1]
    assert found.value == pytest.approx(9.0)


def test_nodes_of_one_unit_need_no_message() -> None:
    it = problem([2, 3, 4], [(0, 1), (0, 2)], [5, 0, 0], units=[0, 1, 0])
    edges, cost = node_edges(it)
    assert edges.tolist() == [[0, 1], [0, 2]]
    assert cost.tolist() == [5.0, 0.0]


def brute_force(took: np.ndarray, edges: np.ndarray, cost: np.ndarray) -> float:
    """The least longest path over all ways to choose favourites: what the program relaxes."""
    best = np.inf
    for x in product((0, 1), repeat=len(edges)):
        out, into = np.zeros(len(took)), np.zeros(len(took))
        for (a, b), value in zip(edges, x, strict=True):
            out[a] += 1 - value
            into[b] += 1 - value
        if (out > 1).any() or (into > 1).any():
            continue
        end = np.zeros(len(took))
        for node in range(len(took)):
            end[node] += took[node]
            for (a, b), c, value in zip(edges, cost, x, strict=True):
                if a == node:
                    end[b] = max(end[b], end[a] + c * value)
        best = min(best, float(end.max()))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_linear_program_bounds_all_choices_of_favourites(seed: int) -> None:
    it = layered(8, 2, seed, width=2, train=False, tight=None)
    edges, cost = node_edges(it)
    took = it.columns.duration[:, 0].astype(float)
    solved = relaxed(took, edges, cost, 5.0)
    assert solved is not None
    x, value = solved
    whole = brute_force(took, edges, cost)
    assert took.max() <= value <= whole + 1e-6
    assert value >= whole - cost.max() * len(edges) / 2
    if np.isin(np.round(x, 6), (0, 1)).all():
        assert value == pytest.approx(whole)


def test_the_relaxation_is_solved_to_optimality() -> None:
    # Two equal children: half an edge each is the optimum, 1 + 2 + 4 = 7, not 1 + 4 + 4 = 9.
    it = problem([1, 4, 4], [(0, 1), (0, 2)], [4, 0, 0])
    solved = relaxed(np.array([1.0, 4.0, 4.0]), *node_edges(it), 5.0)
    assert solved is not None
    assert solved[1] == pytest.approx(7.0)
    assert brute_force(np.array([1.0, 4.0, 4.0]), *node_edges(it)) == 9.0


def test_a_device_waits_for_the_favourite_child() -> None:
    # Without favourites n1 takes d0 at 1, and n2 runs behind it. d0 stays awake for n2 instead, and
    # n1, which is not urgent at 1, goes to d1 as soon as it can start there.
    it = problem([1, 4, 6], [(0, 1), (0, 2)], [2, 0, 0])
    costs, order = list_costs(it), np.arange(3)
    eager = earliest_start(it, costs, order, it.limit)
    assert eager.place.tolist() == [0, 0, 1]
    patient = earliest_start(it, costs, order, it.limit, np.array([2, -1, -1]))
    assert patient.place.tolist() == [0, 1, 0]
    assert patient.end.tolist() == [1, 7, 7]


def test_an_awake_device_runs_what_is_urgent() -> None:
    # d0 waits from 2 to 12 for n3, which waits for n1. n2 has no input: any device could run it.
    it = problem([2, 9, 3, 1], [(0, 3), (1, 3)], [10, 0, 0, 0])
    state = earliest_start(it, list_costs(it), np.arange(4), it.limit, np.array([3, -1, -1, -1]))
    assert state.place.tolist() == [0, 1, 0, 0]
    assert state.end.tolist() == [2, 9, 5, 10]


def test_the_dearest_edges_are_favourites_where_the_program_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = problem([1, 1, 1, 1], [(0, 2), (1, 2), (1, 3)], [5, 9, 0, 0])
    edges, cost = node_edges(it)
    assert dearest(it, edges, cost).tolist() == [-1, 2, -1, -1]
    monkeypatch.setattr("apportion.place.lists.favourite_children.LP_EDGES", 2)
    result = m_sct(StepObjective(it))
    assert "linear program" in result.notes[0]
    assert "lp" not in result.figures


def test_memory_limits_are_kept() -> None:
    it = layered(60, 4, width=6, tight=1.3, live=1)
    objective = StepObjective(it)
    result = m_sct(objective)
    assert objective.evaluate(result.placement).feasible
    assert result.figures["lp"] <= objective.score(result.placement)
