"""METIS and Scotch: the graph that they are given, and cuts that are easy to see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from made_lists import problem

from apportion.place.cuts.cut_graph import cut_graph, cut_weight
from apportion.place.cuts.metis import metis
from apportion.place.cuts.scotch import scotch
from apportion.place.objective import PlacementResult, StepObjective
from apportion.place.placement_problem import PlacementDevice, PlacementProblem

BOTH = [pytest.param(metis, "pymetis", id="metis"), pytest.param(scotch, "pyscotch", id="scotch")]


def two_cliques() -> PlacementProblem:
    """Nodes 0..5 and 6..11, each tied together by heavy outputs, and one light edge between."""
    edges = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    edges += [(a + 6, b + 6) for a, b in edges] + [(5, 6)]
    return problem([10] * 12, edges, [9] * 5 + [1] + [9] * 5 + [0], tick=1e3)


@pytest.mark.parametrize(("place", "package"), BOTH)
def test_the_light_edge_is_cut(place: Callable[..., PlacementResult], package: str) -> None:
    pytest.importorskip(package)
    it = two_cliques()
    result = place(StepObjective(it))
    assert len(set(result.placement[:6].tolist())) == 1
    assert len(set(result.placement[6:].tolist())) == 1
    assert result.placement[0] != result.placement[6]
    assert result.figures["cut"] == 1000  # one tick of a thousandth, in millionths
    again = place(StepObjective(it))
    np.testing.assert_array_equal(result.placement, again.placement)


@pytest.mark.parametrize(("place", "package"), BOTH)
def test_parts_go_to_accelerators_by_their_speeds(
    place: Callable[..., PlacementResult], package: str
) -> None:
    pytest.importorskip(package)
    times = np.tile([[10, 30, 100]], (200, 1))
    it = problem(times, [(i, i + 1) for i in range(199)], [1] * 199 + [0], devices=3)
    cpu = replace(it, devices=(*it.devices[:2], PlacementDevice("cpu0", "cpu")))
    placed = place(StepObjective(cpu)).placement
    count = np.bincount(placed, minlength=3)
    assert count[2] == 0
    assert 135 <= count[0] <= 165  # three quarters


@pytest.mark.parametrize(("place", "package"), BOTH)
def test_fewer_units_than_devices(place: Callable[..., PlacementResult], package: str) -> None:
    pytest.importorskip(package)
    it = problem([1, 1], [(0, 1)], [1, 0], devices=4)
    assert place(StepObjective(it)).placement.tolist() == [0, 1]


@pytest.mark.parametrize(("place", "package"), BOTH)
def test_a_missing_package_is_one_sentence(
    place: Callable[..., PlacementResult], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs {package}.*pip install apportion\[partition\]"):
        place(StepObjective(two_cliques()))


def test_edges_weigh_the_distinct_nodes_between_units() -> None:
    # n0 and n1 are one unit; n2 and n3, which both read n0, another: n0's output counts once.
    it = problem([1, 2, 3, 4], [(0, 2), (0, 3), (1, 3)], [5, 7, 0, 0], units=[0, 0, 1, 1], tick=1e6)
    graph = cut_graph(it)
    assert graph.neighbour.tolist() == [1, 0]
    assert graph.edge_weight.tolist() == [12, 12]
    assert graph.vertex_weight.tolist() == [3, 7]
    assert cut_weight(graph, np.array([0, 1])) == 12
    own = replace(it, transfer=np.array([2e-6, 3e-6, 0.0, 0.0]))
    assert cut_graph(own).edge_weight.tolist() == [5, 5]


def test_weights_fit_in_32_bits() -> None:
    it = problem([10**12] * 4, [(0, 1), (1, 2), (2, 3)], [1e12, 1e11, 1e12, 0])
    graph = cut_graph(it)
    assert 0 < graph.vertex_weight.sum() < 1 << 31
    assert 0 < graph.edge_weight.sum() < 1 << 31
