"""step: the time of one step under a placement, by events. The objective `step`.

In: a PlacementProblem and a device for every unit. Out: when each node starts and ends, the time
of the step, and the peak memory of each device.

A node is ready when all that it reads has arrived at its device. A device runs one node at a time:
in the order of the nodes, or whatever is ready first. An output travels to other devices as a
message over the links of its route; each link serves messages one at a time, first come first
served by (ready, item), as in simulate/schedule.py. A step ends when all devices and links are
free.

Items are numbered by node: the node itself, then its messages. What becomes ready through an item
comes after it in (ready, item), so that one heap is all the state there is. A row of the heap is
one number: the time, then the item. For both to fit in 62 bits, items that are ready after
`latest` are served in the order of their numbers; that is hours.

Searches ask whether a placement is better than another. An evaluation ends early, with a number
above `most`, once a bound on the time of the whole step is: a node's end and what must follow it at
least, or its start and all that its device still has to run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, compiled_part, pop, push
from apportion.place.placement_problem import (
    NEVER,
    PlacementColumns,
    PlacementLinks,
    PlacementProblem,
    check_placement,
)

KEY_BITS = 62  # of a row of the heap
NO_LIMIT = 1 << 61  # ticks that no step takes


class StepSchedule(NamedTuple):
    """A placement, simulated: ticks of the whole step and of each node; bytes per device."""

    ticks: int
    start: Ints  # n
    end: Ints  # n
    peak_bytes: Ints  # k


class StepConstants(NamedTuple):
    """What is the same under all placements of a problem."""

    shift: int  # an item is node << shift, plus 1 and more for messages
    bits: int  # of an item
    latest: int  # ticks
    limited: int  # 1: some device has a memory limit
    worst: float  # more ticks than any placement takes
    limit: Floats  # k: bytes
    inputs: Ints  # n: how many outputs a node reads
    first: Ints  # the items of nodes that read nothing
    tail: Ints  # n: what the step lasts after the end of a node, at least


class StepScratch(NamedTuple):
    """Columns that an evaluation overwrites; those of nodes can be read after it."""

    where: Ints  # n: the device of a node
    start: Ints  # n
    end: Ints  # n
    sequence: Ints  # n: nodes, those of each device as it ran them
    before: Ints  # n: the node that its device ran before, or -1
    ready: Ints  # n
    pending: Ints  # n: what a node still waits for
    extra: Ints  # n: ticks to receive what a node is the first to read
    issues: Ints  # n: ticks of a host to issue that
    after: Ints  # n: the next node of the same device, if devices run nodes in order
    stack: Ints  # n: nodes that are ready, if devices run nodes in order
    free: Ints  # k: when a device is free
    left: Ints  # k: ticks of the nodes that a device has not run
    latest: Ints  # k: the node that a device ran last, or -1
    sent: Ints  # k: the output that was last sent to a device
    host: Ints  # k: when the host of a device has issued what it runs
    peaks: Ints  # k: bytes
    heap: Ints  # messages and nodes that are ready
    sizes: Ints  # of the heap and the stack, and the length of the sequence
    link_free: Ints
    stretch: Ints  # k + 1
    alive: Ints  # m x 2: outputs by the time they go


def step_tables(problem: PlacementProblem) -> StepConstants:
    """What evaluations of a problem's placements have in common."""
    c = problem.columns
    n, devices = c.duration.shape
    most = int(np.diff(c.output_start).max(initial=1))
    shift = (most * devices).bit_length()
    bits = shift + max(n - 1, 1).bit_length()
    inputs = np.bincount(c.reader, minlength=n).astype(np.int64)
    return StepConstants(
        shift=shift,
        bits=bits,
        latest=1 << max(KEY_BITS - bits, 0),
        limited=int(np.isfinite(problem.limit).any()),
        worst=worst_ticks(problem),
        limit=problem.limit,
        inputs=inputs,
        first=np.flatnonzero(inputs == 0).astype(np.int64) << shift,
        tail=_least_tails(c, c.duration.min(axis=1)),
    )


def step_scratch(problem: PlacementProblem) -> StepScratch:
    """Room for evaluations of a problem's placements."""
    c, links = problem.columns, problem.links
    n, devices = c.duration.shape
    each = np.minimum(np.diff(c.reader_start), 1 if links.once else devices - 1)
    shapes: list[int | tuple[int, int]] = [n] * 11 + [devices] * 6
    shapes += [n + int(each.sum()) + 1, 3, max(links.links, 1), devices + 1, (len(c.source) + 1, 2)]
    return StepScratch._make(np.zeros(shape, np.int64) for shape in shapes)


