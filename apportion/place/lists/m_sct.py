"""m-sct: small communication times within memory limits.

In: an objective. Out: Baechi's m-SCT: like m-ETF, but a device that has run a node stays awake for
the node's favourite child (favourite_children.py): for as long as a message to another device would
take it runs only that child, or what is urgent, that is, what any device could run by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.columns import Ints
from apportion.place.best_of import best_of
from apportion.place.lists.favourite_children import favourite_children
from apportion.place.lists.m_etf import baechi_attempts
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.work_clock import work_seconds


def m_sct(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The better of two schedules: of chains of units, and of units. The figure `lp` is the value
    of the linear program, in the problem's unit of time."""
    problem, began = objective.problem, work_seconds()
    favourite = favourite_children(problem, budget / 2)
    left = budget - (work_seconds() - began)
    attempts = baechi_attempts(objective, favourite.child)
    if favourite.value is None:
        note = "favourite children by the dearest edges: the linear program is too large"
        return best_of(objective, attempts, left, report, (note,))
    found = best_of(objective, attempts, left, report)
    return replace(found, figures={**found.figures, "lp": favourite.value / problem.tick})
