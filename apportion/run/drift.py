"""Drift: steps that take longer or shorter than predicted, and which tasks do.

Part of the room run. The times of a rank's steps come in; now and then all ranks compare theirs
with the prediction, and if the slowest is off by a fifth, the next step is recorded task by task.
Out goes a sentence with the operators whose tasks are furthest from their predicted times.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from apportion.graph import Graph
from apportion.lower import TaskGraph
from apportion.quantity import format_quantity
from apportion.simulate import Timeline, op_name

LIMIT = 0.2  # relative, of a step
SHOWN = 3  # operators that a sentence names
WINDOW = 16  # steps whose median counts
FIRST, EVERY = 16, 256  # when steps are compared: the 16th, the 64th, then every so often


def is_time_to_compare(taken: int) -> bool:
    """Whether ranks compare after so many steps since they began; the same on all of them."""
    return taken in (FIRST, 4 * FIRST) or (taken > 0 and taken % EVERY == 0)


@dataclass
class StepTimes:
    """The last steps of a rank, those in which code was compiled left out."""

    skipped: int = 2
    last: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    taken: int = 0

    def add(self, seconds: float) -> None:
        """One more step."""
        self.taken += 1
        if self.taken > self.skipped:
            self.last.append(seconds)

    @property
    def median(self) -> float:
        """Of the last steps; 0 if there are none."""
        return statistics.median(self.last) if self.last else 0.0


def drift_of(seconds: float, predicted: float) -> float | None:
    """How far a step is from its prediction, relative to that; None if that is not worth saying."""
    if predicted <= 0 or seconds <= 0:
        return None
    off = seconds / predicted - 1
    return off if abs(off) > LIMIT else None


@dataclass(frozen=True)
class DriftedOp:
    """The tasks of one operator on all devices: predicted and measured seconds."""

    name: str
    predicted: float
    measured: float


def drifted_ops(
    tasks: TaskGraph, graph: Graph, predicted: Timeline, measured: Timeline
) -> list[DriftedOp]:
    """The operators whose tasks are furthest from their predicted times, furthest first."""
    both = [line.end_ns - line.start_ns for line in (predicted, measured)]
    if len(both[0]) != len(both[1]):
        return []
    work = tasks.is_work
    names = np.where(work, tasks.op, -1)
    found = []
    for op in np.unique(names[names >= 0]).tolist():
        mine = names == op
        sums = [float(seconds[mine].sum()) / 1e9 for seconds in both]
        task = int(np.flatnonzero(mine)[0])
        found.append(DriftedOp(op_name(tasks, graph, task), *sums))
    talking = ~work
    sums = [float(seconds[talking].sum()) / 1e9 for seconds in both]
    found.append(DriftedOp("messages", *sums))
    return sorted(found, key=lambda each: -abs(each.measured - each.predicted))


def drift_sentence(off: float, seconds: float, predicted: float, ops: Iterable[DriftedOp]) -> str:
    """What is said about it."""
    how = "longer" if off > 0 else "shorter"
    some = [
        f"{op.name} {format_quantity(op.measured, 's')} "
        f"(predicted {format_quantity(op.predicted, 's')})"
        for op in list(ops)[:SHOWN]
    ]
    where = f"; most of it in {', '.join(some)}" if some else ""
    return (
        f"a step takes {format_quantity(seconds, 's')}, {abs(off):.0%} {how} than the "
        f"{format_quantity(predicted, 's')} predicted{where}"
    )
