"""step: the time of one step under a placement, by events. The objective `step`.

In: a PlacementProblem and a device for every unit. Out: when each node starts and ends, the time
of the step, and the peak memory of each device.

A node is ready when all that it reads has arrived at its device. A device runs one node at a time:
in the order of the nodes, or whatever is ready first. An output travels to other devices as a
message over the links of its route; each link serves messages one at a time, first come first
served by (ready, item), as in simulate/schedule.py. A step ends when all devices and
links are free.

Items are numbered by node: the node itself, then its messages. What becomes ready through an item
comes after it in (ready, item), so that one heap is all the state there is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, pop, push
from apportion.place.placement_problem import (
    NEVER,
    PlacementColumns,
    PlacementLinks,
    PlacementProblem,
    check_placement,
)


class SimulatedStep(NamedTuple):
    """A placement, simulated: ticks of the whole step and of each node; bytes per device."""

    ticks: int
    start: Ints  # n
    end: Ints  # n
    peak_bytes: Ints  # k


def simulate_step(problem: PlacementProblem, placement: Ints) -> SimulatedStep:
    """What happens if unit i is on device placement[i]."""
    check_placement(problem, placement)
    place = np.ascontiguousarray(placement, np.int64)
    c, links = problem.columns, problem.links
    start, end = np.empty(len(c.unit), np.int64), np.empty(len(c.unit), np.int64)
    ticks = step_ticks(c, links, place, start, end)
    return SimulatedStep(int(ticks), start, end, peak_bytes(c, links, place, start, end))


@compiled
def step_ticks(
    c: PlacementColumns, links: PlacementLinks, place: Ints, start: Ints, end: Ints
) -> int:
    """Ticks of the step; fills start and end of every node."""
    n, devices = len(c.unit), c.duration.shape[1]
    most = 1
    for node in range(n):
        most = max(most, c.output_start[node + 1] - c.output_start[node])
    stride = 1 + most * devices
    ready, pending = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for reader in c.reader:
        pending[reader] += 1
    after, last = np.full(n, -1), np.full(devices, -1)  # the next node of the same device
    extra = np.zeros(n, np.int64)  # ticks to receive what a node is the first to read
    if links.in_order:
        _receive(c, links, place, extra, ready)
        for node in range(n):
            device = place[c.unit[node]]
            if last[device] >= 0:
                after[last[device]] = node
                pending[node] += 1
            last[device] = node
    free = np.zeros(devices, np.int64)
    link_free = np.zeros(max(links.links, 1), np.int64)
    heap, size = np.empty((64 + n, 2), np.int64), 0
    stack, count = np.empty(n, np.int64), 0
    sent = np.full(devices, -1)  # the output that was last sent to each device
    finish = np.int64(0)
    for node in range(n):
        if pending[node] == 0:
            stack[count] = node
            count += 1
    while count or size:
        node, message = np.int64(-1), np.int64(0)
        if count:
            count -= 1
            node = stack[count]
            if not links.in_order:
                if size == len(heap):
                    heap = _longer(heap)
                push(heap, size, ready[node], node * stride)
                size += 1
                continue
            begin = ready[node]
        else:
            when, item = heap[0, 0], heap[0, 1]
            pop(heap, size)
            size -= 1
            node, message = item // stride, item % stride
            begin = when
        device = place[c.unit[node]]
        if message == 0:
            if not links.in_order:
                begin = max(begin, free[device])
            took = c.duration[node, device] + extra[node]
            done = begin + took
            hold = links.device_hold if took > 0 else 0
            free[device] = done + hold
            start[node], end[node] = begin, done
            finish = max(finish, done + hold)
            if after[node] >= 0:
                later = after[node]
                ready[later] = max(ready[later], done + hold)
                pending[later] -= 1
                if pending[later] == 0:
                    stack[count] = later
                    count += 1
            for output in range(c.output_start[node], c.output_start[node + 1]):
                port = output - c.output_start[node]
                once = False
                for at in range(c.reader_start[output], c.reader_start[output + 1]):
                    later = c.reader[at]
                    there = place[c.unit[later]]
                    if there == device:
                        ready[later] = max(ready[later], done)
                        pending[later] -= 1
                        if pending[later] == 0:
                            stack[count] = later
                            count += 1
                    elif sent[there] != output and not (links.once and once):
                        sent[there] = output
                        once = True
                        if size == len(heap):
                            heap = _longer(heap)
                        push(heap, size, done, node * stride + 1 + port * devices + there)
                        size += 1
        else:
            output = c.output_start[node] + (message - 1) // devices
            there = (message - 1) % devices
            route = device * devices + there
            arrives = begin
            for hop in range(links.hop_start[route], links.hop_start[route + 1]):
                link = links.hop_link[hop]
                turn = max(begin, link_free[link])
                passed = turn + np.int64(np.rint(c.send[output] * links.hop_pace[hop]))
                link_free[link] = passed + links.link_hold
                arrives = max(arrives, passed)
                finish = max(finish, passed + links.link_hold)
            beyond = links.lag[device, there] + links.drag[device, there] * c.send[output]
            arrives += np.int64(np.rint(beyond))
            finish = max(finish, arrives)
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                later = c.reader[at]
                place_of_later = place[c.unit[later]]
                if place_of_later == there or (links.once and place_of_later != device):
                    ready[later] = max(ready[later], arrives)
                    pending[later] -= 1
                    if pending[later] == 0:
                        stack[count] = later
                        count += 1
    return finish


@compiled
def _receive(
    c: PlacementColumns, links: PlacementLinks, place: Ints, extra: Ints, ready: Ints
) -> None:
    """What nodes take longer to receive messages, and when hosts have issued them."""
    devices = c.duration.shape[1]
    sent, host = np.full(devices, -1), np.zeros(devices, np.int64)
    issues = np.zeros(len(c.unit), np.int64)
    if len(links.receive):
        for output in range(len(c.source)):
            device = place[c.unit[c.source[output]]]
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                there = place[c.unit[c.reader[at]]]
                if there != device and sent[there] != output:
                    sent[there] = output
                    takes = links.receive[there, 0] + links.receive[there, 1] * c.send[output]
                    extra[c.reader[at]] += np.int64(np.rint(takes))
                    issues[c.reader[at]] += np.int64(links.receive[there, 2])
    if len(c.issue):
        for node in range(len(c.unit)):
            device = place[c.unit[node]]
            if c.issue[node, device] > 0:
                host[device] += c.issue[node, device] + issues[node]
                ready[node] = host[device]


@compiled
def _longer(heap: Ints) -> Ints:
    more = np.empty((2 * len(heap), 2), np.int64)
    more[: len(heap)] = heap
    return more


@compiled
def peak_bytes(
    c: PlacementColumns, links: PlacementLinks, place: Ints, start: Ints, end: Ints
) -> Ints:
    """The most that each device holds: what stays there, and the outputs that live."""
    devices, m = c.duration.shape[1], len(c.source)
    peaks = np.zeros(devices, np.int64)
    for node in range(len(c.unit)):
        peaks[place[c.unit[node]]] += c.resident[node]
    if not links.live:
        return peaks
    time = np.empty(2 * m, np.int64)
    for output in range(m):
        made = c.source[output]
        gone = start[made]
        for at in range(c.reader_start[output], c.reader_start[output + 1]):
            gone = max(gone, end[c.reader[at]] - links.grace)
        time[2 * output], time[2 * output + 1] = start[made], gone
    held, most = peaks.copy(), peaks
    # What comes at the time that something goes adds to it: arrivals first.
    for event in np.argsort(time * 2 + np.arange(2 * m) % 2):
        output = event // 2
        device = place[c.unit[c.source[output]]]
        if event % 2 == 0:
            held[device] += c.nbytes[output]
            most[device] = max(most[device], held[device])
        else:
            held[device] -= c.nbytes[output]
    return most


@compiled
def penalised_ticks(
    c: PlacementColumns,
    links: PlacementLinks,
    limit: Floats,
    worst: float,
    place: Ints,
    start: Ints,
    end: Ints,
) -> float:
    """What searches minimise: the ticks of a step; of a placement that is over the memory limit
    more than of any that is not, by the share that it is over. `worst` is at least the time of
    every placement that fits (`worst_ticks`)."""
    ticks = step_ticks(c, links, place, start, end)
    over = 0.0
    for device in range(len(limit)):
        if limit[device] < np.inf:
            peaks = peak_bytes(c, links, place, start, end)
            for d in range(len(limit)):
                over = max(over, (peaks[d] - limit[d]) / max(limit[d], 1.0))
            break
    if over > 0:
        return worst * (1.0 + over) + ticks
    return float(ticks)


def worst_ticks(problem: PlacementProblem) -> float:
    """More ticks than any placement takes: all nodes one after the other, each on its slowest
    device, and all outputs sent to every device, one after the other."""
    c, links, k = problem.columns, problem.links, len(problem.devices)
    hops = np.diff(links.hop_start).max(initial=0)
    pace = links.hop_pace.max(initial=0) * hops + links.drag.max(initial=0)
    each = links.lag.max(initial=0) + links.link_hold * max(hops, 1) + 1
    slowest = np.where(c.duration < NEVER, c.duration, 0).max(axis=1).astype(float)
    compute = slowest.sum() + len(c.unit) * float(links.device_hold)
    return float(compute + k * (c.send.sum() * pace + len(c.send) * each) + 1)