def simulate_step(
    problem: PlacementProblem, placement: Ints, tables: StepConstants | None = None
) -> StepSchedule:
    """What happens if unit i is on device placement[i]."""
    check_placement(problem, placement)
    place = np.ascontiguousarray(placement, np.int64)
    scratch = step_scratch(problem)
    c, links = problem.columns, problem.links
    ticks = step_ticks(c, links, tables or step_tables(problem), scratch, place, NO_LIMIT)
    find_peaks(c, links, scratch)
    return StepSchedule(int(ticks), scratch.start, scratch.end, scratch.peaks)


@compiled
def step_ticks(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    place: Ints,
    most: int,
) -> int:
    """Ticks of the step; if they are more than `most`, any number above it. Fills start and end of
    the nodes unless it ends early."""
    return step_ticks_part(c, links, t, s, place, most)  # type: ignore[no-any-return]


@compiled_part
def step_ticks_part(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    place: Ints,
    most: int,
) -> int:
    """`step_ticks` as a part of searches."""
    finish: int = _begin(c, links, t, s, place)
    last = (1 << t.shift) - 1
    while finish <= most and s.sizes[0] + s.sizes[1] > 0:
        if s.sizes[1] > 0:
            s.sizes[1] -= 1
            node, message = s.stack[s.sizes[1]], 0
        else:
            item = s.heap[0] & ((1 << t.bits) - 1)
            s.sizes[0] -= 1
            _remove_first(s.heap, s.sizes[0])
            node, message = item >> t.shift, item & last
        if message == 0:
            finish = max(finish, _run_node(c, links, t, s, node))
        else:
            finish = max(finish, _send(c, links, t, s, node, message - 1))
    return finish


@compiled_part
def _begin(
    c: PlacementColumns, links: PlacementLinks, t: StepConstants, s: StepScratch, place: Ints
) -> int:
    """Everything before the first event; a bound on the ticks."""
    n, devices = c.duration.shape
    for device in range(devices):
        s.free[device], s.left[device] = 0, 0
        s.latest[device], s.sent[device] = -1, -1
    for link in range(len(s.link_free)):
        s.link_free[link] = 0
    for node in range(n):
        s.where[node] = place[c.unit[node]]
        s.ready[node] = 0
        s.extra[node] = 0
        s.pending[node] = t.inputs[node]
    s.sizes[0], s.sizes[1], s.sizes[2] = 0, 0, 0
    if links.in_order:
        _receive(c, links, s)
        _follow(s)
    for k in range(len(t.first)):
        node = t.first[k] >> t.shift
        if not links.in_order:
            s.heap[k] = t.first[k]  # rising: that is a heap
            s.sizes[0] += 1
        elif s.pending[node] == 0:
            s.stack[s.sizes[1]] = node
            s.sizes[1] += 1
    for node in range(n):
        device = s.where[node]
        took = c.duration[node, device] + s.extra[node]
        s.left[device] += took + (links.device_hold if took > 0 else 0)
    bound: int = s.left[0]
    for device in range(1, devices):
        bound = max(bound, s.left[device])
    return bound


@compiled_part
def _receive(c: PlacementColumns, links: PlacementLinks, s: StepScratch) -> None:
    """What nodes take longer to receive messages, and when hosts have issued them."""
    if len(links.receive):
        s.issues[:] = 0
        for output in range(len(c.source)):
            device = s.where[c.source[output]]
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                there = s.where[c.reader[at]]
                if there != device and s.sent[there] != output:
                    s.sent[there] = output
                    takes = links.receive[there, 0] + links.receive[there, 1] * c.send[output]
                    s.extra[c.reader[at]] += np.int64(np.rint(takes))
                    s.issues[c.reader[at]] += np.int64(links.receive[there, 2])
        s.sent[:] = -1
    if len(c.issue):
        s.host[:] = 0
        for node in range(len(c.unit)):
            device = s.where[node]
            if c.issue[node, device] > 0:
                s.host[device] += c.issue[node, device]
                if len(links.receive):
                    s.host[device] += s.issues[node]
                s.ready[node] = s.host[device]


