"""single: everything on the one device where that is best.

In: an objective. Out: the placement that every speed-up is measured against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.placement_problem import PlacementProblem


def one_device(
    objective: PlacementObjective,
    *,
    budget: float = 0.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """All units on one device; a unit that cannot run there goes to the first that can run it."""
    return PlacementResult(min(one_device_placements(objective.problem), key=objective.score))


def one_device_placements(problem: PlacementProblem) -> list[Ints]:
    """For each device the placement that has everything there which can run there."""
    allowed = problem.columns.allowed
    return [
        np.where(allowed[:, k], k, allowed.argmax(axis=1)).astype(np.int64)
        for k in range(len(problem.devices))
    ]
