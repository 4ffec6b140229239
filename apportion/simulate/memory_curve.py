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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Bools,
    Ints,
    compiled,
    plain,
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
    own = np.where(tasks.slot_on_host, 0, tasks.slot_nbytes)  # the host's memory is not theirs
    slots = _Slots(*map(plain, (
        tasks.slot_device, own, tasks.slot_category, tasks.slot_base,
        tasks.slot_first, tasks.slot_last,
    )))  # fmt: skip
    last = _exchange_ends(tasks.is_message, plain(tasks.position))
    buffers = message_buffers(tasks) if buffers is None else buffers
    work = _WorkMemory(plain(tasks.device), plain(tasks.workspace), last)
    edges, order = _ordered(slots, buffers, work, tasks.devices)
    time, nbytes = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    category, thing = np.empty(len(order), np.int8), np.empty(len(order), np.int32)
    peaks, times = np.full(tasks.devices, -1), _TaskTimes(plain(start_ns), plain(end_ns), granule)
    _walk(
        slots,
        buffers,
        work,
        times,
        order,
        edges.copy(),
        _CurveColumns(time, nbytes, category, thing, peaks),
    )
    found = []
    for low, high, peak in zip(edges.tolist(), edges[1:].tolist(), peaks.tolist(), strict=False):
        mine, at = slice(low, high), peak - low if peak >= 0 else -1
        found.append(Curve(time[mine], nbytes[mine], category[mine], thing[mine], at))
    return tuple(found)


# Columns


class _Slots(NamedTuple):  # numba takes no dataclass
    """The columns of slots that matter here."""

    device: Ints
    nbytes: Ints
    category: Ints
    base: Ints
    first: Ints
    last: Ints


class _TaskTimes(NamedTuple):
    start: Ints  # n
    end: Ints  # n
    granule: Ints  # per device


class _CurveColumns(NamedTuple):
    """The columns of all curves, one after the other, and the row of each device's peak."""

    time: Ints
    nbytes: Ints
    category: npt.NDArray[np.int8]
    thing: Small
    peaks: Ints


class _WorkMemory(NamedTuple):
    device: Ints  # n
    workspace: Ints  # n, or empty
    last: Ints  # n: the last task of its exchange, itself if it is no message


@compiled
def _exchange_ends(is_message: Bools, position: Ints) -> Ints:
    """For every task the last task of its exchange; itself if it is no message."""
    last, high = np.arange(len(position)), -1  # the message after, of the position at hand
    for t in range(len(position) - 1, -1, -1):
        if is_message[t]:
            high = high if high >= 0 and position[t] == position[high] else t
            last[t] = high
    return last


# Every change has a moment, 3 * (its task + 1) + one of these. Allocations are DURING, frees the
# others, so that sorting by moment is all. A change is known by its number: births of slots, their
# deaths, buffers, workspaces, their ends, each in a stretch of its own.

_DURING, _AFTER, _FREES = range(3)


@compiled
def _moments(
    slots: _Slots, buffers: MessageBuffers, work: _WorkMemory, moment: Small, devices: int
) -> Ints:
    """Writes the moment of each change, -1 for none; returns how many each device has."""
    count, n, s, r = (
        np.zeros(devices, np.int64),
        len(work.device),
        len(slots.device),
        len(buffers.device),
    )
    moment[:] = -1
    for slot in range(s):
        if slots.base[slot] >= 0 or slots.nbytes[slot] == 0:
            continue
        moment[slot] = 3 * (slots.first[slot] + 1) + _DURING
        count[slots.device[slot]] += 1
        last = slots.last[slot]
        if last < n:
            last = work.last[last] if last >= 0 else last
            moment[s + slot] = 3 * (last + 1) + _FREES
            count[slots.device[slot]] += 1
    for buffer in range(r):
        begin, at = buffers.begin[buffer], 2 * s + buffer
        moment[at] = 3 * (max(begin, 0) + 1) + _DURING  # of the first task, if it stays
        count[buffers.device[buffer]] += 1
        if begin >= 0:
            moment[at + r] = max(3 * min(buffers.end[buffer], n) + _FREES, moment[at] + 1)
            count[buffers.device[buffer]] += 1
    for task in range(len(work.workspace)):
        if work.workspace[task]:
            at = 2 * s + 2 * r + task
            moment[at], moment[at + n] = 3 * (task + 1) + _DURING, 3 * (task + 1) + _AFTER
            count[work.device[task]] += 2
    return count


