"""SendBudget: how much may be sent now without going over a bandwidth.

Part of the room servers. What was sent keeps the line busy for as long as it takes at the
configured rate, and rows wait until then. Answers, clocks and what `synchronise` sends do not wait,
but make rows wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class SendBudget:
    """`rate` is in bytes a second; None is no limit, and then nothing is sent early either."""

    rate: float | None
    clock: Callable[[], float] = time.monotonic
    busy_until: float = 0.0

    def spend(self, nbytes: int) -> None:
        """So many bytes were sent."""
        if self.rate is not None:
            self.busy_until = max(self.busy_until, self.clock()) + nbytes / self.rate

    def wait(self) -> float:
        """Seconds until rows may be sent."""
        return max(0.0, self.busy_until - self.clock())
