"""CudaClock: when a CUDA device came to each task, found out without making anybody wait.

Part of the room execute. A Rank reads its clock before and after every task; on a CUDA device that
would say when the host issued the task. A CudaClock puts an event into the stream instead and
answers with the event's number, as a negative one. When the step is over, `times` turns a rank's
spans into nanoseconds of the host's clock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

Span = tuple[int, int, int]
"""A task, and when it started and ended."""

TRIES = 5  # readings of both clocks at once, of which the quickest is the most exact


class CudaClock:
    """Moments of the current stream of a CUDA device.

    `start` waits for the device, so it belongs before the step; reading the clock waits for
    nothing.
    """

    def __init__(self, place: str, new_event: Callable[[], Any] | None = None) -> None:
        self.place = place
        self.new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True))
        self.events: list[Any] = []
        self.lock = threading.Lock()
        self.base: Any = None
        self.base_ns = 0

    def start(self) -> None:
        """Forgets earlier moments, and finds out what the host's clock says now."""
        self.events.clear()
        best = 0
        for _ in range(TRIES):
            torch.cuda.synchronize(self.place)
            event, before = self.new_event(), time.perf_counter_ns()
            event.record()
            event.synchronize()
            after = time.perf_counter_ns()
            if self.base is None or after - before < best:
                best = after - before
                self.base, self.base_ns = event, (before + after) // 2

    def __call__(self) -> int:
        """The moment when the device comes to this place in its stream, by its number below 0."""
        return self.moment(lambda event: event.record())

    def moment(self, record: Callable[[Any], Any]) -> int:
        """The same for another stream, into which `record` puts an event."""
        event = self.new_event()
        record(event)
        with self.lock:
            self.events.append(event)
            return -len(self.events)

    def times(self, spans: Iterable[Span]) -> list[Span]:
        """Spans by the host's clock; waits until the device has come to all of them. Tasks that
        have one span together, as those of a compiled segment, get equal shares of it."""
        together: dict[tuple[int, int], list[int]] = defaultdict(list)
        for task, began, ended in spans:
            together[(began, ended)].append(task)
        for event in self.events:
            event.synchronize()
        found: list[Span] = []
        for (began, ended), tasks in together.items():
            found += shared_out(tasks, self._host_ns(began), self._host_ns(ended))
        return found

    def _host_ns(self, moment: int) -> int:
        if moment >= 0:
            return moment  # of the host already
        milliseconds: float = self.base.elapsed_time(self.events[-moment - 1])
        return self.base_ns + round(milliseconds * 1e6)


def shared_out(tasks: list[int] | tuple[int, ...], began: int, ended: int) -> list[Span]:
    """Spans of tasks that ran together: as if one after the other, each as long. Moments of a
    CudaClock are no times yet: each task gets the whole span, and `times` divides it."""
    if began < 0:
        return [(task, began, ended) for task in tasks]
    ends = [began + (ended - began) * k // len(tasks) for k in range(len(tasks) + 1)]
    return list(zip(tasks, ends, ends[1:], strict=False))
