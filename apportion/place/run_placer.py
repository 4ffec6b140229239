"""run_placer: place a problem by the name of a method. What the command line calls.

In: a PlacementProblem, the names of an objective and a method, a budget. Out: a PlacedProblem: what
the method found, judged, with the bound that is known; or a ValueError if the request makes no
sense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf
from pathlib import Path

import numpy as np

from apportion.columns import Ints
from apportion.place.objective import Evaluation, PlacementObjective, PlacementResult, Report
from apportion.place.objective_names import LATENCY, OBJECTIVES, STEP, THROUGHPUT
from apportion.place.objectives.simple_bound import simple_bound
from apportion.place.placement_problem import PlacementProblem, check_placement, check_problem
from apportion.place.placers import PLACERS
from apportion.work_clock import work_seconds

_HOMES = {
    STEP: "objective:StepObjective",
    THROUGHPUT: "objectives.max_load:ThroughputObjective",
    LATENCY: "objectives.latency:LatencyObjective",
}
SINGLE, EXPERT = "single", "expert"
ROUNDING = 1e-9  # what sums of the same times in another order may differ by, relatively
ROUNDS = 3  # how often a method is asked while what it finds is over the limits

Judge = Callable[[PlacementProblem, Ints], Evaluation]


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
    judge: Judge | None = None,
    policy: Path | None = None,
) -> PlacedProblem:
    """The placement that a method finds within `budget` seconds. `judge` says what a step takes in
    the end, where there is a better simulator than the objective; methods' bounds are not of it.
    Where it finds a placement over the memory limits, the method is asked again with lower ones.
    `policy` is a file with what a method has learned before."""
    _check_request(problem, objective_name, method, contiguous)
    check_problem(problem)
    judges = judge if objective_name == STEP else None
    objective = objective_of(problem, objective_name, contiguous)
    began, rounds = work_seconds(), ROUNDS if judges else 1
    found: tuple[PlacementResult, Evaluation] | None = None
    aim, evaluations = objective, 0
    for turn in range(rounds):
        result = PLACERS[method](
            aim, budget=max(budget - (work_seconds() - began), 0.0), seed=seed + turn,
            starts=starts, contiguous=contiguous, report=report, policy=policy,
        )  # fmt: skip
        evaluations += aim.evaluations
        check_placement(problem, result.placement)
        judged = (judges or _by(objective))(problem, result.placement)
        if found is None or _rank(problem, judged) < _rank(problem, found[1]):
            found = result, judged
        if judged.feasible or result.interrupted or work_seconds() - began >= budget:
            break
        aim = objective_of(_tighter(problem, aim.problem, judged), objective_name, contiguous)
    seconds = work_seconds() - began
    assert found is not None
    result, judged = found
    alone = PLACERS[SINGLE](objective, seed=seed).placement
    single = (judges or _by(objective))(problem, alone)
    restricted = judges is not None or (PLACERS[method].only_contiguous and not contiguous)
    own = -inf if restricted or result.lower_bound is None else result.lower_bound
    simple = simple_bound(problem, objective_name)
    if judged.value < simple <= judged.value * (1 + ROUNDING):
        simple = judged.value
    bound = max(own, simple)
    return PlacedProblem(
        problem, method, objective_name, result, judged, single, bound, seconds, evaluations,
        contiguous,
    )  # fmt: skip


def _by(objective: PlacementObjective) -> Judge:
    """The objective as the judge of its own problem."""
    return lambda _, placement: objective.evaluate(placement)


def _rank(problem: PlacementProblem, judged: Evaluation) -> tuple[bool, float, float]:
    """What fits comes first; of others what is least over."""
    over = float(np.maximum(judged.memory - problem.limit, 0.0).max(initial=0.0))
    return not judged.feasible, 0.0 if judged.feasible else over, judged.value


def _tighter(
    problem: PlacementProblem, aim: PlacementProblem, judged: Evaluation
) -> PlacementProblem:
    """The problem with limits that are lower by as much as the judge finds a placement over."""
    devices = []
    for device, asked, held in zip(problem.devices, aim.devices, judged.memory, strict=True):
        if device.memory_bytes is None or asked.memory_bytes is None:
            devices.append(asked)
            continue
        over = max(int(held) - device.memory_bytes, 0)
        devices.append(replace(asked, memory_bytes=max(asked.memory_bytes - over, 1)))
    return replace(aim, devices=tuple(devices))


def objective_of(
    problem: PlacementProblem, name: str, contiguous: bool = False
) -> PlacementObjective:
    """The objective of that name for a problem; with `contiguous`, which only throughput has, a
    placement that is not contiguous counts as one that does not fit."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(OBJECTIVES)}")
    module, _, kind = _HOMES[name].partition(":")
    make = getattr(import_module(f"apportion.place.{module}"), kind)
    made: PlacementObjective = make(problem, contiguous=True) if contiguous else make(problem)
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
