"""Timeline: when each task ran and what memory was held; one type for simulated and measured.

Memory of a device over time is the sum of

    slots      from the start of the task that makes them (or 0) to the end of the last that uses
               them (or for ever); a slot that shares another's storage costs nothing
    messages   on the sender, packed, while they travel; on the receiver from the start of the
               transfer to the end of the assembly that takes them

Events at one instant count in the order of their tasks, and within a task allocation comes first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from apportion.graph import Graph
from apportion.tasks import (
    ASSEMBLE,
    CATEGORIES,
    COMMUNICATION,
    TRANSFER,
    Ints,
    TaskGraph,
)

SIMULATED, MEASURED = "simulated", "measured"
LANES = ("compute", "send", "receive")

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Bytes held on one device after each change, and what they were at the peak."""

    time_ns: Ints
    nbytes: Ints
    peak_categories: tuple[int, ...]  # bytes per CATEGORIES

    @property
    def peak_bytes(self) -> int:
        return int(self.nbytes.max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """`start_ns` and `end_ns` have an entry per task, `curves` and `busy` one per device.

    `busy` is the share of the step during which the device's compute lane was occupied.
    """

    source: str
    start_ns: Ints
    end_ns: Ints
    curves: tuple[Curve, ...]
    busy: tuple[float, ...]
    bytes_moved: int

    @property
    def step_seconds(self) -> float:
        return float(self.end_ns.max(initial=0)) / 1e9

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(curve.peak_bytes for curve in self.curves)

    @property
    def peak_categories(self) -> tuple[dict[str, int], ...]:
        """For every device the bytes of each category at its peak."""
        return tuple(
            dict(zip(CATEGORIES, curve.peak_categories, strict=True)) for curve in self.curves
        )

    def __str__(self) -> str:
        busy = sum(self.busy) / max(len(self.busy), 1)
        peak = max(self.peak_bytes, default=0)
        return (
            f"{self.source}: {self.step_seconds:.6g} s a step, peak {peak} bytes on a device, "
            f"{self.bytes_moved} bytes moved, devices {busy:.0%} busy"
        )


def timeline(
    tasks: TaskGraph,
    start_ns: Ints,
    end_ns: Ints,
    *,
    source: str,
    communication_on_device: bool = False,
) -> Timeline:
    """The Timeline of tasks that ran at these times."""
    return Timeline(
        source=source,
        start_ns=start_ns,
        end_ns=end_ns,
        curves=_curves(tasks, start_ns, end_ns),
        busy=_busy(tasks, start_ns, end_ns, communication_on_device),
        bytes_moved=tasks.bytes_moved,
    )


def verify(timeline: Timeline, tasks: TaskGraph) -> None:
    """Raises AssertionError unless all tasks ran, each after what it depends on."""
    start, end = timeline.start_ns, timeline.end_ns
    assert len(start) == len(end) == len(tasks), "times are missing"
    assert ((start >= 0) & (end >= start)).all(), "a task ends before it starts"
    owners = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    assert (end[tasks.dep] <= start[owners]).all(), "a task starts before its inputs are there"


def _busy(tasks: TaskGraph, start: Ints, end: Ints, on_device: bool) -> tuple[float, ...]:
    length, moving = end - start, tasks.kind == TRANSFER
    busy = np.zeros(tasks.devices, np.int64)
    np.add.at(busy, tasks.device[~moving], length[~moving])
    if on_device:
        for side in (tasks.device, tasks.peer):
            np.add.at(busy, side[moving], length[moving])
    return tuple((busy / max(int(end.max(initial=0)), 1)).tolist())


# Memory


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """Allocations (positive) and frees (negative), in columns."""

    device: Ints
    time: Ints
    task: Ints  # breaks ties of time
    nbytes: Ints
    category: Ints


def _curves(tasks: TaskGraph, start: Ints, end: Ints) -> tuple[Curve, ...]:
    parts = [*_slot_changes(tasks, start, end), *_message_changes(tasks, start, end)]
    columns = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("device", "time", "task", "nbytes", "category")
    )
    every = _Changes(*columns)
    order = np.lexsort((every.nbytes < 0, every.task, every.time, every.device))
    order = order[every.time[order] < NEVER]
    edges = np.searchsorted(every.device[order], np.arange(tasks.devices + 1))
    return tuple(_curve(every, order[edges[d] : edges[d + 1]]) for d in range(tasks.devices))


def _curve(changes: _Changes, rows: Ints) -> Curve:
    nbytes, category = changes.nbytes[rows], changes.category[rows]
    held = np.cumsum(nbytes)
    until = int(np.argmax(held)) + 1 if len(held) else 0
    categories = np.zeros(len(CATEGORIES), np.int64)
    np.add.at(categories, category[:until], nbytes[:until])
    return Curve(changes.time[rows], held, tuple(categories.tolist()))