@compiled_part
def _follow(s: StepScratch) -> None:
    """Every node waits for the one before it on its device."""
    for node in range(len(s.where)):  # `sent` has the last node of each device
        device = s.where[node]
        s.after[node] = -1
        if s.sent[device] >= 0:
            s.after[s.sent[device]] = node
            s.pending[node] += 1
        s.sent[device] = node
    s.sent[:] = -1


@compiled_part
def _run_node(
    c: PlacementColumns, links: PlacementLinks, t: StepConstants, s: StepScratch, node: int
) -> int:
    """A node runs; a bound on the ticks, which is exact for the last to run."""
    devices = c.duration.shape[1]
    device = s.where[node]
    begin = max(s.ready[node], s.free[device])
    took = c.duration[node, device] + s.extra[node]
    done = begin + took
    free = done + (links.device_hold if took > 0 else 0)
    bound: int = max(begin + s.left[device], done + t.tail[node])
    s.left[device] -= free - begin
    s.free[device] = free
    s.start[node], s.end[node] = begin, done
    s.before[node], s.latest[device] = s.latest[device], node
    s.sequence[s.sizes[2]] = node
    s.sizes[2] += 1
    if links.in_order and s.after[node] >= 0:
        _arrive(links, t, s, s.after[node], free)
    base = (node << t.shift) + 1
    for output in range(c.output_start[node], c.output_start[node + 1]):
        away = False
        for at in range(c.reader_start[output], c.reader_start[output + 1]):
            later = c.reader[at]
            there = s.where[later]
            if there == device:
                _arrive(links, t, s, later, done)
            elif s.sent[there] != output and not (links.once and away):
                s.sent[there] = output
                away = True
                _insert(s.heap, s.sizes[0], (min(done, t.latest) << t.bits) + base + there)
                s.sizes[0] += 1
        base += devices
    return bound


@compiled_part
def _send(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    node: int,
    way: int,
) -> int:
    """A message takes its turn on all links of its route; when it has arrived and they are free."""
    devices = c.duration.shape[1]
    device, there = s.where[node], way % devices
    output = c.output_start[node] + way // devices
    begin = s.end[node]
    arrives, finish = begin, begin
    route = device * devices + there
    for hop in range(links.hop_start[route], links.hop_start[route + 1]):
        link = links.hop_link[hop]
        passed = max(begin, s.link_free[link]) + np.int64(
            np.rint(c.send[output] * links.hop_pace[hop])
        )
        s.link_free[link] = passed + links.link_hold
        arrives = max(arrives, passed)
        finish = max(finish, passed + links.link_hold)
    arrives += np.int64(
        np.rint(links.lag[device, there] + links.drag[device, there] * c.send[output])
    )
    for at in range(c.reader_start[output], c.reader_start[output + 1]):
        later = c.reader[at]
        at_later = s.where[later]
        if at_later == there or (links.once and at_later != device):
            _arrive(links, t, s, later, arrives)
    last: int = max(finish, arrives)
    return last


@compiled_part
def _arrive(links: PlacementLinks, t: StepConstants, s: StepScratch, node: int, when: int) -> None:
    """Something that a node waits for is there."""
    s.ready[node] = max(s.ready[node], when)
    s.pending[node] -= 1
    if s.pending[node] > 0:
        return
    if links.in_order:
        s.stack[s.sizes[1]] = node
        s.sizes[1] += 1
    else:
        key = (min(s.ready[node], t.latest) << t.bits) + (node << t.shift)
        _insert(s.heap, s.sizes[0], key)
        s.sizes[0] += 1


@compiled_part
def _insert(heap: Ints, size: int, key: int) -> None:
    """Adds a number to the heap heap[:size], which has the smallest first."""
    hole = size
    while hole > 0:
        above = (hole - 1) >> 1
        if heap[above] < key:
            break
        heap[hole] = heap[above]
        hole = above
    heap[hole] = key


@compiled_part
def _remove_first(heap: Ints, size: int) -> None:
    """Removes the first of the heap heap[: size + 1]: its place sinks to the end of the heap, where
    the last number takes it and rises. Numbers at the end are large and hardly rise."""
    key, hole, below = heap[size], 0, 1
    while below + 1 < size:
        below += heap[below + 1] < heap[below]
        heap[hole] = heap[below]
        hole, below = below, 2 * below + 1
    if below < size:
        heap[hole] = heap[below]
        hole = below
    while hole > 0:
        above = (hole - 1) >> 1
        if heap[above] < key:
            break
        heap[hole] = heap[above]
        hole = above
    heap[hole] = key


