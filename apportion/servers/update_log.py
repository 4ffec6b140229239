"""UpdateLog: what a client has added to rows and not sent yet, with what tells which go first.

Part of the room servers. Deltas of a row are added up until they are sent. For each row it is known
at which clock the oldest of them was made, since that must not stay here for longer than staleness
allows, and how important they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints
from apportion.servers.priorities import PRIORITIES, importance_of

Numbers = npt.NDArray[Any]
NONE = np.iinfo(np.int32).max


@dataclass
class UpdateLog:
    """The log of one table: `oldest` is NONE where there is nothing to send; `since` is how many
    changes of the table came before the oldest one."""

    rows: int
    columns: int
    dtype: np.dtype[Any]
    priority: str
    deltas: Numbers = field(init=False)
    oldest: npt.NDArray[np.int32] = field(init=False)
    since: Ints = field(init=False)
    changes: int = 0
    importance: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.deltas = np.zeros((self.rows, self.columns), self.dtype)
        self.oldest = np.full(self.rows, NONE, np.int32)
        self.since = np.zeros(self.rows, np.int64)
        self.importance = np.zeros(self.rows, np.float64)

    def add(self, rows: Ints, deltas: Numbers, values: Numbers, clock: int) -> None:
        """Notes deltas of different rows, made at a clock; `values` are the rows before."""
        self.importance[rows] += importance_of(deltas, values, self.priority)
        self.deltas[rows] += deltas
        self.since[rows[self.oldest[rows] == NONE]] = self.changes
        self.changes += 1
        self.oldest[rows] = np.minimum(self.oldest[rows], clock)

    def unsent(self, before: int | None = None) -> Ints:
        """The rows with something to send; with `before` those with something older than that
        clock."""
        limit = NONE if before is None else before
        return np.flatnonzero(self.oldest < limit)

    def first(self, count: int, draw: np.random.Generator, before: int | None = None) -> Ints:
        """At most so many of them, those that the priority puts first."""
        rows = self.unsent(before)
        if len(rows) <= count:
            return rows
        order = PRIORITIES[self.priority](
            self.oldest[rows], self.since[rows], self.importance[rows], draw
        )
        return rows[order[:count]]

    def take(self, rows: Ints) -> Numbers:
        """The deltas of rows, which are sent now."""
        found = self.deltas[rows]
        self.deltas[rows] = 0
        self.oldest[rows] = NONE
        self.importance[rows] = 0
        return found

    def delivered(self, clock: int) -> int:
        """The clock before which everything has been sent, if the client is at `clock`."""
        return min(clock, int(self.oldest.min(initial=NONE)))
