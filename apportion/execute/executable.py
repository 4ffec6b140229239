"""Executable: a TaskGraph made ready to run on real tensors; what all ranks share.

Part of the room execute. A Space, a Strategy and their TaskGraph come in; out go, in the form in
which an interpreter wants them, the slots, the kernel calls, the copies and the messages. It holds
no tensors: rank.py has those of one device, run_part.py calls a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from apportion.columns import Ints
from apportion.describe import Box, full, lengths, volume
from apportion.execute.kernels.base import (
    Template,
    dtype,
    template,
)
from apportion.graph import Op
from apportion.lower import (
    COMPUTE,
    MessageBuffers,
    TaskGraph,
    host_labels,
    message_buffers,
    uses_host,
)
from apportion.machine import usable_cores
from apportion.split import Part, Space, Strategy, layers_of


@dataclass(frozen=True)
class SlotSpec:
    """The tensor that a slot holds: which region of which Value."""

    value: int
    region: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Message:
    """What one device sends to another in a TRANSFER, or in its share of a COLLECTIVE."""

    task: int
    sender: int
    receiver: int
    nbytes: int


@dataclass(frozen=True)
class BoxCopy:
    """A box that an assembly copies or adds, out of a local slot or out of a message.

    source_box  of the slot `source`, seen in its `source_shape`; it has the shape `shape`
    target_box  where it goes in the region that is put together
    term        0 where it is copied; later terms are added
    message     that carries it, at a byte `offset`; -1 if it is on the same device
    """

    source: int
    source_shape: tuple[int, ...]
    source_box: tuple[slice, ...]
    target_box: tuple[slice, ...]
    term: int
    message: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class KernelCall:
    """What a COMPUTE calls: the kernel of a part of an Op, on slots."""

    op: Op
    part: Part
    number: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    args: Template


@dataclass(frozen=True)
class CopySchedule:
    """The copies of all assemblies, and the messages that carry them.

    of_task     the copies of each assembly
    in_message  the copies that each message carries
    readers     the last task that reads each message
    """

    of_task: dict[int, list[BoxCopy]]
    messages: list[Message]
    in_message: dict[int, list[BoxCopy]]
    readers: dict[int, int]


class Executable:
    """A TaskGraph made ready to run: what the ranks share. It holds no tensors.

    What has a row per slot, copy or task is made when it is first used.
    """

    def __init__(self, space: Space, strategy: Strategy, tasks: TaskGraph) -> None:
        self.space = space
        self.strategy = strategy
        self.graph = space.graph
        self.tasks = tasks if tasks.before_storage is None else tasks.before_storage
        self.work = tasks.work  # which kernel call each task makes; empty where it is not known
        self.artefacts: dict[Any, Any] = {}  # compiled code, by what it was compiled from

    @cached_property
    def layers(self) -> list[int]:
        """For each Op its layer, -1 for none."""
        return layers_of(self.graph)

    @cached_property
    def kind(self) -> list[int]:
        return _listed(self.tasks.kind)

    @cached_property
    def is_message(self) -> list[bool]:
        found: list[bool] = self.tasks.is_message.tolist()
        return found

    @cached_property
    def device(self) -> list[int]:
        return _listed(self.tasks.device)

    @cached_property
    def peer(self) -> list[int]:
        return _listed(self.tasks.peer)

    @cached_property
    def position(self) -> list[int]:
        return _listed(self.tasks.position)

    @cached_property
    def nbytes(self) -> list[int]:
        return _listed(self.tasks.nbytes)

    @cached_property
    def slots(self) -> list[SlotSpec]:
        tasks, found = self.tasks, dict[tuple[int, int], SlotSpec]()
        keys = list(zip(tasks.slot_value.tolist(), tasks.slot_region.tolist(), strict=True))
        for key in dict.fromkeys(keys):
            found[key] = self._slot(key[0], tasks.boxes[key[1]])
        return [found[key] for key in keys]

    @cached_property
    def slot_device(self) -> list[int]:
        return _listed(self.tasks.slot_device)

    @cached_property
    def begin(self) -> list[int]:
        return [s for s, first in enumerate(self.tasks.slot_first.tolist()) if first == -1]

    @cached_property
    def carry(self) -> list[tuple[int, int]]:
        return [(a, b) for a, b in self.tasks.carry.tolist()]

    @cached_property
    def frees(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self.tasks))]
        for slot, last in enumerate(self.tasks.slot_last.tolist()):
            if 0 <= last < len(found):
                found[last].append(slot)
        return found

    @cached_property
    def on_host(self) -> list[bool]:
        """Whether each slot lies in the memory of its device's host."""
        found: list[bool] = self.tasks.slot_on_host.tolist()
        return found

    @cached_property
    def labels(self) -> list[int]:
        """What each task has to do with the host; segments have tasks of one label."""
        if not uses_host(self.tasks):
            return [0] * len(self.tasks)
        return _listed(host_labels(self.tasks))

    @cached_property
    def host_homes(self) -> dict[int, int]:
        """New state on the host -> the state of the step's beginning whose memory it takes."""
        tasks, carried = self.tasks, dict[int, list[int]]()
        for end, begin in self.carry:
            carried.setdefault(end, []).append(begin)
        return {
            end: begins[0]
            for end, begins in carried.items()
            if len(begins) == 1
            and self.on_host[end]
            and self.on_host[begins[0]]
            and 0 <= tasks.slot_last[begins[0]] <= tasks.slot_first[end]
        }

    @cached_property
    def unread(self) -> list[int]:
        return [s for s in self.begin if self.tasks.slot_last[s] < 0]

    @cached_property
    def copies(self) -> dict[int, list[BoxCopy]]:
        return self._schedule.of_task

    @cached_property
    def messages(self) -> list[Message]:
        return self._schedule.messages

    @cached_property
    def messages_of(self) -> list[list[int]]:
        """The numbers of the messages that each device sends or receives."""
        found: list[list[int]] = [[] for _ in range(self.tasks.devices)]
        for number, message in enumerate(self.messages):
            for device in {message.sender, message.receiver}:
                found[device].append(number)
        return found

    @cached_property
    def packed(self) -> dict[int, list[BoxCopy]]:
        return self._schedule.in_message

    @cached_property
    def readers(self) -> dict[int, int]:
        return self._schedule.readers

    @cached_property
    def message_buffers(self) -> MessageBuffers:
        """Where the bytes of messages are, on all devices."""
        return message_buffers(self.tasks)

    @cached_property
    def reducers(self) -> dict[int, str | None]:
        return {
            value: self.space.split(i, self.strategy.choices[i].parts).reducers[k]
            for i, op in enumerate(self.graph.ops)
            for k, value in enumerate(op.outputs)
        }

    def _slot(self, value: int, region: Box) -> SlotSpec:
        shape = local_shape(self.space, value, region)
        return SlotSpec(value, region, shape, dtype(self.graph.values[value].dtype or ""))

    @cached_property
    def _schedule(self) -> CopySchedule:
        tasks = self.tasks
        columns = (
            tasks.copy_source, tasks.copy_target, tasks.copy_source_box, tasks.copy_target_box,
            tasks.copy_term, tasks.copy_message, tasks.copy_task, tasks.copy_nbytes,
        )  # fmt: skip
        rows = list(zip(*(c.tolist() for c in columns), strict=True))
        # Large items first, so that every box of a message starts at a multiple of its item size.
        kinds = [self._travels_as(row[0], tasks.boxes[row[2]], row[7]) for row in rows]
        order = sorted(range(len(rows)), key=lambda r: -kinds[r].itemsize)
        ends: dict[int, int] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        bound: dict[int, BoxCopy] = {}
        found = CopySchedule({}, [], {}, {})
        for row in order:
            source, target, here, there, term, transfer, _, nbytes = rows[row]
            number = -1
            if transfer >= 0:
                pair = (transfer, self.slot_device[source], self.slot_device[target])
                number = numbers.setdefault(pair, len(numbers))
            offset = ends.get(number, 0)
            if number >= 0:
                ends[number] = offset + nbytes
            box = tasks.boxes[here]
            bound[row] = BoxCopy(
                source, lengths(self.slots[source].region), slices(box),
                slices(tasks.boxes[there]), term, number, offset, nbytes,
                kinds[row], lengths(box),
            )  # fmt: skip
            if number >= 0:
                found.in_message.setdefault(number, []).append(bound[row])
        found.messages.extend(Message(*pair, ends[k]) for pair, k in numbers.items())
        for row in sorted(bound, key=lambda r: (rows[r][6], rows[r][4], r)):
            found.of_task.setdefault(rows[row][6], []).append(bound[row])
            found.readers[bound[row].message] = rows[row][6]
        return found

    def _travels_as(self, source: int, box: Box, nbytes: int) -> torch.dtype:
        """The dtype of a box of a slot that has so many bytes on its way (lower/half_sums.py)."""
        own = self.slots[source].dtype
        return torch.bfloat16 if nbytes < volume(box) * own.itemsize else own

    @cached_property
    def computes(self) -> dict[int, KernelCall]:
        """What every task calls that calls the kernel of an Op."""
        tasks, found = self.tasks, {}
        templates: dict[int, Template] = {}  # by identity of a Part, which `space` keeps
        kinds = tasks.task_kinds
        calls = (tasks.kind == COMPUTE) | (kinds.is_host_copy | kinds.is_host_work)[tasks.kind]
        for task in range(len(tasks)):
            if calls[task]:
                index, number = int(tasks.op[task]), int(tasks.part[task])
                choice = self.strategy.choices[index]
                part = self.space.split(index, choice.parts).parts[number % choice.count]
                ins = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
                outs = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]]
                op = self.graph.ops[index]
                slots = tuple(ins.tolist()), tuple(outs.tolist())
                if len(tasks.call) and tasks.call[task] >= 0:
                    op, part = joined_part(tasks, op, task, tasks.boxes)
                    found[task] = KernelCall(op, part, number, *slots, template(part.args))
                    continue
                if id(part) not in templates:
                    templates[id(part)] = template(part.args)
                found[task] = KernelCall(op, part, number, *slots, templates[id(part)])
        return found

    @cached_property
    def loss_slots(self) -> list[int]:
        """Where the whole loss is when the step ends."""
        if self.graph.loss is None:
            return []
        whole = full(self.space.factors(self.graph.loss))
        last = self.tasks.slot_last
        return [
            s
            for s, slot in enumerate(self.slots)
            if slot.value == self.graph.loss and slot.region == whole and last[s] == len(self.tasks)
        ]


