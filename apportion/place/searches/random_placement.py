"""random: placements drawn at random, and the best of them.

In: an objective. Out: the best of as many placements as there is time for, each unit on any device
that can run it, all alike. What every search has to beat at an equal number of evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Bools, Ints
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.searches.search_run import SearchRun, given_placements


def random_placement(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
) -> PlacementResult:
    """Never worse than its starts. With `evaluations` it ends after so many instead of by time."""
    allowed = objective.problem.columns.allowed
    rng = np.random.default_rng(seed)
    first = given_placements(objective.problem, starts)
    run = SearchRun(objective, budget, evaluations, report)
    with run:
        for start in first:
            run.score(start)
        while not run.over:
            run.score(drawn_placement(allowed, rng))
    return run.result()


def drawn_placement(allowed: Bools, rng: np.random.Generator) -> Ints:
    """A random device for each unit, of those that can run it."""
    keys = np.where(allowed, rng.random(allowed.shape), -1.0)
    found: Ints = keys.argmax(axis=1).astype(np.int64)
    return found
