"""training_limits: when a training ends: after so many episodes, simulated placements or seconds.

In: the limits, and how many there were. Out: whether it goes on, and how much of it is over.
"""

from __future__ import annotations

import time

import numpy as np


class TrainingLimits:
    """When training ends, and how much of it is over."""

    def __init__(
        self, episodes: int | None, evaluations: int | None, budget: float | None, since: float = 0
    ) -> None:
        self.episodes, self.evaluations = episodes, evaluations
        self.began = time.monotonic()
        self.budget = budget
        self.deadline = np.inf if budget is None else self.began + budget
        self._since = since if since < 1 else 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def left(self, episodes: int, evaluations: int) -> bool:
        """Whether anything may still be simulated after so many."""
        return (
            (self.episodes is None or episodes < self.episodes)
            and (self.evaluations is None or evaluations < self.evaluations)
            and time.monotonic() < self.deadline
        )

    def progress(self, episodes: int, evaluations: int) -> float:
        """From 0 to 1; what is limited by seconds alone goes on from where it was resumed."""
        parts = [0.0]
        if self.episodes is not None:
            parts.append(episodes / max(self.episodes, 1))
        if self.evaluations is not None:
            parts.append(evaluations / max(self.evaluations, 1))
        if self.budget is not None:
            spent = self.seconds / max(self.budget, 1e-9)
            parts.append(self._since + (1 - self._since) * spent)
        return min(1.0, max(parts))
