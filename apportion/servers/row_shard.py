"""RowShard: a server's rows of one table, and what each client has not been sent of them.

Part of the room servers. Shard s of N has the rows s, s + N, s + 2N, ...: rows that are changed
often have low numbers in most data, and so they are spread. Clients are sent the rows that they
have once asked for, and a client's own changes are not sent back to it, since it has made the same
sums.

With staleness 0 changes become visible at the end of a clock, all at once and in the order of
clients: that is bulk-synchronous, bit for bit. With more they are visible at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints
from apportion.servers.adaptive_revision import X, first_state, revise
from apportion.servers.priorities import PRIORITIES, importance_of
from apportion.servers.update_log import NONE

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class TableSpec:
    """A table: rows of `columns` numbers. With `alpha` deltas are gradients, which adaptive
    revision applies; `planes` is how many numbers clients get for each element."""

    number: int
    name: str
    rows: int
    columns: int
    dtype: str
    alpha: float | None = None

    @property
    def planes(self) -> int:
        return 1 if self.alpha is None else 3

    def row_bytes(self) -> int:
        """Bytes of a row as clients get it, with its number."""
        return self.planes * self.columns * np.dtype(self.dtype).itemsize + 4


@dataclass
class RowShard:
    """`rows` are (row, plane, column); `behind[c]` is the clock of the oldest change that client c
    has not been sent of each row, NONE where it has all, and `since[c]` how many messages with
    changes came before it; `asked[c]` the rows that it wants; `applied[c]` how many of its messages
    with changes are in the rows."""

    spec: TableSpec
    shard: int
    shards: int
    values: Numbers
    immediate: bool
    priority: str
    rows: Numbers = field(init=False)
    behind: npt.NDArray[np.int32] = field(init=False)
    since: Ints = field(init=False)
    asked: npt.NDArray[np.bool_] = field(init=False)
    importance: npt.NDArray[np.float64] = field(init=False)
    applied: list[int] = field(init=False)
    waiting: dict[int, list[tuple[int, Ints, Numbers, Numbers | None]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        count = len(self.values)
        plain = self.spec.alpha is None
        self.rows = self.values[:, None, :].copy() if plain else first_state(self.values)
        self.behind = np.full((self.shards, count), NONE, np.int32)
        self.since = np.zeros((self.shards, count), np.int64)
        self.asked = np.zeros((self.shards, count), np.bool_)
        self.importance = np.zeros((self.shards, count), np.float64)
        self.applied = [0] * self.shards

    def local(self, rows: Ints) -> Ints:
        """Where rows of the table are in the shard."""
        return rows // self.shards

    def numbers(self, local: Ints) -> Ints:
        """The table's numbers of rows of the shard."""
        return local * self.shards + self.shard

    # Changes

    def update(
        self, client: int, rows: Ints, deltas: Numbers, read: Numbers | None, clock: int
    ) -> None:
        """A client's changes of rows, made at `clock` or later."""
        if self.immediate:
            self._apply(client, self.local(rows), deltas, read, clock)
        else:
            self.waiting.setdefault(clock, []).append((client, self.local(rows), deltas, read))

    def end_clock(self, clock: int) -> None:
        """All changes of a clock are here: those that waited for that become visible."""
        for client, rows, deltas, read in sorted(self.waiting.pop(clock, []), key=lambda e: e[0]):
            self._apply(client, rows, deltas, read, clock)

    def _apply(
        self, client: int, rows: Ints, deltas: Numbers, read: Numbers | None, clock: int
    ) -> None:
        self.applied[client] += 1
        weight = importance_of(deltas, self.rows[rows, X], self.priority)
        if self.spec.alpha is None:
            self.rows[rows, X] += deltas
        else:
            assert read is not None, "a gradient comes with the sum that it was made with"
            state = self.rows[rows]
            revise(state, deltas, read, self.spec.alpha)
            self.rows[rows] = state
        for other in range(self.shards):
            if other == client and self.spec.alpha is None:
                continue
            wanted = self.asked[other, rows]
            mine = rows[wanted]
            self.since[other, mine[self.behind[other, mine] == NONE]] = sum(self.applied)
            self.behind[other, mine] = np.minimum(self.behind[other, mine], clock)
            self.importance[other, mine] += weight[wanted]

    # What clients get

    def ask(self, client: int, rows: Ints) -> None:
        """A client wants rows, from now on."""
        local = self.local(rows)
        self.asked[client, local] = True
        self.behind[client, local] = np.minimum(self.behind[client, local], 0)

    def unsent(self, client: int, before: int | None = None) -> Ints:
        """Rows of the shard that a client has not been sent; with `before` those with something
        older than that clock."""
        return np.flatnonzero(self.behind[client] < (NONE if before is None else before))

    def first(
        self, client: int, count: int, draw: np.random.Generator, before: int | None = None
    ) -> Ints:
        """At most so many of them, those that the priority puts first."""
        rows = self.unsent(client, before)
        if len(rows) <= count:
            return rows
        order = PRIORITIES[self.priority](
            self.behind[client, rows],
            self.since[client, rows],
            self.importance[client, rows],
            draw,
        )
        return rows[order[:count]]

    def take(self, client: int, local: Ints) -> Numbers:
        """Rows of the shard, which are sent to a client now: (row, plane, column)."""
        self.behind[client, local] = NONE
        self.importance[client, local] = 0
        return self.rows[local, : self.spec.planes]

    def sent_before(self, client: int, clock: int) -> int:
        """The clock before which a client has been sent everything, if `clock` is complete here."""
        return min(clock, int(self.behind[client].min(initial=NONE)))

    def final_rows(self) -> Numbers:
        """The values of all rows."""
        return self.rows[:, X]


def shard_rows(spec: TableSpec, shard: int, shards: int) -> Ints:
    """The numbers of the rows that a shard has."""
    return np.arange(shard, spec.rows, shards)
