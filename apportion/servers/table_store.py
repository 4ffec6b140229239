"""TableStore: tables of rows that processes share, seen from one of them.

The main file of servers/.

    weights = store.table("weights", rows=1000, columns=16)
    for _ in range(20):
        w = weights.get(rows)                 # at most `staleness` clocks old
        weights.inc(rows, delta)              # seen by this process at once, by others later
        store.clock()

A process at clock c sees every change that any process made before its own clock c - staleness, and
its own at once (Ho et al., stale synchronous parallel). How much earlier changes travel than they
must is up to the managed communication of Bösen (Wei et al., SoCC 2015): with a `bandwidth` a
background thread sends all rows, a few at a time and no faster than that. Those that would soon be
too old go first, then those that the priority puts first. What a row has when its turn comes is
sent, so that changes which wait are sent together, and nothing waits in the queue of a cable,
where it could not be overtaken. Without a bandwidth everything is sent at clocks, at once.

    client   adds deltas up in an UpdateLog; get returns what the server last sent, plus those
    server   each process has a RowShard of every table; it sends rows to those who have asked for
    them
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints
from apportion.servers.adaptive_revision import GBAR, LARGEST, X
from apportion.servers.messages import (
    ASK,
    BYE,
    CLOCK,
    DELIVERED,
    KIND,
    PUSH,
    ROWS,
    SEQUENCE,
    SYNC,
    TABLE,
    TICK,
    UPDATE,
    TableMessage,
    TableMessages,
    packed,
)
from apportion.servers.priorities import PRIORITIES
from apportion.servers.row_shard import RowShard, TableSpec, shard_rows
from apportion.servers.send_budget import SendBudget
from apportion.servers.update_log import UpdateLog

Numbers = npt.NDArray[Any]
Values = npt.ArrayLike | Callable[[Ints], npt.ArrayLike]
PUSH_BYTES = 100_000  # that are sent early at once (Bösen's bound)
TOLERANCE = 2  # clocks that what must be sent is sent sooner than it must (Bösen's)
IDLE_SECONDS = 0.002
TIMEOUT = 600.0


@dataclass(frozen=True)
class StoreSettings:
    """How stale rows may be, in clocks; bytes a second that may be sent, or None; what goes first;
    how many clocks sooner than it must what has to be sent is sent; and bytes sent at a time."""

    staleness: int = 0
    bandwidth: float | None = None
    priority: str = "random"
    tolerance: int = TOLERANCE
    push_bytes: int = PUSH_BYTES
    seed: int = 0
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(
                f"a staleness of {self.staleness} clocks makes no sense; give 0 or more"
            )
        if self.bandwidth is not None and self.bandwidth <= 0:
            raise ValueError(f"a bandwidth of {self.bandwidth} bytes a second sends nothing")
        if self.priority not in PRIORITIES:
            raise ValueError(f"unknown priority {self.priority!r}; known: {', '.join(PRIORITIES)}")

    @property
    def managed(self) -> bool:
        """Whether rows travel between clocks, as fast as a bandwidth allows."""
        return self.bandwidth is not None and self.staleness > 0

    def due(self, clock: int) -> int:
        """What was changed before this clock has to be sent to a client that is at `clock`."""
        return min(clock - self.staleness + self.tolerance, clock)

    def client_due(self, clock: int) -> int:
        """What was changed before this clock has to be sent by a client that is at `clock`: it
        leaves half of the time that changes may wait to the server."""
        return self.due(clock) + max(0, self.staleness - self.tolerance) // 2


@dataclass
class _Client:
    """A process's side of one table: what it last got (`base`), what it added since (`log`), and
    what is on its way to each server."""

    spec: TableSpec
    log: UpdateLog
    base: Numbers  # row, plane, column
    has: npt.NDArray[np.bool_]
    asked: npt.NDArray[np.bool_]
    sent: list[int]
    under_way: list[deque[tuple[int, Ints, Numbers]]]
    read: Numbers | None = None  # gbar at the first change that has not been sent

    def values(self, rows: Ints) -> Numbers:
        """Rows as this process sees them: with everything that it has added."""
        if self.spec.alpha is None:
            found: Numbers = self.base[rows, X] + self.log.deltas[rows]
            return found
        rate = self.spec.alpha / np.sqrt(self.base[rows, LARGEST])
        late: Numbers = self.base[rows, X] - rate * (self.log.deltas[rows] + self._pending(rows))
        return late

    def _pending(self, rows: Ints) -> Numbers:
        """Gradients of rows that servers have not acknowledged."""
        found = np.zeros((self.spec.rows, self.spec.columns), self.base.dtype)
        for batches in self.under_way:
            for _, numbers, deltas in batches:
                found[numbers] += deltas
        return found[rows]


class Table:
    """A table of a TableStore."""

    def __init__(self, store: TableStore, spec: TableSpec) -> None:
        self.store, self.spec = store, spec

    def get(self, rows: npt.ArrayLike | None = None) -> Numbers:
        """Copies of rows, of all without an argument; waits until they are fresh enough."""
        return self.store.get(self.spec, self._rows(rows))

    def inc(self, rows: npt.ArrayLike | None, deltas: npt.ArrayLike) -> None:
        """Adds to rows, all of them different; with adaptive revision these are gradients."""
        self.store.inc(self.spec, self._rows(rows), np.asarray(deltas, self.spec.dtype))

    def _rows(self, rows: npt.ArrayLike | None) -> Ints:
        if rows is None:
            return np.arange(self.spec.rows)
        found = np.atleast_1d(np.asarray(rows))
        if not np.issubdtype(found.dtype, np.integer):
            raise ValueError(f"rows of {self.spec.name} are whole numbers, not {found.dtype}")
        if len(found) and not (found.min() >= 0 and found.max() < self.spec.rows):
            raise ValueError(
                f"the table {self.spec.name} has rows 0 to {self.spec.rows - 1}, and "
                f"{int(found.min())} to {int(found.max())} were asked for"
            )
        return found.astype(np.int64)


@dataclass
class TableStore:
    """See the head of this file. One lock guards everything; threads that receive and the one that
    sends early take it for as long as they look at rows."""

    messages: TableMessages
    settings: StoreSettings
    clients: dict[int, _Client] = field(default_factory=dict)
    shards: dict[int, RowShard] = field(default_factory=dict)
    ticks: int = 0
    waited_seconds: float = 0.0
    sent_bytes: int = 0
    early_bytes: int = 0
    failure: str = ""

    def __post_init__(self) -> None:
        count = self.messages.count
        self.rank, self.count = self.messages.rank, count
        self.budget = SendBudget(self.settings.bandwidth)
        self.changed = threading.Condition(threading.RLock())
        self.shard_clock = [0] * count  # how fresh rows of each server are here
        self.delivered = [0] * count  # before which clock each client has sent everything
        self.client_clock = [0] * count
        self.synchronised = [-1] * count
        self.told_clock = [0] * count  # what each client knows of this server
        self.complete = 0
        self.gone: set[int] = set()
        self.closed = False
        self.turn = 0
        self.told_delivered = 0  # what all servers know of this client
        self.draw = np.random.default_rng((self.settings.seed, self.rank))
        self.messages.start(self._handle, self._fail)
        self.thread = threading.Thread(target=self._send_managed, daemon=True)
        self.thread.start()

    # What users call

    def table(
        self,
        name: str,
        rows: int,
        columns: int = 1,
        initial: Values = 0.0,
        dtype: npt.DTypeLike = np.float32,
        adaptive: float | None = None,
    ) -> Table:
        """A table that all processes have to make, in the same order. It begins with `initial`: a
        number, the array, or a function of the numbers of rows. With `adaptive` deltas are
        gradients and adaptive revision applies them, with that step size."""
        if rows < 1 or columns < 1:
            raise ValueError(f"the table {name} of {rows} x {columns} has no elements")
        with self.changed:
            number = len(self.clients)
            spec = TableSpec(number, name, rows, columns, np.dtype(dtype).name, adaptive)
            mine = shard_rows(spec, self.rank, self.count)
            first = _initial(initial, mine, spec)
            self.shards[number] = RowShard(
                spec, self.rank, self.count, first, self.settings.staleness > 0,
                self.settings.priority,
            )  # fmt: skip
            self.clients[number] = self._client(spec)
            self.changed.notify_all()
            return Table(self, spec)

    def _client(self, spec: TableSpec) -> _Client:
        dtype = np.dtype(spec.dtype)
        return _Client(
            spec,
            UpdateLog(spec.rows, spec.columns, dtype, self.settings.priority),
            np.zeros((spec.rows, spec.planes, spec.columns), dtype),
            np.zeros(spec.rows, np.bool_),
            np.zeros(spec.rows, np.bool_),
            [0] * self.count,
            [deque() for _ in range(self.count)],
            None if spec.alpha is None else np.zeros((spec.rows, spec.columns), dtype),
        )

    def get(self, spec: TableSpec, rows: Ints) -> Numbers:
        """See Table."""
        client = self.clients[spec.number]
        began = time.monotonic()
        with self.changed:
            self._ask(client, rows)
            servers = np.unique(rows % self.count)
            needed = self.ticks - self.settings.staleness
            self._wait(
                lambda: (
                    bool(client.has[rows].all())
                    and all(self.shard_clock[server] >= needed for server in servers)
                )
            )
            self.waited_seconds += time.monotonic() - began
            return client.values(rows)

    def inc(self, spec: TableSpec, rows: Ints, deltas: Numbers) -> None:
        """See Table."""
        shape = (len(rows), spec.columns)
        if deltas.shape != shape:
            deltas = np.broadcast_to(deltas, shape)
        if len(np.unique(rows)) < len(rows):
            raise ValueError(f"a row of {spec.name} is added to twice in one call; add up first")
        with self.changed:
            self._check()
            client = self.clients[spec.number]
            if client.read is not None:
                new = rows[client.log.oldest[rows] > self.ticks]
                client.read[new] = client.base[new, GBAR]
            client.log.add(rows, deltas, client.values(rows), self.ticks)
            self.changed.notify_all()

    def clock(self) -> None:
        """Ends a clock of this process: what would become too old is sent, or becomes due."""
        with self.changed:
            self._check()
            self.ticks += 1
            if not self.settings.managed:
                self._send_updates({k: c.log.unsent() for k, c in self.clients.items()})
            self._tell_delivered()
            self.changed.notify_all()

    def synchronise(self) -> None:
        """Waits until all processes have come to this clock and everything is everywhere. All have
        to call it."""
        with self.changed:
            self._check()
            self._send_updates({k: c.log.unsent() for k, c in self.clients.items()})
            self._tell_all((SYNC, 0, self.ticks, 0, self._delivered()))
            self._wait(lambda: all(each >= self.ticks for each in self.shard_clock))

    def close(self) -> None:
        """Sends what is left and waits until everybody does the same."""
        with self.changed:
            if self.closed:
                return
            if not self.failure:
                self._send_updates({k: c.log.unsent() for k, c in self.clients.items()})
                self._tell_all((BYE, 0, self.ticks, 0, self._delivered()))
                self._wait(lambda: len(self.gone) == self.count)
            self.closed = True
            self.changed.notify_all()
        self.thread.join()
        if not self.failure:
            self.messages.close()

    # Waiting

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.timeout
        while not ready():
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                late = [r for r in range(self.count) if self.delivered[r] == min(self.delivered)]
                raise RuntimeError(
                    f"process {self.rank} waited {self.settings.timeout:g} s for rows at clock "
                    f"{self.ticks}; process {late[0]} is the furthest behind"
                )
            self.changed.wait(min(left, 1.0))
        self._check()

    def _check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)

    def _fail(self, why: str) -> None:
        with self.changed:
            if not self.closed and len(self.gone) < self.count:
                self.failure = self.failure or why
            self.changed.notify_all()

    # Sending

    def _send(self, to: int, header: Sequence[int], arrays: Sequence[Numbers] = ()) -> None:
        payload = packed(arrays)
        if to == self.rank:
            self._handle(TableMessage(to, (*header, *(0,) * 8)[:8], payload))
            return
        nbytes = payload.nbytes + 64
        self.sent_bytes += nbytes
        self.budget.spend(nbytes)
        self.messages.send(to, header, payload)

    def _tell_all(self, header: Sequence[int]) -> None:
        for server in range(self.count):
            self._send(server, header)

    def _ask(self, client: _Client, rows: Ints) -> None:
        new = rows[~client.asked[rows]]
        if not len(new):
            return
        new = np.unique(new)
        client.asked[new] = True
        for server in range(self.count):
            mine = new[new % self.count == server]
            if len(mine):
                header = (ASK, client.spec.number, self.ticks, 0, 0, len(mine))
                self._send(server, header, (mine.astype(np.int32),))

    def _tell_delivered(self) -> None:
        """Tells all servers this process's clock, and before which they have got everything."""
        self.told_delivered = self._delivered()
        self._tell_all((TICK, 0, self.ticks, 0, self.told_delivered))

    def _delivered(self) -> int:
        return min((c.log.delivered(self.ticks) for c in self.clients.values()), default=self.ticks)

    def _send_updates(self, rows: dict[int, Ints]) -> None:
        """Sends the changes of some rows to those who have them. Only the last message to a server
        says up to which clock it has got everything."""
        batches = []
        for number, mine in rows.items():
            client = self.clients[number]
            for server in range(self.count):
                part = mine[mine % self.count == server]
                if len(part):
                    tag = int(client.log.oldest[part].min())
                    batches.append((client, server, part, tag, client.log.take(part)))
        delivered = self._delivered()
        last = {server: at for at, (_, server, *_) in enumerate(batches)}
        for at, (client, server, part, tag, deltas) in enumerate(batches):
            client.sent[server] += 1
            if client.spec.alpha is None:
                client.base[part, X] += deltas
            client.under_way[server].append((client.sent[server], part, deltas))
            read = () if client.read is None else (client.read[part],)
            header = (
                UPDATE, client.spec.number, tag, client.sent[server],
                delivered if last[server] == at else 0, len(part),
            )  # fmt: skip
            self._send(server, header, (part.astype(np.int32), deltas, *read))

    def _push(self, client: int, rows: dict[int, Ints]) -> None:
        """Sends rows of this server's shards to a client, and how fresh it is then."""
        if client in self.gone:
            return
        taken = []
        for number, local in rows.items():
            shard = self.shards[number]
            if len(local):
                taken.append((shard, shard.numbers(local), shard.take(client, local)))
        clock = min(
            (s.sent_before(client, self.complete) for s in self.shards.values()),
            default=self.complete,
        )
        if not taken and clock <= self.told_clock[client]:
            return
        self.told_clock[client] = max(self.told_clock[client], clock)
        last = len(taken) - 1
        for at, (shard, numbers, values) in enumerate(taken):
            known = self.told_clock[client] if at == last else 0
            header = (
                PUSH, shard.spec.number, known, shard.applied[client], 0, len(numbers),
            )  # fmt: skip
            self._send(client, header, (numbers.astype(np.int32), values))
        if not taken:
            self._send(client, (PUSH, -1, self.told_clock[client], 0, 0, 0))

    def _push_due(self) -> None:
        """Sends every client what it must have by now; managed rows are left to the thread, and
        only their clock is told if none is due."""
        for client in range(self.count):
            if not self.settings.managed or self.synchronised[client] >= 0:
                if self.complete > self.told_clock[client]:
                    self._push(client, {k: s.unsent(client) for k, s in self.shards.items()})
            elif not any(len(rows) for rows in self._due_rows(client).values()):
                self._push(client, {})
            if self.told_clock[client] >= self.synchronised[client]:
                self.synchronised[client] = -1

    def _due_before(self, client: int) -> int:
        return min(self.settings.due(self.client_clock[client]), self.complete)

    def _due_rows(self, client: int) -> dict[int, Ints]:
        return {k: s.unsent(client, self._due_before(client)) for k, s in self.shards.items()}

    def _send_managed(self) -> None:
        """The background thread: sends rows as fast as the budget allows."""
        while True:
            with self.changed:
                if self.closed or self.failure or not self.settings.managed:
                    return
                if not self.budget.wait() and not self._send_some():
                    self.changed.wait(1.0)
                wait = max(self.budget.wait(), IDLE_SECONDS)
            time.sleep(wait)

    def _send_some(self) -> bool:
        """Changes or rows of at most `push_bytes`, by turns: of those that are due if there are
        any. Returns whether there was something to send."""
        for due in (True, False):
            for _ in range(2 * self.count):
                self.turn += 1
                before = self.sent_bytes
                if self.turn % 2:
                    self._send_updates(self._chosen_updates(due))
                    if self._delivered() > self.told_delivered:
                        self._tell_delivered()
                else:
                    client = (self.turn // 2) % self.count
                    self._push(client, self._chosen_rows(client, due))
                if self.sent_bytes > before:
                    self.early_bytes += 0 if due else self.sent_bytes - before
                    return True
        return False

    def _chosen_updates(self, due: bool) -> dict[int, Ints]:
        before = self.settings.client_due(self.ticks) if due else None
        return {
            k: c.log.first(self._row_limit(c.spec), self.draw, before)
            for k, c in self.clients.items()
        }

    def _chosen_rows(self, client: int, due: bool) -> dict[int, Ints]:
        before = self._due_before(client) if due else None
        return {
            k: s.first(client, self._row_limit(s.spec), self.draw, before)
            for k, s in self.shards.items()
        }

    def _row_limit(self, spec: TableSpec) -> int:
        """How many rows of a table are sent at a time: of each table the same share."""
        whole = sum(c.spec.rows * c.spec.row_bytes() for c in self.clients.values())
        return max(1, spec.rows * self.settings.push_bytes // whole)

    # Receiving

    def _handle(self, message: TableMessage) -> None:
        with self.changed:
            kind, sender = message[KIND], message.sender
            if kind == UPDATE:
                self._updated(message)
            elif kind == ASK:
                self._asked(message)
            elif kind == PUSH:
                self._pushed(message)
            if kind in (TICK, SYNC, BYE):
                self.client_clock[sender] = message[CLOCK]
            if kind == SYNC:
                self.synchronised[sender] = message[CLOCK]
            if kind == BYE:
                self.gone.add(sender)
            if kind in (UPDATE, TICK, SYNC, BYE):
                self._advance(sender, message[DELIVERED], kind != UPDATE)
            self.changed.notify_all()

    def _shard(self, number: int) -> RowShard:
        """A shard; another process may have made its table sooner than this one."""
        while number not in self.shards:
            self.changed.wait(1.0)
            self._check()
        return self.shards[number]

    def _updated(self, message: TableMessage) -> None:
        shard = self._shard(message[TABLE])
        spec, count = shard.spec, message[ROWS]
        shape = ((count, spec.columns), spec.dtype)
        wanted = [((count,), np.int32), shape, *([shape] if spec.alpha is not None else [])]
        rows, deltas, *read = message.unpack(*wanted)
        shard.update(
            message.sender, rows.astype(np.int64), deltas, read[0] if read else None, message[CLOCK]
        )

    def _asked(self, message: TableMessage) -> None:
        shard = self._shard(message[TABLE])
        (rows,) = message.unpack(((message[ROWS],), np.int32))
        shard.ask(message.sender, rows.astype(np.int64))
        local = shard.local(rows.astype(np.int64))
        self._push(message.sender, {shard.spec.number: local})

    def _advance(self, client: int, delivered: int, ticked: bool) -> None:
        """A client has sent everything before a clock: see whether all have."""
        self.delivered[client] = max(self.delivered[client], delivered)
        reached = min(self.delivered)
        for clock in range(self.complete, reached):
            for shard in self.shards.values():
                shard.end_clock(clock)
        grown = reached > self.complete
        self.complete = max(self.complete, reached)
        if grown or ticked:
            self._push_due()

    def _pushed(self, message: TableMessage) -> None:
        server, count = message.sender, message[ROWS]
        self.shard_clock[server] = max(self.shard_clock[server], message[CLOCK])
        if not count:
            return
        client = self.clients[message[TABLE]]
        spec = client.spec
        shape = (count, spec.planes, spec.columns)
        rows, values = message.unpack(((count,), np.int32), (shape, spec.dtype))
        client.base[rows] = values
        client.has[rows] = True
        batches = client.under_way[server]
        while batches and batches[0][0] <= message[SEQUENCE]:
            batches.popleft()
        if spec.alpha is None and batches:
            fresh = np.zeros(spec.rows, np.bool_)
            fresh[rows] = True
            for _, numbers, deltas in batches:  # the server had not seen these
                again = fresh[numbers]
                client.base[numbers[again], X] += deltas[again]


def _initial(initial: Values, rows: Ints, spec: TableSpec) -> Numbers:
    """The first values of some rows."""
    shape = (len(rows), spec.columns)
    if callable(initial):
        found = np.asarray(initial(rows), spec.dtype)
    else:
        given = np.asarray(initial, spec.dtype)
        whole = given.ndim == 2 and len(given) == spec.rows
        found = given[rows] if whole else given
    try:
        return np.broadcast_to(found, shape).astype(spec.dtype)
    except ValueError:
        raise ValueError(
            f"the table {spec.name} is {spec.rows} x {spec.columns}, and what it is to begin with "
            f"has the shape {found.shape}"
        ) from None
