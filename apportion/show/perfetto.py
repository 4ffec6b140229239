"""A Timeline for Perfetto or chrome://tracing, in Chrome's JSON trace format.

Part of the room show. A Timeline comes in, a file goes out, with

process  a device, with a counter of its memory, a series per category; the last one is `links`
thread   of a device: its lanes (compute, send, receive, and what lower/task_kinds.py has beside
         them). A collective is on `send` of all its members.
         Messages that overlap in time are on further threads of the same name.
         Of `links`: one link, and the messages that occupy it, where they are known
arrow    from a message on its sender to the same on its receiver to the assembly that takes it
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from apportion.columns import Ints
from apportion.files import open_atomic
from apportion.graph import Graph
from apportion.lower import CATEGORIES, TaskGraph
from apportion.machine import PATTERNS
from apportion.simulate import Curve, LinkSpans, Timeline, op_name

MANY = 1000  # of threads for one lane; only orders what is shown


@dataclass(frozen=True, slots=True, eq=False)
class LinkUsage:
    """The names of a Cluster's links, and when which message occupied them."""

    names: tuple[str, ...]
    spans: LinkSpans


@dataclass(frozen=True, slots=True, eq=False)
class ThreadSlices:
    """What is drawn on devices, in columns: a task on a thread, the `copy`-th of its lane's. Lanes
    are indices into `lanes`."""

    task: Ints
    device: Ints
    lane: Ints
    copy: Ints
    lanes: tuple[str, ...]

    def thread(self, lane: int, copy: int) -> int:
        """The number of a thread."""
        return lane + len(self.lanes) * copy


def trace(
    timeline: Timeline,
    tasks: TaskGraph,
    graph: Graph,
    path: str | Path,
    links: LinkUsage | None = None,
) -> None:
    """Writes the Timeline; the file appears whole or not at all."""
    if not len(timeline.start_ns) == len(timeline.end_ns) == len(tasks):
        raise ValueError(
            f"the timeline has {len(timeline.start_ns)} tasks, its plan {len(tasks)}; it is of "
            "another plan"
        )
    with open_atomic(Path(path)) as raw, TextIOWrapper(raw, encoding="utf-8") as file:
        _write(file, timeline, _events(timeline, tasks, graph, links))


