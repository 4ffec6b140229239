"""restarts: moves of single units until none makes the step shorter, from many placements.

In: a StepObjective. Out: the best placement found. All moves of one unit to another device are
tried in a random order, and the first that makes the step shorter is kept; once none does, it
begins again at a random placement. The best start comes first. This is the plain method that
learned ones are to be compared with; local_search.py is the better one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints, compiled, compiled_part
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.objectives.step_time import (
    NO_LIMIT,
    StepConstants,
    StepScratch,
    step_score_part,
)
from apportion.place.placement_problem import PlacementColumns, PlacementLinks
from apportion.place.searches.random_draws import draw_below
from apportion.place.searches.search_run import WalkRun, given_placements, step_objective
from apportion.place.searches.step_search import (
    EVALUATIONS,
    FRUITLESS,
    NOW,
    Neighbourhood,
    SearchState,
    enter,
    keep_best,
    neighbourhood,
    search_state,
)

NEXT, RUNS = range(2)  # what is counted: moves of the current order, and random placements


def restarts(
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
    order, counts = np.arange(len(g.able), dtype=np.int64), np.array([len(g.able), 0], np.int64)
    owner = np.repeat(np.arange(problem.units), np.diff(g.able_start))
    given = (problem.columns, problem.links, objective.tables, objective.scratch, g, w)
    first = given_placements(problem, starts)
    run = WalkRun(objective, w, budget, evaluations, report)
    with run:
        for start in first:
            run.call(enter, *given, start)
        while not run.over:
            run.call(_descend, *given, owner, order, counts, run.next_count())
    return run.result(descents=float(counts[RUNS]))


@compiled
def _descend(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    g: Neighbourhood,
    w: SearchState,
    owner: Ints,
    order: Ints,
    counts: Ints,
    until: int,
) -> None:
    """Goes on until there have been so many evaluations. `order` has all moves, as places in
    `g.able`."""
    while w.counts[EVALUATIONS] < until:
        if w.scores[NOW] == np.inf or w.counts[FRUITLESS] >= len(order):
            _scatter(g, w)
            counts[RUNS] += 1
            w.counts[FRUITLESS] = 0
            w.scores[NOW] = step_score_part(c, links, t, s, w.place, float(NO_LIMIT))
            w.counts[EVALUATIONS] += 1
            keep_best(w, w.place, w.scores[NOW])
            continue
        if counts[NEXT] >= len(order):
            _shuffle(w, order)
            counts[NEXT] = 0
        move = order[counts[NEXT]]
        counts[NEXT] += 1
        w.counts[FRUITLESS] += 1
        unit, device = owner[move], g.able[move]
        former = w.place[unit]
        if former == device:
            continue
        w.place[unit] = device
        score = step_score_part(c, links, t, s, w.place, w.scores[NOW])
        w.counts[EVALUATIONS] += 1
        if score < w.scores[NOW]:
            w.scores[NOW] = score
            w.counts[FRUITLESS] = 0
            keep_best(w, w.place, score)
        else:
            w.place[unit] = former


@compiled_part
def _scatter(g: Neighbourhood, w: SearchState) -> None:
    """A random device for each unit."""
    for unit in range(len(w.place)):
        able = g.able_start[unit + 1] - g.able_start[unit]
        w.place[unit] = g.able[g.able_start[unit] + draw_below(w.random, able)]


@compiled_part
def _shuffle(w: SearchState, order: Ints) -> None:
    for last in range(len(order) - 1, 0, -1):
        other = draw_below(w.random, last + 1)
        order[last], order[other] = order[other], order[last]
