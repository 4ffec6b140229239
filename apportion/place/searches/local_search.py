"""local-search: random moves from good placements, those that make the step shorter are kept.

In: a StepObjective and placements to begin with. Out: the best placement found. It begins at the
best of the starts; the moves are those of step_search.py, single units and blocks, most of them on
the critical chain. Moves that make the step a little longer are kept as well, ever fewer; the more
evaluations there will be, the longer it stays with such moves. A walk that makes no progress begins
again a few moves from the best.
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
    critical=0.6, near=0.5, group=0.5, block=0.2, grown=0.05, stretch=0.05, taken=0.05,
    exchange=0.03,
)  # fmt: skip
PATIENCE = 2  # evaluations for each unit and device without progress before the next kick
HOT = 0.0003  # by the root of evaluations per unit: the first temperature, as a share of the best
HOTTEST = 0.003


def local_search(
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
        while not run.over:
            until = run.next_count()
            hot = min(HOT * math.sqrt(run.expected / problem.units), HOTTEST)
            proposals = 100 * (until - run.counted)
            run.call(walk, *given, SHARES, hot, run.expected, patience, until, proposals)
    return run.result()