def _write(file: TextIO, timeline: Timeline, events: Iterator[dict[str, Any]]) -> None:
    head = {"source": timeline.source, "step_seconds": timeline.step_seconds}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(head)}, "traceEvents": [')
    separator = "\n"
    for event in events:
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _events(
    timeline: Timeline, tasks: TaskGraph, graph: Graph, links: LinkUsage | None
) -> Iterator[dict[str, Any]]:
    drawn = slices(timeline, tasks)
    yield from _titles(tasks.devices, drawn)
    yield from _spans(timeline, tasks, graph, drawn)
    yield from _arrows(timeline, tasks, drawn)
    for device, curve in enumerate(timeline.curves):
        yield from _levels(device, curve)
    if links is not None:
        yield from _links(links, tasks, graph)


def slices(timeline: Timeline, tasks: TaskGraph) -> ThreadSlices:
    """Every task on the threads of the devices it involves."""
    ends, kinds = tasks.ends, tasks.task_kinds
    work = np.flatnonzero(tasks.is_work)
    task = np.concatenate([work, ends.task])
    device = np.concatenate([tasks.device[work], ends.device])
    kind, own = tasks.kind[task], tasks.device[task] == device
    lane = np.where(own, kinds.lane[kind], kinds.receiver_lane[kind])
    start, end = timeline.start_ns[task], timeline.end_ns[task]
    order = np.lexsort((task, start, device, lane))
    copy = np.zeros(len(task), np.int64)
    key = (device * len(kinds.lanes) + lane)[order]
    for rows in np.split(order, np.flatnonzero(np.diff(key)) + 1):
        copy[rows] = _apart(start[rows].tolist(), end[rows].tolist())
    return ThreadSlices(task[order], device[order], lane[order], copy[order], kinds.lanes)


def _apart(starts: list[int], ends: list[int]) -> list[int]:
    """A thread for each span, given by rising start, so that none overlaps another on its
    thread."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, thread)
    found = []
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        thread = heappop(free) if free else len(busy)
        heappush(busy, (end, thread))
        found.append(thread)
    return found


def _titles(devices: int, drawn: ThreadSlices) -> Iterator[dict[str, Any]]:
    for device in range(devices):
        yield _title("process_name", device, 0, name=f"device {device}")
        yield _title("process_sort_index", device, 0, sort_index=device)
    used = {(d, lane, 0) for d in range(devices) for lane in range(len(drawn.lanes))}
    used.update(zip(drawn.device.tolist(), drawn.lane.tolist(), drawn.copy.tolist(), strict=True))
    for device, lane, copy in sorted(used):
        thread = drawn.thread(lane, copy)
        yield _title("thread_name", device, thread, name=drawn.lanes[lane])
        yield _title("thread_sort_index", device, thread, sort_index=MANY * lane + copy)


def _title(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _spans(
    timeline: Timeline, tasks: TaskGraph, graph: Graph, drawn: ThreadSlices
) -> Iterator[dict[str, Any]]:
    starts, ends = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    rows = zip(
        drawn.task.tolist(), drawn.device.tolist(), drawn.lane.tolist(), drawn.copy.tolist(),
        strict=True,
    )  # fmt: skip
    for index, device, lane, copy in rows:
        task = tasks.task(index)
        facts = {"task": index, "part": task.part, "nbytes": task.nbytes, "flops": task.flops}
        if task.op < len(graph.ops) and graph.ops[task.op].line:
            facts["line"] = graph.ops[task.op].line
        name, kind = op_name(tasks, graph, index), task.task_kind
        if kind.is_pairwise:
            name += f" to {task.peer}" if device == task.device else f" from {task.device}"
        elif kind.is_collective:
            name += f" ({_pattern(tasks, index)})"
            facts["members"] = list(tasks.groups[tasks.group[index]])
        elif kind.label:
            name += f" ({kind.label})"
        yield {
            "ph": "X", "name": name, "cat": kind.name, "pid": device,
            "tid": drawn.thread(lane, copy), "ts": starts[index] / 1e3,
            "dur": (ends[index] - starts[index]) / 1e3, "args": facts,
        }  # fmt: skip


def _pattern(tasks: TaskGraph, task: int) -> str:
    return PATTERNS[tasks.pattern[task]] if len(tasks.pattern) else tasks.kind_of(task).name


def _arrows(timeline: Timeline, tasks: TaskGraph, drawn: ThreadSlices) -> Iterator[dict[str, Any]]:
    """From where a message is sent, over where it arrives, to the assembly that takes it."""
    rows = zip(drawn.task.tolist(), drawn.device.tolist(), drawn.lane.tolist(), strict=True)
    at = {row: k for k, row in enumerate(rows)}
    threads = [drawn.thread(*p) for p in zip(drawn.lane.tolist(), drawn.copy.tolist(), strict=True)]
    starts, ends = timeline.start_ns.tolist(), tasks.ends
    sender_lane = tasks.task_kinds.lane[tasks.kind]
    receiver_lane = tasks.task_kinds.receiver_lane[tasks.kind]
    for row in np.flatnonzero(ends.received).tolist():
        task, device, taker = int(ends.task[row]), int(ends.device[row]), int(ends.taker[row])
        stops = [(task, device, int(receiver_lane[task]))]
        if tasks.kind_of(task).is_pairwise:
            stops.insert(0, (task, int(tasks.device[task]), int(sender_lane[task])))
        if taker != task:
            stops.append((taker, device, int(sender_lane[taker])))
        if len(stops) == 1:
            continue
        for number, stop in enumerate(stops):
            arrow = {
                "ph": "s" if number == 0 else "f" if number == len(stops) - 1 else "t",
                "bp": "e", "name": "message", "cat": "message", "id": row, "pid": stop[1],
                "tid": threads[at[stop]], "ts": starts[stop[0]] / 1e3,
            }  # fmt: skip
            yield arrow


def _levels(device: int, curve: Curve) -> Iterator[dict[str, Any]]:
    """What lasts, and what is highest between."""
    if not len(curve.time_ns):
        return
    change, time = curve.change, curve.time_ns
    keep = np.append(time[1:] != time[:-1], True)
    keep[:-1] |= (change[:-1] > 0) & (change[1:] < 0)
    rows, bands = np.flatnonzero(keep), curve.bands()
    used = np.flatnonzero(bands.any(axis=0)).tolist()
    for when, held in zip(time[rows].tolist(), bands[rows][:, used].tolist(), strict=True):
        series = {CATEGORIES[k]: nbytes for k, nbytes in zip(used, held, strict=True)}
        yield {"ph": "C", "name": "memory", "pid": device, "ts": when / 1e3, "args": series}


def _links(links: LinkUsage, tasks: TaskGraph, graph: Graph) -> Iterator[dict[str, Any]]:
    pid, spans = tasks.devices, links.spans
    yield _title("process_name", pid, 0, name="links")
    yield _title("process_sort_index", pid, 0, sort_index=pid)
    for link in np.unique(spans.link).tolist():
        yield _title("thread_name", pid, link, name=links.names[link])
        yield _title("thread_sort_index", pid, link, sort_index=link)
    columns = (spans.item, spans.link, spans.start, spans.end)
    for index, link, start, end in zip(*(column.tolist() for column in columns), strict=True):
        task, name = tasks.task(index), op_name(tasks, graph, index)
        if task.task_kind.is_collective:
            name += f" ({_pattern(tasks, index)})"
        else:
            name += f" {task.device} to {task.peer}"
        yield {
            "ph": "X", "name": name, "cat": task.task_kind.name, "pid": pid, "tid": link,
            "ts": start / 1e3, "dur": (end - start) / 1e3,
            "args": {"task": index, "nbytes": task.nbytes},
        }  # fmt: skip
