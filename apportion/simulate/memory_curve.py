"""What devices hold over a step: bytes over time, by category, and what causes the peaks.

Memory of a device is the sum of

    slots      from the task that makes them (or the beginning) to the last that uses them (or for
               ever); a slot that shares another's storage costs nothing
    messages   buffers for both of their ends, for the whole step: messages that are not under way
               at the same time take turns in one (lower/message_buffers.py)
    workspace  while its task runs

Each is rounded up to what the device's allocator hands out.

What a device holds follows from the order of its tasks, which is the order in which it runs them,
and not from the times: a task's results and workspace are there before anything it frees is gone.
Times only say where on the curve that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Bools,
    Ints,
    offsets,
)
from apportion.graph import Graph, Value
from apportion.lower import (
    CATEGORIES,
    COMMUNICATION,
    WORKSPACE,
    MessageBuffers,
    TaskGraph,
    message_buffers,
)
from apportion.machine import PATTERNS, Cluster

CUDA_GRANULE = 512
"""PyTorch's allocator for CUDA rounds every request up to a multiple of this many bytes."""
MIB = 1 << 20

Small = npt.NDArray[np.int32]

TOP_CAUSES = 12  # named at a peak


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Bytes held on one device after each change, in the order in which they happen.

    category  what is allocated or freed, an index into CATEGORIES
    thing     which: a slot, or the number of slots plus the task whose workspace it is, or that is
              the largest message in a buffer
    peak      the first row with the most bytes, -1 if there are no rows
    """

    time_ns: Ints
    nbytes: Ints
    category: npt.NDArray[np.int8]
    thing: Small
    peak: int

    @property
    def peak_bytes(self) -> int:
        return int(self.nbytes[self.peak]) if self.peak >= 0 else 0

    @property
    def peak_ns(self) -> int:
        return int(self.time_ns[self.peak]) if self.peak >= 0 else 0

    @property
    def change(self) -> Ints:
        """Bytes allocated (positive) or freed (negative) by each row."""
        return np.diff(self.nbytes, prepend=0)

    @property
    def peak_categories(self) -> tuple[int, ...]:
        """Bytes per category at the peak."""
        until = self.peak + 1
        change, category = self.change[:until], self.category[:until]
        held = np.zeros(len(CATEGORIES), np.int64)
        np.add.at(held, category, change)
        return tuple(held.tolist())

    def bands(self) -> Ints:
        """Bytes after each change, a column per category; the rows' sums are `nbytes`."""
        bands = np.zeros((len(self.nbytes), len(CATEGORIES)), np.int64)
        bands[np.arange(len(bands)), self.category] = self.change
        return np.cumsum(bands, axis=0, out=bands)

    def alive(self) -> dict[int, int]:
        """Bytes of each thing that is there at the peak."""
        until = self.peak + 1
        things, which = np.unique(self.thing[:until], return_inverse=True)
        held = np.zeros(len(things), np.int64)
        np.add.at(held, which, self.change[:until])
        return {int(k): int(n) for k, n in zip(things, held, strict=True) if n}


def granules(cluster: Cluster) -> Ints:
    """For every device the bytes in whose multiples its allocator gives out memory."""
    return np.array([1 if device.kind == "cpu" else CUDA_GRANULE for device in cluster.devices])


def curves(
    tasks: TaskGraph,
    start_ns: Ints,
    end_ns: Ints,
    granule: Ints | None = None,
    buffers: MessageBuffers | None = None,
) -> tuple[Curve, ...]:
    """The memory of every device, over tasks that ran at these times; `buffers` if they are not
    those of `message_buffers`."""
    if granule is None:
        granule = np.ones(tasks.devices, np.int64)
    buffers = message_buffers(tasks) if buffers is None else buffers
    changes = _changes(tasks, buffers, granule)
    changes = changes.taken(_by_moment(changes))
    time = np.append(start_ns, end_ns)[changes.task + len(tasks) * changes.gives]
    time = np.where(changes.task < 0, 0, np.maximum(time, 0))
    found = []
    signed = np.where(changes.gives, -changes.nbytes, changes.nbytes)
    for mine in _rows_of(changes.device, tasks.devices):
        held = np.cumsum(signed[mine])
        peak = int(held.argmax()) if len(held) and held.max() > 0 else -1
        now = np.maximum.accumulate(time[mine]) if len(mine) else time[mine]
        found.append(Curve(now, held, changes.category[mine], changes.thing[mine], peak))
    return tuple(found)


# Every change has a moment, 3 * (its task + 1) + one of these. Allocations are DURING, frees the
# others, so that sorting by moment is all.

_DURING, _AFTER, _FREES = range(3)


