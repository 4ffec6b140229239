"""pipedream: the planner of PipeDream without its copies of stages: a chain of merged layers, cut.

In: a ThroughputObjective. Out: a contiguous placement. The graph is made into a chain: of every
biconnected component of it, directions left aside, the nodes that others of the component read from
become one layer, as Tarnawski et al. 2020 have rebuilt it; what is left is put in the order of a
depth-first search and cut where the largest load is smallest. Nodes without time that nothing
feeds, such as inputs and masks, tie nothing together. A graph in which everything is read again far
below, such as a training step, becomes a single layer: then all of it is on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.loads.contraction import contraction
from apportion.place.loads.ideals import contiguous_result, linear_start, loads_only
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.placement_problem import PlacementProblem
from apportion.work_clock import work_seconds


def pipedream(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best cut of the chain of merged layers."""
    throughput = loads_only(objective, "pipedream")
    it = contraction(throughput.columns, throughput.edges, merged_layers(throughput.problem))
    place = linear_start(it, work_seconds() + budget)
    figures = {"layers": float(len(it.columns.resident))}
    return contiguous_result(throughput, it, place, contiguous, False, (), figures)


def merged_layers(problem: PlacementProblem) -> Ints:
    """A number for every unit, the same for those that are one layer."""
    c = problem.columns
    half = c.unit * 2 + c.backward  # forward and backward nodes of a unit are apart here
    source = np.repeat(half[c.source], np.diff(c.reader_start))
    pairs = np.unique(np.stack([source, half[c.reader]], axis=1), axis=0)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    takes = np.bincount(half, c.duration.min(axis=1), 2 * problem.units) > 0
    fed = np.zeros(2 * problem.units, np.bool_)
    fed[pairs[:, 1]] = True
    pairs = pairs[(takes | fed)[pairs[:, 0]]]
    component = _biconnected(2 * problem.units, pairs)
    parent = list(range(problem.units))

    def root(unit: int) -> int:
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    first: dict[int, int] = {}
    for (tail, _), number in zip(pairs.tolist(), component, strict=True):
        parent[root(tail // 2)] = root(first.setdefault(number, tail // 2))
    return np.array([root(unit) for unit in range(problem.units)], np.int64)


def _biconnected(count: int, pairs: Ints) -> list[int]:
    """Of each pair, as an edge without direction, its biconnected component (Tarjan's algorithm,
    with a stack of its own)."""
    beside: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for edge, (a, b) in enumerate(pairs.tolist()):
        beside[a].append((b, edge))
        beside[b].append((a, edge))
    entered, low = [-1] * count, [0] * count
    component, clock, found = [-1] * len(pairs), 0, 0
    edges: list[int] = []
    for start in range(count):
        if entered[start] >= 0:
            continue
        entered[start] = low[start] = clock
        clock += 1
        walk = [(start, -1, iter(beside[start]))]
        while walk:
            node, came, rest = walk[-1]
            for other, edge in rest:
                if edge == came or component[edge] >= 0:
                    continue
                if entered[other] < 0:
                    entered[other] = low[other] = clock
                    clock += 1
                    edges.append(edge)
                    walk.append((other, edge, iter(beside[other])))
                    break
                if entered[other] < entered[node]:
                    edges.append(edge)
                    low[node] = min(low[node], entered[other])
            else:
                walk.pop()
                if not walk:
                    continue
                above = walk[-1][0]
                low[above] = min(low[above], low[node])
                if low[node] >= entered[above]:
                    while component[came] < 0:
                        component[edges.pop()] = found
                    found += 1
    return component
