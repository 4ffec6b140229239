"""latency search: simulated annealing on the time of one sample.

In: a LatencyObjective. Out: a placement that fits, if one was found. Rounds begin with the greedy
placement, with the cut of the graph whose largest load is smallest, with what is given, and then
with the best so far and with random cuts in turn. A move takes a unit to another device or to that
of a neighbour, alone or with some neighbours that are on its device; one that breaks a piece apart
is never taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats, Ints, compiled, offsets
from apportion.place.lists.one_device import one_device
from apportion.place.loads.latency_greedy import latency_greedy
from apportion.place.loads.linear_ideals import dp_linear
from apportion.place.loads.load_search import BLOCK, CHANCES, gather
from apportion.place.objective import PlacementObjective, PlacementResult, PlacerProgress, Report
from apportion.place.objectives.latency import LatencyColumns, LatencyObjective, latency_score
from apportion.place.objectives.max_load import ThroughputObjective
from apportion.work_clock import work_seconds

STEPS = 1 << 13  # moves between two looks at the clock; of the first rounds fewer
FIRST = 1 << 7
STRETCHES = 8  # of so many moves in a round
TEMPERATURES = (0.02, 0.005, 0.05)  # of rounds in turn, as shares of the latency
COLD = 1e-5


@compiled
def anneal_latency(
    c: LatencyColumns, place: Ints, best: Ints, best_score: float, allowed: Ints, resident: Ints,
    limit: Floats, pieces: int, worst: float, near_start: Ints, near: Ints, free: Ints,
    draws: Ints, chances: Floats, hot: float, cooling: float,
) -> float:  # fmt: skip
    """One move for each row of `draws`; the score of the best placement, which is in `best`."""
    n, devices = c.duration.shape
    piece, ends = np.zeros(n, np.int64), np.zeros(n, np.int64)
    busy, group = np.zeros(devices, np.int64), np.empty(BLOCK + 1, np.int64)
    score = latency_score(c, place, resident, limit, pieces, worst, piece, ends, busy)
    heat = hot
    for step in range(len(draws)):
        heat *= cooling
        unit = free[draws[step, 0] % len(free)]
        here, there = place[unit], draws[step, 1] % devices
        kind, more = draws[step, 2] % 8, draws[step, 2] >> 3
        group[0], size = unit, 1
        span = near_start[unit + 1] - near_start[unit]
        if span > 0:
            if kind >= 2 and place[near[near_start[unit] + more % span]] != here:
                there = place[near[near_start[unit] + more % span]]
            if kind >= 5 or kind == 1:
                size = gather(place, near_start, near, group, more)
        fits = there != here
        for at in range(size):
            fits = fits and allowed[group[at], there]
        if not fits:
            continue
        for at in range(size):
            place[group[at]] = there
        after = latency_score(c, place, resident, limit, pieces, worst, piece, ends, busy)
        if after <= score + heat * chances[draws[step, 3] & (len(chances) - 1)]:
            score = after
            if score < best_score:
                best_score = score
                best[:] = place
        else:
            for at in range(size):
                place[group[at]] = here
    return best_score


def latency_search(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """Rounds of annealing until the time is over or the bound is reached."""
    if not isinstance(objective, LatencyObjective):
        raise ValueError("latency-search is for --objective latency")
    began = work_seconds()
    bound = objective.lower_bound()
    given = [np.asarray(start, np.int64) for start in starts]
    given += [latency_greedy(objective).placement]
    given += [dp_linear(ThroughputObjective(objective.problem), budget=budget / 4).placement]
    given.sort(key=objective.score)
    best = min([*given, one_device(objective).placement], key=objective.score)
    curve = [(work_seconds() - began, objective.evaluations, objective.score(best))]
    interrupted, rounds = False, 0
    rng = np.random.default_rng(seed)
    try:
        while work_seconds() - began < budget and curve[-1][2] > bound * (1 + 1e-12):
            start = given[rounds] if rounds < len(given) else best
            if rounds >= len(given) and rounds % 2:
                start = _random_cut(objective, rng)
            hot = TEMPERATURES[rounds % len(TEMPERATURES)]
            found = _round(objective, start, hot, min(STEPS, FIRST << rounds), rng, began + budget)
            rounds += 1
            if (score := objective.score(found)) < curve[-1][2]:
                best = found
                curve.append((work_seconds() - began, objective.evaluations, score))
            if report is not None:
                report(PlacerProgress(curve[-1][2], bound, objective.evaluations))
    except KeyboardInterrupt:
        interrupted = True
    notes: tuple[str, ...] = ()
    if not objective.evaluate(best).feasible:
        notes = ("no placement was found that fits; this is the nearest",)
    return PlacementResult(best, bound, notes, tuple(curve), {"rounds": rounds}, interrupted)


def _round(
    objective: LatencyObjective,
    start: Ints,
    hot: float,
    steps: int,
    rng: np.random.Generator,
    until: float,
) -> Ints:
    """One descent from hot to cold; the best placement on the way."""
    problem = objective.problem
    near_start, near = _neighbours(objective)
    allowed = problem.columns.allowed.astype(np.int64)
    free = np.flatnonzero(allowed.sum(axis=1) > 1).astype(np.int64)
    place = np.array(start, np.int64)
    best, score = place.copy(), objective.score(place) * problem.tick
    heat, cooling = hot * score, (COLD / hot) ** (1.0 / (STRETCHES * steps))
    chances = -np.log((np.arange(CHANCES) + 0.5) / CHANCES)
    for _ in range(STRETCHES if len(free) else 0):
        draws = rng.integers(0, 1 << 31, (steps, 4))
        score = anneal_latency(
            objective.columns, place, best, score, allowed, objective.resident, problem.limit,
            objective.pieces, objective.worst, near_start, near, free, draws, chances, heat,
            cooling,
        )  # fmt: skip
        heat *= cooling**steps
        objective.evaluations += steps
        if work_seconds() > until:
            break
    return best


def _random_cut(objective: LatencyObjective, rng: np.random.Generator) -> Ints:
    """Units in their order, a stretch for each of some devices."""
    problem = objective.problem
    k, allowed = len(problem.devices), problem.columns.allowed
    devices = rng.permutation(k)[: int(rng.integers(1, k + 1))]
    ends = np.sort(rng.integers(0, problem.units + 1, len(devices) - 1))
    place = devices[np.searchsorted(ends, np.arange(problem.units), side="right")]
    lost = ~allowed[np.arange(problem.units), place]
    place[lost] = allowed[lost].argmax(axis=1)
    return place.astype(np.int64)


def _neighbours(objective: LatencyObjective) -> tuple[Ints, Ints]:
    """The units that read from each other, as offsets and units."""
    pairs, _ = objective.problem.unit_edges
    both = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0).reshape(-1, 2)
    start = offsets(np.bincount(both[:, 0], minlength=objective.problem.units))
    return start, both[:, 1].copy()
