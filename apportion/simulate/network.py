"""network: TaskGraph + Cluster + CostModel -> the Network that is scheduled. Integer nanoseconds.

A lane of a device runs its tasks in the order of their indices, each when the one before and all it
depends on have ended. So a lane is nothing but one more dependency per task, and only links are
left to contend for. `schedule` says how; `hops` says which links, and for how long.

    work      in the lane of its kind (lower/task_kinds.py), as long as the CostModel says, or as
              the link to the host takes if it is a copy there or back
    host work in no lane: each device's host does what is ready, what the next step needs first
              before the rest
    messages  on links

Where communication burns the device (`Cluster.communication_on_device`) a message also occupies
the compute lanes of all devices that it involves, and copies to the host and back stand in these;
if messages were measured there, it occupies the devices and no links, for as long as the CostModel
says. Between hosts there is a wire besides. In tasks that lower/coalesce.py has ordered, messages
are posted early, and the wire is busy while the devices go on; in plain ones a message is waited
for where it is posted, and its devices with it.

An asynchronous device computes while its host issues the next kernels: a task there is released
when the host has issued it, after all earlier ones of its lane.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from apportion.columns import (
    Bools,
    Ints,
    compiled,
    distinct,
    offsets,
    plain,
)
from apportion.lower import TaskGraph, host_labels, uses_host
from apportion.machine import (
    Cluster,
    CostModel,
    ahead_nanoseconds,
    times_messages,
)
from apportion.simulate.durations import (
    issue_nanoseconds,
    leads,
    nanoseconds,
    on_wire,
)
from apportion.simulate.routes import Hops, hops, no_hops
from apportion.simulate.schedule import NO_ROWS, Network


def network(
    tasks: TaskGraph, cluster: Cluster, cost: CostModel, needed: Ints | None = None
) -> Network:
    """Precedence of dependencies and lanes together, and the hops of every message. `needed`: by
    task, what work of hosts is ordered by, if not by `needed_at`."""
    n = len(tasks)
    duration = nanoseconds(tasks, cluster, cost)
    lane_start, lane = occupied_lanes(tasks, cluster.communication_on_device)
    dep_start, dep = tasks.dep_start, tasks.dep
    if uses_host(tasks) and not cluster.communication_on_device:
        dep_start, dep = _waiting_for_host(tasks)
    pending, next_start, next_, next_lane = _precedence(dep_start, dep, lane_start, lane)
    messages, lead = hops(tasks, cluster), NO_ROWS
    if times_messages(cluster, cost):
        beside = on_wire(tasks, cluster)
        messages = hops(tasks, cluster, beside) if beside.any() else no_hops(n)
        lead = leads(tasks, beside, cluster, cost) if beside.any() else NO_ROWS
    at_host = _by_need(tasks, cluster.communication_on_device)
    urgency = NO_ROWS
    if at_host.any():
        messages = _with_host_work(tasks, messages, at_host, duration, len(cluster.links))
        needed = needed_at(tasks) if needed is None else needed
        urgency = np.where(at_host, needed, -1)
    return Network(
        links=len(cluster.links) + (tasks.devices if at_host.any() else 0),
        duration=duration,
        release=releases(tasks, cluster, cost, duration),
        hold=np.zeros(n, np.int64),
        latency=messages.latency,
        pending=pending,
        next_start=next_start,
        next=next_,
        hop_start=messages.start,
        hop_link=messages.link,
        hop_occupancy=messages.occupancy,
        lead=lead,
        next_lane=next_lane if len(lead) else NO_ROWS,
        urgency=urgency,
    )


# Work of the host


def _by_need(tasks: TaskGraph, on_device: bool) -> Bools:
    """The tasks that hosts do by themselves, in the order of need."""
    found: Bools = tasks.task_kinds.is_host_work[tasks.kind]
    return found & (not on_device)


def needed_at(tasks: TaskGraph) -> Ints:
    """For every task the first one of the next step that reads what it makes; as many as there are
    tasks if none does."""
    n = len(tasks)
    first = np.full(len(tasks.slot_device), n)
    reader = np.repeat(np.arange(n), np.diff(tasks.in_start))
    real = tasks.in_slot >= 0
    np.minimum.at(first, tasks.in_slot[real], reader[real])
    found = np.full(n, n)
    maker = tasks.slot_first[tasks.carry[:, 0]]
    made = maker >= 0
    begins = first[tasks.carry[made, 1]]
    # what makes state is not what needs it first, where it reads it itself
    np.minimum.at(found, maker[made], np.where(begins == maker[made], n, begins))
    return found


def _with_host_work(
    tasks: TaskGraph, messages: Hops, at_host: Bools, duration: Ints, links: int
) -> Hops:
    """The hops with one more for each task that a host does: the host of its device, after all
    links."""
    count = np.diff(messages.start) + at_host
    start = offsets(count)
    link, occupancy = np.empty((2, int(start[-1])), np.int64)
    mine = np.repeat(at_host, count)
    link[~mine], occupancy[~mine] = messages.link, messages.occupancy
    link[mine], occupancy[mine] = links + tasks.device[at_host], duration[at_host]
    return Hops(messages.latency, start, link, occupancy)


def _waiting_for_host(tasks: TaskGraph) -> tuple[Ints, Ints]:
    """What tasks wait for; the first of those that a device runs undisturbed waits for all that
    comes from the host and is first read by one of them."""
    n, labels = len(tasks), host_labels(tasks)
    owner = [np.repeat(np.arange(n), np.diff(tasks.dep_start))]
    dep = [tasks.dep]
    first_reader = np.full(len(tasks.slot_device), n)
    reader = np.repeat(np.arange(n), np.diff(tasks.in_start))
    real = tasks.in_slot >= 0
    np.minimum.at(first_reader, tasks.in_slot[real], reader[real])
    kinds = tasks.task_kinds
    comes = np.flatnonzero((kinds.is_host_copy & ~kinds.to_host)[tasks.kind])
    read = first_reader[tasks.out_slot[tasks.out_start[comes]]]
    for device in range(tasks.devices):
        mine = np.flatnonzero(tasks.is_work & (tasks.device == device))
        new = np.append(True, np.diff(labels[mine]) != 0)
        begin = mine[np.maximum.accumulate(np.where(new, np.arange(len(mine)), 0))]
        place = np.full(n + 1, -1)
        place[mine] = begin
        waits = place[read]
        here = (tasks.device[comes] == device) & (waits > comes)
        owner.append(waits[here])
        dep.append(comes[here])
    key = distinct(np.concatenate(owner) * n + np.concatenate(dep))
    return offsets(np.bincount(key // n, minlength=n)), key % n


# Lanes


def occupied_lanes(tasks: TaskGraph, on_device: bool) -> tuple[Ints, Ints]:
    """The lanes that each task occupies, as offsets and numbers: lane k of a device has the number
    k * devices + device."""
    work, ends = tasks.is_work & ~_by_need(tasks, on_device), tasks.ends
    counts = work.astype(np.int64)
    if on_device:
        counts += np.bincount(ends.task, minlength=len(tasks))
    lane = np.empty(counts.sum(), np.int64)
    of_work = np.repeat(work, counts)
    beside = tasks.task_kinds.lane.copy()
    if on_device:
        beside[tasks.task_kinds.is_host_copy | tasks.task_kinds.is_host_work] = 0
    lane[of_work] = beside[tasks.kind[work]] * tasks.devices + tasks.device[work]
    if on_device:
        lane[~of_work] = ends.device  # ends are in the order of tasks
    return offsets(counts), lane


def _precedence(
    dep_start: Ints, dep: Ints, lane_start: Ints, lane: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """How many tasks each one waits for, and those that wait for it, as offsets and tasks; and of
    these whether they wait in a lane."""
    n = len(dep_start) - 1
    waiting, user = (np.repeat(np.arange(n), np.diff(start)) for start in (dep_start, lane_start))
    by_lane = np.argsort(lane, kind="stable")
    same = lane[by_lane[1:]] == lane[by_lane[:-1]]
    earlier = np.concatenate([dep, user[by_lane[:-1][same]]])
    later = np.concatenate([waiting, user[by_lane[1:][same]]])
    in_lane = np.arange(len(later)) >= len(dep)
    key = np.sort(2 * (earlier * n + later) + in_lane)
    starts = offsets(np.bincount(earlier, minlength=n))
    return np.bincount(later, minlength=n), starts, key // 2 % max(n, 1), key % 2


# Release


def releases(tasks: TaskGraph, cluster: Cluster, cost: CostModel, duration: Ints) -> Ints:
    """When the host has issued each task: 0 where it is the device that runs them."""
    if not any(device.asynchronous for device in cluster.devices):
        return np.zeros(len(tasks), np.int64)
    issue = issue_nanoseconds(tasks, cluster, cost)
    kinds = tasks.task_kinds
    beside = (kinds.is_host_copy | kinds.is_host_work)[tasks.kind]
    duration = np.where(beside, 0, duration)  # beside the queue
    released: Ints = issued(plain(tasks.device), issue, duration, ahead_nanoseconds(cluster, cost))
    return released


def _issued_in_turn(device: Ints, issue: Ints, duration: Ints, ahead: Ints) -> Ints:
    """What `issued` does, on lists."""
    released, rows = np.zeros(len(issue), np.int64), np.flatnonzero(issue)
    host, work, free = ([0] * len(ahead) for _ in range(3))
    queues: list[deque[tuple[int, int]]] = [deque() for _ in ahead]
    moments, limits = [], ahead.tolist()
    columns = (device[rows].tolist(), issue[rows].tolist(), duration[rows].tolist())
    for d, cost, takes in zip(*columns, strict=True):
        host[d] += cost
        work[d] += cost
        queue = queues[d]
        while limits[d] and queue and queue[0][0] <= work[d] - limits[d]:
            host[d] = max(host[d], queue.popleft()[1])
        begun = max(host[d], free[d])
        free[d] = begun + takes
        moments.append(host[d])
        if limits[d]:
            queue.append((work[d], begun))
    released[rows] = moments
    return released


@compiled(plain=_issued_in_turn)
def issued(device: Ints, issue: Ints, duration: Ints, ahead: Ints) -> Ints:
    """Sums along the lanes; a task that takes nobody to issue is released at 0.

    A device's queue has an end: where `ahead` is not 0, the host issues a task no sooner than the
    device can have begun those that were issued so much of the host's work earlier.
    """
    count, devices = len(issue), len(ahead)
    released, begun, spent = np.zeros((3, count), np.int64)
    after, last, queue = np.full(count, -1), np.full(devices, -1), np.full(devices, -1)
    host, work, free = np.zeros((3, devices), np.int64)
    for task in range(count):
        if issue[task] == 0:
            continue
        d = device[task]
        host[d] += issue[task]
        work[d] += issue[task]
        while ahead[d] and queue[d] >= 0 and spent[queue[d]] <= work[d] - ahead[d]:
            host[d] = max(host[d], begun[queue[d]])
            queue[d] = after[queue[d]]
        released[task], spent[task] = host[d], work[d]
        begun[task] = max(host[d], free[d])
        free[d] = begun[task] + duration[task]
        if queue[d] < 0:
            queue[d] = task
        else:
            after[last[d]] = task
        last[d] = task
    return released
