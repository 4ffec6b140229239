"""relax: of a changed schedule only what moves is worked out again.

It is the schedule of schedule.py, kept as the solution of equations: the ready time of a task
follows from the pieces it reads, the messages it waits for and its lanes; the turn of a message on
a link from the message before it in that link's queue, which is sorted by (ready, order). There is
exactly one solution, since what a task depends on comes before it in time. So after a change it is
enough to look again at Ops of which something they depend on has changed, the first in order first,
until nothing changes any more.
"""

from __future__ import annotations

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
    KEY,
    LOOKS,
    READY,
    RELEASE,
    SPENT,
    START,
    TURN,
    WAITING,
    Live,
    find,
    get,
    look_again,
    look_again_at,
    next_op,
    note,
    precedes,
    put,
    put_in,
    take_out,
)

# Turns


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _stays(live: Live, hop: int, key: int, place: int) -> bool:
    """Whether a hop at a place of its queue is still in order with a new key."""
    link = live.hop_link[hop]
    if place > 0 and not precedes(live, live.queue[link, place - 1], key, hop):
        return False
    if place + 1 < live.queued[link]:
        return not precedes(live, live.queue[link, place + 1], key, hop)
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _turn(live: Live, hop: int, key: int) -> int:
    """When its link turns to a message that is ready at `key`."""
    link, old = live.hop_link[hop], get(live, KEY, hop)
    if old == ABSENT:
        note(live, -1 - hop, ABSENT)
        place = put_in(live, hop, key)
        look_again_at(live, link, place + 1)
    else:
        place = find(live, hop, old)
        if old != key:
            note(live, -1 - hop, old)
            if _stays(live, hop, key, place):
                live.cells[live.at[KEY] + hop] = key
            else:
                look_again_at(live, link, take_out(live, hop))
                place = put_in(live, hop, key)
                look_again_at(live, link, place + 1)
    turn = key
    if place > 0:
        before = live.queue[link, place - 1]
        turn = max(turn, get(live, TURN, before) + live.hop_occupancy[before])
    if put(live, TURN, hop, turn):
        look_again_at(live, link, place + 1)
    return turn


# Evaluation


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def ready_at(live: Live, task: int, row: int) -> int:
    """When a task is ready, as things stand."""
    ready = get(live, RELEASE, task)
    for k in range(live.read_start[task], live.read_start[task + 1]):
        ready = max(ready, get(live, AVAILABLE, live.read[k]))
    for k in range(live.wait_start[task], live.wait_start[task + 1]):
        ready = max(ready, get(live, END, live.wait[k]))
    for k in range(live.stand_start[task], live.stand_start[task + 1]):
        device = live.stand[k]
        if live.seen[device] != row:
            live.seen[device] = row
            before = get(live, BEFORE, row * live.devices + device)
            live.lane[device] = get(live, FREE, before * live.devices + device)
        ready = max(ready, live.lane[device])
    return ready


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _evaluate(live: Live, op: int) -> None:
    """Times of all tasks of an Op from what they depend on."""
    row = op + 1
    first = get(live, FIRST, op)
    last = first + get(live, COUNT, op)
    live.counters[SPENT] += last - first + live.hop_start[last] - live.hop_start[first]
    for task in range(first, last):
        ready = ready_at(live, task, row)
        start, end = ready, ready + live.duration[task]
        if live.hop_start[task] < live.hop_start[task + 1]:
            end = 0
            for hop in range(live.hop_start[task], live.hop_start[task + 1]):
                turn = _turn(live, hop, ready)
                start = max(start, turn)
                end = max(end, turn + live.hop_occupancy[hop] + live.latency[task])
        put(live, READY, task, ready)
        put(live, START, task, start)
        put(live, END, task, end)
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            live.lane[live.stand[k]] = end
        for k in range(live.make_start[task], live.make_start[task + 1]):
            if put(live, AVAILABLE, live.make[k], end):
                value = live.piece_value[live.make[k]]
                for r in range(live.reader_start[value], live.reader_start[value + 1]):
                    if live.reader[r] > op:
                        look_again(live, live.reader[r])
    for task in range(first, last):
        for k in range(live.stand_start[task], live.stand_start[task + 1]):
            device = live.stand[k]
            if live.seen[device] == row:
                live.seen[device] = -1
                if put(live, FREE, row * live.devices + device, live.lane[device]):
                    look_again(live, get(live, AFTER, row * live.devices + device) - 1)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def relax(live: Live, limit: int) -> bool:
    """Evaluates what has to be, tasks and hops up to a limit; whether that was enough."""
    live.counters[SPENT] = 0
    while live.counters[WAITING] > 0:
        if live.counters[SPENT] > limit:
            while live.counters[WAITING] > 0:
                next_op(live)
            return False
        _evaluate(live, next_op(live))
        live.counters[LOOKS] += 1
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def finish(live: Live) -> int:
    """When the last lane is free."""
    latest = 0
    for device in range(live.devices):
        before = get(live, BEFORE, (live.ops + 1) * live.devices + device)
        latest = max(latest, get(live, FREE, before * live.devices + device))
    return latest
