"""annealing: simulated annealing with moves of single units and of blocks.

In: a StepObjective. Out: the best placement found. One run over the whole budget, from hot to cold,
with the moves of step_search.py drawn over the whole graph. Starts matter less than in
local_search.py: the heat leads away from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.objective import Objective, PlacementResult, Report
from apportion.place.search_run import WalkRun, first_placements, step_objective
from apportion.place.step_search import (
    BEST,
    NEVER_KICK,
    enter,
    neighbourhood,
    search_state,
    walk,
)

MIX = (0.3, 0.5, 0.4, 0.15, 0.15, 0.15, 0.15, 0.1, 0.1, 0)
HOT = 0.01  # the first temperature, as a share of the time of the first placement


def annealing(
    objective: Objective,
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
    g, w, mix = neighbourhood(problem), search_state(problem, seed), np.array(MIX)
    given = (problem.columns, problem.links, objective.tables, objective.scratch, g, w)
    first = first_placements(problem, starts)
    run = WalkRun(objective, w, budget, evaluations, report)
    with run:
        for start in first:
            run.call(enter, *given, start)
        hot = HOT * w.scores[BEST]
        while not run.over:
            until = run.next_count()
            proposals = 100 * (until - run.counted)
            run.call(walk, *given, mix, hot, run.expected, NEVER_KICK, until, proposals)
    return run.result()
