"""simulate: TaskGraph + Cluster + CostModel -> predicted Timeline. Integer nanoseconds throughout.

A device's lane runs its tasks in the order of their indices, each when the one before and all it
depends on have ended. So a lane is nothing but one more dependency per task, and only links are
left to contend for. `schedule` says how; `hops` says which links, and for how long.

    COMPUTE, ASSEMBLE     work, as long as the CostModel says
    TRANSFER, COLLECTIVE  messages

Where communication burns the device (`Cluster.communication_on_device`) a message also stands in
the lanes of all devices that it involves; if messages were measured there, it occupies the devices
and no links, for as long as the CostModel says.

An asynchronous device computes while its host issues the next kernels: a task there is released
when the host has issued it, after all earlier ones of its lane.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import (
    Ints,
    compiled,
    offsets,
    plain,
)
from apportion.lower import (
    COLLECTIVE,
    TRANSFER,
    TaskGraph,
)
from apportion.machine import (
    Cluster,
    CostModel,
    ahead_nanoseconds,
    times_messages,
)
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
)
from apportion.simulate.memory_curve import granules
from apportion.simulate.routes import hops, no_hops
from apportion.simulate.schedule import Network, schedule_compiled
from apportion.simulate.timeline import SIMULATED, Timeline, timeline


def simulate(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Timeline:
    """The Timeline that the Cluster would show; ValueError if it has too few devices."""
    start, end = schedule_compiled(network(tasks, cluster, cost))
    on_device = cluster.communication_on_device
    return timeline(
        tasks, start, end, source=SIMULATED, communication_on_device=on_device,
        granule=granules(cluster),
    )  # fmt: skip


def network(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Network:
    """Precedence of dependencies and lanes together, and the hops of every message."""
    n = len(tasks)
    duration = nanoseconds(tasks, cluster, cost)
    stand_start, stand = stands(tasks, cluster.communication_on_device)
    pending, next_start, next_ = _precedence(
        plain(tasks.dep_start), plain(tasks.dep), stand_start, stand, tasks.devices
    )
    messages = no_hops(n) if times_messages(cluster, cost) else hops(tasks, cluster)
    return Network(
        links=len(cluster.links),
        duration=duration,
        release=_releases(tasks, cluster, cost, duration),
        hold=np.zeros(n, np.int64),
        latency=messages.latency,
        pending=pending,
        next_start=next_start,
        next=next_,
        hop_start=messages.start,
        hop_link=messages.link,
        hop_occupancy=messages.occupancy,
    )


# Lanes


def stands(tasks: TaskGraph, on_device: bool) -> tuple[Ints, Ints]:
    """The devices in whose lanes each task stands, as offsets and devices."""
    sizes = np.array([len(group) for group in tasks.groups], np.int64)
    members = np.array([device for group in tasks.groups for device in group], np.int64)
    kind, device, peer, group = map(plain, (tasks.kind, tasks.device, tasks.peer, tasks.group))
    starts = offsets(_stand_counts(kind, group, sizes, on_device))
    lanes = _fill_stands(kind, device, peer, group, offsets(sizes), members, starts)
    return starts, lanes


@compiled
def _stand_counts(kind: Ints, group: Ints, sizes: Ints, on_device: bool) -> Ints:
    counts = np.ones(len(kind), np.int64)
    for task in range(len(kind)):
        if kind[task] == TRANSFER:
            counts[task] = 2 if on_device else 0
        elif kind[task] == COLLECTIVE:
            counts[task] = sizes[group[task]] if on_device else 0
    return counts


@compiled
def _fill_stands(
    kind: Ints,
    device: Ints,
    peer: Ints,
    group: Ints,
    group_start: Ints,
    members: Ints,
    starts: Ints,
) -> Ints:
    lanes = np.empty(starts[-1], np.int64)
    for task in range(len(kind)):
        at = starts[task]
        if at == starts[task + 1]:
            continue
        if kind[task] == COLLECTIVE:
            first = group_start[group[task]]
            for k in range(starts[task + 1] - at):
                lanes[at + k] = members[first + k]
            continue
        lanes[at] = device[task]
        if kind[task] == TRANSFER:
            lanes[at + 1] = peer[task]
    return lanes


@compiled
def _precedence(
    dep_start: Ints, dep: Ints, stand_start: Ints, stand: Ints, devices: int
) -> tuple[Ints, Ints, Ints]:
    """How many tasks each one waits for, and those that wait for it, as offsets and tasks."""
    n = len(dep_start) - 1
    pending, starts = np.empty(n, np.int64), np.zeros(n + 2, np.int64)
    before = np.full(len(stand), -1)  # the task before, in the same lane
    last = np.full(devices, -1)
    for task in range(n):
        pending[task] = dep_start[task + 1] - dep_start[task]
        for at in range(dep_start[task], dep_start[task + 1]):
            starts[dep[at] + 2] += 1
        for at in range(stand_start[task], stand_start[task + 1]):
            before[at] = last[stand[at]]
            last[stand[at]] = task
            if before[at] >= 0:
                starts[before[at] + 2] += 1
                pending[task] += 1
    for task in range(n):
        starts[task + 2] += starts[task + 1]
    after = np.empty(starts[n + 1], np.int64)
    for task in range(n):  # starts[k + 1] moves from where the row of k begins to where it ends
        for at in range(dep_start[task], dep_start[task + 1]):
            after[starts[dep[at] + 1]] = task
            starts[dep[at] + 1] += 1
        for at in range(stand_start[task], stand_start[task + 1]):
            if before[at] >= 0:
                after[starts[before[at] + 1]] = task
                starts[before[at] + 1] += 1
    return pending, starts[: n + 1], after


# Release


def _releases(tasks: TaskGraph, cluster: Cluster, cost: CostModel, duration: Ints) -> Ints:
    """When the host has issued each task: 0 where it is the device that runs them."""
    if not any(device.asynchronous for device in cluster.devices):
        return np.zeros(len(tasks), np.int64)
    issue = issue_nanoseconds(tasks, cluster, cost)
    released: Ints = issued(plain(tasks.device), issue, duration, ahead_nanoseconds(cluster, cost))
    return released


@compiled
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