def joined_part(tasks: TaskGraph, op: Op, task: int, regions: Sequence[Box]) -> tuple[Op, Part]:
    """What a task computes that calls something else than the kernel of its Op, in the form of a
    part of an Op; `regions` are what `slot_region` indexes."""
    call = tasks.calls[int(tasks.call[task])]
    ins = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
    outs = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]]
    values = [tuple(tasks.slot_value[slots].tolist()) for slots in (ins, outs)]
    boxes = [tuple(regions[k] for k in tasks.slot_region[slots].tolist()) for slots in (ins, outs)]
    joined = replace(op, kind=call.kind, inputs=values[0], outputs=values[1], args=call.args)
    none, ones = (0,) * len(outs), (1.0,) * len(outs)
    return joined, Part(boxes[0], (), boxes[1], none, call.args, ones, float(tasks.flops[task]))


def _listed(column: Ints) -> list[int]:
    found: list[int] = column.tolist()
    return found


def threads(processes: int) -> int:
    """Threads of each of so many processes on this machine."""
    return max(1, usable_cores() // processes)


def local_shape(space: Space, value: int, region: Box) -> tuple[int, ...]:
    """Shape of the tensor that holds a region of a Value."""
    shape, place = [], 0
    for factors in space.atoms.dims[value]:
        shape.append(volume(region[place : place + len(factors)]))
        place += len(factors)
    return tuple(shape)


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(low, high) for low, high in box)
