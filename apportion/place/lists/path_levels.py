"""path_levels: how far each node is from the end of the step, for the order of list schedulers.

In: a PlacementProblem. Out: for every node the longest path from its start to the end (its
b-level) and from the beginning to its start (its t-level), in ticks: mean durations over the
devices that can run the node, with or without the mean time of a transfer on each edge.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Floats, Ints, compiled
from apportion.place.placement_problem import NEVER, PlacementColumns, PlacementProblem


def mean_duration(problem: PlacementProblem) -> Floats:
    """n: ticks, the mean over the devices that can run the node."""
    duration = problem.columns.duration
    can = duration < NEVER
    total: Floats = np.where(can, duration, 0).sum(axis=1) / np.maximum(can.sum(axis=1), 1)
    return total


def mean_transfer(problem: PlacementProblem) -> Floats:
    """m: ticks that sending an output takes on its own, the mean over pairs of two devices."""
    links, k, c = problem.links, len(problem.devices), problem.columns
    pairs = [(a, b) for a in range(k) for b in range(k) if a != b]
    if not pairs:
        return np.zeros(len(c.source))
    pace = np.zeros(len(pairs))
    for row, (a, b) in enumerate(pairs):
        first, last = links.hop_start[a * k + b], links.hop_start[a * k + b + 1]
        pace[row] = links.hop_pace[first:last].max(initial=0.0)
    lag = np.mean([links.lag[pair] for pair in pairs])
    drag = np.mean([links.drag[pair] for pair in pairs])
    found: Floats = lag + (pace.mean() + drag) * c.send
    return found


def levels(problem: PlacementProblem, transfers: float = 1.0) -> tuple[Floats, Floats]:
    """b-levels and t-levels of all nodes, with so much of each transfer's time."""
    send = transfers * mean_transfer(problem)
    below, above = _levels(problem.columns, mean_duration(problem), send)
    return below, above


@compiled
def _levels(c: PlacementColumns, took: Floats, send: Floats) -> tuple[Floats, Floats]:
    n = len(took)
    below, above = np.zeros(n), np.zeros(n)
    for node in range(n - 1, -1, -1):
        for output in range(c.output_start[node], c.output_start[node + 1]):
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                below[node] = max(below[node], send[output] + below[c.reader[at]])
        below[node] += took[node]
    for node in range(n):
        for output in range(c.output_start[node], c.output_start[node + 1]):
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                later = c.reader[at]
                above[later] = max(above[later], above[node] + took[node] + send[output])
    return below, above


def ranks(keys: Floats) -> Ints:
    """The position of each node if the largest key comes first, ties by index."""
    found = np.empty(len(keys), np.int64)
    found[np.argsort(-keys, kind="stable")] = np.arange(len(keys))
    return found
