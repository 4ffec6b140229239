"""The kinds of task, in one table: what each kind means to everything that reads a TaskGraph.

A TaskGraph's column `kind` holds indices into the table that it carries (`TaskGraph.task_kinds`,
TASK_KINDS unless told otherwise). Verification, simulation, memory, breakdowns, reports and traces
ask the table whether a task is a message and which lane it occupies; none of them lists kinds.

A new kind is a row here and the functions that do what it does:

    its price    an entry of PRICES in simulate/durations.py
    its kernel   an entry of WORK_ON_DEVICE in execute/rank.py; one of DRY_RUNS in
                 execute/dry_run.py if its kernel decides what storage its slots have

and the lowering that makes tasks of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from apportion.columns import Bools, Ints

DEVICE, PAIR, GROUP = "device", "pair", "group"
OUT, BACK, THERE = "out", "back", "there"
COMPUTES, ASSEMBLES, EXCHANGES = "computes", "assembles", "exchanges"


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What one kind of task means.

    A task that involves one device is work: it occupies the lane of that device by this name, and
    holds its slots and its workspace. A task that involves a pair (`device` sends to `peer`) or a
    group (every member sends to every other one) is a message: it occupies links, and the lanes
    named here are only where it is drawn; its ends hold buffers of what they send and receive.
    """

    name: str
    involves: str  # DEVICE, PAIR or GROUP
    lane: str  # of a message: at those who send
    activity: str  # what a device is said to do meanwhile: COMPUTES, ASSEMBLES or EXCHANGES
    receiver_lane: str = ""  # of a message, at those who only receive; "": there are none
    label: str = ""  # follows the name of the Op wherever the task is named
    colour: str = ""  # in the report; "": that of the Op
    host: str = ""
    """Of work that copies between the device and its host OUT or BACK, of work that the host does
    THERE; else ""."""

    def __post_init__(self) -> None:
        assert self.involves in (DEVICE, PAIR, GROUP), f"{self.name}: involves {self.involves!r}"
        assert self.activity in (COMPUTES, ASSEMBLES, EXCHANGES), f"{self.name}: {self.activity!r}"
        assert self.is_work or self.activity == EXCHANGES, f"{self.name}: a message exchanges"
        assert self.is_pairwise == bool(self.receiver_lane), f"{self.name}: of a pair one receives"

    @property
    def is_work(self) -> bool:
        return self.involves == DEVICE

    @property
    def is_message(self) -> bool:
        return not self.is_work

    @property
    def is_host_copy(self) -> bool:
        return self.host in (OUT, BACK)

    @property
    def is_pairwise(self) -> bool:
        return self.involves == PAIR

    @property
    def is_collective(self) -> bool:
        return self.involves == GROUP


@dataclass(frozen=True)
class TaskKinds:
    """The table, and its columns: each has an entry per kind, to be indexed by `TaskGraph.kind`.

    The first row's lane is the compute lane, number 0: it is what keeps a device busy, and where
    messages queue up if communication burns the device. Other lanes run beside it.
    """

    rows: tuple[TaskKind, ...]

    def __post_init__(self) -> None:
        (name, count), *_ = Counter(row.name for row in self.rows).most_common(1)
        assert count == 1, f"two kinds of task are called {name!r}"
        for row in self.rows:
            beside = row.lane != self.rows[0].lane
            assert row.is_message or not beside or row.activity == EXCHANGES, (
                f"{row.name}: a device computes and assembles in its compute lane only"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TaskKind]:
        return iter(self.rows)

    def __getitem__(self, kind: int) -> TaskKind:
        return self.rows[kind]

    def with_kind(self, row: TaskKind) -> TaskKinds:
        """The table with one more row; the new kind's integer is the length of this table."""
        return TaskKinds((*self.rows, row))

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes of a device."""
        named = [lane for row in self.rows for lane in (row.lane, row.receiver_lane) if lane]
        return tuple(dict.fromkeys(named))

    @cached_property
    def lane(self) -> Ints:
        """Index into lanes: what work occupies, where those who send a message draw it."""
        return np.array([self.lanes.index(row.lane) for row in self.rows], np.int64)

    @cached_property
    def receiver_lane(self) -> Ints:
        """Index into lanes: where those draw a message who only receive it."""
        named = [row.receiver_lane or row.lane for row in self.rows]
        return np.array([self.lanes.index(lane) for lane in named], np.int64)

    @cached_property
    def is_work(self) -> Bools:
        return self._which(lambda row: row.is_work)

    @cached_property
    def is_message(self) -> Bools:
        return self._which(lambda row: row.is_message)

    @cached_property
    def is_pairwise(self) -> Bools:
        """Whether it is a message from `device` to `peer`."""
        return self._which(lambda row: row.is_pairwise)

    @cached_property
    def is_collective(self) -> Bools:
        """Whether it is a message among the members of `group`."""
        return self._which(lambda row: row.is_collective)

    @cached_property
    def is_host_copy(self) -> Bools:
        """Whether it copies between a device and its host. Where communication burns the device, so
        do these copies: then they stand in the compute lane."""
        return self._which(lambda row: row.is_host_copy)

    @cached_property
    def is_host_work(self) -> Bools:
        """Whether the host does it, on what lies in its own memory. It does what is ready in the
        order of need and not in that of tasks; where communication burns the device, so does this,
        in the compute lane."""
        return self._which(lambda row: row.host == THERE)

    @cached_property
    def to_host(self) -> Bools:
        """Whether what it makes lies in the host's memory."""
        return self._which(lambda row: row.host in (OUT, THERE))

    @cached_property
    def reads_host(self) -> Bools:
        """Whether what it reads lies in the host's memory."""
        return self._which(lambda row: row.host in (BACK, THERE))

    @cached_property
    def computes(self) -> Bools:
        return self._which(lambda row: row.activity == COMPUTES)

    @cached_property
    def assembles(self) -> Bools:
        return self._which(lambda row: row.activity == ASSEMBLES)

    def _which(self, true_of: Callable[[TaskKind], Any]) -> Bools:
        return np.array([true_of(row) for row in self.rows], np.bool_)


COMPUTE, TRANSFER, ASSEMBLE, COLLECTIVE = 0, 1, 2, 3

TASK_KINDS = TaskKinds(
    (
        TaskKind("compute", DEVICE, "compute", COMPUTES),
        TaskKind("transfer", PAIR, "send", EXCHANGES, receiver_lane="receive", colour="#a267b8"),
        TaskKind("assemble", DEVICE, "compute", ASSEMBLES, label="assemble", colour="#98a2b0"),
        TaskKind("collective", GROUP, "send", EXCHANGES, colour="#a267b8"),
    )
)

TO_HOST, FROM_HOST, HOST_WORK = 4, 5, 6

HOST_TASK_KINDS = (
    TASK_KINDS.with_kind(
        TaskKind(
            "to host", DEVICE, "to host", EXCHANGES, label="to host", colour="#c98a3c", host=OUT
        )
    )
    .with_kind(
        TaskKind(
            "from host",
            DEVICE,
            "from host",
            EXCHANGES,
            label="from host",
            colour="#3c9bc9",
            host=BACK,
        )
    )
    .with_kind(
        TaskKind(
            "host work", DEVICE, "host", EXCHANGES, label="on host", colour="#6f8f4e", host=THERE
        )
    )
)
"""The table of a step that uses the host: the device's two copy engines and what the host itself
computes run beside its compute lane."""

CALLING = frozenset((COMPUTE, TO_HOST, FROM_HOST, HOST_WORK))
"""Kinds whose tasks call the kernel of a part of an Op."""
