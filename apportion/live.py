"""Live: a schedule that can be changed, in arrays; what delta.py works on.

All numbers that change are in one array, `cells`; a journal keeps what was there before, so that a
change can be undone. Tasks are only ever added: an Op's old ones stay where they were. Here is what
the arrays are, the queues of links, and what it takes to give an Op other tasks. How times follow
from that is in relax.py (what moves) and resume.py (everything from some time on).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

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
def put(live: Live, segment: int, index: int, value: int) -> bool:
    """Writes a cell, and in the journal what it was; whether that differs."""
    cell = live.at[segment] + index
    old = live.cells[cell]
    if old == value:
        return False
    note(live, cell, old)
    live.cells[cell] = value
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def note(live: Live, what: int, old: int) -> None:
    written = live.counters[WRITTEN]
    if written < live.journal.shape[1]:
        live.journal[0, written], live.journal[1, written] = what, old
    live.counters[WRITTEN] = written + 1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def get(live: Live, segment: int, index: int) -> int:
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
def next_op(live: Live) -> int:
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
def precedes(live: Live, hop: int, key: int, other: int) -> bool:
    """Whether a queued hop comes before (key, other hop's task)."""
    own = get(live, KEY, hop)
    if own != key:
        return bool(own < key)
    a, b = live.hop_task[hop], live.hop_task[other]
    if live.op[a] != live.op[b]:
        return bool(live.op[a] < live.op[b])
    return bool(a < b)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def find(live: Live, hop: int, key: int) -> int:
    """Where in its link's queue a hop with this key is, or would be."""
    link = live.hop_link[hop]
    low, high = 0, live.queued[link]
    while low < high:
        middle = (low + high) // 2
        if precedes(live, live.queue[link, middle], key, hop):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def take_out(live: Live, hop: int) -> int:
    """Takes a hop out of its queue; where it was."""
    link = live.hop_link[hop]
    place, size = find(live, hop, get(live, KEY, hop)), live.queued[link]
    live.counters[SPENT] += (size - place) // CHEAP
    for k in range(place, size - 1):
        live.queue[link, k] = live.queue[link, k + 1]
    live.queued[link] = size - 1
    live.cells[live.at[KEY] + hop] = ABSENT
    return place


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def put_in(live: Live, hop: int, key: int) -> int:
    """Puts a hop into its queue; where it is."""
    link = live.hop_link[hop]
    place, size = find(live, hop, key), live.queued[link]
    live.counters[SPENT] += (size - place) // CHEAP
    for k in range(size, place, -1):
        live.queue[link, k] = live.queue[link, k - 1]
    live.queue[link, place] = hop
    live.queued[link] = size + 1
    live.cells[live.at[KEY] + hop] = key
    return place


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def look_again_at(live: Live, link: int, place: int) -> None:
    """The Op of the message at a place of a queue will be evaluated."""
    if place < live.queued[link]:
        look_again(live, live.op[live.hop_task[live.queue[link, place]]])


# Changing what an Op does


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def replace(live: Live, op: int, first: int, count: int) -> None:
    """The Op's tasks are now those from `first` on: its messages leave their queues, it enters and
    leaves lanes."""
    old, many, row = get(live, FIRST, op), get(live, COUNT, op), op + 1
    for task in range(old, old + many):
        for hop in range(live.hop_start[task], live.hop_start[task + 1]):
            key = get(live, KEY, hop)
            if key != ABSENT:
                note(live, -1 - hop, key)
                look_again_at(live, live.hop_link[hop], take_out(live, hop))
    live.seen[:] = -1
    for task in range(first, first + count):
        for k in range(live.make_start[task], live.make_start[task + 1]):
            put(live, AVAILABLE, live.make[k], ABSENT)
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            live.seen[live.stand[k]] = row
    for device in range(live.devices):
        here = row * live.devices + device
        stands = get(live, BEFORE, here) != ABSENT
        if stands and live.seen[device] != row:
            _leave(live, here, device)
        elif not stands and live.seen[device] == row:
            _enter(live, row, device)
    live.seen[:] = -1
    put(live, FIRST, op, first)
    put(live, COUNT, op, count)
    look_again(live, op)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _leave(live: Live, here: int, device: int) -> None:
    before, after = get(live, BEFORE, here), get(live, AFTER, here)
    put(live, AFTER, before * live.devices + device, after)
    put(live, BEFORE, after * live.devices + device, before)
    put(live, BEFORE, here, ABSENT)
    put(live, AFTER, here, ABSENT)
    many = live.counters[LEFT]
    if many < live.left.shape[1]:
        live.left[0, many], live.left[1, many] = after, device
    live.counters[LEFT] = many + 1
    look_again(live, after - 1)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _enter(live: Live, row: int, device: int) -> None:
    before = row - 1
    while get(live, AFTER, before * live.devices + device) == ABSENT:
        before -= 1
    after = get(live, AFTER, before * live.devices + device)
    here = row * live.devices + device
    put(live, AFTER, before * live.devices + device, row)
    put(live, BEFORE, after * live.devices + device, row)
    put(live, BEFORE, here, before)
    put(live, AFTER, here, after)
    put(live, FREE, here, ABSENT)
    look_again(live, after - 1)


# Reading and undoing


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def in_order(live: Live, column: Ints) -> Ints:
    """A column by task, of the tasks that are, in the order of Ops."""
    total = 0
    for op in range(live.ops):
        total += get(live, COUNT, op)
    found, at = np.empty(total, column.dtype), 0
    for op in range(live.ops):
        first, count = get(live, FIRST, op), get(live, COUNT, op)
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
        if get(live, KEY, hop) != ABSENT:
            take_out(live, hop)
        if old != ABSENT:
            put_in(live, hop, old)
    live.counters[WRITTEN] = until
