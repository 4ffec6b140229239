"""local-search: random moves from good placements, those that make the step shorter are kept.

In: a StepObjective and placements to begin with. Out: the best placement found. It begins at the
best of the starts; the moves are those of step_search.py, single units and blocks, most of them on
the critical chain. Moves that make the step a little longer are kept as well, ever fewer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.objective import Objective, PlacementResult, Report, StepObjective
from apportion.place.search_run import SearchRun, first_placements
from apportion.place.step_search import (
    BEST,
    enter,
    neighbourhood,
    search_state,
    walk,
)

MIX = (0.8, 0.5, 0.4, 0.15, 0.15, 0.15, 0.15, 0.1, 0.1, 3)
PATIENCE = 2  # evaluations for each unit and device without progress before the next kick
HOT = 0.0005  # the temperature, as a share of the time of the first placement


def local_search(
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
    assert isinstance(objective, StepObjective)
    problem = objective.problem
    g, w, mix = neighbourhood(problem), search_state(problem, seed), np.array(MIX)
    given = (problem.columns, problem.links, objective.tables, objective.scratch, g, w)
    run = SearchRun(objective, w, budget, evaluations, report)
    first = first_placements(problem, starts)
    with run:
        for start in first:
            run.call(enter, *given, start)
        patience = PATIENCE * problem.units * len(problem.devices)
        hot = HOT * w.scores[BEST]
        while not run.over:
            until = run.next_count()
            proposals = 100 * (until - run.counted)
            run.call(walk, *given, mix, hot, run.expected, patience, until, proposals)
    return run.result()
