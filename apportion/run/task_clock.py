"""Clocks that look at a CUDA device between the tasks of a step, whatever runs them.

Part of the room run. A rank reads its clock before the first task and after every one, or after
several that one call does (`timed` workers); here the clock is where measurements are taken. A
reading is the number of the interval that begins, times SCALE, so that spans say which tasks ran in
which interval (`intervals`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SCALE = 1 << 32
SLEEP_CYCLES = 2.0e9  # of a device's clock in a second, at most
LONG = 0.4  # seconds, longer than the host takes to fill the device's queue

Span = tuple[int, int, int]


def intervals(spans: Sequence[Span]) -> dict[int, list[int]]:
    """The tasks that ran in each interval, from the spans of a step."""
    found: dict[int, list[int]] = {}
    for task, began, _ in spans:
        found.setdefault(began // SCALE, []).append(task)
    return found


def sleep(seconds: float) -> None:
    """Keeps the device busy for at least about so long, and the host not at all."""
    torch.cuda._sleep(int(seconds * SLEEP_CYCLES))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


@dataclass
class HostClock:
    """Seconds of the host in every interval; every `rest` intervals the device catches up, so that
    its queue is never full."""

    rest: int = 64
    seconds: list[float] = field(default_factory=list)
    began: float | None = None

    def __call__(self) -> int:
        now, count = time.perf_counter(), len(self.seconds)
        if self.began is not None:
            self.seconds.append(now - self.began)
            count += 1
        if count % self.rest == 0:
            torch.cuda.synchronize()
        self.began = time.perf_counter()
        return count * SCALE


@dataclass
class EventClock:
    """Seconds of the device in every interval, not a number where the host fell behind.

    `first` are the intervals before which the device is made to wait, and for how long, so that the
    host is ahead of it; there are `last` intervals. Without `each`, events stand only there:
    `total` is all of the device's seconds, with and without what events take.
    """

    first: dict[int, float]
    last: int
    each: bool = True
    count: int = -1
    marks: list[tuple[int, Any]] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    total: float = 0.0

    def __call__(self) -> int:
        self.count += 1
        if self.count == self.last:
            self.finish()
        elif self.each and self.marks and self.count not in self.first:
            self._mark()
        if self.count in self.first:
            self.finish()
            sleep(self.first[self.count])
            self._mark()
        return self.count * SCALE

    def _mark(self) -> None:
        event = _event()
        event.record()
        self.marks.append((self.count, event))

    def finish(self) -> None:
        """Ends what was begun at one of `first`: the device catches up, and its times are read."""
        if self.marks:
            self._mark()
            waiting = not self.marks[0][1].query()
            torch.cuda.synchronize()
            self.total += self.marks[0][1].elapsed_time(self.marks[-1][1]) / 1e3
            if self.each and waiting:
                for (number, before), (_, after) in zip(self.marks, self.marks[1:], strict=False):
                    self.seconds[number] = before.elapsed_time(after) / 1e3
        self.marks.clear()
        torch.cuda.synchronize()


@dataclass
class QueueClock:
    """How much of its work, `seconds` by interval, the host can do while the device does nothing:
    then the queue is full. `found` is 0 if it never is."""

    seconds: Sequence[float]
    found: float = 0.0
    done: float = 0.0
    count: int = -1
    began: float = 0.0

    def __call__(self) -> int:
        now = time.perf_counter()
        self.count += 1
        if self.count == 0:
            torch.cuda.synchronize()
            sleep(LONG)
        else:
            if not self.found and now - self.began > LONG / 4:
                self.found = self.done
            if self.count - 1 < len(self.seconds):
                self.done += self.seconds[self.count - 1]
        self.began = time.perf_counter()
        return self.count * SCALE
