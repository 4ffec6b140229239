"""run_placer: place a problem by the name of a method. What the command line calls.

In: a PlacementProblem, the names of an objective and a method, a budget. Out: a PlacedProblem: what
the method found, judged, with the bound that is known; or a ValueError if the request makes no
sense.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf

from apportion.columns import Ints
from apportion.place.objective import (
    LATENCY,
    OBJECTIVES,
    STEP,
    THROUGHPUT,
    Evaluation,
    Objective,
    PlacementResult,
    Report,
)
from apportion.place.placement_problem import PlacementProblem, check_placement, check_problem
from apportion.place.placers import PLACERS
from apportion.place.simple_bound import simple_bound

_HOMES = {
    STEP: "objective:StepObjective",
    THROUGHPUT: "max_load:ThroughputObjective",
    LATENCY: "latency:LatencyObjective",
}
SINGLE, EXPERT = "single", "expert"


@dataclass(frozen=True, eq=False)
class PlacedProblem:
    """A placement with everything that is known of it.

    single       what the best one device would give, for comparison
    lower_bound  the method's own, or what no placement can beat
    contiguous   whether only contiguous placements were asked for
    """

    problem: PlacementProblem
    method: str
    objective: str
    result: PlacementResult
    evaluation: Evaluation
    single: Evaluation
    lower_bound: float
    seconds: float
    evaluations: int
    contiguous: bool = False


def place(
    problem: PlacementProblem,
    objective_name: str = STEP,
    method: str = "auto",
    budget: float = 10.0,
    seed: int = 0,
    contiguous: bool = False,
    report: Report | None = None,
    starts: Sequence[Ints] = (),
) -> PlacedProblem:
    """The placement that a method finds within `budget` seconds."""
    _check_request(problem, objective_name, method, contiguous)
    check_problem(problem)
    objective = objective_of(problem, objective_name, contiguous)
    began = time.perf_counter()
    result = PLACERS[method](
        objective, budget=budget, seed=seed, starts=starts, contiguous=contiguous, report=report
    )
    seconds, evaluations = time.perf_counter() - began, objective.evaluations
    check_placement(problem, result.placement)
    judged = objective.evaluate(result.placement)
    alone = PLACERS[SINGLE](objective, seed=seed)
    restricted = PLACERS[method].only_contiguous and not contiguous
    own = -inf if restricted or result.lower_bound is None else result.lower_bound
    bound = max(own, min(simple_bound(problem, objective_name), judged.value))
    single = objective.evaluate(alone.placement)
    return PlacedProblem(
        problem, method, objective_name, result, judged, single, bound, seconds, evaluations,
        contiguous,
    )  # fmt: skip


def objective_of(problem: PlacementProblem, name: str, contiguous: bool = False) -> Objective:
    """The objective of that name for a problem; with `contiguous`, which only throughput has, a
    placement that is not contiguous counts as one that does not fit."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    module, _, kind = _HOMES[name].partition(":")
    make = getattr(import_module(f"apportion.place.{module}"), kind)
    made: Objective = make(problem, contiguous=True) if contiguous else make(problem)
    return made


def with_memory_limit(problem: PlacementProblem, limit: float) -> PlacementProblem:
    """The problem with so many bytes on every device that has a limit; infinity: no limits."""
    room = None if limit == inf else int(limit)
    devices = tuple(
        it if it.memory_bytes is None else replace(it, memory_bytes=room) for it in problem.devices
    )
    return replace(problem, devices=devices)


def _check_request(
    problem: PlacementProblem, objective: str, method: str, contiguous: bool
) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
    if method not in PLACERS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(sorted(PLACERS))}")
    row = PLACERS[method]
    if objective not in row.objectives:
        raise ValueError(
            f"method {method} is for the objective {' or '.join(row.objectives)}, not {objective}"
        )
    if contiguous and objective != THROUGHPUT:
        raise ValueError("contiguous placements are for the objective throughput")
    if contiguous and not row.contiguous:
        able = [name for name, other in PLACERS.items() if other.contiguous]
        raise ValueError(
            f"method {method} cannot keep placements contiguous; these can: {', '.join(able)}"
        )
    if method == EXPERT and problem.expert is None:
        raise ValueError("no expert's placement of this input is known; give one with --expert")
