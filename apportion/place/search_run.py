"""search_run: a search on the time of a step as it goes on: its clock, its curve and its end.

In: a StepObjective, a budget in seconds or a number of evaluations. Out: a PlacementResult. The
searches themselves are compiled loops, which return to here every few hundredths of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np

from apportion.columns import Ints
from apportion.place.objective import PlacementResult, PlacerProgress, Report, StepObjective
from apportion.place.one_device import one_device_placements
from apportion.place.placement_problem import PlacementProblem, check_placement
from apportion.place.step_search import BEST, BETTER, EVALUATIONS, MOST_AT_ONCE, SearchState

SLICE_SECONDS = 0.02  # between looks at the clock


class SearchRun(AbstractContextManager["SearchRun"]):
    """A search under way. Within `with`, Ctrl-C ends the search and keeps what it has found."""

    def __init__(
        self,
        objective: StepObjective,
        state: SearchState,
        budget: float,
        evaluations: int | None,
        report: Report | None,
    ) -> None:
        self.objective = objective
        self.state = state
        self.budget = budget
        self.most = evaluations
        self.report = report
        self.began = time.perf_counter()
        self.counted = 0  # evaluations so far
        self.curve: list[tuple[float, int, float]] = []
        self.interrupted = False
        self._rate = 0.0  # evaluations a second
        self._still = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.interrupted = kind is KeyboardInterrupt
        return self.interrupted

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def over(self) -> bool:
        """Whether the budget is used up, or nothing can be evaluated any more."""
        if self._still:
            return True
        if self.most is not None:
            return self.counted >= self.most
        return self.seconds >= self.budget

    @property
    def expected(self) -> float:
        """How many evaluations there will have been in the end."""
        if self.most is not None:
            return float(self.most)
        seconds = max(self.seconds, 1e-6)
        return max(self.counted, 1) * max(self.budget / seconds, 1.0)

    def call(self, loop: Callable[..., None], *arguments: object) -> None:
        """Calls a compiled loop that works on the state. Seconds in which it is compiled are not
        counted."""
        native = getattr(loop, "native", None)
        began = time.perf_counter()
        loop(*arguments)
        seconds = time.perf_counter() - began
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
        if self.report is not None:
            self.report(PlacerProgress(float(w.scores[BEST]) / tick, None, self.counted))

    def next_count(self) -> int:
        """The number of evaluations at which to look at the clock again."""
        step = min(max(int(self._rate * SLICE_SECONDS), 8), MOST_AT_ONCE)
        until = self.counted + step
        return until if self.most is None else min(until, self.most)

    def result(self, *notes: str, **figures: float) -> PlacementResult:
        return PlacementResult(
            self.state.best.copy(),
            notes=notes,
            curve=tuple(self.curve),
            figures=figures,
            interrupted=self.interrupted,
        )


def first_placements(problem: PlacementProblem, starts: Sequence[Ints]) -> list[Ints]:
    """The starts that were given, checked; without any, everything on one device, for each."""
    found = [np.ascontiguousarray(start, np.int64) for start in starts]
    for start in found:
        check_placement(problem, start)
    return found or one_device_placements(problem)
