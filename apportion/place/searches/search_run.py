"""search_run: a search for placements as it goes on: its clock, its curve and its end.

In: an objective, a budget in seconds or a number of evaluations. Out: a PlacementResult. A search
tries placements one by one (SearchRun), or in compiled loops that return to here every few
hundredths of a second (WalkRun).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np

from apportion.columns import Ints
from apportion.place.lists.one_device import one_device_placements
from apportion.place.objective import (
    PlacementObjective,
    PlacementResult,
    PlacerProgress,
    Report,
    StepObjective,
)
from apportion.place.placement_problem import PlacementProblem, check_placement
from apportion.place.searches.step_search import (
    BEST,
    BETTER,
    EVALUATIONS,
    MOST_AT_ONCE,
    SearchState,
)
from apportion.work_clock import work_seconds

SLICE_SECONDS = 0.02  # between looks at the clock


class SearchRun(AbstractContextManager["SearchRun"]):
    """A search under way. Within `with`, Ctrl-C ends the search and keeps what it has found."""

    def __init__(
        self,
        objective: PlacementObjective,
        budget: float,
        evaluations: int | None,
        report: Report | None,
    ) -> None:
        self.objective = objective
        self.budget = budget
        self.most = evaluations
        self.report = report
        self.began = work_seconds()
        self.counted = 0  # evaluations so far
        self.best = np.inf
        self.placement: Ints | None = None
        self.curve: list[tuple[float, int, float]] = []
        self.interrupted = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.interrupted = kind is KeyboardInterrupt and self.placement is not None
        return self.interrupted

    @property
    def seconds(self) -> float:
        return work_seconds() - self.began

    @property
    def over(self) -> bool:
        """Whether the budget is used up."""
        if self.most is not None:
            return self.counted >= self.most
        return self.seconds >= self.budget and self.placement is not None

    def score(self, placement: Ints) -> float:
        """The score of a placement, which may be the best."""
        found = float(self.objective.score(placement))
        self.counted += 1
        if self.placement is None or found < self.best:
            self.best, self.placement = found, placement.copy()
            self.curve.append((self.seconds, self.counted, found))
            self.tell()
        return found

    def tell(self) -> None:
        """Reports how far it is."""
        if self.report is not None:
            self.report(PlacerProgress(self.best, None, self.counted))

    def result(self, *notes: str, **figures: float) -> PlacementResult:
        assert self.placement is not None
        return PlacementResult(
            self.placement,
            notes=notes,
            curve=tuple(self.curve),
            figures=figures,
            interrupted=self.interrupted,
        )


class WalkRun(SearchRun):
    """A search in compiled loops."""

    def __init__(
        self,
        objective: StepObjective,
        state: SearchState,
        budget: float,
        evaluations: int | None,
        report: Report | None,
    ) -> None:
        super().__init__(objective, budget, evaluations, report)
        self.state = state
        self._rate = 0.0  # evaluations a second
        self._still = False

    @property
    def over(self) -> bool:
        """Whether the budget is used up, or nothing can be evaluated any more."""
        return self._still or super().over

    @property
    def expected(self) -> float:
        """How many evaluations there will have been in the end."""
        if self.most is not None:
            return float(self.most)
        seconds = max(self.seconds, 1e-6)
        return max(self.counted, 1) * max(self.budget / seconds, 1.0)

    def next_count(self) -> int:
        """The number of evaluations at which to look at the clock again."""
        step = min(max(int(self._rate * SLICE_SECONDS), 8), MOST_AT_ONCE)
        until = self.counted + step
        return until if self.most is None else min(until, self.most)

    def call(self, loop: Callable[..., None], *arguments: object) -> None:
        """Calls a compiled loop that works on the state. Seconds in which it is compiled are not
        counted."""
        native = getattr(loop, "native", None)
        began = work_seconds()
        loop(*arguments)
        seconds = work_seconds() - began
        new = int(self.state.counts[EVALUATIONS]) - self.counted
        if getattr(loop, "native", None) is not native:
            self.began += seconds
        elif seconds > 0:
            self._rate = new / seconds
        self._still = new == 0
        self._read(new)

    def _read(self, new: int) -> None:
        """Notes what the loop has left in the state."""
        w, tick, now = self.state, self.objective.problem.tick, self.seconds
        self.objective.evaluations += new
        self.counted += new
        for k in range(w.counts[BETTER]):
            self.curve.append((now, int(w.better_at[k]), float(w.better[k]) / tick))
        w.counts[BETTER] = 0
        self.best, self.placement = float(w.scores[BEST]) / tick, w.best
        self.tell()


def first_placements(problem: PlacementProblem, starts: Sequence[Ints]) -> list[Ints]:
    """The starts that were given, checked; without any, everything on one device, for each."""
    return given_placements(problem, starts) or one_device_placements(problem)


def given_placements(problem: PlacementProblem, starts: Sequence[Ints]) -> list[Ints]:
    """The starts that were given, checked."""
    found = [np.ascontiguousarray(start, np.int64) for start in starts]
    for start in found:
        check_placement(problem, start)
    return found


def step_objective(objective: PlacementObjective) -> StepObjective:
    """The objective, if it is the time of a step; else ValueError."""
    if not isinstance(objective, StepObjective):
        raise ValueError(f"this search minimises the time of a step, not {objective.name}")
    return objective
