"""budget_knapsack: what to recompute as torch.compile does under an activation memory budget.

Part of the room memory. A Graph, its RecomputeCosts and the bytes that may be kept come in, the Ops
to recompute go out. Of all that the forward keeps for the backward, that is kept which takes
longest to compute again, by a knapsack over single results: each has its bytes and the seconds of
the Op that makes it, whatever that Op needs. What is left out is recomputed, with what it is
computed from, back to what is kept. When which result is needed is not considered.
"""

from __future__ import annotations

from apportion.graph import FORWARD, Graph
from apportion.memory.knapsack import Saving, least_seconds
from apportion.memory.recompute_costs import RecomputeCosts, kept_values


def budget_knapsack(graph: Graph, costs: RecomputeCosts, most: int) -> frozenset[int] | None:
    """The Ops to recompute so that the forward keeps at most so many bytes; None if that cannot
    be."""
    kept = sorted(v for v in kept_values(graph, costs, frozenset()) if _made(graph, v) is not None)
    total = sum(costs.nbytes[v] for v in kept)
    items = [
        [Saving(0, 0.0), Saving(costs.nbytes[v], costs.seconds[_maker(graph, v)])] for v in kept
    ]
    which = least_seconds(items, max(total - most, 0))
    if which is None:
        return None
    stays = {v for v, left in zip(kept, which, strict=True) if not left}
    return frozenset(
        op
        for op, meant in enumerate(graph.ops)
        if meant.phase == FORWARD and stays.isdisjoint(costs.shares[v] for v in meant.outputs)
    )


def _made(graph: Graph, value: int) -> int | None:
    """The forward Op that makes a Value, if one does."""
    made = graph.producer[value]
    return None if made is None or graph.ops[made[0]].phase != FORWARD else made[0]


def _maker(graph: Graph, value: int) -> int:
    found = _made(graph, value)
    assert found is not None
    return found
