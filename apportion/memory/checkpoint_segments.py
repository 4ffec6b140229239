"""checkpoint_segments: the forward cut into pieces between which little is handed on.

Part of the room memory. A Graph, its RecomputeCosts and a number of bytes come in, Segments go out.
A Segment that is recomputed keeps what later Segments read of it and makes the rest again in one
go, so that small boundaries are what matters. Of all ways to cut the forward's order into Segments
that keep no more than so many bytes each, these are the one whose boundaries together are smallest:

    least(i) = min over j < i with kept(j..i) <= most of least(j) + boundary(j..i)

where a boundary is what is made between j and i and read by the forward after i. Chen et al. cut
chains so; here any Graph may be cut, since a stretch of an order needs nothing of what follows it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from apportion.graph import FORWARD, Graph
from apportion.memory.recompute_costs import RecomputeCosts, kept_values

NEAR = 12  # Ops on one side among which a place to cut is the best
PLACES = 400  # to cut, at most
UNKEPT = 1.01  # by which a boundary that nobody else keeps counts for more


@dataclass(frozen=True)
class CheckpointSegment:
    """A stretch of the forward.

    ops       its Ops
    inner     those of them that it pays to recompute: no later Segment's forward reads them
    boundary  bytes of what later Segments read
    kept      bytes that it keeps for the backward if nothing is recomputed
    """

    ops: tuple[int, ...]
    inner: frozenset[int]
    boundary: int
    kept: int


def checkpoint_segments(graph: Graph, costs: RecomputeCosts, most: int) -> list[CheckpointSegment]:
    """The forward in order, in Segments that keep at most so many bytes where that can be."""
    return ForwardCutter(graph, costs).segments(most)


class ForwardCutter:
    """The forward's Ops by their place in the order, and the Values that have memory of their own;
    asked for Segments of several sizes, it looks at the Graph once."""

    def __init__(self, graph: Graph, costs: RecomputeCosts) -> None:
        self.graph, self.costs = graph, costs
        self.ops = [op for op, meant in enumerate(graph.ops) if meant.phase == FORWARD]
        place = {op: k for k, op in enumerate(self.ops)}
        self.made: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for k, op in enumerate(self.ops):
            for value in graph.ops[op].outputs:
                if graph.producer[costs.shares[value]] is not None:
                    self.made.setdefault(costs.shares[value], k)
            for value in graph.ops[op].inputs:
                root = costs.shares[value]
                if root in self.made:
                    self.last[root] = k
        kept = self.kept = kept_values(graph, costs, frozenset())
        self.crossings: dict[int, tuple[list[int], list[float]]] = {}  # by place
        self.keeps = [0] * len(self.ops)
        for value in kept:
            if value in self.made:
                self.keeps[self.made[value]] += costs.nbytes[value]
        self.breaks = {
            place[a] for a, b in zip(self.ops, self.ops[1:], strict=False) if b != a + 1
        }  # where something else than the forward stands between

    def segments(self, most: int) -> list[CheckpointSegment]:
        places = self._places()
        total = [0, *accumulate(self.keeps)]
        least: list[float] = [0.0]
        before = [0]
        starts = [0, *(p + 1 for p in places)]  # the first Op after each cut
        for i, end in enumerate(places, 1):
            if end not in self.crossings:
                self.crossings[end] = self._crossing(end)
            crossing = self.crossings[end]
            best, chosen = float("inf"), i - 1
            for j in range(i - 1, -1, -1):
                if total[end + 1] - total[starts[j]] > most and j < i - 1:
                    break
                cost = least[j] + sum_after(crossing, starts[j])
                if cost < best:
                    best, chosen = cost, j
                if j and places[j - 1] in self.breaks:
                    break
            least.append(best)
            before.append(chosen)
        cuts, i = [], len(places)
        while i:
            cuts.append((starts[before[i]], places[i - 1]))
            i = before[i]
        return [self._segment(low, high, total) for low, high in reversed(cuts)]

    def _places(self) -> list[int]:
        """The Ops after which to cut, the last among them: all, or of many those that hand on no
        more than their neighbours before them, or after them."""
        if len(self.ops) <= PLACES:
            return list(range(len(self.ops)))
        change = [0] * (len(self.ops) + 1)
        for root, last in self.last.items():
            change[self.made[root]] += self.costs.nbytes[root]
            change[last] -= self.costs.nbytes[root]
        across = list(accumulate(change))[: len(self.ops)]
        found = [
            k
            for k in range(len(self.ops) - 1)
            if k in self.breaks
            or across[k] <= min(across[max(0, k - NEAR) : k + 1])
            or across[k] <= min(across[k : k + NEAR + 1])
        ]
        if len(found) > PLACES:
            kept = set(found[:: -(-len(found) // PLACES)])
            found = [k for k in found if k in kept or k in self.breaks]
        return [*found, len(self.ops) - 1]

    def _crossing(self, end: int) -> tuple[list[int], list[float]]:
        """Where the Values are made that are read after a place, rising, and the sum of the bytes
        up to each; what the backward reads anyway counts for a little less."""
        rows = sorted(
            (self.made[root], self.costs.nbytes[root] * (1.0 if root in self.kept else UNKEPT))
            for root, last in self.last.items()
            if self.made[root] <= end < last
        )
        return [at for at, _ in rows], [0.0, *accumulate(n for _, n in rows)]

    def _holds_more(self, op: int) -> bool:
        """Whether to recompute an Op would keep more than it makes: what was gathered for it."""
        nbytes, meant = self.costs.nbytes, self.graph.ops[op]
        held = sum(
            nbytes[v]
            for v in dict.fromkeys(meant.inputs)
            if self.graph.producer[v] is None and v not in self.kept
        )
        return held > sum(nbytes[v] for v in meant.outputs)

    def _segment(self, low: int, high: int, total: Sequence[int]) -> CheckpointSegment:
        costs, graph = self.costs, self.graph
        ops = self.ops[low : high + 1]
        read = {root for root, last in self.last.items() if low <= self.made[root] <= high < last}
        inner = frozenset(
            op
            for op in ops
            if read.isdisjoint(costs.shares[v] for v in graph.ops[op].outputs)
            and not self._holds_more(op)
        )
        boundary = sum(costs.nbytes[root] for root in read)
        return CheckpointSegment(tuple(ops), inner, boundary, total[high + 1] - total[low])


def sum_after(rows: tuple[list[int], list[float]], start: int) -> float:
    """The bytes of what is made at `start` or later."""
    places, sums = rows
    return sums[-1] - sums[bisect_right(places, start - 1)]
