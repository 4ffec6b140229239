"""The schedule of a changed step, from the first time on that can have changed. A part of
simulate/delta/.

In: a BlockStore, a ScheduleState, and the Ops that get other Blocks. Out: the times in the state,
and when the step ends. It is the schedule of simulate/schedule.py.

What stands in a lane reads only what earlier tasks of that lane have made, and what messages of its
own Op bring. So every lane runs by itself until it comes to a message that has not arrived; a
message waits until the lanes have passed what it needs. When no lane can run, the first of the
messages that are ready, by (ready, order), is final: links turn to it, and the lanes that wait for
it run on.

Lanes begin where they were at `since`: before, all is as it was. They go from stop to stop
(schedule_state.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part, pop, push
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
    STORED,
    WAIT,
    WAITING,
    WAITS,
    WATCHING,
    WORK,
    WRITTEN,
    ScheduleState,
    available,
    find_leap,
    first_change,
    has_room,
    replace_blocks,
    write_cell,
)
from apportion.simulate.network import issued


@compiled
def change(blocks: BlockStore, state: ScheduleState, ops: Ints, numbers: Ints, limit: int) -> int:
    """Gives Ops other Blocks; when the step ends. ABSENT, and nothing is changed, if there is no
    room for their messages. If the step ends after `limit`, it is given up once a lane shows it;
    then it ends no sooner than what is returned."""
    if not has_room(blocks, state, numbers):
        return ABSENT
    replaced = np.zeros(state.rows // 2, np.uint8)
    for op in ops:
        replaced[op] = 1
    since = first_change(blocks, state, replaced, ops)
    replace_blocks(blocks, state, ops, numbers)
    since = min(since, first_change(blocks, state, replaced, ops))
    return _run_from(blocks, state, ops, since, limit)  # type: ignore[no-any-return]


@compiled
def begin(blocks: BlockStore, state: ScheduleState, numbers: Ints) -> int:
    """Gives all Ops their first Blocks; when the step ends."""
    ops = np.arange(state.rows // 2)
    replace_blocks(blocks, state, ops, numbers)
    return _run_from(blocks, state, ops, np.int64(0), np.int64(NEVER))  # type: ignore[no-any-return]


@compiled
def _run_from(blocks: BlockStore, state: ScheduleState, ops: Ints, since: int, limit: int) -> int:
    """Works out all times from `since` on, and those of the given Ops; when the step ends, or if
    that is after `limit`, when some lane runs after it."""
    release = _releases(blocks, state)
    _begin_lanes(state, ops, since, release)
    state.counters[HEAPED], state.counters[LOOKS] = 0, _begin_messages(blocks, state, since)
    ends = _run_all(blocks, state, release, limit)
    if ends > limit:
        _clear_watchers(blocks, state)
        return ends  # type: ignore[no-any-return]
    for device in range(state.devices):
        assert state.lane_row[device] == state.rows, "a lane never ran"
        ends = max(ends, state.lane_free[device])
    return ends  # type: ignore[no-any-return]


class _CellOffsets(NamedTuple):
    """Where the segments of `cells` begin."""

    slots: int
    frees: int
    ready: int
    arrivals: int
    blocks: int
    messages: int


# What happens until none is left


@compiled_part
def _run_all(blocks: BlockStore, state: ScheduleState, release: Ints, limit: int) -> int:
    """Runs lanes and messages until none is left, or a lane runs after `limit`; then when, else
    0."""
    at = state.at
    where = _CellOffsets(at[AVAILABLE], at[FREE], at[READY], at[ARRIVES], at[BLOCK], at[MESSAGE])
    runnable, looks = state.devices, state.counters[LOOKS]
    while True:
        if looks > 0:
            looks -= 1
            _look(blocks, state, where, state.look[looks])
        elif runnable > 0:
            runnable -= 1
            device = state.runnable[runnable]
            runnable, looks = _run_lane(
                blocks, state, where, release, limit, device, runnable, looks
            )
            if state.lane_free[device] > limit:
                return int(state.lane_free[device])
        elif state.counters[HEAPED] > 0:
            runnable = _deliver(blocks, state, where, runnable)
        else:
            return 0


@compiled_part
def _look(blocks, state, where, message):  # type: ignore[no-untyped-def]
    """A message looks for the first lane that has not passed what it needs, and waits for it; if
    there is none, it is ready."""
    cells, mail, marks, lane_row = state.cells, state.mail, state.marks, state.lane_row
    ready, need, last = mail[message, SOONEST], mail[message, STAGE], mail[message, LAST_NEED]
    while need < last:
        place = state.need_lane[need]
        if place >= 0:
            device, row = state.need_device[need], state.need_row[need]
            if row > lane_row[device] or (
                row == lane_row[device]
                and (
                    state.lane_place[device] == 0
                    or not _made(blocks, state, device, row, state.need_slot[need])
                )
            ):
                break
            if marks[place] & SEVERAL:
                ready = max(ready, cells[where.slots + state.need_slot[need]])
            else:
                ready = max(ready, cells[where.frees + 2 * place])
        need += 1
    mail[message, SOONEST] = ready
    if need < last:
        mail[message, STAGE] = need
        mail[message, WATCHING] = state.watched[state.need_lane[need]]
        state.watched[state.need_lane[need]] = message
    else:
        write_cell(cells, state.journal, state.counters, where.ready + message, ready)
        push(state.heap, state.counters[HEAPED], ready, mail[message, OP] << SHIFT | message)
        state.counters[HEAPED] += 1


@compiled_part
def _run_lane(blocks, state, where, release, limit, device, runnable, looks):  # type: ignore[no-untyped-def]
    """A lane runs until it has to wait, or runs after `limit`. How many lanes can run then, and how
    many messages are to look again."""
    rows, here, waits, marks, leap = state.rows, device * state.rows, -1, state.marks, state.leap
    row, place, written = state.lane_row[device], state.lane_place[device], state.counters[WRITTEN]
    free, host = state.lane_free[device], state.lane_host[device]
    while row < rows and free <= limit:
        mark = marks[here + row]
        if mark & CLOSE:
            free, host, place, waits, runnable, written = _run_records(
                blocks, state, where, release, device, row, place, free, host, runnable, written
            )
        else:
            if mark & WAITS:
                free, waits = _await(blocks, state, where, here + row, row // 2, free)
            if waits < 0:
                host += leap[here + row, OWN_ISSUE]
                free = max(free, host) + leap[here + row, OWN_WORK]
            if mark <= STANDS:
                row += 1
                continue
        if waits >= 0:
            break
        place = 0
        cell = where.frees + 2 * (here + row)
        written = _write(state.cells, state.journal, written, cell, free)
        written = _write(state.cells, state.journal, written, cell + 1, host)
        looks = _wake(state, here + row, looks)
        stop = here + row
        if leap[stop, NEXT] == 0:
            find_leap(marks, leap, stop, here + rows)
        row = leap[stop, NEXT] - here
        free = max(free + leap[stop, WORK], host + leap[stop, BEHIND])
        host += leap[stop, ISSUE]
    state.counters[WRITTEN] = written
    state.lane_row[device], state.lane_place[device] = row, place
    state.lane_free[device], state.lane_host[device] = free, host
    if waits >= 0 and free <= limit:
        state.next_lane[device] = state.mail[waits, WAITING]
        state.mail[waits, WAITING] = device
        if place > 0:
            looks = _wake(state, here + row, looks)
    return runnable, looks


@compiled_part
def _run_records(  # type: ignore[no-untyped-def]
    blocks, state, where, release, device, row, place, free, host, runnable, written
):  # fmt: skip
    """A lane runs the records of one row one by one, from `place` on. When it and its host are free
    then; at which record it waits, and for which message, or -1; how many lanes can run; how much
    is written in the journal."""
    cells, op, waits, journal = state.cells, row // 2, -1, state.journal
    begin = cells[where.blocks + op] * (2 * state.devices + 1) + (row & 1) * state.devices + device
    first, last, own = blocks.lane[begin], blocks.lane[begin + 1], cells[where.messages + op]
    for k in range(first + place, last):
        ready = free
        if blocks.wait_start[k] < blocks.wait_start[k + 1]:
            for w in range(blocks.wait_start[k + 1] - 1, blocks.wait_start[k] - 1, -1):
                message = own + blocks.wait[w]
                if state.coming[message]:  # the last of them is the last to come
                    waits = message
                    break
                ready = max(ready, cells[where.arrivals + message])
        elif blocks.message[k] >= 0:
            message = own + blocks.message[k]
            if state.coming[message]:
                state.counters[WRITTEN] = written
                runnable = _reach_message(blocks, state, message, free, runnable)
                written = state.counters[WRITTEN]
            if not state.coming[message]:
                free = cells[where.arrivals + message]
                continue
            waits = message
        if waits >= 0:
            place = k - first
            break
        if blocks.issue[k]:
            if state.ahead[device]:
                ready = max(ready, release[host])
                host += 1
            else:
                host += blocks.issue[k]
                ready = max(ready, host)
        free = ready + blocks.duration[k]
        if last - first > 1:
            for m in range(blocks.make_start[k], blocks.make_start[k + 1]):
                slot = state.value_slot[state.value_start[op] + (blocks.make[m] >> SHIFT)]
                cell = where.slots + slot + (blocks.make[m] & PLACE)
                written = _write(cells, journal, written, cell, free)
    return free, host, place, waits, runnable, written


@compiled_part
def _await(blocks, state, where, place, op, free):  # type: ignore[no-untyped-def]
    """When a lane is free and all messages have arrived that its row waits for; or the last of them
    that has not, else -1."""
    first, waits = state.cells[where.messages + op], -1
    for w in range(state.leap[place, LAST_WAIT] - 1, state.leap[place, WAIT] - 1, -1):
        message = first + blocks.wait[w]
        if state.coming[message]:
            waits = message
            break
        free = max(free, state.cells[where.arrivals + message])
    return free, waits


@compiled_part
def _wake(state, place, looks):  # type: ignore[no-untyped-def]
    """The messages that wait for a row of a lane are to look again; how many are."""
    message = state.watched[place]
    if message >= 0:
        state.watched[place] = -1
        while message >= 0:
            state.look[looks] = message
            looks += 1
            message = state.mail[message, WATCHING]
    return looks


@compiled_part
def _deliver(blocks, state, where, runnable):  # type: ignore[no-untyped-def]
    """Links turn to the first message that is ready, and it arrives; how many lanes can run."""
    cells, links = state.cells, state.link
    ready, message = state.heap[0, 0], state.heap[0, 1] & PLACE
    pop(state.heap, state.counters[HEAPED])
    state.counters[HEAPED] -= 1
    k, done, written = state.mail[message, STORED], 0, state.counters[WRITTEN]
    shift = state.mail[message, FIRST_HOP] - blocks.hop_start[k]
    for hop in range(blocks.hop_start[k], blocks.hop_start[k + 1]):
        link = blocks.hop_link[hop]
        turn = max(ready, links[link]) + blocks.hop_occupancy[hop]
        links[link] = turn
        written = _write(cells, state.journal, written, hop + shift, turn)
        done = max(done, turn)
    state.counters[WRITTEN] = written
    return _arrive(state, where.arrivals + message, done + blocks.latency[k], message, runnable)


@compiled_part
def _arrive(state, cell, arrives, message, runnable):  # type: ignore[no-untyped-def]
    """A message arrives: the lanes that wait for it can run; how many can."""
    write_cell(state.cells, state.journal, state.counters, cell, arrives)
    state.coming[message] = 0
    device = state.mail[message, WAITING]
    state.mail[message, WAITING] = -1
    while device >= 0:
        state.runnable[runnable] = device
        runnable += 1
        device = state.next_lane[device]
    return runnable


@compiled_part
def _write(cells, journal, written, cell, value):  # type: ignore[no-untyped-def]
    """Writes a cell, and in the journal what it was; how much is written there."""
    if cells[cell] != value:
        if written < len(journal):
            journal[written, 0], journal[written, 1] = cell, cells[cell]
        written += 1
        cells[cell] = value
    return written


@compiled
def _clear_watchers(blocks: BlockStore, state: ScheduleState) -> None:
    """No message waits for a lane any more."""
    cells, block_of, first_message = state.cells, state.at[BLOCK], state.at[MESSAGE]
    mail, need_lane, watched = state.mail, state.need_lane, state.watched
    message_start = blocks.message_start
    for op in range(state.rows // 2):
        block, first = cells[block_of + op], cells[first_message + op]
        for message in range(first, first + message_start[block + 1] - message_start[block]):
            need = mail[message, STAGE]
            if need < mail[message, LAST_NEED] and need_lane[need] >= 0:
                watched[need_lane[need]] = -1


# Where it begins


@compiled
def _begin_lanes(state: ScheduleState, ops: Ints, since: int, release: Ints) -> None:
    """Puts every lane behind its last stop before `since` and before all that the given Ops do in
    it; to its first row, where a host must not be too far ahead. What such a host has done is the
    number of its releases so far."""
    cells, marks, rows = state.cells, state.marks, state.rows
    for device in range(state.devices):
        here, free = device * rows, state.at[FREE] + 2 * device * rows
        low, high = 0, 0 if state.ahead[device] else (rows - 1) // APART + 1
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
        state.lane_row[device], state.lane_place[device] = before + 1, 0
        state.lane_free[device] = cells[free + 2 * before] if before >= 0 else 0
        state.lane_host[device] = cells[free + 2 * before + 1] if before >= 0 else 0
        if state.ahead[device]:
            state.lane_host[device] = release[device]
        state.runnable[device] = device


@compiled
def _releases(blocks: BlockStore, state: ScheduleState) -> Ints:
    """For every device where its releases begin, and then all of them: when hosts that must not be
    too far ahead issue the tasks of their lanes."""
    devices, rows = state.devices, state.rows
    if not state.ahead.any():
        return np.zeros(devices, np.int64)
    total = 0
    for op in range(rows // 2):
        begin = state.cells[state.at[BLOCK] + op] * (2 * devices + 1)
        total += blocks.lane[begin + 2 * devices] - blocks.lane[begin]
    release, issue, duration = np.zeros((3, devices + total), np.int64)
    at = devices
    for device in range(devices):
        release[device] = at
        for row in range(rows):
            if not (state.ahead[device] and state.marks[device * rows + row] & STANDS):
                continue
            block = state.cells[state.at[BLOCK] + row // 2]
            begin = block * (2 * devices + 1) + (row & 1) * devices + device
            for k in range(blocks.lane[begin], blocks.lane[begin + 1]):
                if blocks.issue[k]:
                    issue[at], duration[at] = blocks.issue[k], blocks.duration[k]
                    at += 1
        first = release[device]
        lane = np.full(at - first, device)
        release[first:at] = issued(lane, issue[first:at], duration[first:at], state.ahead)
    return release


@compiled
def _begin_messages(blocks: BlockStore, state: ScheduleState, since: int) -> int:
    """Links are as the messages before `since` left them; how many others there are to look at."""
    cells, at, message_start, hop_start = (
        state.cells,
        state.at,
        blocks.message_start,
        blocks.hop_start,
    )
    mail, coming, look, links, looks = state.mail, state.coming, state.look, state.link, 0
    stands, hop_link = blocks.stands, blocks.hop_link
    links[:] = 0
    for op in range(state.rows // 2):
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


@compiled_part
def _made(blocks: BlockStore, state: ScheduleState, device: int, row: int, slot: int) -> bool:
    """Whether a lane that stands in the middle of a row has made a piece there already."""
    op = row // 2
    block = state.cells[state.at[BLOCK] + op]
    first = blocks.lane[block * (2 * state.devices + 1) + (row & 1) * state.devices + device]
    low, high = blocks.make_start[first], blocks.make_start[first + state.lane_place[device]]
    for k in range(low, high):
        name, values = blocks.make[k], state.value_start[op]
        if state.value_slot[values + (name >> SHIFT)] + (name & PLACE) == slot:
            return True
    return False


@compiled_part
def _reach_message(
    blocks: BlockStore, state: ScheduleState, message: int, free: int, runnable: int
) -> int:
    """A lane has come to a message that stands in it; once all have, the message is ready. How many
    lanes can run then."""
    cells, at, k = state.cells, state.at, state.mail[message, STORED]
    ready = max(state.mail[message, SOONEST], free)
    state.mail[message, ARRIVED] += 1
    whole = state.mail[message, ARRIVED] == blocks.stands[k]
    if whole:
        for need in range(state.mail[message, NEED], state.mail[message, LAST_NEED]):
            there = available(cells, at, state.marks, state.need_slot[need], state.need_lane[need])
            ready = max(ready, there)
    state.mail[message, SOONEST] = ready
    if whole:
        write_cell(cells, state.journal, state.counters, at[READY] + message, ready)
    if whole and blocks.hop_start[k] < blocks.hop_start[k + 1]:
        push(state.heap, state.counters[HEAPED], ready, state.mail[message, OP] << SHIFT | message)
        state.counters[HEAPED] += 1
    elif whole:
        runnable = _arrive(state, at[ARRIVES] + message, ready + blocks.lasts[k], message, runnable)
    return runnable


# What it came to


@compiled
def write_times(
    blocks: BlockStore, state: ScheduleState, first: Ints, start: Ints, end: Ints
) -> None:
    """Writes start and end of all tasks; those of Op o are from first[o] on."""
    release = _releases(blocks, state)
    for device in range(state.devices):
        free, host = 0, release[device] if state.ahead[device] else 0
        for row in range(state.rows):
            if state.marks[device * state.rows + row] & STANDS:
                free, host = _write_row_times(
                    blocks, state, device, row, free, host, release, first, start, end
                )
    for op in range(state.rows // 2):
        block, low = state.cells[state.at[BLOCK] + op], state.cells[state.at[MESSAGE] + op]
        for message in range(
            low, low + blocks.message_start[block + 1] - blocks.message_start[block]
        ):
            k = state.mail[message, STORED]
            task, shift = (
                first[op] + blocks.order[k],
                state.mail[message, FIRST_HOP] - blocks.hop_start[k],
            )
            start[task] = state.cells[state.at[READY] + message]
            end[task] = state.cells[state.at[ARRIVES] + message]
            for hop in range(blocks.hop_start[k], blocks.hop_start[k + 1]):
                turn = state.cells[hop + shift] - blocks.hop_occupancy[hop]
                start[task] = max(start[task], turn)


@compiled
def _write_row_times(  # type: ignore[no-untyped-def]
    blocks, state, device, row, free, host, release, first, start, end
):  # fmt: skip
    op = row // 2
    block, own = state.cells[state.at[BLOCK] + op], state.cells[state.at[MESSAGE] + op]
    begin = block * (2 * state.devices + 1) + (row & 1) * state.devices + device
    for k in range(blocks.lane[begin], blocks.lane[begin + 1]):
        if blocks.message[k] >= 0:
            free = state.cells[state.at[ARRIVES] + own + blocks.message[k]]
            continue
        ready = free
        if blocks.issue[k] and state.ahead[device]:
            ready = max(ready, release[host])
            host += 1
        elif blocks.issue[k]:
            host += blocks.issue[k]
            ready = max(ready, host)
        for w in range(blocks.wait_start[k], blocks.wait_start[k + 1]):
            ready = max(ready, state.cells[state.at[ARRIVES] + own + blocks.wait[w]])
        free = ready + blocks.duration[k]
        start[first[op] + blocks.task[k]], end[first[op] + blocks.task[k]] = ready, free
    place = device * state.rows + row
    known = state.marks[place] <= STANDS or free == state.cells[state.at[FREE] + 2 * place]
    assert known, "a lane is not as it was"
    return free, host
