"""Rank: the tensors of one device while an Executable runs; and all ranks in one process.

Part of the room execute. Whole tensors come in, of which a rank keeps the regions that its plan
gives it; the loss and the new state go out. A Rank can do each kind of task. `run_together` runs
the global order over all ranks in one process, which is the fast oracle; transport.py runs one rank
per process over torch.distributed. Both do the same tasks by the same functions; only the transport
differs. Whole tensors exist in two places only: the batch that the caller passes to a step, and the
tensors that state is loaded from.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from apportion.describe import Box, flatten, lengths
from apportion.execute.executable import BoxCopy, Executable, slices
from apportion.execute.host_copies import host_room
from apportion.execute.host_update import host_update
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.late_work import LateNode
from apportion.execute.pinned_memory import PinnedMemory, aligned_bytes
from apportion.execute.run_part import run_part
from apportion.graph import INPUT
from apportion.lower import ASSEMBLE, CALLING, HOST_WORK, TO_HOST
from apportion.split import Space

Corrupt = Callable[[int, torch.Tensor], torch.Tensor]
"""Changes the bytes of a message (its number, its bytes): how tests plant errors."""


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


@dataclass(frozen=True, slots=True)
class InputRegion:
    """The region of an input of the step that one device keeps in a slot.

    factors  the shape of the whole input, seen by its atoms; `box` indexes that
    spans    the region as one slice per dimension, or None if it is not
    """

    slot: int
    value: int
    name: str
    factors: tuple[int, ...]
    box: tuple[slice, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: tuple[slice, ...] | None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The region of the whole tensor: a view of it where that is possible."""
        return whole.detach().reshape(self.factors)[self.box].reshape(self.shape)

    def asked(self, ask: Callable[[int, tuple[slice, ...]], torch.Tensor]) -> torch.Tensor:
        """What `ask(value, a slice per dimension)` says it is."""
        if self.spans is None:
            raise ValueError(
                f"the plan keeps a region of {self.name!r} "
                "that is not one slice per dimension; pass the whole batch"
            )
        tensor = ask(self.value, self.spans)
        if tuple(tensor.shape) != self.shape:
            raise ValueError(
                f"the batch function returned {list(tensor.shape)} for {self.name!r}, asked for "
                f"{list(self.shape)}"
            )
        return tensor.detach()


@dataclass
class UnfinishedStep:
    """A step whose late tasks the next one does: the tensors that these read and make, by slot, and
    what they need to run; and of the state that they are to make the slots at the end of their step
    and the beginning of the next. `users`: how many pieces of late work still use each slot."""

    tensors: dict[int, torch.Tensor]
    context: Context
    missing: dict[int, int]
    users: Counter[int]


