"""ScheduleState: the schedule of a step that can be changed, in arrays. A part of simulate/delta/.

In: Blocks (block_store.py) that Ops are given. Out: arrays in which reschedule.py works out times.

All numbers that change are in one array, `cells`; a journal keeps what was there before, so that a
change can be undone. Rows are Ops in order, each twice: before its results are laid out, and after.

Most rows of a lane wait for nothing, and no message needs what they make. So times are kept only at
*stops*: all other rows, and some of these so that none is far away. What happens to a lane between
two stops is a *leap*, worked out once and then taken as a whole: from (free, host) to
(max(free + work, host + behind), host + issue), since a lane is never free before its host.

Here is what the arrays are, what it takes to give an Op another Block, and from which time on that
can matter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints, compiled
from apportion.lower import SHIFT
from apportion.simulate.delta.block_store import PLACE, BlockStore

# Segments of `cells`; `ScheduleState.at` says where each begins.
AVAILABLE = 0  # by slot: when a piece is there; kept only where a lane makes several in a row
FREE = 1  # by stop, device and row: when its lane is free again, and how much its host has issued
READY = 2  # by message
ARRIVES = 3  # by message
PASSED = 4  # by hop: when the link is done with it
BLOCK = 5  # by Op
MESSAGE = 6  # by Op: its first message
SEGMENTS = 7

# Fields of a message
OP = 0
STORED = 1  # its number in the BlockStore
FIRST_HOP = 2  # the cell of its first hop
NEED = 3  # its first need
LAST_NEED = 4  # and where they end
SOONEST = 5  # it is ready no sooner, as far as is known
STAGE = 6  # which of its needs it waits for
WATCHING = 7  # the next message that waits for the same lane
WAITING = 8  # the first lane that waits for it
ARRIVED = 9  # lanes that have come to it
FIELDS = 16

NEVER = np.iinfo(np.int64).max
ABSENT = -1  # the time of what is not known; no block, no message

# Marks of a row in a lane; it is a stop if there is any but the first
STANDS = 1  # its Op has records there
WAITS = 2  # the first of them waits for messages
SEVERAL = 4  # there are several
CLOSE = 8  # to be looked at one by one: several, a message, or a host must not be too far ahead
NEEDED = 16  # a message needs what they make
STATION = 32  # so that a stop is near
KEPT = NEEDED | STATION  # whatever the Op's Block
APART = 64  # rows from one station to the next

# Fields of `leap`
NEXT = 0  # the next stop; 0 if it is not worked out
WORK = 1
BEHIND = 2
ISSUE = 3
OWN_WORK = 4  # of the first record of the row itself
OWN_ISSUE = 5
WAIT = 6  # what it waits for, in the BlockStore
LAST_WAIT = 7  # and where that ends

MESSAGES, HOPS, NEEDS, WRITTEN, HEAPED, LOOKS = range(6)  # counters


class ScheduleState(NamedTuple):  # numba takes no dataclass
    """Ops o (the end of the step is one), rows r = 2 o, devices d, messages m, slots p."""

    devices: int
    rows: int
    span: int  # slots of every stage of a Value
    cells: Ints
    at: Ints  # SEGMENTS + 1
    counters: Ints
    journal: Ints  # capacity x 2: cell, and what was there
    marks: npt.NDArray[np.uint8]  # d x r
    needed: npt.NDArray[np.int32]  # d x r: how often
    leap: Ints  # d x r x 8: from a stop to the next
    # what an Op's Values are
    value_start: Ints  # o + 1
    value_slot: Ints  # the first slot of each
    maker: Ints  # by stage of all Values: the row in which its pieces are made, or -1
    ahead: Ints  # d: how much issued work a host may be ahead of its device; 0: any
    mail: Ints  # m x FIELDS: all about a message in one place, since that is faster
    coming: npt.NDArray[np.uint8]  # m: whether it has not arrived
    need_slot: Ints
    need_lane: Ints  # device * rows + row in which it is made; -1: it is there at the beginning
    need_device: Ints  # that device
    need_row: Ints  # and that row, or -1
    # lanes while a schedule is worked out
    lane_row: Ints
    lane_place: Ints
    lane_free: Ints
    lane_host: Ints
    runnable: Ints
    # who waits for whom: messages for lanes, lanes for messages
    watched: Ints  # d x r: first message
    next_lane: Ints  # d
    heap: Ints  # m x 2: those that are ready: when, and OP << SHIFT | message
    look: Ints  # m: those to look at
    link: Ints  # when each link is free


@compiled
def write_cell(cells: Ints, journal: Ints, counters: Ints, cell: int, value: int) -> None:
    """Writes a cell, and in the journal what it was."""
    old = cells[cell]
    if old != value:
        written = counters[WRITTEN]
        if written < len(journal):
            journal[written, 0], journal[written, 1] = cell, old
        counters[WRITTEN] = written + 1
        cells[cell] = value


# Changing what an Op does


@compiled
def has_room(blocks: BlockStore, state: ScheduleState, numbers: Ints) -> bool:
    """Whether there is room for the messages of more Blocks."""
    messages, hops, needs = state.counters[MESSAGES], state.counters[HOPS], state.counters[NEEDS]
    for block in numbers:
        low, high = blocks.message_start[block], blocks.message_start[block + 1]
        messages += high - low
        hops += blocks.hop_start[high] - blocks.hop_start[low]
        needs += blocks.need_start[high] - blocks.need_start[low]
    room = state.at[PASSED + 1] - state.at[PASSED]
    return bool(messages <= len(state.mail) and hops <= room and needs <= len(state.need_slot))


@compiled
def replace_blocks(blocks: BlockStore, state: ScheduleState, ops: Ints, numbers: Ints) -> None:
    """The Ops have other Blocks now, whose tasks have no times yet."""
    cells, journal, counters, at = state.cells, state.journal, state.counters, state.at
    mail, marks, leap, maker = state.mail, state.marks, state.leap, state.maker
    need_slot, need_lane = state.need_slot, state.need_lane
    need_device, need_row = state.need_device, state.need_row
    message_start, need_start, hop_start = blocks.message_start, blocks.need_start, blocks.hop_start
    names, name_device = blocks.need, blocks.need_device
    _count_needs(blocks, state, ops, np.int64(-1))
    for n in range(len(ops)):
        op, block = ops[n], numbers[n]
        write_cell(cells, journal, counters, at[BLOCK] + op, block)
        write_cell(cells, journal, counters, at[MESSAGE] + op, counters[MESSAGES])
        values = state.value_slot[state.value_start[op] : state.value_start[op + 1]]
        for k in range(message_start[block], message_start[block + 1]):
            message, need = counters[MESSAGES], counters[NEEDS]
            mail[message, OP], mail[message, STORED], mail[message, NEED] = op, k, need
            mail[message, FIRST_HOP] = at[PASSED] + counters[HOPS]
            cells[at[READY] + message] = cells[at[ARRIVES] + message] = ABSENT
            for m in range(need_start[k], need_start[k + 1]):
                slot = values[names[m] >> SHIFT] + (names[m] & PLACE)
                row, device = maker[slot // state.span], name_device[m]
                need_slot[need], need_device[need], need_row[need] = slot, device, row
                need_lane[need] = device * state.rows + row if row >= 0 else -1
                if row >= 0 and marks[need_lane[need]] <= STANDS:
                    _write_stop(cells, at, marks, leap, need_lane[need])
                need += 1
            counters[MESSAGES], counters[NEEDS] = message + 1, need
            counters[HOPS] += hop_start[k + 1] - hop_start[k]
            mail[message, LAST_NEED] = need
    _count_needs(blocks, state, ops, np.int64(1))
    _set_marks(blocks, state, ops)


@compiled
def undo_changes(blocks: BlockStore, state: ScheduleState, ops: Ints) -> None:
    """Everything as it was when the journal was empty; these Ops had other Blocks."""
    cells, journal = state.cells, state.journal
    _count_needs(blocks, state, ops, np.int64(-1))
    for entry in range(state.counters[WRITTEN] - 1, -1, -1):
        cells[journal[entry, 0]] = journal[entry, 1]
    state.counters[WRITTEN] = 0
    _count_needs(blocks, state, ops, np.int64(1))
    _set_marks(blocks, state, ops)


# Stops and leaps


@compiled
def _count_needs(blocks: BlockStore, state: ScheduleState, ops: Ints, by: int) -> None:
    """The messages of Ops need their pieces, or no longer do."""
    cells, mail, block_of, first_message = (
        state.cells,
        state.mail,
        state.at[BLOCK],
        state.at[MESSAGE],
    )
    need_lane, needed, marks, leap = state.need_lane, state.needed, state.marks, state.leap
    message_start = blocks.message_start
    for op in ops:
        block, first = cells[block_of + op], cells[first_message + op]
        if block == ABSENT or message_start[block] == message_start[block + 1]:
            continue
        last = first + message_start[block + 1] - message_start[block] - 1
        for need in range(mail[first, NEED], mail[last, LAST_NEED]):
            place = need_lane[need]
            if place >= 0:
                needed[place] += by
                if needed[place] == max(by, 0):
                    _drop_leaps(marks, leap, place)
                    marks[place] ^= NEEDED


@compiled
def _drop_leaps(marks: npt.NDArray[np.uint8], leap: Ints, place: int) -> None:
    """The leaps from a row and over it are not known any more."""
    leap[place, NEXT] = 0
    before = place - 1
    while before >= 0 and marks[before] <= STANDS:
        before -= 1
    leap[max(before, 0), NEXT] = 0


@compiled
def _write_stop(
    cells: Ints, at: Ints, marks: npt.NDArray[np.uint8], leap: Ints, place: int
) -> None:
    """Writes the times of a row that is to be a stop; every lane begins with one."""
    before = place
    while marks[before] <= STANDS:
        before -= 1
    free, host = cells[at[FREE] + 2 * before], cells[at[FREE] + 2 * before + 1]
    for row in range(before + 1, place + 1):
        host += leap[row, OWN_ISSUE]
        free = max(free, host) + leap[row, OWN_WORK]
    cells[at[FREE] + 2 * place], cells[at[FREE] + 2 * place + 1] = free, host


@compiled
def find_leap(marks: npt.NDArray[np.uint8], leap: Ints, place: int, end: int) -> None:
    """Works out the leap from a stop of a lane whose rows end at `end`."""
    work, behind, issue, row = 0, -NEVER, 0, place + 1
    while row < end and marks[row] <= STANDS:
        issue += leap[row, OWN_ISSUE]
        behind = max(behind, issue) + leap[row, OWN_WORK]
        work += leap[row, OWN_WORK]
        row += 1
    leap[place, WORK], leap[place, BEHIND], leap[place, ISSUE] = work, behind, issue
    leap[place, NEXT] = row


@compiled
def _set_marks(blocks: BlockStore, state: ScheduleState, ops: Ints) -> None:
    """In which lanes Ops stand, by their Blocks, and what they do there."""
    devices, rows, marks, leap = state.devices, state.rows, state.marks, state.leap
    lane, duration, issues, ahead = blocks.lane, blocks.duration, blocks.issue, state.ahead
    wait_start, message, block = blocks.wait_start, blocks.message, state.at[BLOCK]
    cells = state.cells
    for op in ops:
        begin = cells[block + op] * (2 * devices + 1)
        for late in range(2):
            for device in range(devices):
                first = lane[begin + late * devices + device]
                last = lane[begin + late * devices + device + 1]
                mark, place = 0, device * rows + 2 * op + late
                work = issue = wait = last_wait = 0
                if first < last:
                    mark, work, issue = STANDS, duration[first], issues[first]
                    wait, last_wait = wait_start[first], wait_start[first + 1]
                    if wait < last_wait:
                        mark |= WAITS
                    if last - first > 1:
                        mark |= SEVERAL | CLOSE
                    if message[first] >= 0:
                        mark |= CLOSE
                if ahead[device]:
                    mark |= CLOSE
                mark |= marks[place] & KEPT
                old, own = leap[place, OWN_WORK], leap[place, OWN_ISSUE]
                if mark != marks[place] or work != old or issue != own:
                    _drop_leaps(marks, leap, place)
                marks[place], leap[place, OWN_WORK], leap[place, OWN_ISSUE] = mark, work, issue
                leap[place, WAIT], leap[place, LAST_WAIT] = wait, last_wait


# When a piece is there


@compiled
def available(cells: Ints, at: Ints, marks: npt.NDArray[np.uint8], slot: int, place: int) -> int:
    """When a piece is there that a lane has made; `place` is device * rows + row."""
    if place < 0:
        return 0
    if marks[place] & SEVERAL:
        return int(cells[at[AVAILABLE] + slot])
    return int(cells[at[FREE] + 2 * place])


# The first time that can have changed


@compiled
def first_change(
    blocks: BlockStore, state: ScheduleState, replaced: npt.NDArray[np.uint8], ops: Ints
) -> int:
    """A time before which no task of the Ops' Blocks is ready, nor any that follows one of them in
    a lane. `replaced` says of each Op whether it is among these; asked before they are replaced,
    and again after."""
    since, marks, rows, devices = NEVER, state.marks, state.rows, state.devices
    cells, at, lane, width = state.cells, state.at, blocks.lane, 2 * state.devices + 1
    wait_start, wait, message_start = blocks.wait_start, blocks.wait, blocks.message_start
    mail, need_lane, need_slot = state.mail, state.need_lane, state.need_slot
    need_row = state.need_row
    for op in ops:
        block, first = cells[at[BLOCK] + op], cells[at[MESSAGE] + op]
        bounds = np.zeros(message_start[block + 1] - message_start[block], np.int64)
        for m in range(len(bounds)):
            bounds[m] = _message_bound(
                cells, at, marks, mail, need_lane, need_row, need_slot, replaced, first + m
            )
            if not blocks.stands[message_start[block] + m]:
                since = min(since, bounds[m])
        for device in range(devices):
            here = device * rows
            for row in (2 * op, 2 * op + 1):
                if not marks[here + row] & STANDS:
                    continue
                before, after = row - 1, row + 1
                while before >= 0 and (marks[here + before] <= STANDS or replaced[before // 2]):
                    before -= 1
                free = cells[at[FREE] + 2 * (here + before)] if before >= 0 else 0
                if free >= since:
                    continue
                k = lane[block * width + (row & 1) * devices + device]
                ready = free
                for w in range(wait_start[k], wait_start[k + 1]):
                    ready = max(ready, bounds[wait[w]])
                if blocks.message[k] >= 0:
                    ready = max(ready, bounds[blocks.message[k]])
                since = min(since, ready)
                while after < rows and (not marks[here + after] & STANDS or replaced[after // 2]):
                    after += 1
                if after == rows:
                    continue
                ready, later = free, cells[at[BLOCK] + after // 2]
                k = lane[later * width + (after & 1) * devices + device]
                for w in range(wait_start[k], wait_start[k + 1]):
                    if not blocks.stands[message_start[later] + wait[w]]:
                        bound = _message_bound(
                            cells, at, marks, mail, need_lane, need_row, need_slot, replaced,
                            cells[at[MESSAGE] + after // 2] + wait[w],
                        )  # fmt: skip
                        ready = max(ready, bound)
                since = min(since, ready)
    return since


@compiled
def _message_bound(  # type: ignore[no-untyped-def]
    cells, at, marks, mail, need_lane, need_row, need_slot, replaced, message
):  # fmt: skip
    """When a message is ready at the soonest; NEVER if it needs what a replaced Op makes."""
    ready = 0
    for need in range(mail[message, NEED], mail[message, LAST_NEED]):
        place = need_lane[need]
        if place >= 0:
            if replaced[need_row[need] // 2]:
                return NEVER
            ready = max(ready, available(cells, at, marks, need_slot[need], place))
    return ready
