"""A clock for budgets. It stands still while loops are compiled, since a search gets nothing then.

Whoever has a budget of seconds takes the time by `work_seconds`; columns.py stops the clock. The
first command on a machine compiles for up to a minute, and finds what the second one finds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

COMPILING = (
    "compiling loops for this machine: up to a minute, once; what is compiled is kept, and no "
    "budget runs meanwhile"
)


@dataclass
class WorkClock:
    """Seconds without those during which it was stopped. Stops may lie within each other.

    `announce` is told once that something is compiled, since the user waits for it.
    """

    announce: Callable[[str], None] | None = None
    stopped_seconds: float = 0.0  # by stops that are over
    depth: int = 0  # of the stops that are not
    since: float = 0.0  # when the outermost of them began
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """Time does not count from now on."""
        with self._lock:
            if self.depth == 0:
                self.since = time.perf_counter()
            self.depth += 1

    def go_on(self) -> None:
        """The end of a stop."""
        with self._lock:
            self.depth -= 1
            if self.depth == 0:
                self.stopped_seconds += time.perf_counter() - self.since

    def announce_compiling(self) -> None:
        """Says that something is compiled, the first time."""
        announce, self.announce = self.announce, None
        if announce is not None:
            announce(COMPILING)

    @property
    def stopped(self) -> float:
        """Seconds that did not count so far."""
        with self._lock:
            now = time.perf_counter() - self.since if self.depth else 0.0
            return self.stopped_seconds + now

    @property
    def is_stopped(self) -> bool:
        """Whether something is compiled at the moment."""
        return self.depth > 0


# The only one: what is compiled in this process stops it, whoever waits for it.
WORK_CLOCK = WorkClock()


def work_seconds() -> float:
    """Seconds since some moment, without those spent on compiling."""
    return time.perf_counter() - WORK_CLOCK.stopped
