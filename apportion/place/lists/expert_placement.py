"""expert: the placement that a person who knows such networks would choose.

In: an objective. Out: the problem's own expert placement where one is known; else contiguous blocks
of the layers, balanced by compute, over the devices of the fastest kind: what people do who know
nothing else of a network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.lists.blocks import balanced, device_lists, unit_orders
from apportion.place.lists.unit_memory import excess_note
from apportion.place.objective import PlacementObjective, PlacementResult, Report


def expert_placement(
    objective: PlacementObjective,
    *,
    budget: float = 0.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The expert's placement; it may be over a memory limit, which the notes say."""
    problem = objective.problem
    if problem.expert is not None:
        place = np.ascontiguousarray(problem.expert, np.int64)
        return PlacementResult(place, notes=excess_note(objective, place))
    devices = device_lists(problem)[-1]
    kind = problem.devices[int(devices[0])].kind
    devices = devices[[problem.devices[int(d)].kind == kind for d in devices]]
    order, block = unit_orders(problem)[0]
    place = balanced(problem, order, block, devices, problem.limit)
    note = "no expert placement is known: contiguous blocks of layers, balanced by compute"
    return PlacementResult(place, notes=(note, *excess_note(objective, place)))
