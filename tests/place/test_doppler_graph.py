"""Graphs of DOPPLER, and its rule for the time of a step."""

from __future__ import annotations

import heapq
from itertools import product

import numpy as np
import pytest
from placement_graphs import DOPPLER_TEXT

from apportion.columns import Ints
from apportion.place.imports.doppler_graph import read_doppler
from apportion.place.imports.imported import imported_problem
from apportion.place.objectives.step_time import simulate_step
from apportion.place.placement_problem import PlacementProblem


def test_a_small_graph_in_all_its_parts() -> None:
    found = read_doppler(DOPPLER_TEXT, "small")
    graph = found.graph
    assert [op.name for op in graph.ops] == ["0", "1", "2", "3", "4"]
    assert [op.kind for op in graph.ops][:2] == ["imported", "formation"]
    assert graph.ops[0].imported is not None
    assert graph.ops[0].imported.times == (("acc", 2.0),)
    assert graph.ops[0].imported.transfer == 8.0
    assert list(graph.consumers) == [(2, 3), (2, 3), (4,)]  # one edge was twice
    assert not found.notes and found.accelerators == 4


def plain_step(problem: PlacementProblem, device: Ints) -> float:
    """DOPPLER's simulator in the plainest form: first come first served, free links."""
    c, n = problem.columns, len(problem.columns.unit)
    edges = [
        (int(c.source[o]), int(r))
        for o in range(len(c.source))
        for r in c.reader[c.reader_start[o] : c.reader_start[o + 1]]
    ]
    waits = [sum(b == node for _, b in edges) for node in range(n)]
    ready, free, last = [0.0] * n, [0.0] * len(problem.devices), 0.0
    queue = [(0.0, node) for node in range(n) if not waits[node]]
    assert problem.transfer is not None
    while queue:
        when, node = heapq.heappop(queue)
        here = int(device[node])
        end = max(when, free[here]) + c.duration[node, here] / problem.tick
        free[here], last = end, max(last, end)
        for a, b in edges:
            if a == node:
                sent = 0.0 if device[b] == here else float(problem.transfer[a])
                ready[b] = max(ready[b], end + sent)
                waits[b] -= 1
                if not waits[b]:
                    heapq.heappush(queue, (ready[b], b))
    return last


def test_the_time_of_every_placement_is_that_of_the_plain_simulator() -> None:
    problem = imported_problem(read_doppler(DOPPLER_TEXT, "small"), accelerators=2)
    assert problem.tick == 1e10
    times = set()
    for device in product(range(2), repeat=5):
        place = np.array(device, np.int64)
        took = simulate_step(problem, place).ticks / problem.tick
        assert took == pytest.approx(plain_step(problem, place), abs=1e-9), device
        times.add(took)
    assert len(times) > 5 and min(times) < 12.0  # one device: 2 + 3 + 1 + 5 + 1


def test_a_target_that_is_written_unlike_the_others_is_pointed_out() -> None:
    found = read_doppler(DOPPLER_TEXT.replace("2, 2, 3, 4", "2,2, 3, 4"), "small")
    (note,) = found.notes
    assert "the edge from 1 to 2" in note and "taken as it is" in note
    assert found.graph == read_doppler(DOPPLER_TEXT, "small").graph
    assert not read_doppler(DOPPLER_TEXT.replace(", ", ","), "tight throughout").notes


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("7\n", "seven\n", "line 1 has 'seven' instead of a node's number"),
        ("7\n", "7, 8\n", "line 1 is not the number of nodes"),
        ("7\n", "9\n", "says 9 nodes, line 2 that 2 of them are inputs, and there are costs of 5"),
        ("0, 1,\n", "0, 0,\n", "line 2 has an input twice"),
        ("2, 2, 3, 4, 3, 2", "2, 2, 3, 4, 3", "line 3 has 6 sources and line 4 5 targets"),
        ("2, 2, 3, 4, 3, 2", "2, 2, 3, 9, 3, 2", "the edge from 2 to 9 names node 9"),
        ("2, 2, 3, 4, 3, 2", "2, 2, 3, -4, 3, 2", "line 4 has '-4'"),
        ("2, 2, 3, 4, 3, 2", "2, 2, 1, 4, 3, 2", "a cycle through node 1"),
        ("20000000000,8", "-20000000000,8", "the computation of node 0 is -2.0"),
        ("20000000000,8", "nan,8", "the computation of node 0 is nan"),
        ("20000000000,8", "much,8", "the computation of node 0 .line 5. is 'much'"),
        ("20000000000,8", "1e300,8", "that cannot be a time"),
        ("20000000000,80000000000", "20000000000", "line 5 is not the costs of a node"),
    ],
)
def test_a_bad_graph_is_refused_in_a_sentence(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        read_doppler(DOPPLER_TEXT.replace(old, new, 1), "bad")
    assert "\n" not in str(error.value)


def test_what_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="the file has 2 lines"):
        read_doppler("3\n0\n", "bad")
    with pytest.raises(ValueError, match="no nodes"):
        read_doppler("1\n0\n\n\n", "bad")
