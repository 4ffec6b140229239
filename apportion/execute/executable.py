"""Running a TaskGraph: the interpreter that every rank runs, and all ranks in one process.

A `Rank` holds the slots of one device and can do each kind of task. `run_together` runs the global
order over all ranks in one process, which is the fast oracle; processes.py runs one rank per
process over torch.distributed. Both execute the same tasks of the same TaskGraph by the same
functions; only the transport differs.

Whole tensors exist in two places only: the batch that the caller passes to a step, and the tensors
that state is loaded from; a rank keeps the regions that its plan gives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from apportion.columns import Ints
from apportion.describe import Box, flatten, full, lengths, volume
from apportion.execute.kernels import Context, Template, dtype, kernel, template
from apportion.graph import INPUT, Op
from apportion.lower import (
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
    TaskGraph,
)
from apportion.machine import cores
from apportion.split import Part, Space, Strategy

Corrupt = Callable[[int, torch.Tensor], torch.Tensor]
"""Changes a packed message (parcel, bytes): how tests plant errors."""


@dataclass(frozen=True)
class _SlotSpec:
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
class _BoxCopy:
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
class _KernelCall:
    op: Op
    part: Part
    number: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    args: Template


@dataclass(frozen=True)
class _CopySchedule:
    """The copies of all assemblies, and the parcels that carry them."""

    of: dict[int, list[_BoxCopy]]  # by task
    parcels: list[Message]
    packed: dict[int, list[_BoxCopy]]  # by parcel
    readers: dict[int, int]  # the last task that reads a parcel


class Executable:
    """A TaskGraph made ready to run: what the ranks share. It holds no tensors.

    What has a row per slot, copy or task is made when it is first used.
    """

    def __init__(self, space: Space, strategy: Strategy, tasks: TaskGraph) -> None:
        self.space = space
        self.strategy = strategy
        self.graph = space.graph
        self.tasks = tasks

    @cached_property
    def kind(self) -> list[int]:
        return _listed(self.tasks.kind)

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
    def slots(self) -> list[_SlotSpec]:
        return [self._slot(s) for s in range(len(self.tasks.slot_device))]

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
    def unread(self) -> list[int]:
        return [s for s in self.begin if self.tasks.slot_last[s] < 0]

    @cached_property
    def copies(self) -> dict[int, list[_BoxCopy]]:
        return self._copies.of

    @cached_property
    def parcels(self) -> list[Message]:
        return self._copies.parcels

    @cached_property
    def packed(self) -> dict[int, list[_BoxCopy]]:
        return self._copies.packed

    @cached_property
    def readers(self) -> dict[int, int]:
        return self._copies.readers

    @cached_property
    def reducers(self) -> dict[int, str | None]:
        return {
            value: self.space.split(i, self.strategy.choices[i].parts).reducers[k]
            for i, op in enumerate(self.graph.ops)
            for k, value in enumerate(op.outputs)
        }

    def _slot(self, number: int) -> _SlotSpec:
        tasks = self.tasks
        value = int(tasks.slot_value[number])
        region = tasks.boxes[int(tasks.slot_region[number])]
        shape = local_shape(self.space, value, region)
        return _SlotSpec(value, region, shape, dtype(self.graph.values[value].dtype or ""))

    @cached_property
    def _copies(self) -> _CopySchedule:
        tasks = self.tasks
        columns = (
            tasks.copy_source, tasks.copy_target, tasks.copy_source_box, tasks.copy_target_box,
            tasks.copy_term, tasks.copy_message, tasks.copy_task, tasks.copy_nbytes,
        )  # fmt: skip
        rows = list(zip(*(c.tolist() for c in columns), strict=True))
        # Large items first, so that every box of a message starts at a multiple of its item size.
        order = sorted(range(len(rows)), key=lambda r: -self.slots[rows[r][0]].dtype.itemsize)
        ends: dict[int, int] = {}
        numbers: dict[tuple[int, int, int], int] = {}
        bound: dict[int, _BoxCopy] = {}
        found = _CopySchedule({}, [], {}, {})
        for row in order:
            source, target, here, there, term, message, _, nbytes = rows[row]
            parcel = -1
            if message >= 0:
                pair = (message, self.slot_device[source], self.slot_device[target])
                parcel = numbers.setdefault(pair, len(numbers))
            offset = ends.get(parcel, 0)
            if parcel >= 0:
                ends[parcel] = offset + nbytes
            box = tasks.boxes[here]
            bound[row] = _BoxCopy(
                source, lengths(self.slots[source].region), slices(box),
                slices(tasks.boxes[there]), term, parcel, offset, nbytes,
                self.slots[source].dtype, lengths(box),
            )  # fmt: skip
            if parcel >= 0:
                found.packed.setdefault(parcel, []).append(bound[row])
        found.parcels.extend(Message(*pair, ends[number]) for pair, number in numbers.items())
        for row in sorted(bound, key=lambda r: (rows[r][6], rows[r][4], r)):
            found.of.setdefault(rows[row][6], []).append(bound[row])
            found.readers[bound[row].message] = rows[row][6]
        return found

    @cached_property
    def computes(self) -> dict[int, _KernelCall]:
        """What every COMPUTE calls."""
        tasks, found = self.tasks, {}
        templates: dict[int, Template] = {}  # by identity of a Part, which `space` keeps
        for task in range(len(tasks)):
            if self.kind[task] == COMPUTE:
                index, number = int(tasks.op[task]), int(tasks.part[task])
                choice = self.strategy.choices[index]
                part = self.space.split(index, choice.parts).parts[number % choice.count]
                ins = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
                outs = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]]
                op = self.graph.ops[index]
                args = templates.setdefault(id(part), template(part.args))
                slots = tuple(ins.tolist()), tuple(outs.tolist())
                found[task] = _KernelCall(op, part, number, *slots, args)
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


def _listed(column: Ints) -> list[int]:
    found: list[int] = column.tolist()
    return found


def threads(processes: int) -> int:
    """Threads of each of so many processes on this machine."""
    return max(1, cores() // processes)


def local_shape(space: Space, value: int, region: Box) -> tuple[int, ...]:
    """Shape of the tensor that holds a region of a Value."""
    shape, place = [], 0
    for factors in space.atoms.dims[value]:
        shape.append(volume(region[place : place + len(factors)]))
        place += len(factors)
    return tuple(shape)


def dim_spans(space: Space, value: int, region: Box) -> tuple[slice, ...] | None:
    """A region as one slice per dimension, or None if it is not."""
    found, place = [], 0
    for factors in space.atoms.dims[value]:
        span = flatten(region[place : place + len(factors)], factors)
        if span is None:
            return None
        found.append(slice(*span))
        place += len(factors)
    return tuple(found)


def run_part(
    space: Space,
    op: Op,
    part: Part,
    ins: Sequence[torch.Tensor | None],
    context: Context,
    args: Template | None = None,
) -> list[torch.Tensor]:
    """The kernel of one part of an Op; an input that is None is a block of zeros. `args` are
    template(part.args), where they are known."""
    tensors = [_zeros(space, op, part, k, context) if x is None else x for k, x in enumerate(ins)]
    tensors = padded(tensors, part)
    given = (args or template(part.args)).fill(tensors, context)
    if op.body is not None:
        given = [op.body, *given]
    results = list(kernel(op.kind)(context, given))[: len(op.outputs)]
    for k, result in enumerate(results):
        if result is None:
            kind = dtype(space.graph.values[op.outputs[k]].dtype or "")
            results[k] = torch.empty(0, dtype=kind, device=context.device)
        elif part.scales[k] != 1.0:
            own = not any(same_storage(result, x) for x in tensors)
            results[k] = result.mul_(part.scales[k]) if own else result * part.scales[k]
    return results


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are views of the same bytes."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _zeros(space: Space, op: Op, part: Part, k: int, context: Context) -> torch.Tensor:
    shape = local_shape(space, op.inputs[k], part.inputs[k])
    kind = dtype(space.graph.values[op.inputs[k]].dtype or "")
    return torch.zeros(shape, dtype=kind, device=context.device)


def padded(tensors: list[torch.Tensor], part: Part) -> list[torch.Tensor]:
    """The inputs of a part with the pads that its kernel needs around them."""
    for pad in part.pads:
        tensor = tensors[pad.input]
        widths = [0, 0] * (tensor.dim() - 1 - pad.dim) + [pad.before, pad.after]
        tensors[pad.input] = torch.nn.functional.pad(tensor, widths, value=pad.value)
    return tensors


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(low, high) for low, high in box)


@dataclass
class Rank:
    """One device's tensors while an Executable runs."""

    program: Executable
    device: int
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    messages: dict[int, torch.Tensor] = field(default_factory=dict)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    corrupt: Corrupt | None = None
    place: str = "cpu"  # torch's name of the device that holds them
    clock: Callable[[], int] = time.perf_counter_ns

    def load(self, source: Callable[[int], torch.Tensor]) -> None:
        """Copies this device's regions of the state out of whole tensors, `source(value)`."""
        for slot in self._begin(lambda role: role != INPUT):
            self.tensors[slot] = self._region(slot, source)

    def feed(self, source: Callable[[int], torch.Tensor]) -> None:
        """Copies this device's regions of the batch, and drops state that the step does not
        read."""
        self._drop_unread()
        for slot in self._begin(lambda role: role == INPUT):
            self.tensors[slot] = self._region(slot, source)

    def feed_regions(self, ask: Callable[[int, tuple[slice, ...]], torch.Tensor]) -> None:
        """Asks for this device's regions of the batch: `ask(value, a slice per dimension)`."""
        self._drop_unread()
        for slot in self._begin(lambda role: role == INPUT):
            meant = self.program.slots[slot]
            spans = dim_spans(self.program.space, meant.value, meant.region)
            if spans is None:
                raise ValueError(
                    f"the plan keeps a region of {self.program.graph.values[meant.value].name!r} "
                    "that is not one slice per dimension; pass the whole batch"
                )
            tensor = ask(meant.value, spans)
            if tuple(tensor.shape) != meant.shape:
                name = self.program.graph.values[meant.value].name
                raise ValueError(
                    f"the batch function returned {list(tensor.shape)} for {name!r}, asked for "
                    f"{list(meant.shape)}"
                )
            self.tensors[slot] = tensor.detach().to(self.place, meant.dtype, copy=True)

    def _drop_unread(self) -> None:
        for slot in self.program.unread:
            self.tensors.pop(slot, None)

    def _begin(self, wanted: Callable[[str], bool]) -> list[int]:
        program = self.program
        roles = program.graph.values
        return [
            s
            for s in program.begin
            if program.slot_device[s] == self.device and wanted(roles[program.slots[s].value].role)
        ]

    def _region(self, slot: int, source: Callable[[int], torch.Tensor]) -> torch.Tensor:
        meant = self.program.slots[slot]
        factors = self.program.space.factors(meant.value)
        whole = source(meant.value).detach().reshape(factors)
        here = whole[slices(meant.region)].reshape(meant.shape)
        return here.to(self.place, meant.dtype, copy=True)

    def run(self, task: int, context: Context) -> None:
        """One COMPUTE or ASSEMBLE, and the frees after it."""
        began = self.clock()
        self.make(task, context)
        self.free(task)
        self.spans.append((task, began, self.clock()))

    def make(self, task: int, context: Context) -> None:
        """What one COMPUTE or ASSEMBLE makes."""
        if self.program.kind[task] == COMPUTE:
            self._compute(self.program.computes[task], context)
        else:
            self._assemble(task)

    def _compute(self, work: _KernelCall, context: Context) -> None:
        ins = [self.tensors[slot] if slot >= 0 else None for slot in work.ins]
        results = run_part(self.program.space, work.op, work.part, ins, context, work.args)
        for slot, result in zip(work.outs, results, strict=True):
            if result.shape != self.program.slots[slot].shape:
                raise RuntimeError(
                    f"operator {work.op.name!r} ({work.op.kind}), part {work.number}: the kernel "
                    f"made {list(result.shape)} where its description says "
                    f"{list(self.program.slots[slot].shape)}"
                )
            self.tensors[slot] = result

    def pack(self, parcel: int) -> torch.Tensor:
        """The bytes of a parcel."""
        meant = self.program.parcels[parcel]
        message = torch.empty(meant.nbytes, dtype=torch.uint8)
        for copy in self.program.packed[parcel]:
            room = message[copy.offset : copy.offset + copy.nbytes].view(copy.dtype)
            source = self.tensors[copy.source].reshape(copy.source_shape)
            room.reshape(copy.shape).copy_(source[copy.source_box])
        return message if self.corrupt is None else self.corrupt(parcel, message)

    def _assemble(self, task: int) -> None:
        copies = self.program.copies[task]
        slot = int(self.program.tasks.out_slot[self.program.tasks.out_start[task]])
        meant = self.program.slots[slot]
        if self.program.tasks.slot_base[slot] >= 0:
            self.tensors[slot] = self._box(copies[0]).reshape(meant.shape)
            return
        target = torch.empty(lengths(meant.region), dtype=meant.dtype, device=self.place)
        reducer = self.program.reducers.get(meant.value) or "sum"  # of terms of a linear Op
        for copy in copies:
            place = target[copy.target_box]
            if copy.term == 0:
                place.copy_(self._box(copy))
            else:
                combine(reducer, place, self._box(copy))
        self.tensors[slot] = target.reshape(meant.shape)
        for message in {c.message for c in copies} - {-1}:
            if self.program.readers[message] == task:
                del self.messages[message]

    def _box(self, copy: _BoxCopy) -> torch.Tensor:
        if copy.message >= 0:
            raw = self.messages[copy.message][copy.offset : copy.offset + copy.nbytes]
            return raw.view(copy.dtype).reshape(copy.shape).to(self.place)
        return self.tensors[copy.source].reshape(copy.source_shape)[copy.source_box]

    def free(self, task: int) -> None:
        """Drops the slots whose last use the task was."""
        for slot in self.program.frees[task]:
            self.tensors.pop(slot, None)

    def finish(self) -> torch.Tensor | None:
        """Ends the step: state becomes the next step's; returns the loss if it is here."""
        program = self.program
        here = program.slot_device
        new = {b: self.tensors[a] for a, b in program.carry if here[a] == self.device}
        loss = next((self.tensors[s] for s in program.loss_slots if s in self.tensors), None)
        constant = {
            s: self.tensors[s]
            for s in self._begin(lambda role: role != INPUT)
            if s not in new and s in self.tensors
        }
        self.tensors = constant | {b: t if _owns(t) else t.clone() for b, t in new.items()}
        return None if loss is None else loss.detach().clone()

    def state(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Slot -> (Value, tensor) of the state held here."""
        slots = self.program.slots
        return {s: (slots[s].value, t) for s, t in self.tensors.items()}


def _owns(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage, so that keeping it keeps nothing else."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def combine(reducer: str | None, target: torch.Tensor, term: torch.Tensor) -> None:
    """Adds one more term of a partial Value to the ones before, in place."""
    if reducer == "sum":
        target.add_(term)
    elif reducer == "prod":
        target.mul_(term)
    elif reducer == "max":
        torch.maximum(target, term, out=target)
    elif reducer == "min":
        torch.minimum(target, term, out=target)
    elif reducer == "logaddexp":
        torch.logaddexp(target, term, out=target)
    else:
        raise AssertionError(f"no reducer for a partial value ({reducer})")


def run_together(ranks: Sequence[Rank], context: Context) -> torch.Tensor | None:
    """One step of all ranks in this process, in the global order; returns the loss."""
    program = ranks[0].program
    parcels: dict[int, list[int]] = {}
    for number, parcel in enumerate(program.parcels):
        parcels.setdefault(parcel.task, []).append(number)
    for task, kind in enumerate(program.kind):
        if kind not in (TRANSFER, COLLECTIVE):
            ranks[program.device[task]].run(task, context)
            continue
        for number in parcels[task]:
            parcel = program.parcels[number]
            ranks[parcel.receiver].messages[number] = ranks[parcel.sender].pack(number)
        for sender in {program.parcels[number].sender for number in parcels[task]}:
            ranks[sender].free(task)
    losses = [rank.finish() for rank in ranks]
    return next((loss for loss in losses if loss is not None), None)


def gather(ranks: Sequence[Rank]) -> dict[int, torch.Tensor]:
    """Whole tensors of the state, put together from all ranks' regions; copies of a region must be
    bit-equal."""
    found: dict[int, torch.Tensor] = {}
    for rank in ranks:
        for slot, (value, tensor) in rank.state().items():
            meant = rank.program.slots[slot]
            factors = rank.program.space.factors(value)
            if value not in found:
                found[value] = torch.full(factors, float("nan")).to(meant.dtype)
            found[value][slices(meant.region)] = tensor.reshape(lengths(meant.region))
    return {v: t.reshape(_shape_of(ranks[0].program, v)) for v, t in found.items()}


def _shape_of(program: Executable, value: int) -> tuple[int, ...]:
    return tuple(program.graph.values[value].shape or ())
