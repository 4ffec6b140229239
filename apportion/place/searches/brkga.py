"""brkga: a genetic algorithm with biased random keys (Goncalves and Resende 2011), as in REGAL.

In: an objective. Out: the best placement found. A chromosome has a key between 0 and 1 for every
unit and device; a unit is on the device with its largest key, of those that can run it. In each
generation the best chromosomes stay, some are new, and each of the others has the keys of a parent
among the best with a fixed probability, else of any other parent. REGAL's further keys order the
nodes; here the rules of the objective do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.searches.search_run import SearchRun, given_placements

POPULATION = 100
BEST_KEPT = 20
NEW = 15  # random chromosomes in each generation
BIAS = 0.7  # of taking a key from the parent among the best


def brkga(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
    evaluations: int | None = None,
) -> PlacementResult:
    """Never worse than its starts, which are among the first chromosomes. With `evaluations` it
    ends after so many instead of by time."""
    allowed = objective.problem.columns.allowed
    rng = np.random.default_rng(seed)
    first = given_placements(objective.problem, starts)
    keys = rng.random((max(POPULATION, len(first)), *allowed.shape))
    for row, start in enumerate(first):
        keys[row] *= 0.5
        keys[row, np.arange(len(start)), start] += 0.5
    run = SearchRun(objective, budget, evaluations, report)
    generations = 0
    with run:
        scores = np.full(len(keys), np.inf)
        _judge(run, keys, scores, 0)
        while not run.over:
            order = np.argsort(scores, kind="stable")
            keys, scores = keys[order], scores[order]
            keys[BEST_KEPT:] = _next_keys(keys, rng)
            _judge(run, keys, scores, BEST_KEPT)
            generations += 1
    return run.result(generations=float(generations))


def _judge(run: SearchRun, keys: Floats, scores: Floats, first: int) -> None:
    """Fills in the scores from a row on, as long as the budget lasts."""
    allowed = run.objective.problem.columns.allowed
    scores[first:] = np.inf
    for row in range(first, len(keys)):
        if run.over:
            return
        place = np.where(allowed, keys[row], -1.0).argmax(axis=1).astype(np.int64)
        scores[row] = run.score(place)


def _next_keys(keys: Floats, rng: np.random.Generator) -> Floats:
    """Children of rows in the order of their scores, then new chromosomes."""
    children = len(keys) - BEST_KEPT - NEW
    one = rng.integers(0, BEST_KEPT, children)
    other = rng.integers(BEST_KEPT, len(keys), children)
    biased = rng.random((children, *keys.shape[1:])) < BIAS
    mixed = np.where(biased, keys[one], keys[other])
    return np.concatenate([mixed, rng.random((NEW, *keys.shape[1:]))])
