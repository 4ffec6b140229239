"""simple_bound: what no placement can beat, whatever the method.

In: a PlacementProblem and the name of an objective. Out: a lower bound in the problem's unit of
time: the longest path, every node on its fastest device and nothing sent (step and latency); the
longest unit, and all work divided over the devices by how fast they are at best (step and
throughput).
"""

from __future__ import annotations

import numpy as np

from apportion.place.objective_names import LATENCY, THROUGHPUT
from apportion.place.placement_problem import NEVER, PlacementProblem


def simple_bound(problem: PlacementProblem, objective: str) -> float:
    """A lower bound on the objective of every placement."""
    c = problem.columns
    bounds = [0.0]
    if objective != LATENCY:
        times = np.where(c.allowed, problem.unit_seconds, np.inf)
        least = times.min(axis=1)
        busy = least > 0
        # In one unit of time a device does at most so much of what the fastest would do.
        speeds = (least[busy, None] / times[busy]).max(axis=0, initial=0.0)
        bounds += [float(least.max(initial=0.0)), float(least.sum() / max(speeds.sum(), 1.0))]
    if objective != THROUGHPUT:
        can = c.allowed[c.unit] & (c.duration < NEVER)
        fastest = np.where(can, c.duration, NEVER).min(axis=1)
        begin = np.zeros(len(c.unit), np.int64)
        for output, source in enumerate(c.source):  # rising: all that the source waits for is known
            readers = c.reader[c.reader_start[output] : c.reader_start[output + 1]]
            begin[readers] = np.maximum(begin[readers], begin[source] + fastest[source])
        bounds.append(float((begin + fastest).max(initial=0)) / problem.tick)
    return max(bounds)