@compiled
def find_peaks(c: PlacementColumns, links: PlacementLinks, s: StepScratch) -> None:
    """Fills the peaks after an evaluation that did not end early."""
    find_peaks_part(c, links, s)


@compiled_part
def find_peaks_part(c: PlacementColumns, links: PlacementLinks, s: StepScratch) -> None:
    """The most that each device holds: what stays there, and the outputs that live."""
    n, devices = c.duration.shape
    for device in range(devices):
        s.peaks[device] = 0
    for node in range(n):
        s.peaks[s.where[node]] += c.resident[node]
    if not links.live:
        return
    s.stretch[:] = 0
    for node in range(n):
        s.stretch[s.where[node] + 1] += 1
    for device in range(devices):
        s.stretch[device + 1] += s.stretch[device]
    for k in range(n):  # nodes by device, each as it ran them
        node = s.sequence[k]
        s.stack[s.stretch[s.where[node]]] = node
        s.stretch[s.where[node]] += 1
    first = 0
    for device in range(devices):
        s.peaks[device] = _peak(c, links, s, first, s.stretch[device], s.peaks[device])
        first = s.stretch[device]


@compiled_part
def _peak(
    c: PlacementColumns, links: PlacementLinks, s: StepScratch, first: int, last: int, held: int
) -> int:
    """The most bytes over the nodes stack[first:last] of a device that holds some all the time.
    What comes at the time that something goes adds to it."""
    most, size = held, 0
    for k in range(first, last):
        node = s.stack[k]
        now = s.start[node]
        while size > 0 and s.alive[0, 0] < now:
            held -= c.nbytes[s.alive[0, 1]]
            pop(s.alive, size)
            size -= 1
        for output in range(c.output_start[node], c.output_start[node + 1]):
            gone = now
            for at in range(c.reader_start[output], c.reader_start[output + 1]):
                gone = max(gone, s.end[c.reader[at]] - links.grace)
            held += c.nbytes[output]
            push(s.alive, size, gone, output)
            size += 1
        most = max(most, held)
    return most


@compiled
def step_score(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    place: Ints,
    most: float,
) -> float:
    """What searches minimise: the ticks of a step; of a placement that is over the memory limit
    more than of any that is not, by the shares that its devices are over. If it is more than
    `most`, any number above it."""
    return step_score_part(c, links, t, s, place, most)  # type: ignore[no-any-return]


@compiled_part
def step_score_part(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    place: Ints,
    most: float,
) -> float:
    """`step_score` as a part of searches."""
    bound = np.int64(min(most, float(NO_LIMIT)))
    ticks = step_ticks_part(c, links, t, s, place, bound)
    if ticks > bound or not t.limited:
        return float(ticks)
    find_peaks_part(c, links, s)
    over = 0.0
    for device in range(len(t.limit)):
        if s.peaks[device] > t.limit[device]:
            over += (s.peaks[device] - t.limit[device]) / max(t.limit[device], 1.0)
    if over > 0:
        return float(t.worst * (1.0 + over) + ticks)
    return float(ticks)


@compiled
def _least_tails(c: PlacementColumns, least: Ints) -> Ints:
    """What a step lasts after the end of each node if messages take no time and every node that
    follows runs at once on its fastest device."""
    tail = np.zeros(len(least), np.int64)
    for output in range(len(c.source) - 1, -1, -1):
        made = c.source[output]
        for at in range(c.reader_start[output], c.reader_start[output + 1]):
            reader = c.reader[at]
            tail[made] = max(tail[made], least[reader] + tail[reader])
    return tail


def worst_ticks(problem: PlacementProblem) -> float:
    """More ticks than any placement takes: all nodes one after the other, each on its slowest
    device, and all outputs sent to every device, one after the other."""
    c, links, k = problem.columns, problem.links, len(problem.devices)
    hops = np.diff(links.hop_start).max(initial=0)
    receive = links.receive.max(axis=0, initial=0)
    pace = links.hop_pace.max(initial=0) * hops + links.drag.max(initial=0) + receive[1]
    each = links.lag.max(initial=0) + links.link_hold * max(hops, 1) + receive[0] + receive[2] + 2
    slowest = np.where(c.duration < NEVER, c.duration, 0).max(axis=1).astype(float)
    compute = slowest.sum() + len(c.unit) * float(links.device_hold)
    issued = c.issue.max(axis=1).sum() if len(c.issue) else 0
    return float(compute + issued + k * (c.send.sum() * pace + len(c.send) * each) + 1)
