"""PlacementObjective: what a placement is judged by; and what a placer returns.

Three objectives, never mixed (docs/placement.md):

    step        the time of one step (objectives/step_time.py)
    throughput  the largest load of a device: a pipeline's time per sample (objectives/max_load.py)
    latency     the time of one sample through the whole graph (objectives/latency.py)

A placer minimises `score`: the objective's value; for a placement that is over a memory limit more
than for any that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.objective_names import STEP
from apportion.place.objectives.step_time import (
    NO_LIMIT,
    simulate_step,
    step_score,
    step_scratch,
    step_tables,
)
from apportion.place.placement_problem import PlacementProblem


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A placement, judged. `value` is in the problem's unit of time, whether it fits or not."""

    value: float
    loads: Floats  # k: busy time of each device, in the same unit
    memory: Ints  # k: bytes
    feasible: bool


class PlacementObjective(Protocol):
    """One way to judge placements of a problem. `evaluations` counts the calls of both functions,
    and what compiled searches have evaluated by themselves."""

    name: str
    problem: PlacementProblem
    evaluations: int

    def score(self, placement: Ints) -> float:
        """What is minimised, in the problem's unit of time."""

    def evaluate(self, placement: Ints) -> Evaluation:
        """Everything about one placement."""


class StepObjective:
    """The time of one step."""

    name = STEP

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.evaluations = 0
        self.tables = step_tables(problem)
        self.scratch = step_scratch(problem)

    def score(self, placement: Ints) -> float:
        """Time of the step, penalised where it does not fit."""
        self.evaluations += 1
        it = self.problem
        place = np.ascontiguousarray(placement, np.int64)
        found: float = step_score(
            it.columns, it.links, self.tables, self.scratch, place, float(NO_LIMIT)
        )
        return found / it.tick

    def evaluate(self, placement: Ints) -> Evaluation:
        """Time, loads and peaks."""
        self.evaluations += 1
        it = self.problem
        done = simulate_step(it, placement, self.tables)
        device = np.asarray(placement)[it.columns.unit]
        busy = it.columns.duration[np.arange(len(device)), device] / it.tick
        loads = np.bincount(device, busy, len(it.devices)).astype(np.float64)
        fits = bool((done.peak_bytes <= it.limit).all())
        return Evaluation(done.ticks / it.tick, loads, done.peak_bytes, fits)


@dataclass(frozen=True, slots=True)
class PlacerProgress:
    """How far a placer is: the best score so far, a proven bound, and how many evaluations."""

    best: float | None = None
    bound: float | None = None
    evaluations: int = 0


@dataclass(frozen=True, eq=False)
class PlacementResult:
    """What a placer found.

    lower_bound  proven, on the objective's value over all placements that the placer may choose
                 from; None without a proof
    curve        (seconds, evaluations, best score) whenever the best improved
    """

    placement: Ints  # u
    lower_bound: float | None = None
    notes: tuple[str, ...] = ()
    curve: tuple[tuple[float, int, float], ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    interrupted: bool = False


Report = Callable[[PlacerProgress], None]
