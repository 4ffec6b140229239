"""capuchin: swaps that the step hides, then whatever frees most for its time (Peng et al. 2020).

Part of the room memory. A StepModel, the way to the host and the bytes that are to be freed come
in; a MemoryDecision goes out. Of a Value that the forward keeps, the gap is the time between the
last Op of the forward that touches it and the first one after the forward; its free time is the gap
less a copy out and a copy back.

    first  Values with the longest free time, as long as all copies together are hidden: each way
           one after the other, each out of the device before it comes back
    then   Values by bytes a second: recomputed, in the seconds of the Ops that it takes from what
           is kept, or swapped, in the seconds that its copies take beyond the gap; whichever is
           less

Without recomputation this is what swap planners such as SwapAdvisor decide for one order: the Value
whose next use is farthest leaves first. Capuchin watches a first step that runs on demand; here the
times are those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from apportion.graph import FORWARD, Graph
from apportion.memory.choose_memory import MemoryDecision, offloadable, views_of
from apportion.memory.recompute_costs import RecomputeCosts
from apportion.memory.rewritten_graph import unchanged
from apportion.memory.step_model import StepModel
from apportion.memory.time_offloads import HostWay, op_starts


@dataclass(frozen=True, slots=True)
class SwapGap:
    """A Value that is kept: its bytes, when it is free to leave and when it is needed again, and
    the seconds of a copy."""

    value: int
    nbytes: int
    leaves: float
    needed: float
    copy: float

    @property
    def free(self) -> float:
        """Seconds that are left of the gap when it has been copied out and back."""
        return self.needed - self.leaves - 2 * self.copy


def capuchin(
    model: StepModel, way: HostWay, wanted: int, recomputes: bool = True
) -> MemoryDecision:
    """What frees so many bytes, or all that can be freed if that is less; `recomputes`: whether Ops
    may be computed again."""
    gaps = sorted(swap_gaps(model.graph, model.costs, way), key=lambda gap: (-gap.free, gap.value))
    swapped: list[SwapGap] = []
    for gap in gaps:
        if sum(one.nbytes for one in swapped) >= wanted:
            break
        if gap.free >= 0 and _hidden([*swapped, gap]):
            swapped.append(gap)
    taken = {gap.value for gap in swapped}
    rest = [gap for gap in gaps if gap.value not in taken]
    freed = sum(gap.nbytes for gap in swapped)
    return _with_rest(model, rest, frozenset(taken), wanted - freed, recomputes)


def swap_gaps(graph: Graph, costs: RecomputeCosts, way: HostWay) -> list[SwapGap]:
    """The gaps of all Values that the forward keeps for later."""
    starts = op_starts(unchanged(graph), costs)
    values = offloadable(graph, costs, frozenset())
    early: dict[int, int] = {}
    late: dict[int, int] = {}
    for op, meant in enumerate(graph.ops):
        for value in (*meant.inputs, *meant.outputs):
            root = costs.shares[value]
            if root not in values:
                continue
            if meant.phase == FORWARD:
                early[root] = op
            else:
                late.setdefault(root, op)
    return [
        SwapGap(v, costs.nbytes[v], starts[early[v] + 1], starts[late[v]],
                way.seconds(costs.nbytes[v]))
        for v in sorted(values)
        if v in early and v in late
    ]  # fmt: skip


def _hidden(gaps: Sequence[SwapGap]) -> bool:
    """Whether all these are out before they come back, and back when they are needed."""
    gone: dict[int, float] = {}
    free = 0.0
    for gap in sorted(gaps, key=lambda one: one.leaves):
        free = max(free, gap.leaves) + gap.copy
        gone[gap.value] = free
    free = float("inf")
    for gap in sorted(gaps, key=lambda one: -one.needed):
        free = min(free, gap.needed) - gap.copy
        if free < gone[gap.value]:
            return False
    return True


def _with_rest(
    model: StepModel, rest: list[SwapGap], swapped: frozenset[int], wanted: int, recomputes: bool
) -> MemoryDecision:
    """The decision with what else is to leave, the cheapest byte first."""
    graph, costs = model.graph, model.costs
    kept = offloadable(graph, costs, frozenset())
    ops: set[int] = set()
    values = set(swapped)
    gone: set[int] = set()  # Values that are computed again

    def priced(gap: SwapGap) -> tuple[float, frozenset[int] | None]:
        """Seconds a byte, and the Ops to compute again unless it is swapped."""
        exposed = -gap.free if gap.free < 0 else gap.copy  # the link is full, if there is a gap
        again = _needed_ops(graph, costs, gap.value, kept - gone) if recomputes else None
        if again is not None:
            seconds = sum(costs.seconds[op] for op in again - ops)
            if seconds <= exposed:
                return seconds / gap.nbytes, again
        return exposed / gap.nbytes, None

    queue = [(priced(gap)[0], k) for k, gap in enumerate(rest)] if wanted > 0 else []
    heapify(queue)
    while wanted > 0 and queue:
        _, k = heappop(queue)
        price, how = priced(rest[k])  # it may have become more since
        if queue and price > queue[0][0] * (1 + 1e-9):
            heappush(queue, (price, k))
            continue
        wanted -= rest[k].nbytes
        if how is None:
            values.add(rest[k].value)
        else:
            ops |= how
            gone.add(rest[k].value)
    again = frozenset(ops) | views_of(graph, costs, frozenset(gone))
    return MemoryDecision(again, frozenset(values))


def _needed_ops(
    graph: Graph, costs: RecomputeCosts, value: int, kept: frozenset[int]
) -> frozenset[int] | None:
    """The Ops of the forward that make a Value from what is kept otherwise and from what the step
    begins with; None if some of them are not of the forward."""
    found: set[int] = set()
    waiting = [value]
    while waiting:
        made = graph.producer[waiting.pop()]
        if made is None or made[0] in found:
            continue
        op = graph.ops[made[0]]
        if op.phase != FORWARD:
            return None
        found.add(made[0])
        for read in op.inputs:
            root = costs.shares[read]
            if root == value or root not in kept:
                waiting.append(read)
            elif read != root:
                waiting.append(read)  # a view of what is kept is viewed again
    return frozenset(op for op in found if not _makes_kept(graph, costs, op, kept - {value}))


def _makes_kept(graph: Graph, costs: RecomputeCosts, op: int, kept: frozenset[int]) -> bool:
    """Whether an Op makes a Value that is kept."""
    return any(v in kept and costs.shares[v] == v for v in graph.ops[op].outputs)