class _Changes(NamedTuple):
    """What is allocated and freed, in columns; as in Curve, and the task that it happens at, -1 for
    the beginning."""

    moment: Ints
    device: Ints
    nbytes: Ints
    gives: Bools  # back
    task: Ints
    category: npt.NDArray[np.int8]
    thing: Small

    def taken(self, rows: Ints) -> _Changes:
        columns: list[Any] = [column[rows] for column in self]
        return _Changes(*columns)


def _changes(tasks: TaskGraph, buffers: MessageBuffers, granule: Ints) -> _Changes:
    """All of them: births of slots, their deaths, buffers, their ends, workspaces, their ends."""
    n, slots = len(tasks), len(tasks.slot_device)
    held = (tasks.slot_base < 0) & (tasks.slot_nbytes > 0) & ~tasks.slot_on_host
    born = np.flatnonzero(held)
    dies = np.flatnonzero(held & (tasks.slot_last < n))
    first, last = tasks.slot_first[born], tasks.slot_last[dies]
    last = np.where(last >= 0, exchange_ends(tasks)[last], last)
    kept = np.arange(len(buffers.device))
    back = np.flatnonzero(buffers.begin >= 0)
    taken_at, given_at = buffers.begin, buffers.end[back]
    works = np.flatnonzero(tasks.workspace)
    begins = 3 * (np.maximum(taken_at, 0) + 1) + _DURING  # of the first task, if it stays
    moments = (
        3 * (first + 1) + _DURING,
        3 * (last + 1) + _FREES,
        begins,
        np.maximum(3 * np.minimum(given_at, n) + _FREES, begins[back] + 1),
        3 * (works + 1) + _DURING,
        3 * (works + 1) + _AFTER,
    )
    which = np.repeat(np.arange(6), [len(each) for each in moments])
    device = (tasks.slot_device[born], tasks.slot_device[dies], buffers.device,
              buffers.device[back], tasks.device[works], tasks.device[works])  # fmt: skip
    nbytes = (tasks.slot_nbytes[born], tasks.slot_nbytes[dies], buffers.nbytes,
              buffers.nbytes[back], tasks.workspace[works], tasks.workspace[works])  # fmt: skip
    category = (tasks.slot_category[born], tasks.slot_category[dies],
                np.full(len(kept), COMMUNICATION), np.full(len(back), COMMUNICATION),
                np.full(len(works), WORKSPACE), np.full(len(works), WORKSPACE))  # fmt: skip
    thing = (born, dies, slots + buffers.task, slots + buffers.task[back], slots + works,
             slots + works)  # fmt: skip
    where = np.concatenate(device)
    return _Changes(
        moment=np.concatenate(moments),
        device=where,
        nbytes=handed_out(np.concatenate(nbytes), granule[where]),
        gives=which % 2 == 1,
        task=np.concatenate((first, last, taken_at, given_at - 1, works, works)),
        category=np.concatenate(category).astype(np.int8),
        thing=np.concatenate(thing).astype(np.int32),
    )


def exchange_ends(tasks: TaskGraph) -> Ints:
    """For every task the last task of its exchange; itself if it is no message."""
    last, messages = np.arange(len(tasks)), np.flatnonzero(tasks.is_message)
    position = tasks.position[messages]
    ends = np.flatnonzero(np.append(position[1:] != position[:-1], True)[: len(messages)])
    last[messages] = np.repeat(messages[ends], np.diff(ends, prepend=-1))
    return last


def _by_moment(changes: _Changes) -> Ints:
    """The rows of changes, sorted by moment, equals as they stand."""
    count = max(len(changes.moment), 1)
    return np.sort(changes.moment * count + np.arange(len(changes.moment))) % count


def _rows_of(device: Ints, devices: int) -> list[Ints]:
    """The rows of every device, in their order."""
    order = np.argsort(device.astype(np.uint16), kind="stable")  # by radix
    edges = offsets(np.bincount(device, minlength=devices)).tolist()
    return [order[low:high] for low, high in pairwise(edges)]


