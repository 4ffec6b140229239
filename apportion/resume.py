"""resume: a changed schedule worked out anew from the first time on that can have changed.

Tasks that were ready before keep their times; the rest is one run of the compiled engine.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from apportion.live import (
    ABSENT,
    AFTER,
    AVAILABLE,
    BEFORE,
    COUNT,
    END,
    FIRST,
    FREE,
    HOPS,
    KEY,
    LEFT,
    NEVER,
    PIECES,
    READS,
    READY,
    RELEASE,
    STANDS,
    START,
    TASKS,
    TURN,
    WAITING,
    WAITS,
    Live,
    get,
    in_order,
    look_again,
    next_op,
    put,
)
from apportion.relax import ready_at
from apportion.schedule import Network
from apportion.tasks import Ints

# The first time that can have changed


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def release_all(live: Live, released: Ints) -> int:
    """The host issues all tasks then, in the order of Ops; the first time that this changes."""
    at, since = 0, NEVER
    for op in range(live.ops):
        first, count = get(live, FIRST, op), get(live, COUNT, op)
        changed = False
        for k in range(count):
            task, new = first + k, released[at + k]
            old, ready = get(live, RELEASE, task), get(live, READY, task)
            if not put(live, RELEASE, task, new):
                continue
            changed = True
            if ready == ABSENT:
                continue
            if new > ready:
                since = min(since, ready)
            elif old >= ready:
                since = min(since, max(new, _read_at(live, task)))
        at += count
        if changed:
            look_again(live, op)
    return since


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _read_at(live: Live, task: int) -> int:
    """When all is there that a task reads, as far as that is known."""
    there = 0
    for k in range(live.read_start[task], live.read_start[task + 1]):
        there = max(there, get(live, AVAILABLE, live.read[k]))
    return there


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def first_ready(live: Live, op: int) -> int:
    """When the first of an Op's tasks was ready."""
    since, first = NEVER, get(live, FIRST, op)
    for task in range(first, first + get(live, COUNT, op)):
        since = min(since, get(live, READY, task))
    return since


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def first_entry(live: Live, op: int, replaced: Ints) -> int:
    """When the first of an Op's new tasks is ready that depends on nothing that is replaced, or the
    first was that now comes after one of them in a lane."""
    since, first, row = NEVER, get(live, FIRST, op), op + 1
    live.seen[:] = -1
    for task in range(first, first + get(live, COUNT, op)):
        ready = get(live, RELEASE, task)
        own = live.wait_start[task] < live.wait_start[task + 1]
        for k in range(live.read_start[task], live.read_start[task + 1]):
            available = get(live, AVAILABLE, live.read[k])
            own, ready = own or available == ABSENT, max(ready, available)
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            device = live.stand[k]
            before = get(live, BEFORE, row * live.devices + device)
            own = own or live.seen[device] == row or (before > 0 and replaced[before - 1] == 1)
            live.seen[device] = row
            ready = max(ready, get(live, FREE, before * live.devices + device))
        if not own:
            since = min(since, ready)
    for device in range(live.devices):
        after = get(live, AFTER, row * live.devices + device)
        if live.seen[device] == row and after <= live.ops and replaced[after - 1] == 0:
            since = min(since, get(live, READY, _task_on(live, after - 1, device)))
    live.seen[:] = -1
    return since


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def first_follower(live: Live, replaced: Ints) -> int:
    """When the first task can be ready that came after one which has left its lane."""
    many, since = live.counters[LEFT], NEVER
    if many > live.left.shape[1]:
        return 0
    for k in range(many):
        row, device = live.left[0, k], live.left[1, k]
        if row > live.ops or replaced[row - 1] == 1:
            continue
        before = get(live, BEFORE, row * live.devices + device)
        task = _task_on(live, row - 1, device)
        if before == ABSENT or task < 0:
            continue
        since = min(since, get(live, READY, task))
        if before == 0 or replaced[before - 1] == 0:
            free = max(get(live, FREE, before * live.devices + device), 0)
            since = min(since, max(free, get(live, RELEASE, task), _read_at(live, task)))
    return since


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _task_on(live: Live, op: int, device: int) -> int:
    """The first of an Op's tasks in a lane, or -1."""
    first = get(live, FIRST, op)
    for task in range(first, first + get(live, COUNT, op)):
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            if live.stand[k] == device:
                return task
    return -1


