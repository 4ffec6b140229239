"""Breakdown: where the time of a step goes; and predicted beside measured.

A device at any moment of a step

    computes    runs a task of a kind that computes (lower/task_kinds.py)
    assembles   runs one of a kind that assembles
    exchanges   does neither while a message of its own, or work beside its compute lane, is under
                way
    waits       does nothing

so that the four add up to the step. A measured message is under way from the moment when all that
it involves have come to it to the moment when a receiver goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from apportion.columns import Ints
from apportion.lower import TaskGraph
from apportion.simulate.timeline import MEASURED, Timeline, timeline

Span = tuple[int, int, int]
"""A task, and when it started and ended by the machine's clock, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one device."""

    computes: float
    assembles: float
    exchanges: float
    waits: float


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure, predicted and measured."""

    name: str
    unit: str  # "s" or "B"
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """By how much the prediction is too high, as a share of what was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


def breakdowns(tasks: TaskGraph, line: Timeline) -> tuple[Breakdown, ...]:
    """Where the time of every device goes."""
    step, ends = line.step_ns, tasks.ends
    length = line.end_ns - line.start_ns
    computing = tasks.task_kinds.computes[tasks.kind]
    assembling = tasks.task_kinds.assembles[tasks.kind]
    working, found = tasks.is_work, []
    for device in range(tasks.devices):
        mine = tasks.device == device
        computes, assembles = mine & computing, mine & assembling
        work, messages = np.flatnonzero(mine & working), ends.task[ends.device == device]
        busy = _covered(line, np.flatnonzero(computes | assembles))
        talks = _covered(line, np.concatenate([work, messages])) - busy
        talks = min(talks, step - busy)  # where steps overlap, the rest is beside other work
        found.append(
            Breakdown(
                int(length[computes].sum()) / 1e9,
                int(length[assembles].sum()) / 1e9,
                talks / 1e9,
                (step - busy - talks) / 1e9,
            )
        )
    return tuple(found)


def _covered(line: Timeline, tasks: Ints) -> int:
    """Nanoseconds during which at least one of the tasks runs."""
    if not len(tasks):
        return 0
    start, end = line.start_ns[tasks], line.end_ns[tasks]
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    apart = np.append(True, start[1:] > end[:-1])
    last = np.append(np.flatnonzero(apart)[1:] - 1, len(start) - 1)
    return int((end[last] - start[apart]).sum())


def measured_timeline(tasks: TaskGraph, ranks: Iterable[Iterable[Span]]) -> Timeline:
    """The Timeline of a step from what each rank noted: its own tasks, and messages at both ends.

    The memory is what the order of tasks makes of it, at the measured times.
    """
    never = np.iinfo(np.int64).max
    start, end = np.full(len(tasks), -1), np.full(len(tasks), never)
    for rank, spans in enumerate(ranks):
        task, began, ended = np.array(list(spans), np.int64).reshape(-1, 3).T
        np.maximum.at(start, task, began)
        sent = tasks.is_pairwise[task] & (tasks.peer[task] != rank)
        np.minimum.at(end, task[~sent], ended[~sent])
    missing = np.flatnonzero(end == never)
    if len(missing):
        raise RuntimeError(f"no rank says when it ran task {missing[0]}: a defect of execution")
    end = np.maximum(start, end)
    begin = int(start.min()) if len(start) else 0
    return timeline(tasks, start - begin, end - begin, source=MEASURED)


def comparison(
    tasks: TaskGraph,
    predicted: Timeline,
    measured: Timeline,
    step_seconds: float,
    peak_bytes: Sequence[int],
    bytes_moved: int,
    beside: Sequence[int] = (),
) -> tuple[ComparisonRow, ...]:
    """Figures of one step: the last three are measured by other means than the Timeline's spans.
    Seconds of what devices do are means over the devices. `beside` are bytes that each device holds
    beside the step, as for a checkpoint that is being saved."""
    rows = [ComparisonRow("step", "s", predicted.step_seconds, step_seconds)]
    both = [breakdowns(tasks, line) for line in (predicted, measured)]
    for name in ("computes", "assembles", "exchanges", "waits"):
        means = [sum(getattr(b, name) for b in bs) / max(len(bs), 1) for bs in both]
        rows.append(ComparisonRow(name, "s", *means))
    peaks = map(sum, zip_longest(predicted.peak_bytes, beside, fillvalue=0))
    rows.append(ComparisonRow("peak memory", "B", max(peaks, default=0), max(peak_bytes)))
    rows.append(ComparisonRow("bytes moved", "B", predicted.bytes_moved, bytes_moved))
    return tuple(rows)
