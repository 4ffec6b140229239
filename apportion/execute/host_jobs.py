"""Work that a host does while its device goes on: what the next step needs first before the rest.

Part of the room execute. HostJobs come in, each with an event after which it can be done and a
number that says how soon the next step needs it. One thread does them: of those that can be done
the most urgent one. Gradients of the last layers come first and those of the first layers are
needed first: first come first served, the next step would wait for all of them.

Threads end when there is nothing to do, and begin again with the next job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from apportion.machine import usable_cores

IDLE = 0.5  # seconds after which a thread ends
MOST_THREADS = 14  # more do not help: memory is what is waited for


@dataclass
class HostJob:
    """Something to do when `event` has passed; `urgency`: the smallest first. `begin` begins it and
    says what is left to do, in parts that may be done at the same time; `end` comes after them."""

    urgency: int
    event: Any
    begin: Callable[[], Sequence[Callable[[], None]]]
    end: Callable[[], None] = lambda: None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    left: int = 0

    def wait(self) -> None:
        """Waits until it is done; raises RuntimeError if that failed."""
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(f"an update on the host failed: {self.error}") from self.error


class HostJobs:
    """Does jobs in threads. `is_done` and `synchronize` are those of the device's Streams."""

    def __init__(
        self,
        is_done: Callable[[Any], bool],
        synchronize: Callable[[Any], None],
        threads: int | None = None,
    ) -> None:
        self.is_done, self.synchronize = is_done, synchronize
        self.threads = threads or max(1, min(MOST_THREADS, usable_cores() - 2))
        self.changed = threading.Condition()
        self.waiting: deque[HostJob] = deque()  # in the order in which their events pass
        self.ready: list[tuple[int, int, HostJob]] = []
        self.parts: deque[tuple[HostJob, Callable[[], None]]] = deque()
        self.count = 0
        self.running = 0
        self.watches = False  # whether a thread waits for the next event

    def submit(self, job: HostJob) -> None:
        """Hands a job over."""
        with self.changed:
            self.waiting.append(job)
            while self.running < self.threads:
                self.running += 1
                threading.Thread(target=self._work).start()
            self.changed.notify()

    def _work(self) -> None:
        while True:
            found = self._next()
            if found is None:
                return
            job, part = found
            self._call(job, part)
            self._finish_part(job)
            del found, job, part  # which hold what they read, and this thread may wait for long

    def _call(self, job: HostJob, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException as error:  # whoever waits for the job hears of it
            job.error = error
            return ()

    def _finish_part(self, job: HostJob) -> None:
        with self.changed:
            job.left -= 1
            over = job.left == 0
        if over:
            self._call(job, job.end)
            job.done.set()

    def _next(self) -> tuple[HostJob, Callable[[], None]] | None:
        """The next part to do, of the most urgent job that can be done; None if there has been none
        for a while."""
        while True:
            with self.changed:
                if self.parts:
                    return self.parts.popleft()
                self._look()
                if self.ready:
                    self._begin(heappop(self.ready)[2])
                    continue
                if not self.waiting or self.watches:
                    if not self.changed.wait(IDLE) and not self.waiting and not self.parts:
                        self.running -= 1
                        return None
                    continue
                self.watches, first = True, self.waiting[0].event
            self.synchronize(first)
            with self.changed:
                self.watches = False

    def _look(self) -> None:
        """Moves the jobs whose events have passed to those that can be done."""
        while self.waiting and self.is_done(self.waiting[0].event):
            job = self.waiting.popleft()
            self.count += 1
            heappush(self.ready, (job.urgency, self.count, job))

    def _begin(self, job: HostJob) -> None:
        parts = [*self._call(job, job.begin)] or [lambda: None]
        job.left = len(parts)
        self.parts.extend((job, part) for part in parts)
        self.changed.notify_all()


class InOrder:
    """Calls functions one after the other in a thread, each of which may wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[Callable[[], None]] = deque()
        self.thread: threading.Thread | None = None

    def submit(self, function: Callable[[], None]) -> None:
        """Hands a function over, which must not raise."""
        with self.changed:
            self.waiting.append(function)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work)
                self.thread.start()
            self.changed.notify()

    @property
    def idle(self) -> bool:
        """Whether all functions have been called."""
        return not self.waiting

    def _work(self) -> None:
        while True:
            with self.changed:
                if not self.waiting and not self.changed.wait(IDLE) and not self.waiting:
                    self.thread = None
                    return
                if not self.waiting:
                    continue
                function = self.waiting[0]
            function()
            with self.changed:
                self.waiting.popleft()
            del function  # which holds what it copied, and this thread may wait for long
