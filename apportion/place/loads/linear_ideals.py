"""linear ideals: the dynamic program over ideals along a single order of the graph.

In: a ThroughputObjective. Out: a contiguous placement, the best of those that cut one order into
stretches: that of a depth-first search, or that of the nodes. Takes well under a second where
ideals.py takes minutes, and is seldom worse by as much as a percent.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion.columns import Ints
from apportion.place.loads.contraction import contraction
from apportion.place.loads.ideals import contiguous_result, linear_start, loads_only
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.work_clock import work_seconds


def dp_linear(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best placement along an order."""
    throughput = loads_only(objective, "dp-linear")
    it = contraction(throughput.columns, throughput.edges)
    place = linear_start(it, work_seconds() + budget)
    figures = {"blocks": float(len(it.columns.resident))}
    return contiguous_result(throughput, it, place, contiguous, False, (), figures)