# From there on


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def current(live: Live, since: int) -> tuple[Network, Ints, Ints]:
    """The tasks that are and become ready at `since` or later, or have no times yet, in the order
    of Ops, for a schedule; which tasks these are; and where in the order of all.

    Those before keep their times. What they leave behind becomes releases and, for every link that
    is still busy, an item at the front that keeps it busy as long.
    """
    every = in_order(live, np.arange(len(live.op)))
    links, tops = len(live.queued), live.counters
    ready = live.cells[live.at[READY] : live.at[READY] + tops[TASKS]]
    turn = live.cells[live.at[TURN] : live.at[TURN] + tops[HOPS]]
    order, where = np.empty(len(every), np.int64), np.empty(len(every), np.int64)
    place, maker = np.full(tops[TASKS], -1), np.full(tops[PIECES], -1)
    n, free = links, np.zeros(links, np.int64)
    for k in range(len(every)):
        task = every[k]
        if ready[task] == ABSENT or since <= ready[task]:
            place[task], order[n - links], where[n - links] = n, task, k
            for m in range(live.make_start[task], live.make_start[task + 1]):
                maker[live.make[m]] = n
            n += 1
        else:
            for hop in range(live.hop_start[task], live.hop_start[task + 1]):
                link = live.hop_link[hop]
                free[link] = max(free[link], turn[hop] + live.hop_occupancy[hop])
    order, where = order[: n - links], where[: n - links]
    release, pending, next_start, after = _precedence(live, order, place, maker)
    hop_start = np.zeros(n + 1, np.int64)
    hop_start[: links + 1] = np.arange(links + 1)
    for k in range(n - links):
        hops = live.hop_start[order[k] + 1] - live.hop_start[order[k]]
        hop_start[links + k + 1] = hop_start[links + k] + hops
    hop_link, occupancy = np.empty(hop_start[n], np.int64), np.empty(hop_start[n], np.int64)
    hop_link[:links], occupancy[:links] = np.arange(links), free
    duration, latency = np.ones(n, np.int64), np.zeros(n, np.int64)
    for k in range(n - links):
        task, item = order[k], links + k
        duration[item], latency[item] = live.duration[task], live.latency[task]
        shift = live.hop_start[task] - hop_start[item]
        for hop in range(hop_start[item], hop_start[item + 1]):
            hop_link[hop] = live.hop_link[hop + shift]
            occupancy[hop] = live.hop_occupancy[hop + shift]
    net = Network(
        links, duration, release, np.zeros(n, np.int64), latency, pending, next_start, after,
        hop_start, hop_link, occupancy,
    )  # fmt: skip
    return net, order, where


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _precedence(live: Live, order: Ints, place: Ints, maker: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Of items, links first: releases, how many each waits for, and those that wait for each."""
    links, tops = len(live.queued), live.counters
    n = links + len(order)
    available = live.cells[live.at[AVAILABLE] : live.at[AVAILABLE] + tops[PIECES]]
    end = live.cells[live.at[END] : live.at[END] + tops[TASKS]]
    released = live.cells[live.at[RELEASE] : live.at[RELEASE] + tops[TASKS]]
    release, pending, starts = (
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n + 2, np.int64),
    )
    before = np.empty(tops[READS] + tops[WAITS] + tops[STANDS], np.int64)
    count = 0
    live.lane[:] = -1
    for k in range(len(order)):
        task, item = order[k], links + k
        latest, begun = released[task], count
        for r in range(live.read_start[task], live.read_start[task + 1]):
            before[count] = maker[live.read[r]]
            if before[count] < 0:
                latest = max(latest, available[live.read[r]])
            else:
                count += 1
        for w in range(live.wait_start[task], live.wait_start[task + 1]):
            before[count] = place[live.wait[w]]
            if before[count] < 0:
                latest = max(latest, end[live.wait[w]])
            else:
                count += 1
        for s in range(live.stand_start[task], live.stand_start[task + 1]):
            device = live.stand[s]
            before[count] = live.lane[device]
            if before[count] < 0:
                latest = max(latest, _lane_before(live, task, device, place))
            else:
                count += 1
            live.lane[device] = item
        release[item], pending[item] = latest, count - begun
        for at in range(begun, count):
            starts[before[at] + 2] += 1
    for item in range(n):
        starts[item + 2] += starts[item + 1]
    after, at = np.empty(starts[n + 1], np.int64), 0
    for item in range(links, n):
        for _ in range(pending[item]):
            after[starts[before[at] + 1]] = item
            starts[before[at] + 1] += 1
            at += 1
    return release, pending, starts[: n + 1], after


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _lane_before(live: Live, task: int, device: int, place: Ints) -> int:
    """When a lane is free for the first of its tasks that is scheduled again."""
    op = live.op[task]
    free = 0
    for earlier in range(get(live, FIRST, op), task):
        for k in range(live.stand_start[earlier], live.stand_start[earlier + 1]):
            if live.stand[k] == device and place[earlier] < 0:
                free = max(free, get(live, END, earlier))
    if free > 0:
        return free
    row = get(live, BEFORE, (op + 1) * live.devices + device)
    return max(get(live, FREE, row * live.devices + device), 0)


# Taking the result over


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def seed(live: Live, start: Ints, end: Ints) -> None:
    """Takes over a schedule that was worked out elsewhere: times in the order of Ops."""
    at = 0
    for op in range(live.ops):
        first, count = get(live, FIRST, op), get(live, COUNT, op)
        for task in range(first, first + count):
            live.cells[live.at[START] + task] = start[at]
            live.cells[live.at[END] + task] = end[at]
            for k in range(live.make_start[task], live.make_start[task + 1]):
                live.cells[live.at[AVAILABLE] + live.make[k]] = end[at]
            for k in range(live.stand_start[task], live.stand_start[task + 1]):
                lane = (op + 1) * live.devices + live.stand[k]
                live.cells[live.at[FREE] + lane] = end[at]
            at += 1
    while live.counters[WAITING] > 0:
        next_op(live)
    live.queued[:] = 0
    for op in range(live.ops):
        _seed_messages(live, op)
    for link in range(len(live.queued)):
        size, free = live.queued[link], 0
        key = live.cells[live.at[KEY] + live.queue[link, :size]]
        live.queue[link, :size] = live.queue[link, :size][np.argsort(key, kind="mergesort")]
        for place in range(size):
            hop = live.queue[link, place]
            turn = max(get(live, KEY, hop), free)
            live.cells[live.at[TURN] + hop] = turn
            free = turn + live.hop_occupancy[hop]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _seed_messages(live: Live, op: int) -> None:
    """Adds the messages of an Op to the queues; what they depend on has its times."""
    first, row = get(live, FIRST, op), op + 1
    for task in range(first, first + get(live, COUNT, op)):
        ready = ready_at(live, task, row)
        live.cells[live.at[READY] + task] = ready
        for hop in range(live.hop_start[task], live.hop_start[task + 1]):
            link = live.hop_link[hop]
            live.queue[link, live.queued[link]] = hop
            live.queued[link] += 1
            live.cells[live.at[KEY] + hop] = ready
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            live.lane[live.stand[k]] = get(live, END, task)
    live.seen[:] = -1
