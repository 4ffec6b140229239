"""tensorflowmem: order, offloading and placement as TensorFlowMem does it (Wei, CMU 2019).

Part of the room memory. A StepModel, an OrderModel, the way to the host and a limit come in, a
MemoryPlan goes out, which is lowered, simulated and run as any other. The thesis was not to be had:
this is a reconstruction from its slides, in three passes.

    partition  An order of low peak is cut into chunks, each as long as what its Ops make is within
               a number of bytes. Chunks run one after the other; what is in one may run at the same
               time, so that its Ops come by levels here. One chunk is stock TensorFlow.
    offload    A Value of the forward that is not used for some chunks leaves at the end of the
               chunk that used it last, and begins to come back one chunk before it is used again.
               Those first whose copies the chunks between hide, the largest bytes times gap first,
               until the estimated peak is within the limit; then others, the least stall first.
    placement  Parameters and what the optimizer keeps of them lie on the host and are updated
               there. A parameter comes one chunk before it is used, is dropped when it is not used
               for a chunk, and comes again.

What differs: a Value leaves once, between forward and backward, and a chunk is given to its copy
out as one is to its copy back, so that it has to be unused for four chunks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.graph import FORWARD, Graph
from apportion.memory.choose_memory import offloadable, views_of
from apportion.memory.host_state import (
    FIXED,
    HOST,
    HostState,
    derived_ops,
    host_state,
    readers_on_device,
    travelling_gradient,
    update_of,
)
from apportion.memory.host_units import large_parameters
from apportion.memory.level_order import level_order
from apportion.memory.offload import Offload
from apportion.memory.order_model import OrderModel
from apportion.memory.planned_graph import MemoryPlan, before_host
from apportion.memory.rewritten_graph import RewrittenGraph
from apportion.memory.step_model import StepModel
from apportion.memory.time_offloads import HostWay

FEWEST = 1 << 12  # bytes under which a Value is not worth a copy


@dataclass(frozen=True)
class ChunkPartition:
    """Units in chunks that run one after the other, and the bytes that each may make."""

    chunks: tuple[tuple[int, ...], ...]
    budget: int


def partition(orders: OrderModel, order: Sequence[int], budget: int) -> ChunkPartition:
    """The chunks of an order, each with as many units as make so many bytes at most; in each they
    come by levels."""
    found: list[list[int]] = []
    made = budget + 1
    for unit in order:
        own = sum(orders.nbytes[memory] for memory in orders.makes[unit])
        if made + own > budget:
            found.append([])
            made = 0
        found[-1].append(unit)
        made += own
    return ChunkPartition(tuple(tuple(level_order(orders, chunk)) for chunk in found), budget)


def tensorflowmem(
    model: StepModel,
    orders: OrderModel,
    way: HostWay,
    limit: int,
    parts: ChunkPartition,
    offloads: bool = True,
    places: bool = True,
) -> MemoryPlan:
    """The decisions of all passes, or without some; `parts` are those of the first."""
    return _Passes(model, orders, way, limit, parts).plan(offloads, places)


@dataclass(frozen=True, slots=True)
class _Use:
    """A Value by chunks: the last of the forward that uses it, and the first that does later."""

    value: int
    nbytes: int
    early: int
    late: int


class _Passes:
    def __init__(
        self, model: StepModel, orders: OrderModel, way: HostWay, limit: int, parts: ChunkPartition
    ) -> None:
        self.graph, self.costs, self.way, self.limit = model.graph, model.costs, way, limit
        units = [unit for chunk in parts.chunks for unit in chunk]
        self.order, self.count = orders.ops(units), len(parts.chunks)
        self.chunk = {
            op: number
            for number, chunk in enumerate(parts.chunks)
            for unit in chunk
            for op in orders.units[unit]
        }
        seconds = np.zeros(self.count)
        for op, number in self.chunk.items():
            seconds[number] += self.costs.seconds[op]
        self.ends = np.cumsum(seconds)
        places = np.cumsum([0, *map(len, parts.chunks)])[:-1]
        self.levels = np.maximum.reduceat(np.array(orders.levels(units)), places)

    def plan(self, offloads: bool, places: bool) -> MemoryPlan:
        state = self._placed() if places else {}
        values = self._offloaded() if offloads else frozenset[int]()
        again = derived_ops(self.graph, state) if state else frozenset[int]()
        values = values.difference(*(self.graph.ops[op].outputs for op in again))
        again |= views_of(self.graph, self.costs, values) if values else frozenset[int]()
        made = before_host(self.graph, MemoryPlan(self.order, tuple(sorted(again))))
        starts = self._starts(made)
        states = tuple(self._state(made.graph, v, how, starts) for v, how in state.items())
        there = made.then(host_state(made.graph, states))
        starts = self._starts(there)
        uses = {use.value: use for use in self._uses()}
        away = tuple(
            Offload(v, starts[uses[v].early + 2], starts[uses[v].late - 1],
                    starts[uses[v].early + 1])
            for v in sorted(values)
        )  # fmt: skip
        repeats = tuple(sorted({made.origins[op] for op in made.repeats}))
        return MemoryPlan(self.order, repeats, states, away)

    def _starts(self, made: RewrittenGraph) -> list[int]:
        """The Op of a rewritten Graph at which each chunk begins, and one beyond all, thrice."""
        count = len(made.graph.ops)
        found, here = [count] * self.count, self.count - 1
        for op in range(count - 1, -1, -1):
            own = not made.is_repeat(op) and not made.is_host_copy(op) and made.origins[op] >= 0
            if own and made.graph.ops[op].kind == self.graph.ops[made.origins[op]].kind:
                here = self.chunk[made.origins[op]]
            found[here] = op
        for number in range(self.count - 2, -1, -1):
            found[number] = min(found[number], found[number + 1])
        return [*found, count, count, count]

    # Offloading

    def _uses(self) -> list[_Use]:
        graph, costs = self.graph, self.costs
        early: dict[int, int] = {}
        late: dict[int, int] = {}
        for op in self.order:
            meant, here = graph.ops[op], self.chunk[op]
            for value in (*meant.inputs, *meant.outputs):
                root = costs.shares[value]
                if meant.phase == FORWARD:
                    early[root] = here
                else:
                    late.setdefault(root, here)
        return [
            _Use(v, costs.nbytes[v], early[v], late[v])
            for v in sorted(offloadable(graph, costs, frozenset()))
            if v in early and v in late and costs.nbytes[v] >= FEWEST
        ]

    def _offloaded(self) -> frozenset[int]:
        uses = [use for use in self._uses() if use.late - use.early >= 4]
        gap = {use: float(self.ends[use.late - 1] - self.ends[use.early]) for use in uses}
        stall = {use: 2 * self.way.seconds(use.nbytes) - gap[use] for use in uses}
        hidden = [use for use in uses if stall[use] <= 0]
        hidden.sort(key=lambda use: -use.nbytes * gap[use])
        others = sorted((use for use in uses if stall[use] > 0), key=stall.__getitem__)
        found = set()
        for use in (*hidden, *others):
            if self.levels.max() <= self.limit:
                break
            self.levels[use.early + 2 : use.late - 1] -= use.nbytes
            found.add(use.value)
        return frozenset(found)

    # Placement

    def _placed(self) -> dict[int, str]:
        """The parameters that lie on the host, and where each is updated. Levels are lowered."""
        graph, found = self.graph, dict[int, str]()
        for value in large_parameters(graph):
            update = update_of(graph, value)
            found[value] = FIXED if update is None else HOST
            state = [] if update is None else list(graph.ops[update].inputs[2:])
            self.levels -= sum(graph.values[v].nbytes for v in (value, *state))
            readers = readers_on_device(graph, value, found[value])
            for first, last in self._stretches(sorted(self.chunk[op] for op in readers)):
                self.levels[max(first - 1, 0) : last + 1] += graph.values[value].nbytes
        return found

    def _stretches(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """The first and the last of chunks that follow each other with one between at most."""
        found: list[tuple[int, int]] = []
        for chunk in chunks:
            if found and chunk - found[-1][1] <= 2:
                found[-1] = (found[-1][0], chunk)
            else:
                found.append((chunk, chunk))
        return found

    def _state(self, graph: Graph, value: int, update: str, starts: Sequence[int]) -> HostState:
        begins = starts[: self.count]

        def chunk(op: int) -> int:
            place = bisect_left(begins, op + 1) - 1
            return max(place, 0)

        fetches: list[tuple[int, int]] = []
        last = -3
        for reader in sorted(readers_on_device(graph, value, update)):
            here = chunk(reader)
            if here - last > 2:
                fetches.append((reader, starts[max(here - 1, 0)]))
            last = here
        own = update_of(graph, value)
        if update != HOST or own is None:
            return HostState(value, update, tuple(fetches))
        made = graph.producer[travelling_gradient(graph, own)]
        left = chunk(own if made is None else made[0])
        return HostState(value, update, tuple(fetches), 0, starts[left + 1], starts[left + 2])
