"""auto: tries the placers that suit, one after the other, and keeps the best placement.

In: an objective. Out: the best of what all rows of PLACERS with an `auto` number find, in the order
of these numbers. What is found early is where the searches start, so none of them ends worse. The
seconds that are left are divided among the rows still to come by their shares; a row that takes
less leaves more to the others, and one for which nothing is left is not tried. A part is kept for
the last of them, which searches from the best. A proven optimum ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.objective import PlacementObjective, PlacementResult, PlacerProgress, Report
from apportion.place.objectives.simple_bound import simple_bound
from apportion.place.placement_problem import check_placement
from apportion.place.placers import PLACERS, Placer
from apportion.work_clock import work_seconds

STARTS = 3  # of the best placements so far are handed on
LEAST = 0.1  # share of the budget that a placer gets while there is so much: most need far less
RESERVED = 0.3  # share of the budget that is kept for the last placer, a search from the best
EXACT = 1e-9  # a value this near to its bound is the optimum


class Attempts:
    """What was tried so far, the best first."""

    def __init__(self, objective: PlacementObjective, report: Report | None) -> None:
        self.objective = objective
        self.report = report
        self.began = work_seconds()
        self.found: list[tuple[float, int, Ints]] = []  # score, when, placement
        self.bound: float | None = simple_bound(objective.problem, objective.name)
        self.curve: list[tuple[float, int, float]] = []

    def add(self, placement: Ints, bound: float | None = None) -> float:
        """Takes note of a placement; its score."""
        place = np.ascontiguousarray(placement, np.int64)
        score = self.objective.score(place)
        if not self.found or score < self.found[0][0]:
            self.curve.append((work_seconds() - self.began, self.objective.evaluations, score))
        if not any(np.array_equal(place, other) for _, _, other in self.found):
            self.found.append((score, len(self.found), place))
            self.found.sort(key=lambda row: row[:2])
        if bound is not None:
            self.bound = bound if self.bound is None else max(bound, self.bound)
        self.tell(PlacerProgress())
        return score

    def tell(self, progress: PlacerProgress) -> None:
        """Passes progress on, with the best of all instead of the best of one placer."""
        if self.report is None:
            return
        scores = [self.found[0][0]] if self.found else []
        if progress.best is not None:
            scores.append(progress.best)
        self.report(
            PlacerProgress(min(scores, default=None), self.bound, self.objective.evaluations)
        )

    @property
    def proven(self) -> bool:
        """Whether the best cannot be improved."""
        best = self.found[0][0] if self.found else np.inf
        return self.bound is not None and best <= self.bound + EXACT * max(abs(self.bound), 1e-300)


def auto_rows(objective: PlacementObjective, contiguous: bool) -> list[tuple[str, Placer]]:
    """The placers that suit, in the order in which they are tried."""
    rows = [
        (row.auto, name, row)
        for name, row in PLACERS.items()
        if row.auto is not None
        and objective.name in row.objectives
        and (row.contiguous or not contiguous)
    ]
    return [(name, row) for _, name, row in sorted(rows, key=lambda row: row[:2])]


def auto(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best placement of all placers that suit the objective."""
    attempts = Attempts(objective, report)
    for start in starts:
        check_placement(objective.problem, start)
        attempts.add(start)
    figures: dict[str, float] = {}
    notes: list[str] = []
    interrupted, best_name = False, "what it was given"
    rows = auto_rows(objective, contiguous)
    for at, (name, row) in enumerate(rows):
        kept = RESERVED * budget if at + 1 < len(rows) else 0.0
        left = max(budget - (work_seconds() - attempts.began), 0.0)
        if left <= kept and attempts.found and at + 1 < len(rows):
            continue
        share = row.share / max(sum(r.share for _, r in rows[at:]), 1e-9)
        try:
            result = row(
                objective,
                budget=min(max(left * share, LEAST * budget), max(left - kept, 0.0)),
                seed=seed,
                starts=[place for _, _, place in attempts.found[:STARTS]],
                contiguous=contiguous,
                report=attempts.tell,
            )
        except KeyboardInterrupt:
            if not attempts.found:
                raise
            interrupted = True
            break
        except ValueError as error:  # a placer that does not suit this problem: others do
            notes.append(f"{name} was left out: {error}")
            continue
        whole = contiguous or not row.only_contiguous
        best = attempts.found[0][0] if attempts.found else np.inf
        figures[name] = attempts.add(result.placement, result.lower_bound if whole else None)
        if figures[name] < best:
            best_name = name
        if interrupted := result.interrupted:
            break
        if attempts.proven:
            break
    if not attempts.found:
        raise ValueError("no placer could place this problem: " + "; ".join(notes))
    return PlacementResult(
        attempts.found[0][2], attempts.bound, (f"the best is by {best_name}", *notes),
        tuple(attempts.curve), figures, interrupted,
    )  # fmt: skip
