"""exhaustive_recompute: the outcome of every set of forward Ops, which planners are judged by.

Part of the room memory. A Graph and a function that simulates a set of recomputed Ops come in, the
outcomes of all sets go out: 2 to the power of the forward Ops, so that this is for small Graphs.
"""

from __future__ import annotations

from collections.abc import Mapping

from apportion.graph import FORWARD, Graph
from apportion.memory.choose_recompute import RecomputeOutcome, Simulate

MOST = 14  # forward Ops


def exhaustive_recompute(graph: Graph, run: Simulate) -> dict[frozenset[int], RecomputeOutcome]:
    """The outcome of each set of forward Ops; ValueError if there are too many."""
    ops = [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]
    if len(ops) > MOST:
        raise ValueError(
            f"all sets of {len(ops)} forward operators are too many to simulate; "
            f"use a step with {MOST} at most"
        )
    sets = (
        frozenset(op for k, op in enumerate(ops) if number >> k & 1)
        for number in range(1 << len(ops))
    )
    return {some: run(some) for some in sets}


def best_within(
    outcomes: Mapping[frozenset[int], RecomputeOutcome], limit: int
) -> RecomputeOutcome:
    """The quickest of outcomes that are over by at most `limit`, or the least over."""
    fitting = [one for one in outcomes.values() if one.over <= limit]
    if fitting:
        return min(fitting, key=lambda one: (one.seconds, one.over))
    return min(outcomes.values(), key=lambda one: (one.over, one.seconds))
