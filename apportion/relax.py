"""relax: a schedule that can be changed, in arrays; what delta.py works on.

It is the schedule of schedule.py, kept as the solution of equations: the ready time of a task
follows from the pieces it reads, the messages it waits for and its lanes; the turn of a message on
a link from the message before it in that link's queue, which is sorted by (ready, order). There is
exactly one solution, since what a task depends on comes before it in time. So after a change it is
enough to look again at Ops of which something they depend on has changed, the first in order first,
until nothing changes any more.

All numbers that this changes are in one array, `cells`; a journal keeps what was there before, so
that a change can be undone. Tasks are only ever added: an Op's old ones stay where they were.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.schedule import Network
from apportion.tasks import Ints

# Segments of `cells`; `Live.at` says where each begins.
START, END, READY, RELEASE, AVAILABLE, TURN, KEY, FIRST, COUNT, FREE, BEFORE, AFTER = range(12)

NEVER = np.iinfo(np.int64).max

CHEAP = 32  # places that are moved in a queue in the time that a task takes

ABSENT = -1  # the key of a hop that is in no queue; the pointers of a lane that an Op is not in


class Live(NamedTuple):  # numba takes no dataclass
    """Tasks t, pieces p, hops h, Ops o (the end of the step is one), devices d; capacities are
    larger. `counters` are numbers of tasks, reads, waits, makes, stands, hops, pieces, journal
    entries, waiting Ops, evaluations, and of tasks and hops in these since the last change."""

    devices: int
    ops: int
    cells: Ints
    at: Ints
    counters: Ints
    # by task, written once
    op: Ints
    duration: Ints
    latency: Ints
    read_start: Ints  # t + 1
    read: Ints  # pieces
    wait_start: Ints  # t + 1
    wait: Ints  # tasks
    make_start: Ints  # t + 1
    make: Ints  # pieces
    stand_start: Ints  # t + 1
    stand: Ints  # devices in whose lanes the task stands
    hop_start: Ints  # t + 1
    hop_link: Ints
    hop_occupancy: Ints
    hop_task: Ints
    piece_value: Ints
    # by Value
    reader_start: Ints
    reader: Ints  # Ops
    # queues of links, sorted by (key, task order)
    queue: Ints  # links x capacity: hops
    queued: Ints  # links
    # the journal: cell or -1 - hop, and what was there
    journal: Ints  # 2 x capacity
    # Ops to look at again: a heap, and whether an Op is in it
    waiting: Ints
    awaited: Ints
    # lanes that Ops have left in this change: the row that came after, and the device
    left: Ints  # 2 x capacity
    # lanes while an Op is evaluated
    lane: Ints
    seen: Ints


TASKS, READS, WAITS, MAKES, STANDS, HOPS, PIECES, WRITTEN, WAITING, LOOKS, SPENT, LEFT = range(12)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _put(live: Live, segment: int, index: int, value: int) -> bool:
    """Writes a cell, and in the journal what it was; whether that differs."""
    cell = live.at[segment] + index
    old = live.cells[cell]
    if old == value:
        return False
    _note(live, cell, old)
    live.cells[cell] = value
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _note(live: Live, what: int, old: int) -> None:
    written = live.counters[WRITTEN]
    if written < live.journal.shape[1]:
        live.journal[0, written], live.journal[1, written] = what, old
    live.counters[WRITTEN] = written + 1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _get(live: Live, segment: int, index: int) -> int:
    return int(live.cells[live.at[segment] + index])


# Ops to look at again


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def look_again(live: Live, op: int) -> None:
    """The Op will be evaluated."""
    if op < 0 or op >= live.ops or live.awaited[op]:
        return
    live.awaited[op] = 1
    hole = live.counters[WAITING]
    live.counters[WAITING] = hole + 1
    while hole > 0 and live.waiting[(hole - 1) // 2] > op:
        live.waiting[hole] = live.waiting[(hole - 1) // 2]
        hole = (hole - 1) // 2
    live.waiting[hole] = op


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _next(live: Live) -> int:
    first, size = live.waiting[0], live.counters[WAITING] - 1
    live.counters[WAITING] = size
    last, hole = live.waiting[size], 0
    while 2 * hole + 1 < size:
        below = 2 * hole + 1
        if below + 1 < size and live.waiting[below + 1] < live.waiting[below]:
            below += 1
        if last <= live.waiting[below]:
            break
        live.waiting[hole] = live.waiting[below]
        hole = below
    live.waiting[hole] = last
    live.awaited[first] = 0
    return int(first)


# Queues of links


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _precedes(live: Live, hop: int, key: int, other: int) -> bool:
    """Whether a queued hop comes before (key, other hop's task)."""
    own = _get(live, KEY, hop)
    if own != key:
        return bool(own < key)
    a, b = live.hop_task[hop], live.hop_task[other]
    if live.op[a] != live.op[b]:
        return bool(live.op[a] < live.op[b])
    return bool(a < b)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _find(live: Live, hop: int, key: int) -> int:
    """Where in its link's queue a hop with this key is, or would be."""
    link = live.hop_link[hop]
    low, high = 0, live.queued[link]
    while low < high:
        middle = (low + high) // 2
        if _precedes(live, live.queue[link, middle], key, hop):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _take_out(live: Live, hop: int) -> int:
    """Takes a hop out of its queue; where it was."""
    link = live.hop_link[hop]
    place, size = _find(live, hop, _get(live, KEY, hop)), live.queued[link]
    live.counters[SPENT] += (size - place) // CHEAP
    for k in range(place, size - 1):
        live.queue[link, k] = live.queue[link, k + 1]
    live.queued[link] = size - 1
    live.cells[live.at[KEY] + hop] = ABSENT
    return place


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _put_in(live: Live, hop: int, key: int) -> int:
    """Puts a hop into its queue; where it is."""
    link = live.hop_link[hop]
    place, size = _find(live, hop, key), live.queued[link]
    live.counters[SPENT] += (size - place) // CHEAP
    for k in range(size, place, -1):
        live.queue[link, k] = live.queue[link, k - 1]
    live.queue[link, place] = hop
    live.queued[link] = size + 1
    live.cells[live.at[KEY] + hop] = key
    return place


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _look_again_at(live: Live, link: int, place: int) -> None:
    """The Op of the message at a place of a queue will be evaluated."""
    if place < live.queued[link]:
        look_again(live, live.op[live.hop_task[live.queue[link, place]]])


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _stays(live: Live, hop: int, key: int, place: int) -> bool:
    """Whether a hop at a place of its queue is still in order with a new key."""
    link = live.hop_link[hop]
    if place > 0 and not _precedes(live, live.queue[link, place - 1], key, hop):
        return False
    if place + 1 < live.queued[link]:
        return not _precedes(live, live.queue[link, place + 1], key, hop)
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _turn(live: Live, hop: int, key: int) -> int:
    """When its link turns to a message that is ready at `key`."""
    link, old = live.hop_link[hop], _get(live, KEY, hop)
    if old == ABSENT:
        _note(live, -1 - hop, ABSENT)
        place = _put_in(live, hop, key)
        _look_again_at(live, link, place + 1)
    else:
        place = _find(live, hop, old)
        if old != key:
            _note(live, -1 - hop, old)
            if _stays(live, hop, key, place):
                live.cells[live.at[KEY] + hop] = key
            else:
                _look_again_at(live, link, _take_out(live, hop))
                place = _put_in(live, hop, key)
                _look_again_at(live, link, place + 1)
    turn = key
    if place > 0:
        before = live.queue[link, place - 1]
        turn = max(turn, _get(live, TURN, before) + live.hop_occupancy[before])
    if _put(live, TURN, hop, turn):
        _look_again_at(live, link, place + 1)
    return turn


# Evaluation


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _ready(live: Live, task: int, row: int) -> int:
    """When a task is ready, as things stand."""
    ready = _get(live, RELEASE, task)
    for k in range(live.read_start[task], live.read_start[task + 1]):
        ready = max(ready, _get(live, AVAILABLE, live.read[k]))
    for k in range(live.wait_start[task], live.wait_start[task + 1]):
        ready = max(ready, _get(live, END, live.wait[k]))
    for k in range(live.stand_start[task], live.stand_start[task + 1]):
        device = live.stand[k]
        if live.seen[device] != row:
            live.seen[device] = row
            before = _get(live, BEFORE, row * live.devices + device)
            live.lane[device] = _get(live, FREE, before * live.devices + device)
        ready = max(ready, live.lane[device])
    return ready


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _evaluate(live: Live, op: int) -> None:
    """Times of all tasks of an Op from what they depend on."""
    row = op + 1
    first = _get(live, FIRST, op)
    last = first + _get(live, COUNT, op)
    live.counters[SPENT] += last - first + live.hop_start[last] - live.hop_start[first]
    for task in range(first, last):
        ready = _ready(live, task, row)
        start, end = ready, ready + live.duration[task]
        if live.hop_start[task] < live.hop_start[task + 1]:
            end = 0
            for hop in range(live.hop_start[task], live.hop_start[task + 1]):
                turn = _turn(live, hop, ready)
                start = max(start, turn)
                end = max(end, turn + live.hop_occupancy[hop] + live.latency[task])
        _put(live, READY, task, ready)
        _put(live, START, task, start)
        _put(live, END, task, end)
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            live.lane[live.stand[k]] = end
        for k in range(live.make_start[task], live.make_start[task + 1]):
            if _put(live, AVAILABLE, live.make[k], end):
                value = live.piece_value[live.make[k]]
                for r in range(live.reader_start[value], live.reader_start[value + 1]):
                    if live.reader[r] > op:
                        look_again(live, live.reader[r])
    for task in range(first, last):
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            device = live.stand[k]
            if live.seen[device] == row:
                live.seen[device] = -1
                if _put(live, FREE, row * live.devices + device, live.lane[device]):
                    look_again(live, _get(live, AFTER, row * live.devices + device) - 1)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def relax(live: Live, limit: int) -> bool:
    """Evaluates what has to be, tasks and hops up to a limit; whether that was enough."""
    live.counters[SPENT] = 0
    while live.counters[WAITING] > 0:
        if live.counters[SPENT] > limit:
            while live.counters[WAITING] > 0:
                _next(live)
            return False
        _evaluate(live, _next(live))
        live.counters[LOOKS] += 1
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def finish(live: Live) -> int:
    """When the last lane is free."""
    latest = 0
    for device in range(live.devices):
        before = _get(live, BEFORE, (live.ops + 1) * live.devices + device)
        latest = max(latest, _get(live, FREE, before * live.devices + device))
    return latest


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
    for earlier in range(_get(live, FIRST, op), task):
        for k in range(live.stand_start[earlier], live.stand_start[earlier + 1]):
            if live.stand[k] == device and place[earlier] < 0:
                free = max(free, _get(live, END, earlier))
    if free > 0:
        return free
    row = _get(live, BEFORE, (op + 1) * live.devices + device)
    return max(_get(live, FREE, row * live.devices + device), 0)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def seed(live: Live, start: Ints, end: Ints) -> None:
    """Takes over a schedule that was worked out elsewhere: times in the order of Ops."""
    at = 0
    for op in range(live.ops):
        first, count = _get(live, FIRST, op), _get(live, COUNT, op)
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
        _next(live)
    live.queued[:] = 0
    for op in range(live.ops):
        _seed_messages(live, op)
    for link in range(len(live.queued)):
        size, free = live.queued[link], 0
        key = live.cells[live.at[KEY] + live.queue[link, :size]]
        live.queue[link, :size] = live.queue[link, :size][np.argsort(key, kind="mergesort")]
        for place in range(size):
            hop = live.queue[link, place]
            turn = max(_get(live, KEY, hop), free)
            live.cells[live.at[TURN] + hop] = turn
            free = turn + live.hop_occupancy[hop]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _seed_messages(live: Live, op: int) -> None:
    """Adds the messages of an Op to the queues; what they depend on has its times."""
    first, row = _get(live, FIRST, op), op + 1
    for task in range(first, first + _get(live, COUNT, op)):
        ready = _ready(live, task, row)
        live.cells[live.at[READY] + task] = ready
        for hop in range(live.hop_start[task], live.hop_start[task + 1]):
            link = live.hop_link[hop]
            live.queue[link, live.queued[link]] = hop
            live.queued[link] += 1
            live.cells[live.at[KEY] + hop] = ready
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            live.lane[live.stand[k]] = _get(live, END, task)
    live.seen[:] = -1


# Changing what an Op does


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def replace(live: Live, op: int, first: int, count: int) -> None:
    """The Op's tasks are now those from `first` on: its messages leave their queues, it enters and
    leaves lanes."""
    old, many, row = _get(live, FIRST, op), _get(live, COUNT, op), op + 1
    for task in range(old, old + many):
        for hop in range(live.hop_start[task], live.hop_start[task + 1]):
            key = _get(live, KEY, hop)
            if key != ABSENT:
                _note(live, -1 - hop, key)
                _look_again_at(live, live.hop_link[hop], _take_out(live, hop))
    live.seen[:] = -1
    for task in range(first, first + count):
        for k in range(live.make_start[task], live.make_start[task + 1]):
            _put(live, AVAILABLE, live.make[k], ABSENT)
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            live.seen[live.stand[k]] = row
    for device in range(live.devices):
        here = row * live.devices + device
        stands = _get(live, BEFORE, here) != ABSENT
        if stands and live.seen[device] != row:
            _leave(live, here, device)
        elif not stands and live.seen[device] == row:
            _enter(live, row, device)
    live.seen[:] = -1
    _put(live, FIRST, op, first)
    _put(live, COUNT, op, count)
    look_again(live, op)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _leave(live: Live, here: int, device: int) -> None:
    before, after = _get(live, BEFORE, here), _get(live, AFTER, here)
    _put(live, AFTER, before * live.devices + device, after)
    _put(live, BEFORE, after * live.devices + device, before)
    _put(live, BEFORE, here, ABSENT)
    _put(live, AFTER, here, ABSENT)
    many = live.counters[LEFT]
    if many < live.left.shape[1]:
        live.left[0, many], live.left[1, many] = after, device
    live.counters[LEFT] = many + 1
    look_again(live, after - 1)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _enter(live: Live, row: int, device: int) -> None:
    before = row - 1
    while _get(live, AFTER, before * live.devices + device) == ABSENT:
        before -= 1
    after = _get(live, AFTER, before * live.devices + device)
    here = row * live.devices + device
    _put(live, AFTER, before * live.devices + device, row)
    _put(live, BEFORE, after * live.devices + device, row)
    _put(live, BEFORE, here, before)
    _put(live, AFTER, here, after)
    _put(live, FREE, here, ABSENT)
    look_again(live, after - 1)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def release_all(live: Live, released: Ints) -> int:
    """The host issues all tasks then, in the order of Ops; the first time that this changes."""
    at, since = 0, NEVER
    for op in range(live.ops):
        first, count = _get(live, FIRST, op), _get(live, COUNT, op)
        changed = False
        for k in range(count):
            task, new = first + k, released[at + k]
            old, ready = _get(live, RELEASE, task), _get(live, READY, task)
            if not _put(live, RELEASE, task, new):
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
        there = max(there, _get(live, AVAILABLE, live.read[k]))
    return there


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def first_ready(live: Live, op: int) -> int:
    """When the first of an Op's tasks was ready."""
    since, first = NEVER, _get(live, FIRST, op)
    for task in range(first, first + _get(live, COUNT, op)):
        since = min(since, _get(live, READY, task))
    return since


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def first_entry(live: Live, op: int, replaced: Ints) -> int:
    """When the first of an Op's new tasks is ready that depends on nothing that is replaced, or the
    first was that now comes after one of them in a lane."""
    since, first, row = NEVER, _get(live, FIRST, op), op + 1
    live.seen[:] = -1
    for task in range(first, first + _get(live, COUNT, op)):
        ready = _get(live, RELEASE, task)
        own = live.wait_start[task] < live.wait_start[task + 1]
        for k in range(live.read_start[task], live.read_start[task + 1]):
            available = _get(live, AVAILABLE, live.read[k])
            own, ready = own or available == ABSENT, max(ready, available)
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            device = live.stand[k]
            before = _get(live, BEFORE, row * live.devices + device)
            own = own or live.seen[device] == row or (before > 0 and replaced[before - 1] == 1)
            live.seen[device] = row
            ready = max(ready, _get(live, FREE, before * live.devices + device))
        if not own:
            since = min(since, ready)
    for device in range(live.devices):
        after = _get(live, AFTER, row * live.devices + device)
        if live.seen[device] == row and after <= live.ops and replaced[after - 1] == 0:
            since = min(since, _get(live, READY, _task_on(live, after - 1, device)))
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
        before = _get(live, BEFORE, row * live.devices + device)
        task = _task_on(live, row - 1, device)
        if before == ABSENT or task < 0:
            continue
        since = min(since, _get(live, READY, task))
        if before == 0 or replaced[before - 1] == 0:
            free = max(_get(live, FREE, before * live.devices + device), 0)
            since = min(since, max(free, _get(live, RELEASE, task), _read_at(live, task)))
    return since


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _task_on(live: Live, op: int, device: int) -> int:
    """The first of an Op's tasks in a lane, or -1."""
    first = _get(live, FIRST, op)
    for task in range(first, first + _get(live, COUNT, op)):
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            if live.stand[k] == device:
                return task
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def in_order(live: Live, column: Ints) -> Ints:
    """A column by task, of the tasks that are, in the order of Ops."""
    total = 0
    for op in range(live.ops):
        total += _get(live, COUNT, op)
    found, at = np.empty(total, column.dtype), 0
    for op in range(live.ops):
        first, count = _get(live, FIRST, op), _get(live, COUNT, op)
        found[at : at + count] = column[first : first + count]
        at += count
    return found


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def undo(live: Live, until: int) -> None:
    """Everything as it was when the journal had so many entries."""
    for entry in range(live.counters[WRITTEN] - 1, until - 1, -1):
        what, old = live.journal[0, entry], live.journal[1, entry]
        if what >= 0:
            live.cells[what] = old
            continue
        hop = -1 - what
        if _get(live, KEY, hop) != ABSENT:
            _take_out(live, hop)
        if old != ABSENT:
            _put_in(live, hop, old)
    live.counters[WRITTEN] = until
