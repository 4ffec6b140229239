"""resume: the schedule of a changed step, from the first time on that can have changed.

It is the schedule of schedule.py. What stands in a lane reads only what earlier tasks of that lane
have made, and what messages of its own Op bring. So every lane runs by itself until it comes to a
message that has not arrived; a message waits until the lanes have passed what it needs. When no
lane can run, the first of the messages that are ready, by (ready, order), is final: links turn to
it, and the lanes that wait for it run on.

Lanes begin where they were at `since`: before, all is as it was. They go from stop to stop
(live.py).
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints, compiled
from apportion.lower import SHIFT
from apportion.simulate.delta.block_store import PLACE, BlockStore
from apportion.simulate.delta.schedule_state import (
    ABSENT,
    APART,
    ARRIVED,
    ARRIVES,
    AVAILABLE,
    BEHIND,
    BLOCK,
    CLOSE,
    FIRST_HOP,
    FREE,
    HEAPED,
    ISSUE,
    LAST_NEED,
    LAST_WAIT,
    LOOKS,
    MESSAGE,
    NEED,
    NEVER,
    NEXT,
    OP,
    OWN_ISSUE,
    OWN_WORK,
    READY,
    SEVERAL,
    SOONEST,
    STAGE,
    STANDS,
    STOCKED,
    WAIT,
    WAITING,
    WAITS,
    WATCHING,
    WORK,
    WRITTEN,
    Live,
    available,
    chart,
    first_change,
    fits,
    put,
    replace,
)
from apportion.simulate.simulate import issued


@compiled
def change(stock: BlockStore, live: Live, ops: Ints, blocks: Ints, limit: int) -> int:
    """Gives Ops other Blocks; when the step ends. ABSENT, and nothing is changed, if there is no
    room for their messages. If the step ends after `limit`, it is given up once a lane shows it;
    then it ends no sooner than what is returned."""
    if not fits(stock, live, blocks):
        return ABSENT
    replaced = np.zeros(live.rows // 2, np.uint8)
    for op in ops:
        replaced[op] = 1
    since = first_change(stock, live, replaced, ops)
    replace(stock, live, ops, blocks)
    since = min(since, first_change(stock, live, replaced, ops))
    return run(stock, live, ops, since, limit)  # type: ignore[no-any-return]


@compiled
def begin(stock: BlockStore, live: Live, blocks: Ints) -> int:
    """Gives all Ops their first Blocks; when the step ends."""
    ops = np.arange(live.rows // 2)
    replace(stock, live, ops, blocks)
    return run(stock, live, ops, 0, NEVER)  # type: ignore[no-any-return]


@compiled
def run(stock: BlockStore, live: Live, ops: Ints, since: int, limit: int) -> int:
    """Works out all times from `since` on, and those of the given Ops; when the step ends, or if
    that is after `limit`, when some lane runs after it."""
    release = _releases(stock, live)
    _begin_lanes(live, ops, since, release)
    live.counters[HEAPED], live.counters[LOOKS] = 0, _begin_messages(stock, live, since)
    ends = _run(stock, live, release, limit)
    if ends > limit:
        _forget(stock, live)
        return ends  # type: ignore[no-any-return]
    for device in range(live.devices):
        assert live.lane_row[device] == live.rows, "a lane never ran"
        ends = max(ends, live.lane_free[device])
    return ends  # type: ignore[no-any-return]


@compiled
def _run(stock: BlockStore, live: Live, release: Ints, limit: int) -> int:
    """Runs lanes and messages until none is left, or a lane runs after `limit`; then when, else 0.
    It is one function, and all arrays are named at first, because calls that pass these structures
    take longer than what there is to do."""
    cells, journal, counters, room = live.cells, live.journal, live.counters, len(live.journal)
    rows, devices, width = live.rows, live.devices, 2 * live.devices + 1
    slots, frees, ready_at, arrivals = (
        live.at[AVAILABLE], live.at[FREE], live.at[READY], live.at[ARRIVES],
    )  # fmt: skip
    block_of, first_message = live.at[BLOCK], live.at[MESSAGE]
    marks, leap = live.marks, live.leap
    value_start, value_slot = live.value_start, live.value_slot
    lane_row, lane_place, lane_free = live.lane_row, live.lane_place, live.lane_free
    lane_host, runnable, watched, mail = live.lane_host, live.runnable, live.watched, live.mail
    next_lane, heap, look, links = live.next_lane, live.heap, live.look, live.link
    need_slot, need_lane = live.need_slot, live.need_lane
    need_device, need_row = live.need_device, live.need_row
    coming = live.coming
    lane, duration, issue, is_message = stock.lane, stock.duration, stock.issue, stock.message
    wait_start, wait, make_start, make = (
        stock.wait_start, stock.wait, stock.make_start, stock.make,
    )  # fmt: skip
    hop_start, hop_link, occupancy = stock.hop_start, stock.hop_link, stock.hop_occupancy
    latency, ahead = stock.latency, live.ahead
    many, looks = devices, counters[LOOKS]
    while True:
        if looks > 0:  # a message looks for the first lane that has not passed what it needs
            looks -= 1
            message = look[looks]
            ready, need = mail[message, SOONEST], mail[message, STAGE]
            while need < mail[message, LAST_NEED]:
                place = need_lane[need]
                if place >= 0:
                    device, row = need_device[need], need_row[need]
                    if row > lane_row[device] or (
                        row == lane_row[device]
                        and (
                            lane_place[device] == 0
                            or not _made(stock, live, device, row, need_slot[need])
                        )
                    ):
                        break
                    if marks[place] & SEVERAL:
                        ready = max(ready, cells[slots + need_slot[need]])
                    else:
                        ready = max(ready, cells[frees + 2 * place])
                need += 1
            mail[message, SOONEST] = ready
            if need < mail[message, LAST_NEED]:
                mail[message, STAGE] = need
                mail[message, WATCHING] = watched[need_lane[need]]
                watched[need_lane[need]] = message
            else:
                put(cells, journal, counters, ready_at + message, ready)
                _push(heap, counters, ready, mail[message, OP] << SHIFT | message)
        elif many > 0:  # a lane runs until it has to wait
            many -= 1
            device = runnable[many]
            here, written, waits = device * rows, counters[WRITTEN], -1
            row, place = lane_row[device], lane_place[device]
            free, host = lane_free[device], lane_host[device]
            while row < rows and free <= limit:
                mark = marks[here + row]
                if mark & CLOSE:
                    op = row // 2
                    begin = cells[block_of + op] * width + (row & 1) * devices + device
                    first, last = lane[begin], lane[begin + 1]
                    alone = last - first == 1
                    for k in range(first + place, last):
                        ready = free
                        if wait_start[k] < wait_start[k + 1]:
                            own = cells[first_message + op]
                            for w in range(wait_start[k + 1] - 1, wait_start[k] - 1, -1):
                                if coming[own + wait[w]]:  # the last of them is the last to come
                                    waits = own + wait[w]
                                    break
                                ready = max(ready, cells[arrivals + own + wait[w]])
                        elif is_message[k] >= 0:
                            message = cells[first_message + op] + is_message[k]
                            if coming[message]:
                                counters[WRITTEN] = written
                                many = _meet(stock, live, message, free, many)
                                written = counters[WRITTEN]
                            if not coming[message]:
                                free = cells[arrivals + message]
                                continue
                            waits = message
                        if waits >= 0:
                            place = k - first
                            break
                        if issue[k]:
                            if ahead[device]:
                                ready = max(ready, release[host])
                                host += 1
                            else:
                                host += issue[k]
                                ready = max(ready, host)
                        free = ready + duration[k]
                        if alone:
                            continue
                        for m in range(make_start[k], make_start[k + 1]):
                            value = value_start[op] + (make[m] >> SHIFT)
                            cell = slots + value_slot[value] + (make[m] & PLACE)
                            if cells[cell] != free:
                                if written < room:
                                    journal[written, 0], journal[written, 1] = cell, cells[cell]
                                written += 1
                                cells[cell] = free
                else:
                    if mark & WAITS:
                        first = cells[first_message + row // 2]
                        low, high = leap[here + row, WAIT], leap[here + row, LAST_WAIT]
                        for w in range(high - 1, low - 1, -1):
                            if coming[first + wait[w]]:
                                waits = first + wait[w]
                                break
                            free = max(free, cells[arrivals + first + wait[w]])
                    if waits < 0:
                        host += leap[here + row, OWN_ISSUE]
                        free = max(free, host) + leap[here + row, OWN_WORK]
                    if mark <= STANDS:
                        row += 1
                        continue
                if waits >= 0:
                    break
                place = 0
                cell = frees + 2 * (here + row)
                if cells[cell] != free:
                    if written < room:
                        journal[written, 0], journal[written, 1] = cell, cells[cell]
                    written += 1
                    cells[cell] = free
                cell += 1
                if cells[cell] != host:
                    if written < room:
                        journal[written, 0], journal[written, 1] = cell, cells[cell]
                    written += 1
                    cells[cell] = host
                message = watched[here + row]
                if message >= 0:
                    watched[here + row] = -1
                    while message >= 0:
                        look[looks] = message
                        looks += 1
                        message = mail[message, WATCHING]
                cell = here + row
                if leap[cell, NEXT] == 0:
                    chart(marks, leap, cell, here + rows)
                row = leap[cell, NEXT] - here
                free = max(free + leap[cell, WORK], host + leap[cell, BEHIND])
                host += leap[cell, ISSUE]
            counters[WRITTEN] = written
            lane_row[device], lane_place[device] = row, place
            lane_free[device], lane_host[device] = free, host
            if free > limit:
                return int(free)
            if waits >= 0:
                next_lane[device] = mail[waits, WAITING]
                mail[waits, WAITING] = device
                if place > 0 and watched[here + row] >= 0:
                    message = watched[here + row]
                    watched[here + row] = -1
                    while message >= 0:
                        look[looks] = message
                        looks += 1
                        message = mail[message, WATCHING]
        elif counters[HEAPED] > 0:  # links turn to the first message, and it arrives
            ready, message = heap[0, 0], heap[0, 1] & PLACE
            _pop(heap, counters)
            k, done, written = mail[message, STOCKED], 0, counters[WRITTEN]
            shift = mail[message, FIRST_HOP] - hop_start[k]
            for hop in range(hop_start[k], hop_start[k + 1]):
                link = hop_link[hop]
                turn = max(ready, links[link]) + occupancy[hop]
                links[link], cell = turn, hop + shift
                if cells[cell] != turn:
                    if written < room:
                        journal[written, 0], journal[written, 1] = cell, cells[cell]
                    written += 1
                    cells[cell] = turn
                done = max(done, turn)
            counters[WRITTEN] = written
            put(cells, journal, counters, arrivals + message, done + latency[k])
            coming[message] = 0
            device = mail[message, WAITING]
            mail[message, WAITING] = -1
            while device >= 0:
                runnable[many] = device
                many += 1
                device = next_lane[device]
        else:
            return 0


@compiled
def _forget(stock: BlockStore, live: Live) -> None:
    """No message waits for a lane any more."""
    cells, block_of, first_message = live.cells, live.at[BLOCK], live.at[MESSAGE]
    mail, need_lane, watched = live.mail, live.need_lane, live.watched
    message_start = stock.message_start
    for op in range(live.rows // 2):
        block, first = cells[block_of + op], cells[first_message + op]
        for message in range(first, first + message_start[block + 1] - message_start[block]):
            need = mail[message, STAGE]
            if need < mail[message, LAST_NEED] and need_lane[need] >= 0:
                watched[need_lane[need]] = -1


# Where it begins


@compiled
def _begin_lanes(live: Live, ops: Ints, since: int, release: Ints) -> None:
    """Puts every lane behind its last stop before `since` and before all that the given Ops do in
    it; to its first row, where a host must not be too far ahead. What such a host has done is the
    number of its releases so far."""
    cells, marks, rows = live.cells, live.marks, live.rows
    for device in range(live.devices):
        here, free = device * rows, live.at[FREE] + 2 * device * rows
        low, high = 0, 0 if live.ahead[device] else (rows - 1) // APART + 1
        while low < high:
            middle = (low + high) // 2
            if cells[free + 2 * middle * APART] < since:
                low = middle + 1
            else:
                high = middle
        high = min(low * APART, rows)
        for op in ops:
            for late in range(2):
                if marks[here + 2 * op + late] & STANDS:
                    high = min(high, 2 * op + late)
        before = high - 1
        while before >= 0 and (marks[here + before] <= STANDS or cells[free + 2 * before] >= since):
            before -= 1
        live.lane_row[device], live.lane_place[device] = before + 1, 0
        live.lane_free[device] = cells[free + 2 * before] if before >= 0 else 0
        live.lane_host[device] = cells[free + 2 * before + 1] if before >= 0 else 0
        if live.ahead[device]:
            live.lane_host[device] = release[device]
        live.runnable[device] = device


@compiled
def _releases(stock: BlockStore, live: Live) -> Ints:
    """For every device where its releases begin, and then all of them: when hosts that must not be
    too far ahead issue the tasks of their lanes."""
    devices, rows = live.devices, live.rows
    if not live.ahead.any():
        return np.zeros(devices, np.int64)
    total = 0
    for op in range(rows // 2):
        begin = live.cells[live.at[BLOCK] + op] * (2 * devices + 1)
        total += stock.lane[begin + 2 * devices] - stock.lane[begin]
    release, issue, duration = np.zeros((3, devices + total), np.int64)
    at = devices
    for device in range(devices):
        release[device] = at
        for row in range(rows):
            if not (live.ahead[device] and live.marks[device * rows + row] & STANDS):
                continue
            block = live.cells[live.at[BLOCK] + row // 2]
            begin = block * (2 * devices + 1) + (row & 1) * devices + device
            for k in range(stock.lane[begin], stock.lane[begin + 1]):
                if stock.issue[k]:
                    issue[at], duration[at] = stock.issue[k], stock.duration[k]
                    at += 1
        first = release[device]
        lane = np.full(at - first, device)
        release[first:at] = issued(lane, issue[first:at], duration[first:at], live.ahead)
    return release


@compiled
def _begin_messages(stock: BlockStore, live: Live, since: int) -> int:
    """Links are as the messages before `since` left them; how many others there are to look at."""
    cells, at, message_start, hop_start = live.cells, live.at, stock.message_start, stock.hop_start
    mail, coming, look, links, looks = live.mail, live.coming, live.look, live.link, 0
    stands, hop_link = stock.stands, stock.hop_link
    links[:] = 0
    for op in range(live.rows // 2):
        block = cells[at[BLOCK] + op]
        low, high = message_start[block], message_start[block + 1]
        if low == high:
            continue
        first = cells[at[MESSAGE] + op]
        for k in range(low, high):
            message = first + k - low
            ready = cells[at[READY] + message]
            if ready != ABSENT and ready < since:
                coming[message] = 0
                shift = mail[message, FIRST_HOP] - hop_start[k]
                for h in range(hop_start[k], hop_start[k + 1]):
                    link, passed = hop_link[h], cells[h + shift]
                    links[link] = max(links[link], passed)
                continue
            coming[message], mail[message, SOONEST] = 1, 0
            mail[message, ARRIVED], mail[message, WAITING] = 0, -1
            if not stands[k]:
                mail[message, STAGE] = mail[message, NEED]
                look[looks] = message
                looks += 1
    return looks


# Messages


@compiled
def _made(stock: BlockStore, live: Live, device: int, row: int, slot: int) -> bool:
    """Whether a lane that stands in the middle of a row has made a piece there already."""
    op = row // 2
    block = live.cells[live.at[BLOCK] + op]
    first = stock.lane[block * (2 * live.devices + 1) + (row & 1) * live.devices + device]
    low, high = stock.make_start[first], stock.make_start[first + live.lane_place[device]]
    for k in range(low, high):
        name, values = stock.make[k], live.value_start[op]
        if live.value_slot[values + (name >> SHIFT)] + (name & PLACE) == slot:
            return True
    return False


@compiled
def _meet(stock: BlockStore, live: Live, message: int, free: int, many: int) -> int:
    """A lane has come to a message that stands in it; once all have, the message is ready. How many
    lanes can run then."""
    cells, at, k = live.cells, live.at, live.mail[message, STOCKED]
    ready = max(live.mail[message, SOONEST], free)
    live.mail[message, ARRIVED] += 1
    whole = live.mail[message, ARRIVED] == stock.stands[k]
    if whole:
        for need in range(live.mail[message, NEED], live.mail[message, LAST_NEED]):
            there = available(cells, at, live.marks, live.need_slot[need], live.need_lane[need])
            ready = max(ready, there)
    live.mail[message, SOONEST] = ready
    if whole:
        put(cells, live.journal, live.counters, at[READY] + message, ready)
    if whole and stock.hop_start[k] < stock.hop_start[k + 1]:
        _push(live.heap, live.counters, ready, live.mail[message, OP] << SHIFT | message)
    elif whole:
        live.coming[message] = 0
        many = _arrive(cells, live.journal, live.counters, at[ARRIVES] + message,
                       ready + stock.lasts[k], live.mail, live.next_lane, live.runnable, message,
                       many)  # fmt: skip
    return many


@compiled
def _arrive(  # type: ignore[no-untyped-def]
    cells, journal, counters, cell, arrives, mail, next_lane, runnable, message, many
):  # fmt: skip
    """A message arrives: the lanes that wait for it can run; how many can."""
    put(cells, journal, counters, cell, arrives)
    device = mail[message, WAITING]
    mail[message, WAITING] = -1
    while device >= 0:
        runnable[many] = device
        many += 1
        device = next_lane[device]
    return many


# The heap of messages that are ready


@compiled
def _push(heap: Ints, counters: Ints, ready: int, order: int) -> None:
    hole = counters[HEAPED]
    counters[HEAPED] = hole + 1
    while hole > 0:
        above = (hole - 1) >> 1
        if heap[above, 0] < ready or (heap[above, 0] == ready and heap[above, 1] < order):
            break
        heap[hole, 0], heap[hole, 1] = heap[above, 0], heap[above, 1]
        hole = above
    heap[hole, 0], heap[hole, 1] = ready, order


@compiled
def _pop(heap: Ints, counters: Ints) -> None:
    size = counters[HEAPED] - 1
    counters[HEAPED] = size
    ready, order, hole, below = heap[size, 0], heap[size, 1], 0, 1
    while below < size:
        if below + 1 < size and (
            heap[below + 1, 0] < heap[below, 0]
            or (heap[below + 1, 0] == heap[below, 0] and heap[below + 1, 1] < heap[below, 1])
        ):
            below += 1
        if ready < heap[below, 0] or (ready == heap[below, 0] and order < heap[below, 1]):
            break
        heap[hole, 0], heap[hole, 1] = heap[below, 0], heap[below, 1]
        hole, below = below, 2 * below + 1
    heap[hole, 0], heap[hole, 1] = ready, order


# What it came to


@compiled
def tell(stock: BlockStore, live: Live, first: Ints, start: Ints, end: Ints) -> None:
    """Writes start and end of all tasks; those of Op o are from first[o] on."""
    release = _releases(stock, live)
    for device in range(live.devices):
        free, host = 0, release[device] if live.ahead[device] else 0
        for row in range(live.rows):
            if live.marks[device * live.rows + row] & STANDS:
                free, host = _tell_row(
                    stock, live, device, row, free, host, release, first, start, end
                )
    for op in range(live.rows // 2):
        block, low = live.cells[live.at[BLOCK] + op], live.cells[live.at[MESSAGE] + op]
        for message in range(
            low, low + stock.message_start[block + 1] - stock.message_start[block]
        ):
            k = live.mail[message, STOCKED]
            task, shift = (
                first[op] + stock.order[k],
                live.mail[message, FIRST_HOP] - stock.hop_start[k],
            )
            start[task] = live.cells[live.at[READY] + message]
            end[task] = live.cells[live.at[ARRIVES] + message]
            for hop in range(stock.hop_start[k], stock.hop_start[k + 1]):
                turn = live.cells[hop + shift] - stock.hop_occupancy[hop]
                start[task] = max(start[task], turn)


@compiled
def _tell_row(  # type: ignore[no-untyped-def]
    stock, live, device, row, free, host, release, first, start, end
):  # fmt: skip
    op = row // 2
    block, own = live.cells[live.at[BLOCK] + op], live.cells[live.at[MESSAGE] + op]
    begin = block * (2 * live.devices + 1) + (row & 1) * live.devices + device
    for k in range(stock.lane[begin], stock.lane[begin + 1]):
        if stock.message[k] >= 0:
            free = live.cells[live.at[ARRIVES] + own + stock.message[k]]
            continue
        ready = free
        if stock.issue[k] and live.ahead[device]:
            ready = max(ready, release[host])
            host += 1
        elif stock.issue[k]:
            host += stock.issue[k]
            ready = max(ready, host)
        for w in range(stock.wait_start[k], stock.wait_start[k + 1]):
            ready = max(ready, live.cells[live.at[ARRIVES] + own + stock.wait[w]])
        free = ready + stock.duration[k]
        start[first[op] + stock.task[k]], end[first[op] + stock.task[k]] = ready, free
    place = device * live.rows + row
    known = live.marks[place] <= STANDS or free == live.cells[live.at[FREE] + 2 * place]
    assert known, "a lane is not as it was"
    return free, host
