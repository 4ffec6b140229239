"""TaskGraph: what every device does, in columns, in one global order.

A task's index is its place in the order.

Four kinds of task; what a kind means to others is in the table of task_kinds.py:

    COMPUTE   one part of one Op on one device
    TRANSFER  one message from `device` to `peer`: all boxes that go from the one to the other at
              one position, packed. All transfers at one position form one exchange.
    ASSEMBLE  one region of a Value put together on one device, from local slots and received boxes
    COLLECTIVE  an exchange in which every member of a group sends as much to every other one: one
              row instead of a TRANSFER per pair

A **slot** is a tensor on a device: a piece of a Value that an Op part left there, or an assembled
region. Slots are made by a task (or are there when the step begins) and die after the last task
that uses them: freeing is a column, not a task. A **copy** is one box that goes from a slot into
another; copies of one TRANSFER travel together.

Ops and edges own consecutive rows: `op_start` buckets tasks by Op, `edge_start` buckets copies by
(Op, input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, offsets
from apportion.graph import Arg
from apportion.lower.task_kinds import TASK_KINDS, TaskKind, TaskKinds

# What the bytes of a slot are. The first seven are the roles of Values, ordered as in graph.ROLES.
CATEGORIES = (
    "parameter", "optimizer state", "buffer", "input", "activation", "gradient", "output",
    "communication", "workspace",
)  # fmt: skip
COMMUNICATION, WORKSPACE = CATEGORIES.index("communication"), CATEGORIES.index("workspace")

Box = tuple[tuple[int, int], ...]
"""A half-open range per atom of a Value."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a TaskGraph."""

    index: int
    kind: int
    op: int
    part: int
    device: int
    peer: int
    position: int
    nbytes: int
    flops: float
    task_kind: TaskKind  # the row of its kind

    def __str__(self) -> str:
        pairwise = self.task_kind.is_pairwise
        where = f"{self.device}->{self.peer}" if pairwise else str(self.device)
        what = f"{self.task_kind.name} op {self.op} part {self.part}"
        return f"{self.index}: {what} on {where}, {self.nbytes} bytes"


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Boxes that go from a slot into another, in columns. Lengths: copies c, edges e."""

    source: Ints  # c: slot
    target: Ints  # c: slot
    source_box: Ints  # c: index into boxes, relative to the source slot's region
    target_box: Ints  # c: index into boxes, relative to the target slot's region
    term: Ints  # c: which partial value; the target adds terms up in rising order
    message: Ints  # c: the message that carries it, or -1 if it stays on the device
    task: Ints  # c: the ASSEMBLE it is for
    nbytes: Ints  # c
    edge_op: Ints  # e
    edge_value: Ints  # e
    edge_start: Ints  # e + 1: copies of edge i
    boxes: tuple[Box, ...]  # those of copies and of slots


class AssembledBox(NamedTuple):
    """One box of an assembly. Sizes are per atom."""

    sizes: tuple[int, ...]
    adds: bool  # a further term, added to what is there
    source: int  # which of the slots that the assembly reads, or -1: it is in a message
    source_sizes: tuple[int, ...]  # of the source's region; () for a message


@dataclass(frozen=True, slots=True, eq=False)
class Assemblies:
    """How every region is put together, apart from where; what is alike is there once."""

    regions: tuple[Box, ...]  # what slot_region indexes
    which: Ints  # n: index into distinct of an ASSEMBLE, else -1
    distinct: tuple[tuple[AssembledBox, ...], ...]


@dataclass(frozen=True, slots=True)
class JoinedCall:
    """What a task calls in place of its Op's kernel; `Ref(k)` is the k-th slot that it reads."""

    kind: str
    args: tuple[Arg, ...]


