"""scotch: Scotch's mapping of the graph onto the devices, by pyscotch (`pip install
apportion[partition]`).

In: an objective. Out: one part for each accelerator, with Scotch's default strategy. As in the
published comparisons it knows neither directions nor memory, so that parts may not fit.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from apportion.columns import Ints
from apportion.place.cuts.cut_graph import CutGraph, cut_graph, cut_weight, placement_of_parts
from apportion.place.lists.unit_memory import excess_note
from apportion.place.objective import PlacementObjective, PlacementResult, Report


def scotch(
    objective: PlacementObjective,
    *,
    budget: float = 0.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """Parts of Scotch, each on one device."""
    pyscotch = _pyscotch()
    problem = objective.problem
    graph = cut_graph(problem)
    part = np.zeros(problem.units, np.int64)
    if 1 < len(graph.devices) <= problem.units:
        part = _parts(pyscotch, graph, seed)
    elif len(graph.devices) > 1:
        part = np.arange(problem.units)
    place = placement_of_parts(problem, graph, part)
    return PlacementResult(
        place, notes=excess_note(objective, place), figures={"cut": float(cut_weight(graph, part))}
    )


def _pyscotch() -> Any:
    """The package, with its library loaded; it greets on stderr, which nobody needs to read."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            import pyscotch

            pyscotch.scotch_version()
    except (ImportError, OSError):
        raise ValueError(
            "the method scotch needs pyscotch, which is not installed: "
            "pip install apportion[partition]"
        ) from None
    return pyscotch


def _parts(pyscotch: Any, graph: CutGraph, seed: int) -> Ints:
    count = len(graph.devices)
    pyscotch.random_seed(seed)
    pyscotch.random_reset()
    with pyscotch.Graph() as made:
        made.build(graph.start, graph.neighbour, graph.vertex_weight, graph.edge_weight)
        if np.ptp(graph.share) < 0.01 / count:
            found = made.partition(count)
        else:
            with pyscotch.Architecture() as devices:
                devices.complete_weighted(count, np.rint(graph.share * 1000).astype(np.int64))
                found = made.map(devices)
    return np.array(found, np.int64)
