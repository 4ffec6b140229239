"""forward_chain: the forward as a chain of links, as methods for chains see it.

Part of the room memory. A Graph and its RecomputeCosts come in, ChainLinks go out: the forward's
order, cut wherever a single Value that the forward made is read further on. Inside a link anything
may be connected; between two there is one memory, so that a link can be computed from what the one
before it has left. A Graph in which something passes beside everything is one link.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.graph import FORWARD, Graph
from apportion.memory.recompute_costs import RecomputeCosts, kept_values


@dataclass(frozen=True)
class ChainLink:
    """A stretch of the forward.

    ops       its Ops
    inner     those that the backward may compute again: all but what makes the output and what
              shares its memory
    output    bytes of what the next link reads
    kept      bytes that it keeps for the backward if nothing is recomputed
    forward   seconds of its Ops
    """

    ops: tuple[int, ...]
    inner: frozenset[int]
    output: int
    kept: int
    forward: float


def forward_chain(graph: Graph, costs: RecomputeCosts) -> list[ChainLink]:
    """The links of the forward, in order."""
    ops = [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]
    last: dict[int, int] = {}
    for op in ops:
        for value in (*graph.ops[op].inputs, *graph.ops[op].outputs):
            if graph.producer[costs.shares[value]] is not None:
                last[costs.shares[value]] = op
    found: list[ChainLink] = []
    begun: set[int] = set()
    stretch: list[int] = []
    for op in ops:
        stretch.append(op)
        made = (costs.shares[v] for v in graph.ops[op].outputs)
        begun.update(root for root in made if root in last)
        begun = {root for root in begun if last[root] > op}
        if len(begun) == 1 or op == ops[-1]:
            found.append(_link(graph, costs, stretch, begun))
            stretch = []
    return found


def _link(graph: Graph, costs: RecomputeCosts, ops: list[int], handed: set[int]) -> ChainLink:
    kept = kept_values(graph, costs, frozenset())
    made = {costs.shares[v]: op for op in ops for v in graph.ops[op].outputs}
    own = [root for root in made if graph.producer[root] is not None]
    return ChainLink(
        tuple(ops),
        frozenset(
            op for op in ops if handed.isdisjoint(costs.shares[v] for v in graph.ops[op].outputs)
        ),
        sum(costs.nbytes[root] for root in handed),
        sum(costs.nbytes[root] for root in own if root in kept),
        sum(costs.seconds[op] for op in ops),
    )
