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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from apportion.describe import Box, flatten, lengths
from apportion.execute.executable import BoxCopy, Executable, slices
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.run_part import run_part
from apportion.graph import INPUT
from apportion.lower import ASSEMBLE, COMPUTE
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


@dataclass
class Rank:
    """One device's tensors while an Executable runs."""

    executable: Executable
    device: int
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)  # bytes of messages
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
            meant = self.executable.slots[slot]
            spans = dim_spans(self.executable.space, meant.value, meant.region)
            name = self.executable.graph.values[meant.value].name
            if spans is None:
                raise ValueError(
                    f"the plan keeps a region of {name!r} "
                    "that is not one slice per dimension; pass the whole batch"
                )
            tensor = ask(meant.value, spans)
            if tuple(tensor.shape) != meant.shape:
                raise ValueError(
                    f"the batch function returned {list(tensor.shape)} for {name!r}, asked for "
                    f"{list(meant.shape)}"
                )
            self.tensors[slot] = self._kept(tensor, meant.dtype)

    def _drop_unread(self) -> None:
        for slot in self.executable.unread:
            self.tensors.pop(slot, None)

    def _begin(self, wanted: Callable[[str], bool]) -> list[int]:
        executable = self.executable
        roles = executable.graph.values
        return [
            s
            for s in executable.begin
            if executable.slot_device[s] == self.device
            and wanted(roles[executable.slots[s].value].role)
        ]

    def _region(self, slot: int, source: Callable[[int], torch.Tensor]) -> torch.Tensor:
        meant = self.executable.slots[slot]
        factors = self.executable.space.factors(meant.value)
        whole = source(meant.value).detach().reshape(factors)
        here = whole[slices(meant.region)].reshape(meant.shape)
        return self._kept(here, meant.dtype)

    def _kept(self, tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """A dense copy in a storage of its own, as what was compiled expects."""
        made = torch.empty(tensor.shape, dtype=kind, device=self.place)
        return made.copy_(tensor.detach())

    def run(self, task: int, context: Context) -> None:
        """One task of work, and the frees after it."""
        began = self.clock()
        self.make(task, context)
        self.free(task)
        self.spans.append((task, began, self.clock()))

    def make(self, task: int, context: Context) -> None:
        """What one task of work makes."""
        WORK_ON_DEVICE[self.executable.kind[task]](self, task, context)

    def compute(self, task: int, context: Context) -> None:
        """The kernel of one COMPUTE."""
        work = self.executable.computes[task]
        ins = [self.tensors[slot] if slot >= 0 else None for slot in work.ins]
        results = run_part(self.executable.space, work.op, work.part, ins, context, work.args)
        for slot, result in zip(work.outs, results, strict=True):
            if result.shape != self.executable.slots[slot].shape:
                raise RuntimeError(
                    f"operator {work.op.name!r} ({work.op.kind}), part {work.number}: the kernel "
                    f"made {list(result.shape)} where its description says "
                    f"{list(self.executable.slots[slot].shape)}"
                )
            self.tensors[slot] = result

    def pack(self, message: int) -> torch.Tensor:
        """The bytes of a message."""
        packed = torch.empty(self.executable.messages[message].nbytes, dtype=torch.uint8)
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
        target = torch.empty(lengths(meant.region), dtype=meant.dtype, device=self.place)
        reducer = self.executable.reducers.get(meant.value) or "sum"  # of terms of a linear Op
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

    def _box(self, copy: BoxCopy) -> torch.Tensor:
        if copy.message >= 0:
            raw = self.received[copy.message][copy.offset : copy.offset + copy.nbytes]
            return raw.view(copy.dtype).reshape(copy.shape).to(self.place)
        return self.tensors[copy.source].reshape(copy.source_shape)[copy.source_box]

    def free(self, task: int) -> None:
        """Drops the slots whose last use the task was."""
        for slot in self.executable.frees[task]:
            self.tensors.pop(slot, None)

    def finish(self) -> torch.Tensor | None:
        """Ends the step: state becomes the next step's; returns the loss if it is here."""
        executable = self.executable
        here = executable.slot_device
        new = {b: self.tensors[a] for a, b in executable.carry if here[a] == self.device}
        loss = next((self.tensors[s] for s in executable.loss_slots if s in self.tensors), None)
        constant = {
            s: self.tensors[s]
            for s in self._begin(lambda role: role != INPUT)
            if s not in new and s in self.tensors
        }
        self.tensors = constant | {b: t if _owns(t) else _dense(t) for b, t in new.items()}
        return None if loss is None else loss.detach().clone()

    def state(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Slot -> (Value, tensor) of the state held here."""
        slots = self.executable.slots
        return {s: (slots[s].value, t) for s, t in self.tensors.items()}


# By kind of task: a registry, so that a kind that is added to the table runs by an entry here.
WORK_ON_DEVICE: dict[int, Callable[[Rank, int, Context], None]] = {
    COMPUTE: Rank.compute,
    ASSEMBLE: Rank.assemble,
}


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