def _slot_changes(tasks: TaskGraph, start: Ints, end: Ints) -> tuple[_Changes, _Changes]:
    own = np.flatnonzero(tasks.slot_base < 0)
    first, last = tasks.slot_first[own], tasks.slot_last[own]
    # Entry -1 is a slot that is there from the beginning, entry n one that survives the step.
    born = np.append(start, 0)[first]
    dies = np.maximum(np.append(end, [NEVER, 0])[last], _packed(tasks, start)[own])
    device, nbytes = tasks.slot_device[own], tasks.slot_nbytes[own]
    category = tasks.slot_category[own]
    return (
        _Changes(device, born, first, nbytes, category),
        _Changes(device, dies, last, -nbytes, category),
    )


def _packed(tasks: TaskGraph, start: Ints) -> Ints:
    """For every slot the time at which the last message that carries a box of it was packed.

    A message may wait for a link while its sender computes on, past the slot's last task.
    """
    sent = np.flatnonzero(tasks.copy_message >= 0)
    time = np.zeros(len(tasks.slot_base), np.int64)
    np.maximum.at(time, _storage(tasks)[tasks.copy_source[sent]], start[tasks.copy_message[sent]])
    return time


def _storage(tasks: TaskGraph) -> Ints:
    """For every slot the one that owns its bytes: bases may have bases."""
    owner = np.where(tasks.slot_base < 0, np.arange(len(tasks.slot_base)), tasks.slot_base)
    while not np.array_equal(owner, owner[owner]):
        owner = owner[owner]
    return owner


def _message_changes(tasks: TaskGraph, start: Ints, end: Ints) -> Iterator[_Changes]:
    moving = np.flatnonzero(tasks.kind == TRANSFER)
    sent = np.flatnonzero(tasks.copy_message >= 0)
    taken, taker = end.copy(), np.arange(len(tasks))
    np.maximum.at(taken, tasks.copy_message[sent], end[tasks.copy_task[sent]])
    np.maximum.at(taker, tasks.copy_message[sent], tasks.copy_task[sent])
    sender, receiver = tasks.device[moving], tasks.peer[moving]
    nbytes, kind = tasks.nbytes[moving], np.full(len(moving), COMMUNICATION)
    yield _Changes(sender, start[moving], moving, nbytes, kind)
    yield _Changes(sender, end[moving], moving, -nbytes, kind)
    yield _Changes(receiver, start[moving], moving, nbytes, kind)
    yield _Changes(receiver, taken[moving], taker[moving], -nbytes, kind)


# Trace


def trace(timeline: Timeline, tasks: TaskGraph, graph: Graph, path: str | Path) -> None:
    """Writes the Timeline for Perfetto or chrome://tracing; the file appears whole or not at all.

    A process is a device, its threads are the lanes compute, send and receive.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            _write(file, timeline, tasks, graph)
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(f"the trace {path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _write(file: TextIO, timeline: Timeline, tasks: TaskGraph, graph: Graph) -> None:
    head = {"source": timeline.source, "step_seconds": timeline.step_seconds}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(head)}, "traceEvents": [')
    separator = "\n"
    for events in (_titles(tasks.devices), _spans(timeline, tasks, graph), _levels(timeline)):
        for event in events:
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")


def _titles(devices: int) -> Iterator[dict[str, Any]]:
    for device in range(devices):
        name = {"name": f"device {device}"}
        yield {"ph": "M", "name": "process_name", "pid": device, "tid": 0, "args": name}
        for lane, title in enumerate(LANES):
            name = {"name": title}
            yield {"ph": "M", "name": "thread_name", "pid": device, "tid": lane, "args": name}


def _spans(timeline: Timeline, tasks: TaskGraph, graph: Graph) -> Iterator[dict[str, Any]]:
    starts, ends = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    for task, start, end in zip(tasks, starts, ends, strict=True):
        name = graph.ops[task.op].name if task.op < len(graph.ops) else "end of step"
        facts = {"task": task.index, "part": task.part, "nbytes": task.nbytes, "flops": task.flops}
        span = {"ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3, "args": facts}
        if task.kind == TRANSFER:
            there, back = f"{name} to {task.peer}", f"{name} from {task.device}"
            yield {**span, "name": there, "cat": "transfer", "pid": task.device, "tid": 1}
            yield {**span, "name": back, "cat": "transfer", "pid": task.peer, "tid": 2}
        else:
            kind = "assemble" if task.kind == ASSEMBLE else "compute"
            name = f"{name} (assemble)" if task.kind == ASSEMBLE else name
            yield {**span, "name": name, "cat": kind, "pid": task.device, "tid": 0}


def _levels(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device, curve in enumerate(timeline.curves):
        for time, nbytes in zip(curve.time_ns.tolist(), curve.nbytes.tolist(), strict=True):
            held = {"bytes": nbytes}
            yield {"ph": "C", "name": "memory", "pid": device, "ts": time / 1e3, "args": held}
