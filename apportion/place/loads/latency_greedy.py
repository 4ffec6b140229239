"""latency greedy: accelerators are filled one after the other, in the order of the graph.

In: a LatencyObjective. Out: the placement of the baseline of Tarnawski et al. 2020: units that read
from each other in a cycle together, in the order of a depth-first search; each goes to the current
accelerator as long as it fits, then the next one begins; what is left goes to the host. The order
of the nodes is tried as well, and the better of the two is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.loads.contraction import acyclic_blocks, edges_between, first_in_order
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.objectives.latency import LatencyObjective
from apportion.place.objectives.max_load import order_edges


def latency_greedy(
    objective: PlacementObjective,
    *,
    budget: float = 0.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The better of two orders."""
    if not isinstance(objective, LatencyObjective):
        raise ValueError("latency-greedy is for --objective latency")
    problem = objective.problem
    edges = order_edges(problem)
    block = acyclic_blocks(np.arange(problem.units), edges)
    count = int(block.max(initial=-1)) + 1
    between = edges_between(edges, block)
    orders = [first_in_order(count, between, deep=deep) for deep in (True, False)]
    found = [_filled(objective, block, order) for order in orders]
    return PlacementResult(min(found, key=objective.score), objective.lower_bound())


def _filled(objective: LatencyObjective, block: Ints, order: Ints) -> Ints:
    """Blocks in an order on one accelerator after the other."""
    problem, host = objective.problem, objective.columns.host
    accelerators = np.flatnonzero(host == 0).tolist()
    rest = int(np.flatnonzero(host)[0]) if host.any() else accelerators[-1]
    needs = np.bincount(block, objective.resident)
    allowed = np.ones((len(order), len(problem.devices)), np.bool_)
    np.logical_and.at(allowed, block, problem.columns.allowed)
    place = np.empty(len(order), np.int64)
    turn, held = 0, 0.0
    for number in order.tolist():
        at = accelerators[turn] if turn < len(accelerators) else rest
        if at != rest and held > 0 and held + needs[number] > problem.limit[at]:
            turn, held = turn + 1, 0.0
            at = accelerators[turn] if turn < len(accelerators) else rest
        if at != rest and (needs[number] > problem.limit[at] or not allowed[number, at]):
            at = rest
        elif at != rest:
            held += needs[number]
        if not allowed[number, at]:
            at = int(allowed[number].argmax())
        place[number] = at
    return place[block]
