"""best_placement: the best of the placements that training looks at.

In: an objective, and placements one after the other. Out: of each its seconds and whether it fits;
and the best of them, with the curve of when it was found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from apportion.columns import Ints
from apportion.place import PlacementObjective

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(eq=False)
class BestPlacement:
    """The nearest to fitting so far, and of those the fastest."""

    objective: PlacementObjective
    began: float  # when training did, of time.perf_counter()
    best: Ints | None = None
    over: float = np.inf  # the share by which `best` is over a limit
    value: float = np.inf  # in the problem's unit of time
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    used: int = 0  # evaluations

    def judge(self, placement: Ints) -> tuple[float, bool]:
        """Its seconds and whether it fits: one evaluation."""
        over, value = judged(self.objective, placement)
        self.used += 1
        if (over, value) < (self.over, self.value):
            self.best, self.over, self.value = placement.copy(), over, value
            if over == 0:
                self.curve.append((time.perf_counter() - self.began, self.used, value))
        return value * SECONDS.get(self.objective.problem.time_unit, 1.0), over == 0


def judged(objective: PlacementObjective, placement: Ints) -> tuple[float, float]:
    """The share by which a placement is over a limit, and its value. One evaluation."""
    limit = objective.problem.limit
    if np.isinf(limit).all():
        return 0.0, objective.score(placement)
    found = objective.evaluate(placement)
    if found.feasible:
        return 0.0, found.value
    return max(float(((found.memory - limit) / np.maximum(limit, 1.0)).max()), 1e-12), found.value