class Ends(NamedTuple):  # numba takes no dataclass
    """Buffers of messages: a row for each device that a message involves, in the order of tasks; of
    a TRANSFER the sender's comes first."""

    task: Ints
    device: Ints
    sent: Ints  # bytes packed to be sent
    received: Ints  # bytes that arrive
    taker: Ints  # the last task that reads what arrives


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Columns. Lengths: tasks n, slots s, Ops o."""

    devices: int

    # tasks
    kind: Ints  # n: index into task_kinds
    op: Ints  # n: the Op computed, or that a transfer or assembly serves; o for the end of the step
    part: Ints  # n: which part of the Op (replicas counted on), -1 unless COMPUTE
    device: Ints  # n: where it runs; the sender of a TRANSFER
    peer: Ints  # n: the receiver of a TRANSFER, else -1
    position: Ints  # n: non-decreasing; transfers of equal position form one exchange
    nbytes: Ints  # n: bytes sent; bytes read and written by COMPUTE (views: 0) and ASSEMBLE
    flops: Floats  # n: floating-point operations of COMPUTE, else 0
    itemsize: Ints  # n: bytes per element of the arithmetic
    dep_start: Ints  # n + 1: offsets into dep
    dep: Ints  # tasks that must end before this one starts; every entry is smaller than its index

    # slots
    slot_device: Ints  # s
    slot_value: Ints  # s
    slot_region: Ints  # s: index into boxes, in the coordinates of the Value's atoms
    slot_nbytes: Ints  # s: bytes of the region
    slot_category: Ints  # s: index into CATEGORIES
    slot_base: Ints  # s: the slot whose storage this one shares, or -1
    slot_first: Ints  # s: the task that makes it, -1 if it is there when the step begins
    slot_last: Ints  # s: the last task that uses it, aliases counted; n if it survives the step

    # slots read and made by tasks, in argument order; -1 for an input that is a block of zeros
    in_start: Ints  # n + 1
    in_slot: Ints
    out_start: Ints  # n + 1
    out_slot: Ints

    # buckets
    op_start: Ints  # o + 2: tasks of Op i (its fetches and parts) are op_start[i]:op_start[i+1];
    #                 the last bucket brings state back to where it began. Not of late tasks

    copies: Copies | Callable[[], Copies]
    """The copies, or what makes them: there are many, and a simulation needs none of them."""

    taken: Ints
    """n: boxes that a message carries, or that an assembly puts together."""

    ends: Ends
    """Who sends and receives how much in which message."""

    workspace: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """n, or empty where it is not known: bytes that a task needs while it runs, beside its
    slots."""

    carry: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Rows (slot at the end of the step, slot at the beginning of the next) of the state that
    survives."""

    group: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """n: index into groups for a COLLECTIVE, else -1; empty where there is none. Its `device` is
    the first member, its `nbytes` what all pairs send together."""

    pattern: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """n: index into PATTERNS for a COLLECTIVE, else -1; empty where there is none."""

    groups: tuple[tuple[int, ...], ...] = ()
    """Members of collectives, rising."""

    kinds: tuple[str, ...] = ()
    """o: what each Op computes, as in Op.kind; empty where it is not known."""

    work: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """n: index into works of a COMPUTE or ASSEMBLE, else -1; empty where it is not known."""

    works: tuple[str, ...] = ()
    """The distinct kernel calls, with shapes, strides and dtypes: what a cost is measured for."""

    call: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """n: index into calls of a COMPUTE that calls something else than its Op's kernel, else -1;
    empty where there is none."""

    calls: tuple[JoinedCall, ...] = ()
    """The calls that do the work of several tasks, and the one that does nothing."""

    make_assemblies: Callable[[], Assemblies] | None = None
    """What makes `assemblies`, where lowering made the tasks; it needs no copies."""

    became: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Where coalesce.py made these tasks: for every task of the plain lowering the one that it is
    here, or is a part of; empty where they are the plain ones. A Storage counts plain tasks."""

    late_start: int = -1
    """The first of the tasks that the next step may do (late_tasks.py), which come after all
    others; -1 where steps do not overlap."""

    due: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """For each task from `late_start` on the task of the next step that it has to be done before;
    rising."""

    priority: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """n: of messages that wait for a wire the one with the least is sent first, and those of an
    earlier step before later ones; empty where they travel as they are posted."""

    slice_bytes: int = 0
    """A message is sent in pieces of so many bytes, between which others may overtake it; 0:
    whole."""

    credit_bytes: int = 0
    """What a wire has taken is not overtaken: so many bytes; 0: as many as it likes."""

    sends_directly: bool = False
    """Whether the members of a COLLECTIVE send to each other directly, as ranks do; else it is as
    quick as by the algorithm that is cheapest for it."""

    task_kinds: TaskKinds = TASK_KINDS
    """What the kinds of its tasks mean."""

    before_storage: TaskGraph | None = None
    """The tasks as lowering made them, where columns have been corrected by what kernels allocate:
    in those a slot may live longer than what runs needs it."""

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def _copies(self) -> Copies:
        return self.copies if isinstance(self.copies, Copies) else self.copies()

    def make_copies(self) -> Copies:
        """The copies, made now if they have not been."""
        return self._copies

    @cached_property
    def assemblies(self) -> Assemblies:
        """How every assembled region is put together."""
        assert self.make_assemblies is not None, "lowering did not make these tasks"
        return self.make_assemblies()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What slot_region and the boxes of copies index."""
        return self._copies.boxes

    @property
    def copy_source(self) -> Ints:
        return self._copies.source

    @property
    def copy_target(self) -> Ints:
        return self._copies.target

    @property
    def copy_source_box(self) -> Ints:
        return self._copies.source_box

    @property
    def copy_target_box(self) -> Ints:
        return self._copies.target_box

    @property
    def copy_term(self) -> Ints:
        return self._copies.term

    @property
    def copy_message(self) -> Ints:
        return self._copies.message

    @property
    def copy_task(self) -> Ints:
        return self._copies.task

    @property
    def copy_nbytes(self) -> Ints:
        return self._copies.nbytes

    @property
    def edge_op(self) -> Ints:
        return self._copies.edge_op

    @property
    def edge_value(self) -> Ints:
        return self._copies.edge_value

    @property
    def edge_start(self) -> Ints:
        return self._copies.edge_start

    def task(self, index: int) -> Task:
        """One row."""
        return Task(
            index,
            int(self.kind[index]),
            int(self.op[index]),
            int(self.part[index]),
            int(self.device[index]),
            int(self.peer[index]),
            int(self.position[index]),
            int(self.nbytes[index]),
            float(self.flops[index]),
            self.kind_of(index),
        )

    def kind_of(self, index: int) -> TaskKind:
        """What the kind of one task means."""
        return self.task_kinds[int(self.kind[index])]

    def __iter__(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def is_work(self) -> Bools:
        """n: whether it occupies a lane of `device`."""
        return self.task_kinds.is_work[self.kind]

    @property
    def is_message(self) -> Bools:
        """n: whether it sends bytes from device to device."""
        return self.task_kinds.is_message[self.kind]

    @property
    def is_pairwise(self) -> Bools:
        """n: whether it is a message from `device` to `peer`."""
        return self.task_kinds.is_pairwise[self.kind]

    @property
    def is_collective(self) -> Bools:
        """n: whether it is a message among the members of `group`."""
        return self.task_kinds.is_collective[self.kind]

    @cached_property
    def slot_on_host(self) -> Bools:
        """s: whether it lies in the memory of its device's host: what goes there or is made there,
        and of what a step begins with what is read there."""
        made, kinds = self.slot_first >= 0, self.task_kinds
        found = np.zeros(len(self.slot_first), bool)
        if len(kinds) == len(TASK_KINDS):
            return found
        found[made] = kinds.to_host[self.kind[self.slot_first[made]]]
        reader = np.repeat(np.arange(len(self)), np.diff(self.in_start))
        read = self.in_slot[kinds.reads_host[self.kind[reader]] & (self.in_slot >= 0)]
        begun = read[self.slot_first[read] < 0]
        found[begun] = True
        return found

    @property
    def keeps_state_on_host(self) -> bool:
        """Whether the step begins with something that lies on a host."""
        return bool((self.slot_on_host & (self.slot_first < 0)).any())

    @property
    def bytes_moved(self) -> int:
        """Bytes that leave a device in one step."""
        return int(self.nbytes[self.is_message].sum())


@dataclass(frozen=True, slots=True)
class Storage:
    """What kernels really allocate, where it differs from the slots' regions.

    Tasks are those of the plain lowering, whatever has been coalesced since.

    slots      (slot, base, bytes): storage that another slot shares, or of another size
    workspace  (task, bytes)
    works      the distinct kernel calls, as text
    work       which of them each task makes, -1 for none; empty where it is not known
    kept       (slot, task): slots that are needed until a later task than the last that uses them
    late       (slot, task): slots that come to be at a later task than the one that makes them,
               where a compiler puts off what nobody needs yet
    """

    slots: tuple[tuple[int, int, int], ...] = ()
    workspace: tuple[tuple[int, int], ...] = ()
    works: tuple[str, ...] = ()
    work: tuple[int, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    late: tuple[tuple[int, int], ...] = ()


def with_storage(tasks: TaskGraph, storage: Storage) -> TaskGraph:
    """The tasks with the columns corrected; slots live as long as what shares their storage. What
    runs are the tasks as they were (`before_storage`)."""
    base, nbytes = tasks.slot_base.copy(), tasks.slot_nbytes.copy()
    first, last = tasks.slot_first.copy(), tasks.slot_last.copy()
    workspace = np.zeros(len(tasks), np.int64)
    if storage.slots:
        slots, new_base, size = np.array(storage.slots, np.int64).T
        base[slots], nbytes[slots] = new_base, size
        shares = new_base >= 0
        np.maximum.at(last, new_base[shares], last[slots[shares]])
    became = tasks.became
    if storage.kept:
        slots, until = np.array(storage.kept, np.int64).T
        until = became[until] if len(became) else until
        np.maximum.at(last, slots, until)
        shares = base[slots] >= 0
        np.maximum.at(last, base[slots[shares]], until[shares])
    if storage.late:
        slots, since = np.array(storage.late, np.int64).T
        first[slots] = became[since] if len(became) else since
        np.maximum.at(last, slots, first[slots])
    if storage.workspace:
        at, size = np.array(storage.workspace, np.int64).T
        workspace[became[at] if len(became) else at] = size
    work = np.array(storage.work, np.int64)
    if len(became) and len(work):
        work = np.full(len(tasks), -1)
        work[became] = storage.work  # tasks that became one are messages: all have -1
    return replace(
        tasks,
        slot_base=base,
        slot_nbytes=nbytes,
        slot_first=first,
        slot_last=last,
        workspace=workspace,
        works=storage.works,
        work=work,
        before_storage=tasks if tasks.before_storage is None else tasks.before_storage,
    )


def verify(tasks: TaskGraph) -> None:
    """Raises AssertionError unless the columns agree with each other (a defect of lowering, not of
    the user)."""
    n, s = len(tasks), len(tasks.slot_device)
    assert all(
        len(c) == n
        for c in (tasks.op, tasks.part, tasks.device, tasks.peer, tasks.position, tasks.nbytes)
    )
    assert len(tasks.dep_start) == len(tasks.in_start) == len(tasks.out_start) == n + 1
    owners = np.repeat(np.arange(n), np.diff(tasks.dep_start))
    assert (tasks.dep < owners).all(), "a task depends on a later one"
    assert (np.diff(tasks.position) >= 0).all(), "positions fall"
    assert ((tasks.device >= 0) & (tasks.device < tasks.devices)).all()
    assert ((tasks.kind >= 0) & (tasks.kind < len(tasks.task_kinds))).all(), "an unknown kind"
    pairwise, moving = tasks.is_pairwise, tasks.is_message
    assert (tasks.peer[pairwise] != tasks.device[pairwise]).all(), "a device sends to itself"
    readers = np.repeat(np.arange(n), np.diff(tasks.in_start))
    real = tasks.in_slot >= 0
    assert (tasks.slot_first[tasks.in_slot[real]] < readers[real]).all(), (
        "a slot is read before it is made"
    )
    assert (tasks.slot_last[tasks.in_slot[real]] >= readers[real]).all(), (
        "a slot is read after it is freed"
    )
    assert len(tasks.slot_last) == s
    sent = tasks.copy_message >= 0
    carried = np.bincount(tasks.copy_message[sent], tasks.copy_nbytes[sent], minlength=n)
    assert (carried[moving] == tasks.nbytes[moving]).all(), (
        "a message's bytes are not those of its copies"
    )
    told = counted(tasks)
    assert (told.taken == tasks.taken).all(), "the boxes that a task takes are not its copies"
    assert all(np.array_equal(a, b) for a, b in zip(told.ends, tasks.ends, strict=True)), (
        "the ends of messages are not those of their copies"
    )


# The ends of messages, from copies


NO_ENDS = Ends(*(np.zeros(0, np.int64),) * 5)


def counted(tasks: TaskGraph) -> TaskGraph:
    """The tasks with `taken` and `ends` as the copies have it."""
    sent = tasks.copy_message[tasks.copy_message >= 0]
    taken = np.bincount(tasks.copy_task, minlength=len(tasks))
    taken = taken + np.bincount(sent, minlength=len(tasks))
    return replace(tasks, taken=taken, ends=message_ends(tasks))


def message_ends(tasks: TaskGraph) -> Ends:
    """The ends of all messages as the copies have it."""
    at = tasks.slot_device
    copied = (
        tasks.copy_message, tasks.copy_task, at[tasks.copy_source], at[tasks.copy_target],
        tasks.copy_nbytes,
    )  # fmt: skip
    member_start = np.cumsum([0, *map(len, tasks.groups)])
    members = np.array([device for group in tasks.groups for device in group], np.int64)
    columns = (tasks.device, tasks.peer, tasks.nbytes, tasks.group, member_start, members)
    return ends_of(tasks.is_pairwise, tasks.is_collective, columns, copied)


def ends_of(
    pairwise: Bools, collective: Bools, columns: tuple[Ints, ...], copied: tuple[Ints, ...]
) -> Ends:
    """The ends of messages: of tasks that are pairwise and of those that are collective. `columns`
    are device, peer, bytes and group of all tasks, and of all groups where their members begin,
    and these; `copied` are message, task, sender, receiver and bytes of all copies."""
    device, peer, nbytes, group, member_start, members = columns
    pairs, together = np.flatnonzero(pairwise), np.flatnonzero(collective)
    sizes = np.zeros(len(device), np.int64)
    sizes[pairs] = 2
    sizes[together] = np.diff(member_start)[group[together]] if len(together) else 0
    start = offsets(sizes)
    task = np.repeat(np.arange(len(device)), sizes)
    at, sent, received = np.zeros((3, len(task)), np.int64)
    first = start[pairs]
    at[first], at[first + 1] = device[pairs], peer[pairs]
    sent[first] = received[first + 1] = nbytes[pairs]
    if len(together):
        several = sizes[together]
        place = np.arange(several.sum()) - np.repeat(offsets(several)[:-1], several)
        begin = member_start[group[together]]
        at[place + np.repeat(start[together], several)] = members[place + np.repeat(begin, several)]
    message, taken, source, target, copied_bytes = copied
    real = np.flatnonzero(message >= 0)
    carrying, row = message[real], start[message[real]] + 1
    shared = np.flatnonzero(collective[carrying])
    if len(shared):
        most, of = int(members.max()) + 1, carrying[shared]
        keys = np.repeat(np.arange(len(member_start) - 1), np.diff(member_start)) * most + members
        shift = start[of] - member_start[group[of]]
        copies = real[shared]
        np.add.at(sent, shift + np.searchsorted(keys, group[of] * most + source[copies]),
                  copied_bytes[copies])  # fmt: skip
        row[shared] = shift + np.searchsorted(keys, group[of] * most + target[copies])
        np.add.at(received, row[shared], copied_bytes[copies])
    taker = task.copy()
    np.maximum.at(taker, row, taken[real])
    return Ends(task, at, sent, received, taker)