@dataclass
class Rank:
    """One device's tensors while an Executable runs.

    tensors   by slot
    received  bytes of messages, by number
    spans     (task, start, end) by `clock`, of steps while `records` is set
    place     torch's name of the device that holds the tensors
    settled   state that is known to be dense and all of its storage
    rooms     memory of the host, by slot of the state that lies there when the step begins
    last      the step before, if it is not finished; `tensors` lacks the state that it makes
    settle_host  waits until the host has done what it was told to, where it works by itself
    """

    executable: Executable
    device: int
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    corrupt: Corrupt | None = None
    place: str = "cpu"
    clock: Callable[[], int] = time.perf_counter_ns
    records: bool = False
    settled: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    rooms: dict[int, torch.Tensor] = field(default_factory=dict)
    last: UnfinishedStep | None = None
    settle_host: Callable[[], None] | None = None

    def load(self, source: Callable[[int], torch.Tensor]) -> None:
        """Copies this device's regions of the state out of whole tensors, `source(value)`."""
        self.last = None
        if self.settle_host is not None:
            self.settle_host()
        for slot in self._state_slots:
            whole = source(self.executable.slots[slot].value)
            region = _input_region(self.executable, slot).of(whole)
            if self.executable.on_host[slot]:
                self.tensors[slot] = self.room(slot).copy_(region)
            else:
                self.tensors[slot] = self.copied(region, slot)

    def feed(self, source: Callable[[int], torch.Tensor]) -> None:
        """Copies this device's regions of the batch, and drops state that the step does not
        read."""
        self._keep([region.of(source(region.value)) for region in self.inputs])

    def feed_regions(self, ask: Callable[[int, tuple[slice, ...]], torch.Tensor]) -> None:
        """Asks for this device's regions of the batch: `ask(value, a slice per dimension)`."""
        self._keep([region.asked(ask) for region in self.inputs])

    def _keep(self, batch: Sequence[torch.Tensor]) -> None:
        self.drop_unread()
        for region, tensor in zip(self.inputs, batch, strict=True):
            self.tensors[region.slot] = self.copied(tensor, region.slot)

    def copied(self, region: torch.Tensor, slot: int) -> torch.Tensor:
        """A region as a dense tensor in a storage of its own, as what was compiled expects."""
        kind = self.executable.slots[slot].dtype
        made = torch.empty(region.shape, dtype=kind, device=self.place)
        return made.copy_(region.detach())

    def room(self, slot: int) -> torch.Tensor:
        """Memory of the host for a slot: that of the state whose place it takes, or the slot's own,
        which stays if the step begins with it, and on a GPU in any case; else new."""
        executable = self.executable
        begin = executable.host_homes.get(slot, slot)
        if begin in self.rooms:
            return self.rooms[begin]
        meant, on_gpu = executable.slots[begin], self.place.startswith("cuda")
        if on_gpu:
            made = self.pinned.take(meant.shape, meant.dtype)
        else:
            made = host_room(meant.shape, meant.dtype, self.place)
        if on_gpu or executable.tasks.slot_first[begin] < 0:
            self.rooms[begin] = made
        return made

    @cached_property
    def pinned(self) -> PinnedMemory:
        """Pinned memory for all slots of this rank that lie on the host of a GPU."""
        executable = self.executable
        mine = (s for s, there in enumerate(executable.on_host) if there)
        rooms = [
            executable.slots[slot]
            for slot in mine
            if executable.slot_device[slot] == self.device and slot not in executable.host_homes
        ]
        return PinnedMemory(sum(aligned_bytes(m.shape, m.dtype) for m in rooms), self.place)

    def drop_unread(self) -> None:
        """Drops the state that the step does not read."""
        for slot in self.executable.unread:
            self.tensors.pop(slot, None)

    @cached_property
    def inputs(self) -> tuple[InputRegion, ...]:
        """What this device keeps of the batch."""
        executable = self.executable
        return tuple(
            _input_region(executable, slot)
            for slot in self._begin_slots
            if executable.graph.values[executable.slots[slot].value].role == INPUT
        )

    @cached_property
    def _begin_slots(self) -> tuple[int, ...]:
        executable = self.executable
        return tuple(s for s in executable.begin if executable.slot_device[s] == self.device)

    @cached_property
    def _state_slots(self) -> tuple[int, ...]:
        fed = {region.slot for region in self.inputs}
        return tuple(slot for slot in self._begin_slots if slot not in fed)

    @cached_property
    def _carry(self) -> tuple[tuple[int, int], ...]:
        executable = self.executable
        return tuple(
            (a, b) for a, b in executable.carry if executable.slot_device[a] == self.device
        )

    @cached_property
    def _constant_slots(self) -> tuple[int, ...]:
        carried = {b for _, b in self._carry}
        return tuple(slot for slot in self._state_slots if slot not in carried)

    def run(self, task: int, context: Context) -> None:
        """One task of work, and the frees after it."""
        if not self.records:
            self.make(task, context)
            self.free(task)
            return
        began = self.clock()
        self.make(task, context)
        self.free(task)
        self.spans.append((task, began, self.clock()))

    def make(self, task: int, context: Context) -> None:
        """What one task of work makes."""
        WORK_ON_DEVICE[self.executable.kind[task]](self, task, context)

    def compute(self, task: int, context: Context) -> None:
        """The kernel of one part of an Op."""
        work = self.executable.computes[task]
        ins = [self.tensors[slot] if slot >= 0 else None for slot in work.ins]
        results = run_part(self.executable.space, work.op, work.part, ins, context, work.args)
        for slot, result in zip(work.outs, results, strict=True):
            shape = self.executable.slots[slot].shape
            if result.shape != shape and 0 in shape:
                result = result.new_empty(shape)  # left out in one precision, made in another
            if result.shape != shape:
                raise RuntimeError(
                    f"operator {work.op.name!r} ({work.op.kind}), part {work.number}: the kernel "
                    f"made {list(result.shape)} where its description says {list(shape)}"
                )
            self.tensors[slot] = result

    def to_host(self, task: int, context: Context) -> None:
        """A copy to the host's memory."""
        work = self.executable.computes[task]
        room = self.room(work.outs[0])
        self.tensors[work.outs[0]] = room.copy_(self.tensors[work.ins[0]])

    def host_work(self, task: int, context: Context) -> None:
        """An update that the host does, on its own memory and in place."""
        work = self.executable.computes[task]
        ins = [self.tensors[slot] for slot in work.ins]
        outs = [self.room(slot) for slot in work.outs]
        host_update(self.executable.graph.bodies, work.op, ins, outs, context)
        self.tensors.update(zip(work.outs, outs, strict=True))

    def pack(self, message: int) -> torch.Tensor:
        """The bytes of a message."""
        nbytes = self.executable.messages[message].nbytes
        packed = torch.empty(nbytes, dtype=torch.uint8, device=self.place)
        for copy in self.executable.packed[message]:
            room = packed[copy.offset : copy.offset + copy.nbytes].view(copy.dtype)
            source = self.tensors[copy.source].reshape(copy.source_shape)
            room.reshape(copy.shape).copy_(source[copy.source_box])
        return packed if self.corrupt is None else self.corrupt(message, packed)

    def assemble(self, task: int, context: Context) -> None:
        """The region that one ASSEMBLE puts together."""
        copies = self.executable.copies[task]
        slot = int(self.executable.tasks.out_slot[self.executable.tasks.out_start[task]])
        meant = self.executable.slots[slot]
        if self.executable.tasks.slot_base[slot] >= 0:
            self.tensors[slot] = self._box(copies[0]).reshape(meant.shape)
            return
        reducer = self.executable.reducers.get(meant.value) or "sum"  # of terms of a linear Op
        shape = lengths(meant.region)
        same = all(copy.dtype == meant.dtype for copy in copies)
        target = self._sum(copies, shape) if reducer == "sum" and same else None
        if target is None:
            target = torch.empty(shape, dtype=meant.dtype, device=self.place)
            for copy in copies:
                place = target[copy.target_box]
                if copy.term == 0:
                    place.copy_(self._box(copy))
                else:
                    combine(reducer, place, self._box(copy))
        self.tensors[slot] = target.reshape(meant.shape)
        for message in {c.message for c in copies} - {-1}:
            if self.executable.readers[message] == task:
                del self.received[message]

    def _sum(self, copies: Sequence[BoxCopy], shape: tuple[int, ...]) -> torch.Tensor | None:
        """The sum of terms that are whole and dense, without a copy of the first; else None."""
        if len(copies) < 2 or any(c.term != k or c.shape != shape for k, c in enumerate(copies)):
            return None
        terms = [self._box(copy) for copy in copies]
        if not all(term.is_contiguous() for term in terms):
            return None
        target = torch.add(terms[0], terms[1])
        for term in terms[2:]:
            target.add_(term)
        return target

    def _box(self, copy: BoxCopy) -> torch.Tensor:
        if copy.message >= 0:
            raw = self.received[copy.message][copy.offset : copy.offset + copy.nbytes]
            return raw.view(copy.dtype).reshape(copy.shape)
        here = self.tensors[copy.source].reshape(copy.source_shape)[copy.source_box]
        return here.to(copy.dtype)

    def free(self, task: int) -> None:
        """Drops the slots whose last use the task was."""
        for slot in self.executable.frees[task]:
            self.tensors.pop(slot, None)

    def finish(self) -> torch.Tensor | None:
        """Ends the step: state becomes the next step's; returns the loss if it is here."""
        return self._end({})

    def put_off(self, context: Context, left: Iterable[LateNode]) -> torch.Tensor | None:
        """Ends a step but for what is left of its late work; returns the loss if it is here."""
        assert self.last is None, "two steps are not finished"
        users = Counter(slot for node in left for slot in node.slots)
        held = {slot: self.tensors[slot] for slot in users if slot in self.tensors}
        missing = {a: b for a, b in self._late_carry.items() if a not in self.tensors}
        loss = self._end(missing)
        self.last = UnfinishedStep(held, context, missing, users)
        return loss

    def _end(self, late: Mapping[int, int]) -> torch.Tensor | None:
        """What is carried on becomes the next step's, but for what is `late`; the loss."""
        tensors = self.tensors
        new = {b: tensors[a] for a, b in self._carry if a not in late}
        loss = next((tensors[s] for s in self.executable.loss_slots if s in tensors), None)
        kept = {s: tensors[s] for s in self._constant_slots if s in tensors}
        kept |= {s: room for s, room in self.rooms.items() if s in self._constant_slots}
        self.tensors = kept | {b: self._settle(b, t) for b, t in new.items()}
        return None if loss is None else loss.detach().clone()

    def do_late(self, work: Callable[[Context], None], node: LateNode, begun: bool) -> None:
        """Does a piece of late work of the last step, on its tensors. Of what it makes the state is
        the next step's, but for what that does not read if it has `begun`."""
        last = self.last
        assert last is not None
        current, self.tensors = self.tensors, last.tensors
        try:
            work(last.context)
        finally:
            last.tensors, self.tensors = self.tensors, current
        for end in node.made:
            begin = last.missing.pop(end, -1)
            if begin >= 0 and not (begun and begin in self._unread):
                self.tensors[begin] = self._settle(begin, last.tensors[end])
        for slot in node.slots:
            last.users[slot] -= 1
            if not last.users[slot]:
                last.tensors.pop(slot, None)

    @cached_property
    def _unread(self) -> frozenset[int]:
        return frozenset(self.executable.unread)

    @cached_property
    def _late_carry(self) -> dict[int, int]:
        """State that late tasks make: the slot at the end of a step, and that of the next one."""
        tasks = self.executable.tasks
        return {a: b for a, b in self._carry if tasks.slot_first[a] >= tasks.late_start >= 0}

    def _settle(self, slot: int, tensor: torch.Tensor) -> torch.Tensor:
        """New state as a tensor of its own; what was so before, and was written over, still is."""
        if slot in self.rooms:
            return tensor if tensor is self.rooms[slot] else self.rooms[slot].copy_(tensor)
        known = self.settled.get(slot)
        if known is not None and known() is tensor:
            return tensor
        tensor = tensor if _owns(tensor) else _dense(tensor)
        self.settled[slot] = weakref.ref(tensor)
        return tensor

    def state(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Slot -> (Value, tensor) of the state held here, which has to be that of a step that is
        finished."""
        if self.last is not None:
            raise RuntimeError("the last step is not finished: call finish() before state is read")
        if self.settle_host is not None:
            self.settle_host()
        slots = self.executable.slots
        return {s: (slots[s].value, t) for s, t in self.tensors.items()}


# By kind of task: a registry, so that a kind that is added to the table runs by an entry here.
WORK_ON_DEVICE: dict[int, Callable[[Rank, int, Context], None]] = {
    **dict.fromkeys(CALLING, Rank.compute),
    TO_HOST: Rank.to_host,
    HOST_WORK: Rank.host_work,
    ASSEMBLE: Rank.assemble,
}


def _input_region(executable: Executable, slot: int) -> InputRegion:
    meant, space = executable.slots[slot], executable.space
    return InputRegion(
        slot, meant.value, executable.graph.values[meant.value].name, space.factors(meant.value),
        slices(meant.region), meant.shape, meant.dtype,
        dim_spans(space, meant.value, meant.region),
    )  # fmt: skip


def _owns(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and all of its storage, so that keeping it keeps nothing else."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and tensor.is_contiguous()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


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
    executable = ranks[0].executable
    messages: dict[int, list[int]] = {}
    for number, message in enumerate(executable.messages):
        messages.setdefault(message.task, []).append(number)
    for task, is_message in enumerate(executable.is_message):
        if not is_message:
            ranks[executable.device[task]].run(task, context)
            continue
        for number in messages[task]:
            message = executable.messages[number]
            ranks[message.receiver].received[number] = ranks[message.sender].pack(number)
        for sender in {executable.messages[number].sender for number in messages[task]}:
            ranks[sender].free(task)
    losses = [rank.finish() for rank in ranks]
    return next((loss for loss in losses if loss is not None), None)


def gather(ranks: Sequence[Rank]) -> dict[int, torch.Tensor]:
    """Whole tensors of the state, put together from all ranks' regions; copies of a region must be
    bit-equal."""
    found: dict[int, torch.Tensor] = {}
    for rank in ranks:
        for slot, (value, tensor) in rank.state().items():
            meant = rank.executable.slots[slot]
            factors = rank.executable.space.factors(value)
            if value not in found:
                found[value] = torch.full(factors, float("nan")).to(meant.dtype)
            found[value][slices(meant.region)] = tensor.reshape(lengths(meant.region))
    return {v: t.reshape(_shape_of(ranks[0].executable, v)) for v, t in found.items()}


def _shape_of(executable: Executable, value: int) -> tuple[int, ...]:
    return tuple(executable.graph.values[value].shape or ())
