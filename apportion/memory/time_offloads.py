"""time_offloads: where in the order offloaded Values leave the device and come back.

Part of the room memory. A Graph with recomputed Ops, what its Ops take and the link to the host
come in, with the Values that are offloaded; Offloads go out. The device computes while the link is
busy, so the order says

    gone  when the copy to the host is complete, as far as times tell: copies leave in the order in
          which Values are made, each after the one before
    back  so early that the copy back is complete when it is first read, if the link does nothing
          else than what is needed later

and no more than DEPTH Values are on their way in either direction, so that what a slow link costs
is time and not memory. Where copies burn the device there is nothing to wait for: a Value goes when
it is made, and comes back when it is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from apportion.graph import FORWARD
from apportion.machine import Link
from apportion.memory.offload import Offload
from apportion.memory.recompute_costs import RecomputeCosts
from apportion.memory.rewritten_graph import RewrittenGraph

DEPTH = 3  # Values on their way to the host, or back, at a time


@dataclass(frozen=True)
class HostWay:
    """The way of a device's Values to its host, and whether they travel beside what it computes."""

    link: Link
    beside: bool = True

    def seconds(self, nbytes: int) -> float:
        """What a copy takes."""
        return self.link.latency + nbytes / self.link.bandwidth


def time_offloads(
    made: RewrittenGraph,
    costs: RecomputeCosts,
    way: HostWay,
    values: Iterable[int],
    chunks: Sequence[int] = (),
) -> tuple[Offload, ...]:
    """The Offloads of Values that own their memory; what nobody reads after the forward is left
    out. With `chunks`, the Ops at which chunks of the order begin, copies begin and are waited for
    at these only."""
    uses = _uses(made, costs, frozenset(values))
    starts = op_starts(made, costs)
    gone = _gone(made, costs, way, uses, starts)
    back = _back(costs, way, uses, starts)
    found = (Offload(value, gone[value], back[value]) for value in sorted(uses))
    if not chunks or not way.beside:
        return tuple(found)
    return tuple(_at_chunks(made, each, chunks) for each in found)


def op_starts(made: RewrittenGraph, costs: RecomputeCosts) -> list[float]:
    """When each Op begins, and last when the step ends, if Ops run one after another."""
    seconds = (
        0.0 if origin < 0 or made.is_host_copy(op) else costs.seconds[origin]
        for op, origin in enumerate(made.origins)
    )
    return [0.0, *accumulate(seconds)]


def _at_chunks(made: RewrittenGraph, each: Offload, chunks: Sequence[int]) -> Offload:
    """The Offload that leaves and is gone a little later, and comes back a little sooner."""
    maker = made.graph.producer[each.value]
    assert maker is not None
    end = len(made.graph.ops)

    def later(op: int) -> int:
        place = bisect_left(chunks, op)
        return chunks[place] if place < len(chunks) else end

    back = chunks[max(bisect_right(chunks, each.back) - 1, 0)]
    return Offload(each.value, later(each.gone), back, later(maker[0] + 1))


@dataclass(slots=True)
class _Uses:
    """The last Op of the forward that reads a Value or a view of it, the one that makes it if none
    does; and the first later one."""

    early: int
    late: int = -1


def _uses(made: RewrittenGraph, costs: RecomputeCosts, values: frozenset[int]) -> dict[int, _Uses]:
    graph, found = made.graph, dict[int, _Uses]()
    for value in values:
        producer = graph.producer[value]
        assert producer is not None, "only what the forward makes is offloaded"
        found[value] = _Uses(producer[0])
    for op, meant in enumerate(graph.ops):
        for read in dict.fromkeys(costs.shares[made.values[v]] for v in meant.inputs):
            if read in found:
                use = found[read]
                if meant.phase == FORWARD:
                    use.early = op
                elif use.late < 0:
                    use.late = op
    return {value: use for value, use in found.items() if use.late >= 0}


def _gone(
    made: RewrittenGraph,
    costs: RecomputeCosts,
    way: HostWay,
    uses: dict[int, _Uses],
    starts: Sequence[float],
) -> dict[int, int]:
    makers = {value: made.graph.producer[value] for value in uses}
    order = sorted((maker[0], value) for value, maker in makers.items() if maker is not None)
    found, free = {}, 0.0
    for place, (maker, value) in enumerate(order):
        free = max(free, starts[maker + 1]) + way.seconds(costs.nbytes[value])
        complete = bisect_left(starts, free)
        if place + DEPTH < len(order):
            complete = min(complete, order[place + DEPTH][0])
        found[value] = max(complete if way.beside else 0, uses[value].early + 1)
    return found


def _back(
    costs: RecomputeCosts, way: HostWay, uses: dict[int, _Uses], starts: Sequence[float]
) -> dict[int, int]:
    order = sorted((use.late, value) for value, use in uses.items())
    found, free = {}, starts[-1]
    for place, (late, value) in reversed(list(enumerate(order))):
        free = min(free, starts[late]) - way.seconds(costs.nbytes[value])
        begins = max(bisect_right(starts, free) - 1, 0)
        if place >= DEPTH:
            begins = max(begins, order[place - DEPTH][0])
        found[value] = min(begins, late) if way.beside else late
    return found
