"""TaskGraph: what every device does, in columns, in one global order.

A task's index is its place in the order.

Four kinds of task:

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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

COMPUTE, TRANSFER, ASSEMBLE, COLLECTIVE = 0, 1, 2, 3
KINDS = ("compute", "transfer", "assemble", "collective")

# What the blocks of a COLLECTIVE are: different for every pair, the same for all receivers of one
# sender, or terms that each receiver adds up.
ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = 0, 1, 2
PATTERNS = ("all-to-all", "all-gather", "reduce-scatter")

# What the bytes of a slot are. The first seven are the roles of Values, ordered as in graph.ROLES.
CATEGORIES = (
    "parameter", "optimizer state", "buffer", "input", "activation", "gradient", "output",
    "communication", "workspace",
)  # fmt: skip
COMMUNICATION, WORKSPACE = CATEGORIES.index("communication"), CATEGORIES.index("workspace")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

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

    def __str__(self) -> str:
        where = f"{self.device}->{self.peer}" if self.kind == TRANSFER else str(self.device)
        what = f"{KINDS[self.kind]} op {self.op} part {self.part}"
        return f"{self.index}: {what} on {where}, {self.nbytes} bytes"


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Columns. Lengths: tasks n, slots s, copies c, Ops o, edges e."""

    devices: int

    # tasks
    kind: Ints  # n
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

    # copies
    copy_source: Ints  # c: slot
    copy_target: Ints  # c: slot
    copy_source_box: Ints  # c: index into boxes, relative to the source slot's region
    copy_target_box: Ints  # c: index into boxes, relative to the target slot's region
    copy_term: Ints  # c: which partial value; the target adds terms up in rising order
    copy_message: Ints  # c: the TRANSFER that carries it, or -1 if it stays on the device
    copy_task: Ints  # c: the ASSEMBLE it is for
    copy_nbytes: Ints  # c

    # buckets
    op_start: Ints  # o + 2: tasks of Op i (its fetches and parts) are op_start[i]:op_start[i+1];
    #                 the last bucket brings state back to where it began
    edge_op: Ints  # e
    edge_value: Ints  # e
    edge_start: Ints  # e + 1: copies of edge i

    boxes: tuple[Box, ...]

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

    def __len__(self) -> int:
        return len(self.kind)

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
        )

    def __iter__(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def bytes_moved(self) -> int:
        """Bytes that leave a device in one step."""
        return int(self.nbytes[(self.kind == TRANSFER) | (self.kind == COLLECTIVE)].sum())


@dataclass(frozen=True, slots=True)
class Storage:
    """What kernels really allocate, where it differs from the slots' regions.

    slots      (slot, base, bytes): storage that another slot shares, or of another size
    workspace  (task, bytes)
    works      the distinct kernel calls, as text
    work       which of them each task makes, -1 for none; empty where it is not known
    """

    slots: tuple[tuple[int, int, int], ...] = ()
    workspace: tuple[tuple[int, int], ...] = ()
    works: tuple[str, ...] = ()
    work: tuple[int, ...] = ()


def with_storage(tasks: TaskGraph, storage: Storage) -> TaskGraph:
    """The tasks with the columns corrected; slots live as long as what shares their storage."""
    base, nbytes = tasks.slot_base.copy(), tasks.slot_nbytes.copy()
    last, workspace = tasks.slot_last.copy(), np.zeros(len(tasks), np.int64)
    for slot, new_base, size in storage.slots:
        base[slot], nbytes[slot] = new_base, size
    for slot, new_base, _ in storage.slots:
        if new_base >= 0:
            last[new_base] = max(last[new_base], last[slot])
    for task, size in storage.workspace:
        workspace[task] = size
    return replace(
        tasks,
        slot_base=base,
        slot_nbytes=nbytes,
        slot_last=last,
        workspace=workspace,
        works=storage.works,
        work=np.array(storage.work, np.int64),
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
    moving = tasks.kind == TRANSFER
    assert (tasks.peer[moving] != tasks.device[moving]).all(), "a device sends to itself"
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