def handed_out(size: Ints, granule: Ints) -> Ints:
    """Bytes that allocators give for requests.

    PyTorch's for CUDA does not split a remainder of up to 1 MiB off a block above 1 MiB, and takes
    memory of the device in segments of 2 MiB from 10 MiB on. What remains with a block depends on
    what was freed before; this is the remainder of a fresh segment, else an allowance above the
    average that was measured (0.16 MiB).
    """
    size = (size + granule - 1) // granule * granule
    large = np.flatnonzero((size > MIB) & (granule == CUDA_GRANULE))
    most = size[large]
    rest = -most % (2 * MIB)
    size[large] += np.where((rest == 0) | ((most >= 10 * MIB) & (rest <= MIB)), rest, MIB // 4)
    return size


# Peaks


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that is there at a peak: its name, type, category and bytes, the Op that made it
    (of a message or a workspace, the Op that it serves) and the user's line."""

    name: str
    type: str
    category: str
    nbytes: int
    op: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a device holds: how much, when, at which task (-1: as the step begins) of which
    Op, and why. `causes` are the largest, `others` counts the rest and their bytes."""

    device: int
    nbytes: int
    time_ns: int
    task: int
    op: str
    categories: dict[str, int]
    causes: tuple[Cause, ...]
    others: tuple[int, int]


def peaks(
    curves: Sequence[Curve], tasks: TaskGraph, graph: Graph, top: int = TOP_CAUSES
) -> tuple[Peak, ...]:
    """The peak of every device, with its `top` largest causes."""
    known = _Causes(tasks, graph)
    return tuple(_peak(device, curve, known, top) for device, curve in enumerate(curves))


def peak(device: int, curve: Curve, tasks: TaskGraph, graph: Graph, top: int = TOP_CAUSES) -> Peak:
    """The peak of one device."""
    return _peak(device, curve, _Causes(tasks, graph), top)


def _peak(device: int, curve: Curve, known: _Causes, top: int) -> Peak:
    tasks, graph = known.tasks, known.graph
    slots, held = len(tasks.slot_nbytes), Counter[int]()
    for thing, nbytes in curve.alive().items():
        held[known.number(thing, device)] += nbytes
    found = held.most_common()
    thing = int(curve.thing[curve.peak]) if curve.peak >= 0 else -1
    task = int(tasks.slot_first[thing]) if 0 <= thing < slots else thing - slots
    return Peak(
        device=device,
        nbytes=curve.peak_bytes,
        time_ns=curve.peak_ns,
        task=max(task, -1),
        op=op_name(tasks, graph, task) if task >= 0 else "",
        categories=dict(zip(CATEGORIES, curve.peak_categories, strict=True)),
        causes=tuple(replace(known.causes[n], nbytes=nbytes) for n, nbytes in found[:top]),
        others=(len(found[top:]), sum(nbytes for _, nbytes in found[top:])),
    )


class _Causes:
    """What things are, numbered; devices hold much that is alike."""

    def __init__(self, tasks: TaskGraph, graph: Graph) -> None:
        self.tasks = tasks
        self.graph = graph
        self.causes: list[Cause] = []
        self._numbers: dict[Cause, int] = {}
        self._of_slots: dict[tuple[int, int], int] = {}  # by Value and category

    def number(self, thing: int, device: int) -> int:
        """The number of what a thing is; equal for slots of one Value."""
        if thing >= len(self.tasks.slot_nbytes):
            return self._number(_cause(thing, device, self.tasks, self.graph))
        key = int(self.tasks.slot_value[thing]), int(self.tasks.slot_category[thing])
        known = self._of_slots.get(key)
        if known is None:
            known = self._number(_cause(thing, device, self.tasks, self.graph))
            self._of_slots[key] = known
        return known

    def _number(self, cause: Cause) -> int:
        number = self._numbers.setdefault(cause, len(self._numbers))
        if number == len(self.causes):
            self.causes.append(cause)
        return number


def _cause(thing: int, device: int, tasks: TaskGraph, graph: Graph) -> Cause:
    """What a thing is, with no bytes; equal for slots of one Value."""
    slots = len(tasks.slot_nbytes)
    if thing < slots:
        index = int(tasks.slot_value[thing])
        value, made = graph.values[index], graph.producer[index]
        category = CATEGORIES[tasks.slot_category[thing]]
        if made is None:
            return Cause(value.name, _type(value), category, 0)
        maker = graph.ops[made[0]]
        return Cause(value.name, _type(value), category, 0, maker.name, maker.line)
    task = thing - slots
    op, line = op_name(tasks, graph, task), ""
    if tasks.op[task] < len(graph.ops):
        line = graph.ops[tasks.op[task]].line
    kind = tasks.kind_of(task)
    if kind.is_pairwise:
        sends = tasks.device[task] == device
        where = f"to device {tasks.peer[task]}" if sends else f"from device {tasks.device[task]}"
        return Cause(f"message {where}", "", CATEGORIES[COMMUNICATION], 0, op, line)
    if kind.is_collective:
        members = tasks.groups[tasks.group[task]]
        name = PATTERNS[tasks.pattern[task]] if len(tasks.pattern) else "exchange"
        name = f"{name} among {len(members)} devices"
        return Cause(name, "", CATEGORIES[COMMUNICATION], 0, op, line)
    return Cause("workspace", "", CATEGORIES[WORKSPACE], 0, op, line)


def op_name(tasks: TaskGraph, graph: Graph, task: int) -> str:
    """The name of the Op that a task computes or serves."""
    op = int(tasks.op[task])
    return graph.ops[op].name if op < len(graph.ops) else "end of step"


def _type(value: Value) -> str:
    shape = "?" if value.shape is None else ",".join(map(str, value.shape))
    return f"{value.dtype or '?'}[{shape}]"
