"""priority_network: several steps that overlap -> the items that are scheduled by priority.

A part of simulate/. In: RepeatedSteps, a Cluster and a CostModel. Out: a PriorityNetwork, and where
the tasks are in it.

A lane does what is not late in its order, as network.py says. Late tasks have no place in it: they
are ready when what they read is there and nobody else of their step reads what they write over, and
have to be done before the first task of the next step that is due after them. A lane that is free
takes a late task that others wait for first (a message comes of it), then the next in its order,
and what else is late only while that is not ready. So do ranks (execute/late_work.py).

A message waits for its links by priority, in slices. Where messages burn the devices and were
measured there, each end occupies its device besides: to pack and send, or to receive; the wire
turns to a message when it is packed, and its receiver has come to where it is posted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, distinct, offsets, plain
from apportion.lower import TaskGraph
from apportion.machine import Cluster, CostModel, times_messages
from apportion.simulate.durations import leads, nanoseconds, on_wire
from apportion.simulate.network import releases
from apportion.simulate.priority_schedule import PriorityNetwork
from apportion.simulate.repeat_steps import RepeatedSteps
from apportion.simulate.routes import Hops, hops, no_hops

LED, ORDERED, IDLE = range(3)  # what a lane takes first
CLASS = 1 << 40
FREE_CREDIT = 4 << 20  # bytes that a kernel takes of its own accord
EXPRESS = 1 << 15  # bytes of a message that waits for no slice of another (execute/wire.py)


class MessageParts(NamedTuple):
    """What the ends of messages occupy their devices with: items after those of all tasks."""

    item: Ints
    task: Ints
    device: Ints
    duration: Ints
    leads: Bools  # the message waits for it; else for what is before it in its lane
    meets: Bools  # it begins together with those at the other ends


def priority_network(
    several: RepeatedSteps, one: TaskGraph, cluster: Cluster, cost: CostModel
) -> tuple[PriorityNetwork, MessageParts]:
    """The items: all tasks of all steps, a message as what occupies its links, and MessageParts."""
    tasks, n = several.tasks, len(several.tasks)
    duration = nanoseconds(tasks, cluster, cost)
    wires = hops(tasks, cluster)
    none, nothing = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    parts = MessageParts(none, none, none, none, nothing, nothing)
    if times_messages(cluster, cost):
        beside = on_wire(tasks, cluster)
        wires = hops(tasks, cluster, beside) if beside.any() else no_hops(n)
        parts = _message_parts(tasks, duration, leads(tasks, beside, cluster, cost), beside)
    late = several.source >= one.late_start
    lanes = _lanes(tasks, cluster, parts)
    where = np.append(np.arange(n), parts.task)
    order = _LaneOrder(lanes, where, late[where])
    waits = [_dependencies(tasks), order.chains(), _late(several, one, order)]
    waits += _posted(tasks, parts, order) if len(parts.item) else [_sent(tasks, order)]
    edges = np.concatenate(waits)
    count = len(where)
    key = distinct(edges[:, 0] * count + edges[:, 1])
    before, after = key // count, key % count
    released = releases(tasks, cluster, cost, duration)
    rank = _ranks(several, one, late, where)
    size, credit = _grains(one, wires, tasks)
    return PriorityNetwork(
        lanes=len(tasks.task_kinds.lanes) * tasks.devices, links=max(len(cluster.links), 1),
        lane=lanes, rank=rank,
        duration=np.maximum(np.append(np.where(tasks.is_work, duration, 0), parts.duration), 1),
        release=np.append(released, np.zeros(len(parts.item), np.int64)),
        latency=np.append(wires.latency, np.zeros(len(parts.item), np.int64)),
        pending=np.bincount(after, minlength=count),
        next_start=offsets(np.bincount(before, minlength=count)), next=plain(after),
        hop_start=np.append(wires.start, np.full(len(parts.item), wires.start[-1])),
        hop_link=wires.link, hop_occupancy=wires.occupancy, hop_slice=size, hop_credit=credit,
        express=np.append(tasks.is_message & (tasks.nbytes <= EXPRESS), parts.item < 0),
    ), parts  # fmt: skip


def _message_parts(tasks: TaskGraph, duration: Ints, lead: Ints, beside: Bools) -> MessageParts:
    """Of a message on a wire: at those who send one for packing, which the wire waits for, and one
    for the rest; at those who only receive one. Of others one at every end, at the same time."""
    ends = tasks.ends
    task, device, sends = ends.task, ends.device, (ends.sent > 0) & beside[ends.task]
    whole = duration[task]
    packing = np.where(sends, np.clip(lead[task], 1, None), whole)
    rest = np.flatnonzero(sends & (whole > packing))
    rows = np.concatenate([np.arange(len(task)), rest])
    second = np.arange(len(rows)) >= len(task)
    length = np.where(second, (whole - packing)[rows], packing[rows])
    order = np.lexsort((second, rows))
    rows, second, length = rows[order], second[order], length[order]
    return MessageParts(
        len(tasks) + np.arange(len(rows)), task[rows], device[rows], np.maximum(length, 1),
        (sends[rows] | ~beside[task[rows]]) & ~second, ~beside[task[rows]],
    )  # fmt: skip


def _lanes(tasks: TaskGraph, cluster: Cluster, parts: MessageParts) -> Ints:
    lane = tasks.task_kinds.lane.copy()
    if cluster.communication_on_device:
        lane[tasks.task_kinds.is_host_copy | tasks.task_kinds.is_host_work] = 0
    own = np.where(tasks.is_work, lane[tasks.kind] * tasks.devices + tasks.device, -1)
    found: Ints = np.append(own, parts.device)
    return found


def _dependencies(tasks: TaskGraph) -> Ints:
    owner = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    return np.stack([tasks.dep, owner], axis=1)


class _LaneOrder:
    """The order of lanes: items that are not late, by the task that they are of."""

    def __init__(self, lanes: Ints, where: Ints, late: Bools) -> None:
        self.lanes, self.late = np.append(lanes, -1), late
        item = np.flatnonzero((lanes >= 0) & ~late)
        order = np.lexsort((item, where[item], lanes[item]))
        self.item, self.width = np.append(item[order], -1), int(where.max(initial=0)) + 2
        self.key = lanes[self.item[:-1]] * self.width + where[self.item[:-1]]

    def chains(self) -> Ints:
        """Pairs of items that follow each other in a lane."""
        first, second = self.item[:-2], self.item[1:-1]
        return _pairs(first, second, self.lanes[first] == self.lanes[second])

    def before(self, lane: Ints, task: Ints) -> Ints:
        """The last item of a lane that is of an earlier task; -1 if there is none."""
        found = self.item[np.searchsorted(self.key, lane * self.width + task) - 1]
        return np.where(self.lanes[found] == lane, found, -1)

    def since(self, lane: Ints, task: Ints) -> Ints:
        """The first item of a lane that is of that task or a later one; -1 if there is none."""
        found = self.item[np.searchsorted(self.key, lane * self.width + task)]
        return np.where(self.lanes[found] == lane, found, -1)


def _sent(tasks: TaskGraph, order: _LaneOrder) -> Ints:
    """Messages that occupy no device, after what their senders do before they post them."""
    ends = tasks.ends
    mine = (ends.sent > 0) & ~order.late[ends.task]
    return _pairs(order.before(ends.device, ends.task), ends.task, mine)


def _posted(tasks: TaskGraph, parts: MessageParts, order: _LaneOrder) -> list[Ints]:
    """Messages after they are packed, which is after all that they send is made; and after whoever
    receives them has come to where they are posted. Ends that have no wire between them begin
    together."""
    every = parts.item >= 0
    reached = order.before(parts.device, parts.task)
    stands = ~order.late[parts.item]
    owner = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    start = offsets(np.bincount(owner, minlength=len(tasks)))
    rows = np.repeat(np.arange(len(parts.item)), np.diff(start)[parts.task])
    at = np.arange(len(rows)) - np.repeat(
        offsets(np.diff(start)[parts.task])[:-1], np.diff(start)[parts.task]
    )
    made = tasks.dep[start[parts.task[rows]] + at]
    found = [
        _pairs(parts.item, parts.task, parts.leads),
        _pairs(made, parts.item[rows], parts.leads[rows]),
        _pairs(reached, parts.task, stands & ~parts.leads),
    ]
    several = offsets(np.bincount(parts.task, minlength=len(tasks)))
    together = np.flatnonzero(parts.meets & stands)
    for other in range(int(np.diff(several).max(initial=0))):
        row = several[parts.task[together]] + other
        there = row < several[parts.task[together] + 1]
        at = together[there]
        found.append(_pairs(reached[row[there]], parts.item[at], every[at]))
    return found


def _pairs(before: Ints, after: Ints, which: Bools) -> Ints:
    found: Ints = np.stack([before, after], axis=1)[which & (before >= 0)]
    return found


def _late(several: RepeatedSteps, one: TaskGraph, order: _LaneOrder) -> Ints:
    """What late tasks wait for beside what they read, and what waits for them."""
    pairs, m = _conflicts(one), one.late_start
    steps = several.at.shape[0]
    edges = [several.at[k][pairs] for k in range(steps)]
    mine = m + np.flatnonzero(one.is_work[m:])
    due = np.minimum(one.due[mine - m], len(one) - 1)
    for k in range(steps - 1):
        task, until = several.at[k][mine], several.at[k + 1][due]
        first = order.since(order.lanes[task], until)
        edges.append(np.stack([task, first], axis=1)[first >= 0])
    return np.concatenate(edges)


def _conflicts(one: TaskGraph) -> Ints:
    """Pairs of tasks on a device, the second of them late, that do not change places: who reads a
    slot before the last one does, which may write over it."""
    reader = np.repeat(np.arange(len(one)), np.diff(one.in_start))
    real = (one.in_slot >= 0) & one.is_work[reader]
    reader, slot = reader[real], one.in_slot[real]
    last = np.full(len(one.slot_device), -1)
    np.maximum.at(last, slot, reader)
    after = last[slot]
    found = (after >= one.late_start) & (reader < after)
    return np.unique(np.stack([reader[found], after[found]], axis=1), axis=0)


def _ranks(several: RepeatedSteps, one: TaskGraph, late: Bools, where: Ints) -> Ints:
    """What a lane takes first, and of messages which is sent first."""
    tasks = several.tasks
    leads_on = np.zeros(len(one), np.bool_)
    for task in range(len(one) - 1, one.late_start - 1, -1):
        if leads_on[task] or one.is_message[task]:
            leads_on[one.dep[one.dep_start[task] : one.dep_start[task + 1]]] = True
            leads_on[task] = True
    group = np.where(late, np.where(leads_on[several.source], LED, IDLE), ORDERED)[where]
    rank = group * CLASS + where
    first = tasks.priority if len(tasks.priority) else np.arange(len(tasks))
    rank[: len(tasks)] = np.where(tasks.is_message, first, rank[: len(tasks)])
    return plain(rank)


def _grains(one: TaskGraph, wires: Hops, tasks: TaskGraph) -> tuple[Ints, Ints]:
    """For every hop how long a slice and the credit occupy the link."""
    task = np.repeat(np.arange(len(tasks)), np.diff(wires.start))
    nbytes = np.maximum(tasks.nbytes[task], 1)
    pace = wires.occupancy / nbytes
    cut = (one.slice_bytes > 0) & (nbytes > one.slice_bytes)
    size = np.where(cut, np.maximum(np.rint(pace * one.slice_bytes), 1), 0)
    credit = np.rint(pace * (one.credit_bytes or FREE_CREDIT))
    return size.astype(np.int64), credit.astype(np.int64)
