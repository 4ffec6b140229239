"""metis: METIS's balanced cut of the least weight, by pymetis (`pip install
apportion[partition]`).

In: an objective. Out: one part for each accelerator, with METIS's default settings. As in the
published comparisons it knows neither directions nor memory, so that parts may not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.cuts.cut_graph import cut_graph, cut_weight, placement_of_parts
from apportion.place.lists.unit_memory import excess_note
from apportion.place.objective import PlacementObjective, PlacementResult, Report


def metis(
    objective: PlacementObjective,
    *,
    budget: float = 0.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """Parts of METIS, each on one device."""
    try:
        import pymetis
    except ImportError:
        raise ValueError(
            "the method metis needs pymetis, which is not installed: "
            "pip install apportion[partition]"
        ) from None
    problem = objective.problem
    graph = cut_graph(problem)
    count = len(graph.devices)
    weights = [float(s) for s in graph.share]
    weights[-1] = 1.0 - sum(weights[:-1])
    part = np.zeros(problem.units, np.int64)
    if 1 < count <= problem.units:
        _, found = pymetis.part_graph(
            count,
            pymetis.CSRAdjacency(graph.start.astype(np.int32), graph.neighbour.astype(np.int32)),
            vweights=graph.vertex_weight.astype(np.int32),
            eweights=graph.edge_weight.astype(np.int32),
            tpwgts=None if np.ptp(graph.share) < 0.01 / count else weights,
            options=pymetis.Options(seed=seed),
        )
        part = np.array(found, np.int64)
    elif count > 1:
        part = np.arange(problem.units)
    place = placement_of_parts(problem, graph, part)
    return PlacementResult(
        place, notes=excess_note(objective, place), figures={"cut": float(cut_weight(graph, part))}
    )
