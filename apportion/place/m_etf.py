"""m-etf: earliest task first within memory limits.

In: an Objective. Out: Baechi's m-ETF: of all ready nodes and all devices with room, the pair that
can start first (earliest_start.py); with and without joined chains, and the better of the two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.chains import joined_chains
from apportion.place.earliest_start import earliest_start
from apportion.place.list_state import list_costs
from apportion.place.objective import Objective, PlacementResult, PlacerProgress, Report
from apportion.place.unit_memory import excess_note, within_limits


def m_etf(
    objective: Objective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The better of two schedules: of chains of units, and of units."""
    problem, began = objective.problem, time.perf_counter()
    order = np.arange(len(problem.columns.unit))
    best, score = None, np.inf
    for joined in (joined_chains(problem), None):
        if best is not None and time.perf_counter() - began > budget / 2:
            break
        costs = list_costs(problem, joined)

        def fill(room: Floats, joined: Ints | None = joined, costs=costs) -> Ints:  # type: ignore[no-untyped-def]
            place = earliest_start(problem, costs, order, room).place
            return place if joined is None else place[joined]

        place, found = within_limits(objective, fill)
        if best is None or found < score:
            best, score = place, found
        if report is not None:
            report(PlacerProgress(score, None, objective.evaluations))
    assert best is not None
    return PlacementResult(best, notes=excess_note(objective, best))
