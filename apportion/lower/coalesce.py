"""coalesce: messages of a TaskGraph that can travel together do, and are posted early.

In: the TaskGraph of lower.py, where every Op has its own exchanges. Out: a TaskGraph of the same
work, in which post_order.py says when exchanges are posted and which are one: one TRANSFER for each
pair of devices, one COLLECTIVE for each group and pattern. The bytes, the boxes and the order in
which terms are added stay as they are, so that results are equal bit for bit.

runnable.py applies it to all that is predicted of a plan, measured and run. Searches that change
one Choice at a time (simulate/delta) go on with the plain lowering, where a change stays local.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.columns import Bools, Ints, distinct, offsets, plain
from apportion.lower.late_tasks import done_together, dues, first_reads, late_tasks, needs
from apportion.lower.post_order import (
    DEPTH,
    LEAD,
    BucketLimits,
    Placing,
    Rows,
    State,
    TaskDependencies,
    Units,
    find_needs,
    find_units,
    place,
)
from apportion.lower.task_graph import Assemblies, Copies, Ends, TaskGraph
from apportion.lower.task_kinds import ASSEMBLE
from apportion.split import MADE, RANKED, WITHIN, Communication

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """Bytes that a device sends in one bucket: a share of all that it sends to the same devices in
    a step, so that most of it is under way while the rest is computed; at least so many that a
    bucket costs more than to begin it does, at most so many that buffers stay small."""

    least: int = 1 * MIB
    most: int = 25 * MIB
    share: float = 1 / 8


BUCKETS = BucketSizes()
SMALL_BUCKETS = BucketSizes(MIB // 4, 4 * MIB, 1 / 32)
"""Where steps overlap: what is needed first waits for no more than it must."""


def coalesce(
    tasks: TaskGraph,
    sizes: BucketSizes = BUCKETS,
    refetched: Sequence[int] = (),
    how: Communication = WITHIN,
    updates: Bools | None = None,
) -> TaskGraph:
    """The same work with exchanges that are posted early, and together where they can be; those of
    Values that the backward fetches again are posted as late as they can be. Where steps overlap,
    the tasks that the next step may do come after all others (late_tasks.py); `updates` are the Ops
    that it may do."""
    message = tasks.is_message
    if not message.any():
        return tasks
    given, code, members, first = _dependencies_and_units(tasks)
    late = crossing = np.zeros(len(tasks), np.bool_)
    if how.overlaps or how.held:
        assert updates is not None, "which Ops update is not known"
        found, must = late_tasks(tasks, given, updates)
        crossing = message & ~found & ~must
        late = found if how.overlaps and crossing.any() else late
    need, unit_need, feeds = find_needs(given, len(code))
    units = _units(tasks, given, late, (code, members, first), unit_need, refetched)
    if how.held:
        units = units._replace(pulled=units.pulled | crossing[units.first])
    rows = _rows(given, units, need, feeds)
    sizes = SMALL_BUCKETS if late.any() else sizes
    placing = place(given, units, _limits(units, sizes), rows, _state(given, units, rows))
    if late.any():
        placing = _late_last(tasks, given, late, placing)
        placing = _late_by_need(tasks, given, late, placing)
    became, first = _numbered(tasks, given.unit, placing)
    made = _Coalesced(tasks, given, placing, became, first).task_graph()
    late_start = int(np.searchsorted(late[first], True)) if late.any() else -1
    made = replace(made, slice_bytes=how.slice_bytes, credit_bytes=how.credit_bytes)
    if late_start >= 0:
        made = replace(made, late_start=late_start, due=dues(made, late_start))
    return made if how.order == MADE else replace(made, priority=priorities(made, how))


# What is known before anything is placed


def _dependencies_and_units(tasks: TaskGraph) -> tuple[TaskDependencies, Ints, Ints, Ints]:
    """What depends on what; and of every unit a hash of its set of devices, how many these are, and
    its first message."""
    message, n = tasks.is_message, len(tasks)
    end_start = offsets(np.bincount(tasks.ends.task, minlength=n))
    unit, code, members, first = find_units(
        message, plain(tasks.position), end_start, plain(tasks.ends.device), tasks.devices
    )
    given = TaskDependencies(
        plain(tasks.op), message, tasks.kind == ASSEMBLE, *_dependencies(tasks), unit,
        len(tasks.op_start) - 1,
    )  # fmt: skip
    return given, code, members, first


def _units(
    tasks: TaskGraph,
    given: TaskDependencies,
    late: Bools,
    found: tuple[Ints, Ints, Ints],
    need: Ints,
    refetched: Sequence[int],
) -> Units:
    """The units; late ones never travel with others."""
    code, members, first = found
    message = given.message
    sent = np.bincount(given.unit[message], tasks.nbytes[message], len(code)).astype(np.int64)
    _, key = np.unique(2 * code + late[first], return_inverse=True)  # code is a hash
    pulled = _pulled(tasks, given.unit, need, refetched)
    return Units(plain(key.reshape(-1)), sent // members, need, pulled, first)


def _late_last(tasks: TaskGraph, given: TaskDependencies, late: Bools, placing: Placing) -> Placing:
    """The same order, but for late tasks and buckets, which come after all others; they stand at
    the first Op that is late, or beyond, the others at most there."""
    shift = len(given.op) + len(placing.bucket_sequence)
    work = ~given.message
    op = int(tasks.op[late & work & ~given.assembles].min(initial=given.ops - 1))
    sequence = placing.sequence + shift * (late & work)
    at_op = np.where(late & work, np.maximum(placing.at_op, op), placing.at_op)
    unit_late = np.zeros(len(placing.bucket), np.bool_)
    unit_late[given.unit[given.message]] = late[given.message]
    bucket_late = np.zeros(len(placing.bucket), np.bool_)
    bucket_late[placing.bucket[unit_late]] = True
    bucket_op = placing.bucket_op
    bucket_op = np.where(bucket_late, np.maximum(bucket_op, op), np.minimum(bucket_op, op))
    return Placing(
        sequence, at_op, placing.bucket, placing.bucket_sequence + shift * bucket_late, bucket_op
    )


def _late_by_need(
    tasks: TaskGraph, given: TaskDependencies, late: Bools, placing: Placing
) -> Placing:
    """The same order, but for late tasks and buckets, which follow in the order in which the next
    step needs what comes of them."""
    became, first = _numbered(tasks, given.unit, placing)
    made = _Coalesced(tasks, given, placing, became, first).task_graph()
    late_start = int(np.searchsorted(late[first], True))
    need = needs(made, late_start, first_reads(made, late_start))[late_start:]
    need = done_together(made, late_start, need)
    rank = np.empty(len(need), np.int64)
    rank[np.argsort(need, kind="stable")] = np.arange(len(need))
    shift = int(max(placing.sequence.max(), placing.bucket_sequence.max())) + 1
    sequence, of_bucket = placing.sequence.copy(), placing.bucket_sequence.copy()
    moved = np.flatnonzero(late)
    place_of = shift + rank[became[moved] - late_start]
    is_work = ~given.message[moved]
    sequence[moved[is_work]] = place_of[is_work]
    bucket = placing.bucket[given.unit[moved[~is_work]]]
    of_bucket[bucket] = np.iinfo(np.int64).max
    np.minimum.at(of_bucket, bucket, place_of[~is_work])
    return placing._replace(sequence=sequence, bucket_sequence=of_bucket)


def priorities(tasks: TaskGraph, how: Communication) -> Ints:
    """For every message when what it brings is read first, as a number of a task, n further on if
    that is one of the next step; or, where it is ranked, the place of what it brings."""
    n, m = len(tasks), tasks.late_start if tasks.late_start >= 0 else len(tasks)
    first = first_reads(tasks, m)
    if how.order == RANKED:
        count = 1 + max(int(tasks.slot_value.max(initial=0)), *how.ranking, 0)
        place = np.full(count, n - 1)
        place[list(how.ranking)] = np.minimum(np.arange(len(how.ranking)), n - 1)
        first = place[tasks.slot_value]
    return np.where(tasks.is_message, needs(tasks, m, first), 0)


def _dependencies(tasks: TaskGraph) -> tuple[Ints, Ints]:
    """What tasks wait for, the makers of all that they read among it; as offsets and tasks."""
    n, every = len(tasks), np.arange(len(tasks))
    real = tasks.in_slot >= 0
    owner = np.repeat(every, np.diff(tasks.in_start))[real]
    maker = tasks.slot_first[tasks.in_slot[real]]
    made = maker >= 0
    owner = np.concatenate([np.repeat(every, np.diff(tasks.dep_start)), owner[made]])
    key = distinct(owner * n + np.concatenate([tasks.dep, maker[made]]))
    return offsets(np.bincount(key // n, minlength=n)), key % n


def _pulled(tasks: TaskGraph, unit: Ints, need: Ints, refetched: Sequence[int]) -> Bools:
    """Whether all that a unit sends is there when the step begins, or stays until the unit is
    needed for some Op of its own device, or is sent to be fetched again."""
    reader = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
    real = tasks.in_slot >= 0
    reader, slot = reader[real], tasks.in_slot[real]
    computing = ~tasks.is_message[reader] & (tasks.kind[reader] != ASSEMBLE)
    last = np.where(tasks.slot_first < 0, len(tasks.op_start), -1)
    np.maximum.at(last, slot[computing], tasks.op[reader[computing]])
    sends = unit[reader] >= 0
    by, sent = unit[reader[sends]], slot[sends]
    until = last[sent]
    if refetched:
        first = np.full(len(last), len(tasks.op_start))
        np.minimum.at(first, sent, need[by])
        until[np.isin(tasks.slot_value[sent], refetched) & (need[by] > first[sent])] = len(
            tasks.op_start
        )
    found = np.full(len(need), len(tasks.op_start))
    np.minimum.at(found, by, until)
    pulled: Bools = found >= need
    return pulled


def _limits(units: Units, sizes: BucketSizes) -> BucketLimits:
    keys = int(units.key.max(initial=-1)) + 1

    def limit(mine: Bools) -> Ints:
        total = np.bincount(units.key[mine], units.nbytes[mine], keys)
        return plain(np.clip(total * sizes.share, sizes.least, sizes.most))

    return BucketLimits(limit(~units.pulled), limit(units.pulled), sizes.most)


def _by(number: Ints, items: Ints, count: int) -> tuple[Ints, Ints]:
    """Items by a number: offsets, and the items, those of one number in their order."""
    order = np.argsort(number, kind="stable")
    return offsets(np.bincount(number, minlength=count)), plain(items[order])


def _rows(given: TaskDependencies, units: Units, need: Ints, feeds: Bools) -> Rows:
    n, ops, keys = len(given.op), given.ops, int(units.key.max(initial=-1)) + 1
    task = np.repeat(np.arange(n), np.diff(given.dep_start))
    waits = given.message[task] | feeds[task]
    made = given.assembles[task] & given.message[given.dep]
    pairs = distinct(given.unit[given.dep[made]] * n + task[made])
    due = np.sort(np.concatenate([np.flatnonzero(given.assembles), units.first]))
    due_op = np.where(given.message[due], units.need[given.unit[due]], need[due])
    pushed, pulled = np.flatnonzero(~units.pulled), np.flatnonzero(units.pulled)
    pulled = pulled[np.lexsort((units.first[pulled], units.need[pulled]))]
    computes = np.flatnonzero(~given.message & ~given.assembles)
    return Rows(
        *_by(given.dep[waits], task[waits], n), *_by(pairs // n, pairs % n, len(units.key)),
        *_by(due_op, due, ops), *_by(np.maximum(units.need[pushed] - LEAD, 0), pushed, ops),
        *_by(units.key[pulled], pulled, keys), *_by(given.op[computes], computes, ops),
    )  # fmt: skip


def _state(given: TaskDependencies, units: Units, rows: Rows) -> State:
    n, u, keys = len(given.op), len(units.key), int(units.key.max(initial=-1)) + 1
    later, message = rows.next, given.message[rows.next]
    return State(
        np.zeros(6, np.int64), np.zeros(n, bool), np.bincount(later[~message], minlength=n),
        np.bincount(given.unit[later[message]], minlength=u), np.zeros(u, np.int64),
        np.zeros(u, np.int64), np.zeros(n, np.int64), np.full(u, -1), np.full(keys, -1),
        np.full(keys, -1), np.zeros(keys, np.int64), np.full((keys, DEPTH), -1),
        rows.pull_start[:-1].copy(), np.full(u, -1), np.zeros(u, bool),
    )  # fmt: skip


# The new tasks


def _numbered(tasks: TaskGraph, unit: Ints, placing: Placing) -> tuple[Ints, Ints]:
    """For every task the one that it becomes, and for every new one the first that becomes it."""
    message = unit >= 0
    bucket = placing.bucket[unit]
    sequence = np.where(message, placing.bucket_sequence[bucket], placing.sequence)
    together = tasks.is_collective
    group = tasks.group if len(tasks.group) else np.full(len(tasks), -1)
    pattern = tasks.pattern if len(tasks.pattern) else np.full(len(tasks), -1)
    sender = np.where(together, group, tasks.device) * message
    receiver = np.where(together, pattern, tasks.peer) * message
    columns = (receiver, sender, ~together & message, sequence)
    order = np.lexsort(columns)
    sorted_ = np.stack(columns)[:, order]
    new = np.append(True, (sorted_[:, 1:] != sorted_[:, :-1]).any(axis=0))
    became = np.empty(len(tasks), np.int64)
    became[order] = np.cumsum(new) - 1
    return became, order[new]


class _Coalesced:
    """The columns of the new TaskGraph, each from those of the old one."""

    def __init__(
        self, tasks: TaskGraph, given: TaskDependencies, placing: Placing, became: Ints, first: Ints
    ) -> None:
        self.tasks, self.became, self.first, self.n = tasks, became, first, len(first)
        self.given, self.message = given, given.message[first]
        bucket = placing.bucket[given.unit[first]]
        self.op = np.where(self.message, placing.bucket_op[bucket], placing.at_op[first])
        begins = self.message & (np.append(-1, bucket[:-1]) != bucket)
        begins[1:] |= self.message[1:] & ~self.message[:-1]
        self.position = 2 * np.cumsum(begins) + ~self.message

    def task_graph(self) -> TaskGraph:
        tasks, first = self.tasks, self.first
        in_start, in_slot = self._read()
        out_count = np.diff(tasks.out_start)[first]
        index = np.arange(out_count.sum()) + np.repeat(
            tasks.out_start[first] - offsets(out_count)[:-1], out_count
        )
        columns = ("kind", "part", "device", "peer", "flops", "itemsize")
        optional = ("group", "pattern", "workspace", "work", "call")
        given = {c: getattr(tasks, c)[first] for c in columns}
        given |= {c: getattr(tasks, c)[first] for c in optional if len(getattr(tasks, c))}
        dep_start, dep = self._dependencies()
        slot_first, slot_last = self._lives(in_start, in_slot)
        ways = tasks.make_assemblies
        return replace(
            tasks, **given, op=self.op, position=self.position, nbytes=self._sum(tasks.nbytes),
            taken=self._sum(tasks.taken), dep_start=dep_start, dep=dep, slot_first=slot_first,
            slot_last=slot_last, in_start=in_start, in_slot=in_slot, out_start=offsets(out_count),
            out_slot=tasks.out_slot[index],
            op_start=np.searchsorted(self.op, np.arange(len(tasks.op_start))),
            copies=self._copies, ends=self._ends(), became=self.became,
            make_assemblies=None if ways is None else self._assemblies,
        )  # fmt: skip

    def _sum(self, column: Ints) -> Ints:
        """A column of messages added up; of work as it is."""
        found = np.zeros(self.n, np.int64)
        np.add.at(found, self.became, column)
        return found

    def _dependencies(self) -> tuple[Ints, Ints]:
        owner = self.became[np.repeat(np.arange(len(self.became)), np.diff(self.given.dep_start))]
        key = distinct(owner * self.n + self.became[self.given.dep])
        return offsets(np.bincount(key // self.n, minlength=self.n)), key % self.n

    def _read(self) -> tuple[Ints, Ints]:
        """Slots that tasks read: work in the order of its arguments, messages each slot once."""
        tasks, slots = self.tasks, len(self.tasks.slot_device)
        old = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))
        of_message = tasks.is_message[old]
        work, messages = np.flatnonzero(~of_message), np.flatnonzero(of_message)
        key = distinct(self.became[old[messages]] * max(slots, 1) + tasks.in_slot[messages])
        owner = np.concatenate([self.became[old[work]], key // max(slots, 1)])
        slot = np.concatenate([tasks.in_slot[work], key % max(slots, 1)])
        order = np.argsort(owner, kind="stable")
        return offsets(np.bincount(owner, minlength=self.n)), slot[order]

    def _lives(self, in_start: Ints, in_slot: Ints) -> tuple[Ints, Ints]:
        """The first and the last task of every slot."""
        tasks, n = self.tasks, self.n
        first = np.where(tasks.slot_first < 0, -1, self.became[np.maximum(tasks.slot_first, 0)])
        last = first.copy()
        reader = np.repeat(np.arange(n), np.diff(in_start))
        real = in_slot >= 0
        np.maximum.at(last, in_slot[real], reader[real])
        last[tasks.slot_last >= len(tasks)] = n
        gone = tasks.slot_last < -1  # nobody makes them
        last[gone] = tasks.slot_last[gone]
        shared = tasks.slot_base >= 0
        np.maximum.at(last, tasks.slot_base[shared], last[shared])
        return first, last

    def _ends(self) -> Ends:
        """Ends of messages that became one are one: they are of the same devices in the same
        order."""
        ends, old = self.tasks.ends, len(self.tasks)
        start = offsets(np.bincount(ends.task, minlength=old))
        count = np.diff(start)[self.first]
        new_start = offsets(count)
        row = new_start[self.became[ends.task]] + np.arange(len(ends.task)) - start[ends.task]
        total = int(new_start[-1])
        device, sent, received = np.zeros((3, total), np.int64)
        device[row] = ends.device
        np.add.at(sent, row, ends.sent)
        np.add.at(received, row, ends.received)
        task = np.repeat(np.arange(self.n), count)
        return Ends(task, device, sent, received, self._takers(task, device))

    def _takers(self, task: Ints, device: Ints) -> Ints:
        """For every end of a message the last task on its device that waits for the message."""
        tasks, count = self.tasks, self.tasks.devices
        reader = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
        taking = tasks.is_message[tasks.dep]
        reader, message = reader[taking], self.became[tasks.dep[taking]]
        key = task * count + device
        order = np.argsort(key)
        row = order[np.searchsorted(key[order], message * count + tasks.device[reader])]
        taker = task.copy()
        np.maximum.at(taker, row, self.became[reader])
        return taker

    def _copies(self) -> Copies:
        old = self.tasks.make_copies()
        task = self.became[old.task]
        order = np.argsort(task, kind="stable")
        message = np.where(old.message < 0, -1, self.became[np.maximum(old.message, 0)])
        task, target = task[order], old.target[order]
        owner, value = self.op[task], self.tasks.slot_value[target]
        change = (owner[1:] != owner[:-1]) | (value[1:] != value[:-1])
        start = np.flatnonzero(np.append(True, change))[: len(owner)]
        return Copies(
            old.source[order], target, old.source_box[order], old.target_box[order],
            old.term[order], message[order], task, old.nbytes[order],
            owner[start], value[start], np.append(start, len(owner)), old.boxes,
        )  # fmt: skip

    def _assemblies(self) -> Assemblies:
        old = self.tasks.assemblies
        return replace(old, which=old.which[self.first])
