"""Timeline: when each task ran and what memory was held; one type for simulated and measured.

Memory of a device is the sum of

    slots      from the task that makes them (or the beginning) to the last that uses them (or for
               ever); a slot that shares another's storage costs nothing
    messages   on the sender, packed, during their exchange; on the receiver from the beginning of
               the exchange to the end of the assembly that takes them
    workspace  while its task runs

It changes in the order of the device's tasks; within a task allocation comes first.
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
    WORKSPACE,
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
#
# What a device holds follows from the order of its tasks, which is the order in which it runs them,
# and not from the times: all messages of one exchange are there at once, a task's results and
# workspace are there before anything it frees is gone. Times only say where on the curve that is.

_BEFORE, _DURING, _AFTER, _FREES = range(4)  # moments of a task, in order


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Allocations (positive) and frees (negative), in columns, in the order in which they
    happen."""

    device: Ints
    moment: Ints
    time: Ints
    nbytes: Ints
    category: Ints


def memory_changes(tasks: TaskGraph, start: Ints, end: Ints) -> Changes:
    """Every change of what devices hold, sorted by device and moment."""
    rows = [*_slot_changes(tasks, start, end), *_message_changes(tasks, start, end)]
    rows += _workspace_changes(tasks, start, end)
    device, moment, time, nbytes, category = (
        np.concatenate([row[k] for row in rows]) for k in range(5)
    )
    order = np.lexsort((nbytes < 0, moment, device))
    device, time = device[order], time[order]
    for d in range(tasks.devices):
        mine = slice(*np.searchsorted(device, [d, d + 1]))
        time[mine] = np.maximum.accumulate(time[mine])
    return Changes(device, moment[order], time, nbytes[order], category[order])


def _curves(tasks: TaskGraph, start: Ints, end: Ints) -> tuple[Curve, ...]:
    changes = memory_changes(tasks, start, end)
    edges = np.searchsorted(changes.device, np.arange(tasks.devices + 1))
    return tuple(_curve(changes, slice(edges[d], edges[d + 1])) for d in range(tasks.devices))


def _curve(changes: Changes, rows: slice) -> Curve:
    nbytes, category = changes.nbytes[rows], changes.category[rows]
    held = np.cumsum(nbytes)
    until = int(np.argmax(held)) + 1 if len(held) else 0
    categories = np.zeros(len(CATEGORIES), np.int64)
    np.add.at(categories, category[:until], nbytes[:until])
    return Curve(changes.time[rows], held, tuple(categories.tolist()))


def _exchanges(tasks: TaskGraph) -> tuple[Ints, Ints]:
    """For every task the first and the last task of its exchange; itself if it is no transfer."""
    first, last = np.arange(len(tasks)), np.arange(len(tasks))
    moving = np.flatnonzero(tasks.kind == TRANSFER)
    _, group = np.unique(tasks.position[moving], return_inverse=True)
    low = np.full(len(moving), len(tasks))
    high = np.zeros(len(moving), np.int64)
    np.minimum.at(low, group, moving)
    np.maximum.at(high, group, moving)
    first[moving], last[moving] = low[group], high[group]
    return first, last


def _slot_changes(tasks: TaskGraph, start: Ints, end: Ints) -> Iterator[tuple[Ints, ...]]:
    own = np.flatnonzero(tasks.slot_base < 0)
    device, nbytes, category = (
        column[own] for column in (tasks.slot_device, tasks.slot_nbytes, tasks.slot_category)
    )
    born = tasks.slot_first[own]
    # Entry -1 is a slot that is there from the beginning.
    yield device, 4 * born + _DURING, np.append(start, 0)[born], nbytes, category
    dies = own[tasks.slot_last[own] < len(tasks)]
    # Entry -1 is a slot that nobody reads: it goes when the step begins.
    last = np.append(_exchanges(tasks)[1], -1)[tasks.slot_last[dies]]
    yield (
        tasks.slot_device[dies],
        4 * last + _FREES,
        np.append(end, 0)[last],
        -tasks.slot_nbytes[dies],
        tasks.slot_category[dies],
    )


def _message_changes(tasks: TaskGraph, start: Ints, end: Ints) -> Iterator[tuple[Ints, ...]]:
    moving = np.flatnonzero(tasks.kind == TRANSFER)
    sent = np.flatnonzero(tasks.copy_message >= 0)
    taker = np.arange(len(tasks))
    np.maximum.at(taker, tasks.copy_message[sent], tasks.copy_task[sent])
    first, last = (column[moving] for column in _exchanges(tasks))
    nbytes, kind = tasks.nbytes[moving], np.full(len(moving), COMMUNICATION)
    sender, receiver, taken = tasks.device[moving], tasks.peer[moving], taker[moving]
    yield receiver, 4 * first + _BEFORE, start[moving], nbytes, kind
    yield sender, 4 * first + _DURING, start[moving], nbytes, kind
    yield sender, 4 * last + _AFTER, end[moving], -nbytes, kind
    yield receiver, 4 * taken + _AFTER, end[taken], -nbytes, kind


def _workspace_changes(tasks: TaskGraph, start: Ints, end: Ints) -> Iterator[tuple[Ints, ...]]:
    busy = np.flatnonzero(tasks.workspace)
    device, nbytes = tasks.device[busy], tasks.workspace[busy]
    kind = np.full(len(busy), WORKSPACE)
    yield device, 4 * busy + _DURING, start[busy], nbytes, kind
    yield device, 4 * busy + _AFTER, end[busy], -nbytes, kind


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
