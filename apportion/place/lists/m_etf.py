"""m-etf: earliest task first within memory limits.

In: an objective. Out: Baechi's m-ETF: of all ready nodes and all devices with room, the pair that
can start first (earliest_start.py); with chains joined (chains.py) and without, and the better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.best_of import Attempt, best_of
from apportion.place.lists.chains import joined_chains
from apportion.place.lists.earliest_start import earliest_start
from apportion.place.lists.list_state import list_costs
from apportion.place.lists.unit_memory import within_limits
from apportion.place.objective import PlacementObjective, PlacementResult, Report


def m_etf(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The better of two schedules: of chains of units, and of units."""
    return best_of(objective, baechi_attempts(objective, None), budget, report)


def baechi_attempts(objective: PlacementObjective, favourite: Ints | None) -> Iterator[Attempt]:
    """Schedules of chains and of units; with favourite children those of m-SCT."""
    problem = objective.problem
    order = np.arange(len(problem.columns.unit))

    def schedule(joined: Ints) -> tuple[Ints, float]:
        costs = list_costs(problem, joined)

        def fill(room: Floats) -> Ints:
            return earliest_start(problem, costs, order, room, favourite).place[joined]

        return within_limits(objective, fill)

    yield "chains", lambda: schedule(joined_chains(problem))
    yield "units", lambda: schedule(np.arange(problem.units))
