"""cut_graph: a placement problem as partitioners of graphs see it; what METIS and Scotch share.

In: a PlacementProblem. Out: a CutGraph, without directions. Vertices are units, weighted by their
time on the fastest device; edges between units by the transfers of the distinct nodes that one
reads from the other. Memory, directions and order are left out, as in the published comparisons.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, offsets
from apportion.place.lists.path_levels import mean_transfer
from apportion.place.placement_problem import PlacementProblem

MICRO = 1e6  # weights are whole numbers: millionths of the problem's unit of time
WHOLE = float(1 << 30)  # and all weights together fit in 32 bits


class CutGraph(NamedTuple):
    """Neighbours of each vertex, each edge in both directions, and weights of both."""

    start: Ints  # u + 1
    neighbour: Ints
    edge_weight: Ints
    vertex_weight: Ints  # u
    devices: Ints  # those that get a part
    share: Floats  # of the work, for each of them; all sum to 1


def cut_graph(problem: PlacementProblem) -> CutGraph:
    """The graph to cut, and over which devices."""
    c = problem.columns
    time = np.where(c.allowed, problem.unit_seconds, np.inf).min(axis=1)
    one, two, weight = _crossings(problem)
    order = np.lexsort((two, one))
    devices, share = _devices(problem)
    return CutGraph(
        offsets(np.bincount(one, minlength=problem.units)), two[order], _whole(weight[order], 1),
        _whole(time, 0), devices, share,
    )  # fmt: skip


def _whole(weight: Floats, least: int) -> Ints:
    """Weights as whole numbers."""
    scale = min(MICRO, WHOLE / max(float(weight.sum()), 1e-300))
    return np.maximum(np.rint(weight * scale), least).astype(np.int64)


def _crossings(problem: PlacementProblem) -> tuple[Ints, Ints, Floats]:
    """Pairs of units, in both directions, and what it costs to cut between them."""
    c = problem.columns
    cost = mean_transfer(problem) / problem.tick
    made = np.arange(len(c.source))
    if problem.transfer is not None:
        cost, made = problem.transfer, c.source
    rows = np.repeat(made, np.diff(c.reader_start))
    source = c.unit[np.repeat(c.source, np.diff(c.reader_start))]
    target = c.unit[c.reader]
    apart = np.stack([source, target, rows], axis=1)[source != target]
    if not len(apart):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    apart = np.unique(apart, axis=0)
    both = np.concatenate([apart[:, :2], apart[:, 1::-1]])
    pairs, which = np.unique(both, axis=0, return_inverse=True)
    weight = np.bincount(which.ravel(), np.tile(cost[apart[:, 2]], 2), len(pairs))
    return pairs[:, 0], pairs[:, 1], weight.astype(np.float64)


def _devices(problem: PlacementProblem) -> tuple[Ints, Floats]:
    """Accelerators, or all devices where none is marked as a CPU; shares by their speeds."""
    kinds = [device.kind for device in problem.devices]
    use = np.array([kind != "cpu" for kind in kinds])
    if not use.any():
        use[:] = True
    devices = np.flatnonzero(use)
    allowed = problem.columns.allowed[:, devices]
    both = allowed.all(axis=1)
    time = problem.unit_seconds[:, devices][both].sum(axis=0)
    if not both.any() or not (time > 0).all():
        return devices, np.full(len(devices), 1.0 / len(devices))
    return devices, (1.0 / time) / (1.0 / time).sum()


def placement_of_parts(problem: PlacementProblem, graph: CutGraph, part: Ints) -> Ints:
    """The device of each unit; what cannot run on its part's device goes to its fastest."""
    place = graph.devices[np.asarray(part, np.int64)]
    allowed = problem.columns.allowed
    fastest = np.where(allowed, problem.unit_seconds, np.inf).argmin(axis=1)
    return np.where(allowed[np.arange(len(place)), place], place, fastest).astype(np.int64)


def cut_weight(graph: CutGraph, part: Ints) -> int:
    """The weight of all edges between parts."""
    one = np.repeat(np.arange(len(graph.vertex_weight)), np.diff(graph.start))
    return int(graph.edge_weight[part[one] != part[graph.neighbour]].sum()) // 2
