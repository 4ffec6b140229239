"""annealing: simulated annealing with moves of single units and of blocks.

In: a StepObjective. Out: the best placement found. One run over the whole budget, from hot to cold,
with the moves of step_search.py drawn over the whole graph. Starts matter less than in
local_search.py: the heat leads away from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from apportion.columns import Ints
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.searches.search_run import WalkRun, first_placements, step_objective
from apportion.place.searches.step_search import (
    MoveShares,
    enter,
    neighbourhood,
    search_state,
    walk,
)

SHARES = MoveShares(
    critical=0.3, near=0.5, group=0.3, block=0.1, grown=0.1, stretch=0.1, taken=0.1, exchange=0.05
)  # fmt: skip
PATIENCE = 4  # evaluations for each unit and device without progress before the next kick
HOT = 0.1  # by the root of the number of units: what the heat begins with, as a share of the best


def annealing(
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
    objective = step_objective(objective)
    problem = objective.problem
    g, w = neighbourhood(problem), search_state(problem, seed)
    given = (problem.columns, problem.links, objective.tables, objective.scratch, g, w)
    first = first_placements(problem, starts)
    run = WalkRun(objective, w, budget, evaluations, report)
    with run:
        for start in first:
            run.call(enter, *given, start)
        patience = PATIENCE * problem.units * len(problem.devices)
        hot = HOT / math.sqrt(problem.units)
        while not run.over:
            until = run.next_count()
            proposals = 100 * (until - run.counted)
            run.call(walk, *given, SHARES, hot, run.expected, patience, until, proposals)
    return run.result()
