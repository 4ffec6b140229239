"""time_host_state: when state that lies on the host comes to the device, and when it leaves.

Part of the room memory. A Graph with recomputed Ops, what its Ops take and the link to the host
come in, with the parameters that lie on the host and where each is updated; HostStates go out.

The order is cut into chunks, the layers of the forward and of the backward where there are such
(`chunk_starts`). Copies begin, and are waited for, at the start of a chunk only: between two starts
the device runs without being disturbed, and its kernels can be recorded as one.

    comes   so early that it is there when it is first read, if the link does nothing else than what
            is needed later, but no more than `lookahead` chunks ahead
    leaves  at the first start after it is made
    gone    at the first start at which the copy is complete, as far as times tell, but no more than
            `lookahead` chunks later

A copy that is read again within the time of two copies, or within the lookahead, stays until then.
Where copies burn the device there is nothing to gain: a parameter comes when it is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from apportion.graph import FORWARD, Graph
from apportion.memory.host_state import (
    DEVICE,
    HOST,
    HostState,
    moved_state,
    readers_on_device,
    shadow_dtype,
    travelling_gradient,
    update_of,
)
from apportion.memory.recompute_costs import RecomputeCosts
from apportion.memory.rewritten_graph import RewrittenGraph, in_dtype
from apportion.memory.time_offloads import HostWay, op_starts
from apportion.split import layers_of

LOOKAHEAD = 2  # chunks
FEWEST = 64  # chunks of a step in which no layers are seen
SHORT = 0.2  # of the mean chunk: shorter ones go with the one before


def chunk_starts(made: RewrittenGraph, costs: RecomputeCosts) -> list[int]:
    """The Ops at which chunks begin, rising, 0 first."""
    starts, graph = op_starts(made, costs), made.graph
    found = _layer_starts(graph)
    if len(found) < 3:
        found = [bisect_left(starts, starts[-1] * k / FEWEST) for k in range(FEWEST)]
        found = sorted({*found, _first_after_forward(graph)})
    short = SHORT * starts[-1] / max(len(found), 1)
    kept = [0]
    for op in found:
        if op > kept[-1] and starts[op] - starts[kept[-1]] >= short:
            kept.append(op)
    return kept


def _layer_starts(graph: Graph) -> list[int]:
    """The Ops at which another layer begins, or another pass over it."""
    found, last = [0], (True, -1)
    for op, layer in enumerate(layers_of(graph)):
        here = (graph.ops[op].phase == FORWARD, layer)
        if here != last:
            found.append(op)
        last = here
    return sorted(set(found))


def _first_after_forward(graph: Graph) -> int:
    later = (k for k, op in enumerate(graph.ops) if op.phase != FORWARD)
    return next(later, len(graph.ops))


def time_host_state(
    made: RewrittenGraph,
    costs: RecomputeCosts,
    way: HostWay,
    updates: Mapping[int, str],
    lookahead: int = LOOKAHEAD,
) -> tuple[HostState, ...]:
    """The HostStates of these parameters, each with where it is updated."""
    return _Timing(made, costs, way, lookahead).timed(updates)


@dataclass
class _CopyBack:
    """What comes: whose it is, which copy of it (-1: the optimizer's state), and the Op that reads
    it first."""

    parameter: int
    reader: int
    moments: bool
    seconds: float
    begin: int = 0


@dataclass
class _CopyOut:
    """What leaves, after which Op."""

    parameter: int
    maker: int
    seconds: float
    out: int = 0
    gone: int = 0


class _Timing:
    def __init__(
        self, made: RewrittenGraph, costs: RecomputeCosts, way: HostWay, lookahead: int
    ) -> None:
        self.graph, self.way, self.lookahead = made.graph, way, lookahead
        self.starts = op_starts(made, costs)
        self.chunks = chunk_starts(made, costs)

    def timed(self, updates: Mapping[int, str]) -> tuple[HostState, ...]:
        arrivals = [each for v, update in updates.items() for each in self._arrivals(v, update)]
        departures = [
            self._departure(v, update) for v, update in updates.items() if update in (HOST, DEVICE)
        ]
        self._time_arrivals(arrivals)
        self._time_departures(departures)
        found = {v: HostState(v, update, ()) for v, update in updates.items()}
        for come in arrivals:
            before = found[come.parameter]
            if come.moments:
                found[come.parameter] = replace(before, moments=come.begin)
            else:
                fetches = (*before.fetches, (come.reader, come.begin))
                found[come.parameter] = replace(before, fetches=fetches)
        for leave in departures:
            before = found[leave.parameter]
            found[leave.parameter] = replace(before, out=leave.out, gone=leave.gone)
        return tuple(found.values())

    def _arrivals(self, value: int, update: str) -> list[_CopyBack]:
        graph = self.graph
        shadow = shadow_dtype(graph, value) if update == HOST else None
        whole = graph.values[value]
        nbytes = whole.nbytes if shadow is None else in_dtype(whole, shadow).nbytes
        seconds = self.way.seconds(nbytes)
        found: list[_CopyBack] = []
        last = -1
        for reader in readers_on_device(graph, value, update):
            if last < 0 or not self._stays(last, reader, seconds):
                found.append(_CopyBack(value, reader, False, seconds))
            last = reader
        own = update_of(graph, value)
        if update == DEVICE and own is not None:
            inputs = graph.ops[own].inputs
            state = [graph.values[inputs[k]].nbytes for k in moved_state(graph, value, own)]
            if state:
                took = sum(map(self.way.seconds, state))
                found.append(_CopyBack(value, own, True, took))
        return found

    def _stays(self, last: int, reader: int, seconds: float) -> bool:
        """Whether a copy stays from one reader to the next."""
        if not self.way.beside:
            return self.graph.ops[last].phase == self.graph.ops[reader].phase
        soon = self._chunk(reader) - self._chunk(last) <= self.lookahead
        return soon or self.starts[reader] - self.starts[last + 1] <= 2 * seconds

    def _departure(self, value: int, update: str) -> _CopyOut:
        graph, own = self.graph, update_of(self.graph, value)
        assert own is not None, "only what is updated leaves"
        if update == HOST:
            leaving = travelling_gradient(graph, own)
            made = graph.producer[leaving]
            seconds = self.way.seconds(graph.values[leaving].nbytes)
            return _CopyOut(value, own if made is None else made[0], seconds)
        inputs = graph.ops[own].inputs
        moved = [value, *(inputs[k] for k in moved_state(graph, value, own))]
        return _CopyOut(value, own, sum(self.way.seconds(graph.values[v].nbytes) for v in moved))

    def _chunk(self, op: int) -> int:
        """The chunk that an Op is in."""
        return bisect_right(self.chunks, op) - 1

    def _start(self, chunk: int) -> int:
        """The Op at which a chunk begins; one beyond all if there is no such chunk."""
        return self.chunks[chunk] if chunk < len(self.chunks) else len(self.graph.ops)

    def _time_arrivals(self, arrivals: Sequence[_CopyBack]) -> None:
        free = self.starts[-1]
        for each in sorted(arrivals, key=lambda one: -one.reader):
            if not self.way.beside:
                each.begin = each.reader
                continue
            free = min(free, self.starts[each.reader]) - each.seconds
            begins = max(bisect_right(self.starts, free) - 1, 0)
            soonest = max(self._chunk(each.reader) - self.lookahead, 0)
            each.begin = self._start(max(self._chunk(begins), soonest))

    def _time_departures(self, departures: Sequence[_CopyOut]) -> None:
        free = 0.0
        for each in sorted(departures, key=lambda one: one.maker):
            if not self.way.beside:
                each.out = each.gone = each.maker + 1
                continue
            chunk = self._chunk(each.maker) + 1
            each.out = self._start(chunk)
            free = max(free, self.starts[each.out]) + each.seconds
            done = bisect_left(self.starts, free)
            complete = bisect_left(self.chunks, done)
            each.gone = self._start(min(complete, chunk + self.lookahead))
