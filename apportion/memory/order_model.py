"""order_model: what a step holds in any order of its Ops, without lowering it.

Part of the room memory. A StepModel and the tasks that it was made of come in, an OrderModel goes
out, which methods for orders (level_order.py, least_peak_order.py, olla_order.py) read. It looks at
a step as units, Ops that one call computes and that therefore stay together, and at memories:

    a memory is held from the unit that makes it, or from the begin of the step if it is an input,
    to the last unit that touches it; state is held throughout
    updates wait for each other until HELD_BYTES of gradients do, and are one call then

A unit comes after those that make what it reads; one that updates state, also after those that read
the state as it was. On one device this is what simulation gives, to the byte
(tests/memory/test_orders.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from apportion.columns import Bools
from apportion.describe import UPDATE_KIND
from apportion.graph import Graph
from apportion.lower import TaskGraph
from apportion.memory.step_model import StepModel
from apportion.simulate import Timeline

DONE_BY_NEXT = (
    "apportion.channel_sum",
    "apportion.channel_squares",
    "apportion.batch_norm_reduce",
    "apportion.conv_backward_input",
)
"""Ops whose work a joined call after them does; of others it is one before them."""
NOTHING = "apportion.nothing"
HELD_BYTES = 1 << 26  # of gradients that wait for one call, as execute/fused_update.py has it


@dataclass(frozen=True, eq=False)
class OrderModel:
    """A step whose units may run in another order.

    units      the Ops of each, as captured, one after the other
    needs      for each unit those that come before it
    touches    for each unit the memories that it reads or makes
    makes      for each unit the memories that it makes
    nbytes     of each memory
    begins     the memories that are there when the step begins
    stays      the memories that are there when it ends
    workspace  bytes that each unit holds while it runs, beside the memories
    updates    bytes of the gradient of each unit that is an update, 0 of others
    base       bytes that are held throughout
    """

    units: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    touches: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    begins: frozenset[int]
    stays: frozenset[int]
    workspace: tuple[int, ...]
    updates: tuple[int, ...]
    base: int

    @cached_property
    def touched_by(self) -> tuple[tuple[int, ...], ...]:
        """For each memory the units that touch it."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for unit, memories in enumerate(self.touches):
            for memory in memories:
                found[memory].append(unit)
        return tuple(map(tuple, found))

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """For each unit those that come after it."""
        found: list[list[int]] = [[] for _ in self.units]
        for unit, before in enumerate(self.needs):
            for one in before:
                found[one].append(unit)
        return tuple(map(tuple, found))

    @cached_property
    def unit_of(self) -> dict[int, int]:
        """The unit of each Op."""
        return {op: unit for unit, ops in enumerate(self.units) for op in ops}

    def ops(self, order: Iterable[int]) -> tuple[int, ...]:
        """The Ops of units in this order."""
        return tuple([op for unit in order for op in self.units[unit]])

    def order_of(self, ops: Sequence[int]) -> list[int]:
        """The units in the order of Ops, each when its last Op comes and no sooner than what it
        needs; as captured if there are none."""
        if not len(ops):
            return list(range(len(self.units)))
        last = {self.unit_of[op]: place for place, op in enumerate(ops)}
        left = [len(before) for before in self.needs]
        ready = [(last[unit], unit) for unit, count in enumerate(left) if not count]
        heapify(ready)
        found = []
        while ready:
            _, unit = heappop(ready)
            found.append(unit)
            for follower in self.followers[unit]:
                left[follower] -= 1
                if not left[follower]:
                    heappush(ready, (last[follower], follower))
        return found

    def levels(self, order: Sequence[int]) -> list[int]:
        """The bytes that are held while each unit of an order runs."""
        left = [len(units) for units in self.touched_by]
        now = self.base + sum(self.nbytes[m] for m in self.begins)
        found, waiting, gradients = [], 0, 0  # bytes that updates still hold
        for unit in order:
            now += sum(self.nbytes[memory] for memory in self.makes[unit])
            found.append(now + self.workspace[unit])
            freed = 0
            for memory in self.touches[unit]:
                left[memory] -= 1
                if not left[memory] and memory not in self.stays:
                    freed += self.nbytes[memory]
            if not self.updates[unit]:
                now -= freed
                continue
            waiting, gradients = waiting + freed, gradients + self.updates[unit]
            if gradients > HELD_BYTES:
                now, waiting, gradients = now - waiting, 0, 0
        return found

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes that are held in an order."""
        return max(self.levels(order), default=self.base)

    def is_order(self, order: Sequence[int]) -> bool:
        """Whether these are all units, each after those that it needs."""
        place = {unit: k for k, unit in enumerate(order)}
        if len(place) != len(order) or len(order) != len(self.units):
            return False
        return all(place[a] < place[b] for b, before in enumerate(self.needs) for a in before)


def order_model(
    model: StepModel, tasks: TaskGraph, timeline: Timeline, device: int, origins: Sequence[int]
) -> OrderModel:
    """The model of the Graph of a StepModel on a device; `origins` has for each Op of the tasks the
    one of that Graph (Space.origins)."""
    graph, columns = model.graph, model.columns
    units = _units(graph, tasks, origins)
    unit_of = {op: unit for unit, ops in enumerate(units) for op in ops}
    inputs = _inputs(graph, tasks, timeline, device)
    nbytes = [inputs.get(v, int(columns.nbytes[v])) for v in range(len(graph.values))]
    real = {v: k for k, v in enumerate(v for v, size in enumerate(nbytes) if size)}
    touches: list[dict[int, None]] = [{} for _ in units]
    makes: list[dict[int, None]] = [{} for _ in units]
    for op, meant in enumerate(graph.ops):
        for value in (*meant.inputs, *meant.outputs):
            root = int(columns.shares[value])
            if root in real:
                touches[unit_of[op]][real[root]] = None
        for value in meant.outputs:
            if value in real:
                makes[unit_of[op]][real[value]] = None
    begins = frozenset(real[v] for v in inputs if v in real)
    state = int(timeline.curves[device].nbytes[_first_change(tasks, timeline, device)])
    return OrderModel(
        units=units,
        needs=_needs(graph, unit_of, len(units)),
        touches=tuple(map(tuple, touches)),
        makes=tuple(map(tuple, makes)),
        nbytes=tuple(nbytes[v] for v in real),
        begins=begins,
        stays=frozenset(k for v, k in real.items() if columns.stays[v]),
        workspace=tuple(max(int(columns.during[op]) for op in ops) for ops in units),
        updates=tuple(_gradient(graph, ops) for ops in units),
        base=state - sum(inputs.values()),
    )


def _gradient(graph: Graph, ops: Sequence[int]) -> int:
    """Bytes of the gradient that an update reads, 0 if the Ops are none."""
    op = graph.ops[ops[-1]]
    known = op.kind == UPDATE_KIND and len(op.inputs) > 1
    return graph.values[op.inputs[1]].nbytes if known else 0


def _needs(graph: Graph, unit_of: dict[int, int], count: int) -> tuple[tuple[int, ...], ...]:
    found: list[set[int]] = [set() for _ in range(count)]
    for op, meant in enumerate(graph.ops):
        for value in meant.inputs:
            made = graph.producer[value]
            if made is not None:
                found[unit_of[op]].add(unit_of[made[0]])
    for before, after in graph.state:
        made = graph.producer[after]
        for reader in graph.consumers[before] if made is not None else ():
            if made is not None and reader < made[0]:
                found[unit_of[made[0]]].add(unit_of[reader])
    return tuple(tuple(sorted(some - {unit})) for unit, some in enumerate(found))


def _units(graph: Graph, tasks: TaskGraph, origins: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The Ops, those together of which one call does the work."""
    calls = {}
    if len(tasks.call):
        for task, op in enumerate(tasks.op.tolist()):
            number = int(tasks.call[task])
            if op < len(origins) and number >= 0:
                calls[origins[op]] = tasks.calls[number].kind
    found: list[list[int]] = []
    waiting = False  # whether the next Op does the work of the last ones
    for op, meant in enumerate(graph.ops):
        idle = calls.get(op) == NOTHING
        follows = idle and meant.kind not in DONE_BY_NEXT
        if found and (waiting or (follows and found[-1][-1] in calls)):
            found[-1].append(op)
        else:
            found.append([op])
        waiting = idle and not follows
    return tuple(map(tuple, found))


def _inputs(graph: Graph, tasks: TaskGraph, timeline: Timeline, device: int) -> dict[int, int]:
    """The Values that are there when the step begins and not when it ends, with their bytes."""
    curve, slots = timeline.curves[device], len(tasks.slot_device)
    rows = np.flatnonzero((curve.thing < slots) & (curve.change > 0))
    found: dict[int, int] = {}
    for row in rows.tolist():
        slot = int(curve.thing[row])
        value = int(tasks.slot_value[slot])
        gone = tasks.slot_first[slot] < 0 and tasks.slot_last[slot] < len(tasks)
        if gone and value < len(graph.values):
            found[value] = found.get(value, 0) + int(curve.change[row])
    return found


def _first_change(tasks: TaskGraph, timeline: Timeline, device: int) -> int:
    """The row of the curve at which all is there that the step begins with."""
    curve, slots = timeline.curves[device], len(tasks.slot_device)
    slot = np.minimum(curve.thing, slots - 1)
    begun: Bools = (curve.thing >= slots) | (tasks.slot_first[slot] >= 0) | (curve.change < 0)
    return max(int(np.argmax(begun)) - 1, 0) if begun.any() else len(curve.thing) - 1
