"""best_of: the best of several placements that take no search, for placers with variants.

In: an objective, and named functions that make a placement and its score. Out: a PlacementResult
with the best, the score of each as a figure, and a curve. The first is always made; the others
until the budget is spent or somebody interrupts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from apportion.columns import Ints
from apportion.place.lists.unit_memory import excess_note
from apportion.place.objective import PlacementObjective, PlacementResult, PlacerProgress, Report
from apportion.work_clock import work_seconds

Attempt = tuple[str, Callable[[], tuple[Ints, float]]]


def best_of(
    objective: PlacementObjective,
    attempts: Iterable[Attempt],
    budget: float,
    report: Report | None = None,
    notes: tuple[str, ...] = (),
) -> PlacementResult:
    """The best placement; notes say which it was and by how much it is over a memory limit."""
    began = work_seconds()
    best, score, chosen, interrupted = np.zeros(0, np.int64), np.inf, "", False
    figures: dict[str, float] = {}
    curve: list[tuple[float, int, float]] = []
    for name, attempt in attempts:
        if figures and work_seconds() - began > budget:
            break
        try:
            place, figures[name] = attempt()
        except KeyboardInterrupt:
            if not figures:
                raise
            interrupted = True
            break
        if not curve or figures[name] < score:
            best, score, chosen = place, figures[name], name
            curve.append((work_seconds() - began, objective.evaluations, score))
        if report is not None:
            report(PlacerProgress(score, None, objective.evaluations))
    notes = (*notes, f"the best variant is {chosen}", *excess_note(objective, best))
    return PlacementResult(best, None, notes, tuple(curve), figures, interrupted)