def _ordered(
    slots: _Slots, buffers: MessageBuffers, work: _WorkMemory, devices: int
) -> tuple[Ints, Small]:
    """Where each device's changes begin among the rows, and the numbers of all by moment."""
    most = 2 * len(slots.device) + 2 * len(buffers.device) + 2 * len(work.workspace)
    moment = np.empty(most, np.int32)
    count = _moments(slots, buffers, work, moment, devices)
    edges = np.zeros(devices + 1, np.int64)
    np.cumsum(count, out=edges[1:])
    order: Small = _by_moment(moment, 3 * (len(work.device) + 1), int(edges[-1]))
    return edges, order


@compiled
def _by_moment(moment: Small, moments: int, total: int) -> Small:
    """Numbers of the changes that there are, sorted by moment, equals by number."""
    at = np.zeros(moments + 1, np.int32)
    for k in range(len(moment)):
        if moment[k] >= 0:
            at[moment[k] + 1] += 1
    for k in range(moments):
        at[k + 1] += at[k]
    order = np.empty(total, np.int32)
    for k in range(len(moment)):
        if moment[k] >= 0:
            order[at[moment[k]]] = k
            at[moment[k]] += 1
    return order


@compiled
def _walk(
    slots: _Slots,
    buffers: MessageBuffers,
    work: _WorkMemory,
    times: _TaskTimes,
    order: Small,
    at: Ints,
    rows: _CurveColumns,
) -> None:
    """Writes the rows of all curves; `at` is where each device's next row goes."""
    s, r, n = len(slots.device), len(buffers.device), len(work.device)
    held, now, most = np.zeros_like(at), np.zeros_like(at), np.zeros_like(at)
    for number in order:
        if number < 2 * s:
            slot = number if number < s else number - s
            device, size = slots.device[slot], slots.nbytes[slot]
            what, kind = slot, slots.category[slot]
            task = slots.first[slot] if number < s else slots.last[slot]
            if number >= s and task >= 0:
                task = work.last[task]
            gives = number >= s
        elif number < 2 * s + 2 * r:
            gives = number >= 2 * s + r
            buffer = number - 2 * s - (r if gives else 0)
            device, size, kind = buffers.device[buffer], buffers.nbytes[buffer], COMMUNICATION
            what, task = s + buffers.task[buffer], buffers.begin[buffer]
            task = buffers.end[buffer] - 1 if gives else task
        else:
            task = number - 2 * s - 2 * r
            gives = task >= n
            task -= n if gives else 0
            device, size, kind, what = work.device[task], work.workspace[task], WORKSPACE, s + task
        moment = 0
        if task >= 0:
            moment = times.end[task] if gives else times.start[task]
        granule = times.granule[device]
        if granule > 1:
            size = handed_out(size, granule)
        held[device] += -size if gives else size
        now[device] = max(now[device], moment)
        row = at[device]
        at[device] += 1
        rows.time[row], rows.nbytes[row] = now[device], held[device]
        rows.category[row], rows.thing[row] = kind, what
        if held[device] > most[device]:
            most[device], rows.peaks[device] = held[device], row


@compiled
def handed_out(size: int, granule: int) -> int:
    """Bytes that an allocator gives for a request.

    PyTorch's for CUDA does not split a remainder of up to 1 MiB off a block above 1 MiB, and takes
    memory of the device in segments of 2 MiB from 10 MiB on. What remains with a block depends on
    what was freed before; this is the remainder of a fresh segment, else an allowance above the
    average that was measured (0.16 MiB).
    """
    size = (size + granule - 1) // granule * granule
    if granule != CUDA_GRANULE or size <= MIB:
        return size
    rest = -size % (2 * MIB)
    if rest == 0 or (size >= 10 * MIB and rest <= MIB):
        return size + rest
    return size + MIB // 4


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
