"""m-sct: small communication times within memory limits.

In: an Objective. Out: Baechi's m-SCT: like m-ETF, but a device that has run a node stays awake for
the node's favourite child (favourite_children.py): for as long as a message to another device would
take it runs only that child, or what is urgent, that is, what any device could run by now.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.chains import joined_chains
from apportion.place.earliest_start import earliest_start
from apportion.place.favourite_children import favourite_children
from apportion.place.list_state import ListCosts, list_costs
from apportion.place.objective import Objective, PlacementResult, PlacerProgress, Report
from apportion.place.unit_memory import excess_note, within_limits


def m_sct(
    objective: Objective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The better of two schedules: of chains of units, and of units."""
    problem, began = objective.problem, time.perf_counter()
    order = np.arange(len(problem.columns.unit))
    favourite = favourite_children(problem, budget / 2)
    notes: tuple[str, ...] = ()
    if favourite.value is None:
        notes = ("favourite children by the dearest edges: the linear program is too large",)

    def fill(room: Floats, joined: Ints | None, costs: ListCosts) -> Ints:
        place = earliest_start(problem, costs, order, room, favourite.child).place
        return place if joined is None else place[joined]

    best, score = None, np.inf
    for joined in (joined_chains(problem), None):
        if best is not None and time.perf_counter() - began > budget:
            break
        costs = list_costs(problem, joined)
        place, found = within_limits(objective, lambda room, j=joined, c=costs: fill(room, j, c))
        if best is None or found < score:
            best, score = place, found
        if report is not None:
            report(PlacerProgress(score, None, objective.evaluations))
    assert best is not None
    figures = {} if favourite.value is None else {"lp": favourite.value / problem.tick}
    return PlacementResult(best, notes=notes + excess_note(objective, best), figures=figures)
