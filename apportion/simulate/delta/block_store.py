"""BlockStore: the tasks of Ops with their times, in flat arrays by number. A part of
simulate/delta/.

In: OpTasks of lower/ and their TaskPrices (new_blocks.py brings them). Out: Blocks, which the
schedule of schedule_state.py and reschedule.py is run from.

A **Block** is the tasks of an Op. Those that stand in a lane are its *records*, sorted by when (0
before the results are laid out, 1 after) and device, so that a lane finds its own in a row.
Messages that stand in no lane are not records. What a record reads is not written down: it was made
in the same lane before, or a message brings it, for which the record waits. A piece is named by j,
which of the Op's Values it is of, and by its place among all that Value's pieces (stage_names.py).
So a name stays the same, whatever other stages do.

Blocks are only ever added at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part
from apportion.lower import COLLECTIVE, OPS, PIECE, SHIFT, TASKS, TRANSFER
from apportion.simulate.routes import Lines, latency, occupancy

BLOCKS, RECORDS, WAITS, MAKES, MESSAGES, HOPS, NEEDS = range(7)

PLACE = (1 << SHIFT) - 1

GROWTH = 4  # room that is not used takes no memory


class BlockStore(NamedTuple):  # numba takes no dataclass
    """Blocks b, records k, messages m. Rows of k and m end where the next begins."""

    devices: int
    used: Ints  # how many there are: BLOCKS, RECORDS, ...
    # by block
    tasks: Ints
    lane: Ints  # b x (2 devices + 1): records by when and device
    message_start: Ints  # b + 1
    # by record
    duration: Ints
    issue: Ints
    task: Ints  # its index in the Block
    message: Ints  # if it is a message, which of the Block's; else -1
    wait_start: Ints  # k + 1
    wait: Ints  # messages of the Block
    make_start: Ints  # k + 1
    make: Ints  # names of pieces
    # by message
    latency: Ints
    lasts: Ints  # how long it takes where it occupies no links
    order: Ints  # its index in the Block
    stands: Ints  # lanes that it stands in
    hop_start: Ints  # m + 1
    hop_link: Ints
    hop_occupancy: Ints
    need_start: Ints  # m + 1
    need: Ints  # names of pieces that it reads
    need_device: Ints


ROOM_OF = {  # as many as there are of what
    "tasks": BLOCKS, "message_start": BLOCKS, "duration": RECORDS, "issue": RECORDS,
    "task": RECORDS, "message": RECORDS, "wait_start": RECORDS, "wait": WAITS,
    "make_start": RECORDS, "make": MAKES, "latency": MESSAGES, "lasts": MESSAGES,
    "order": MESSAGES, "stands": MESSAGES, "hop_start": MESSAGES, "hop_link": HOPS,
    "hop_occupancy": HOPS, "need_start": MESSAGES, "need": NEEDS, "need_device": NEEDS,
}  # fmt: skip


def empty_blocks(devices: int, room: Ints) -> BlockStore:
    """A store without Blocks that has so much room."""
    columns = {name: np.zeros(int(room[of]) + 1, np.int64) for name, of in ROOM_OF.items()}
    lane = np.zeros(int(room[BLOCKS]) * (2 * devices + 1), np.int64)
    return BlockStore(devices, np.zeros(7, np.int64), lane=lane, **columns)


def enlarged(blocks: BlockStore, more: Ints) -> BlockStore:
    """A larger copy, so that there is so much room left."""
    new = empty_blocks(blocks.devices, GROWTH * (blocks.used + more))
    used = blocks.used.tolist()
    for name, of in ROOM_OF.items():
        getattr(new, name)[: used[of] + 1] = getattr(blocks, name)[: used[of] + 1]
    lanes = used[BLOCKS] * (2 * blocks.devices + 1)
    new.lane[:lanes], new.used[:] = blocks.lane[:lanes], blocks.used
    return new


class MessageFacts(NamedTuple):
    """What Blocks need to know of messages, beside their tasks."""

    lines: Lines  # what they travel on
    on_device: bool  # whether they stand in lanes
    on_links: bool  # whether they occupy links


@compiled
def add_blocks(blocks, tasks, prices, messages, place, device):  # type: ignore[no-untyped-def]
    """Adds the Blocks of OpTasks with TaskPrices to a BlockStore; whether there was room.
    `messages` are MessageFacts; for every piece there is its place (stage_names.py) and its
    device."""
    more = room_for(tasks, prices, messages)
    columns = (
        blocks.tasks, blocks.duration, blocks.wait, blocks.make, blocks.latency, blocks.hop_link,
        blocks.need,
    )  # fmt: skip
    for k in range(len(columns)):
        if blocks.used[k] + more[k] >= len(columns[k]):
            return False
    number = np.empty(tasks.used[TASKS], np.int64)
    for op in range(tasks.used[OPS]):
        low, high = tasks.task_start[op], tasks.task_start[op + 1]
        block, begin = blocks.used[BLOCKS], blocks.used[BLOCKS] * (2 * blocks.devices + 1)
        blocks.tasks[block], blocks.message_start[block] = high - low, blocks.used[MESSAGES]
        task_of = _sort_into_lanes(blocks, tasks, low, high, begin, messages.on_device)
        _add_messages(blocks, tasks, prices, messages, place, device, low, high, number)
        _add_records(blocks, tasks, prices, place, task_of, low, number)
        blocks.used[BLOCKS] = block + 1
        blocks.message_start[block + 1] = blocks.used[MESSAGES]
    return True


@compiled
def room_for(tasks, prices, messages):  # type: ignore[no-untyped-def]
    """No fewer than what of anything the Blocks of OpTasks take."""
    kind, group, start = tasks.kind, tasks.group, tasks.group_start
    line, lines, count = prices.line, messages.lines.start, tasks.used[TASKS]
    more = np.zeros(7, np.int64)
    more[BLOCKS], more[MESSAGES] = tasks.used[OPS], count
    more[WAITS], more[MAKES] = tasks.wait_start[count], tasks.make_start[count]
    more[NEEDS] = tasks.need_start[count]
    for task in range(count):
        more[RECORDS] += _lane_count(kind, group, start, task, messages.on_device)
        if messages.on_links and (kind[task] == TRANSFER or kind[task] == COLLECTIVE):
            more[HOPS] += lines[line[task] + 1] - lines[line[task]]
    return more


@compiled_part
def _lane_count(kind, group, group_start, task, on_device):  # type: ignore[no-untyped-def]
    """In how many lanes a task stands; all are int64 columns."""
    if kind[task] == TRANSFER:
        return 2 if on_device else 0
    if kind[task] == COLLECTIVE:
        return group_start[group[task] + 1] - group_start[group[task]] if on_device else 0
    return 1


@compiled
def _sort_into_lanes(blocks, tasks, low, high, begin, on_device):  # type: ignore[no-untyped-def]
    """Writes from lane[begin] on where the records of every lane begin; the tasks of an Op, low to
    high, that are these records, from the first record of all on."""
    kind, group, group_start, member = tasks.kind, tasks.group, tasks.group_start, tasks.member
    device, peer, late = tasks.device, tasks.peer, tasks.late
    lane, devices = blocks.lane, blocks.devices
    count, first = np.zeros(2 * devices, np.int64), blocks.used[RECORDS]
    for task in range(low, high):
        at = late[task] * devices
        for k in range(_lane_count(kind, group, group_start, task, on_device)):
            if kind[task] == COLLECTIVE:
                count[at + member[group_start[group[task]] + k]] += 1
            else:
                count[at + (peer[task] if k else device[task])] += 1
    lane[begin] = first
    for k in range(2 * devices):
        lane[begin + k + 1] = lane[begin + k] + count[k]
        count[k] = lane[begin + k] - first
    found = np.empty(lane[begin + 2 * devices] - first, np.int64)
    for task in range(low, high):
        at = late[task] * devices
        for k in range(_lane_count(kind, group, group_start, task, on_device)):
            if kind[task] == COLLECTIVE:
                where = at + member[group_start[group[task]] + k]
            else:
                where = at + (peer[task] if k else device[task])
            found[count[where]] = task
            count[where] += 1
    return found


@compiled_part
def _add_records(blocks, tasks, prices, place, task_of, low, number):  # type: ignore[no-untyped-def]
    """Adds the tasks that stand in lanes; the Op's first task is `low`. `number` says of every task
    which message of the Op it is, or -1."""
    used, record = blocks.used, blocks.used[RECORDS]
    duration, issue, wait_start, wait = (
        blocks.duration, blocks.issue, blocks.wait_start, blocks.wait,
    )  # fmt: skip
    make_start, make, task_column, message = (
        blocks.make_start, blocks.make, blocks.task, blocks.message,
    )  # fmt: skip
    takes, issues, waits, made = prices.duration, prices.issue, tasks.wait, tasks.make
    first_wait, first_made = tasks.wait_start, tasks.make_start
    for task in task_of:
        duration[record], issue[record] = takes[task], issues[task]
        task_column[record], message[record] = task - low, number[task]
        if number[task] < 0:
            for w in range(first_wait[task], first_wait[task + 1]):
                wait[used[WAITS]] = number[low + waits[w]]
                used[WAITS] += 1
            for m in range(first_made[task], first_made[task + 1]):
                make[used[MAKES]] = made[m] >> SHIFT << SHIFT | place[made[m] & PIECE]
                used[MAKES] += 1
        record += 1
        wait_start[record], make_start[record] = used[WAITS], used[MAKES]
    used[RECORDS] = record


@compiled_part
def _add_messages(  # type: ignore[no-untyped-def]
    blocks, tasks, prices, messages, place, device, low, high, number
):  # fmt: skip
    """Adds the messages of an Op whose tasks are low to high; writes their numbers in the Op."""
    used, kind, group, group_start = blocks.used, tasks.kind, tasks.group, tasks.group_start
    need_start, need, needs, need_device = (
        tasks.need_start, tasks.need, blocks.need, blocks.need_device,
    )  # fmt: skip
    first = used[MESSAGES]
    for task in range(low, high):
        number[task] = -1
        if kind[task] != TRANSFER and kind[task] != COLLECTIVE:
            continue
        message = used[MESSAGES]
        number[task] = message - first
        blocks.lasts[message], blocks.order[message] = prices.duration[task], task - low
        blocks.stands[message] = _lane_count(kind, group, group_start, task, messages.on_device)
        blocks.latency[message] = 0
        if messages.on_links:
            _add_hops(
                blocks.hop_link, blocks.hop_occupancy, blocks.latency, used, messages.lines,
                prices.line[task], tasks.nbytes[task],
            )  # fmt: skip
        for n in range(need_start[task], need_start[task + 1]):
            piece = need[n] & PIECE
            needs[used[NEEDS]] = need[n] >> SHIFT << SHIFT | place[piece]
            need_device[used[NEEDS]] = device[piece]
            used[NEEDS] += 1
        used[MESSAGES] = message + 1
        blocks.hop_start[message + 1], blocks.need_start[message + 1] = used[HOPS], used[NEEDS]


@compiled_part
def _add_hops(link, occupied, late, used, lines, line, nbytes):  # type: ignore[no-untyped-def]
    """What the next message of so many bytes occupies on its line, and its latency."""
    late[used[MESSAGES]] = latency(nbytes, lines.lag[line], lines.drag[line])
    for h in range(lines.start[line], lines.start[line + 1]):
        link[used[HOPS]], occupied[used[HOPS]] = lines.link[h], occupancy(nbytes, lines.pace[h])
        used[HOPS] += 1


@compiled
def totals(blocks: BlockStore, numbers: Ints) -> Ints:
    """How much the Blocks of these numbers have together, each as often as it is named."""
    total, width = np.zeros(7, np.int64), 2 * blocks.devices + 1
    for block in numbers:
        low, high = blocks.lane[block * width], blocks.lane[block * width + width - 1]
        first, last = blocks.message_start[block], blocks.message_start[block + 1]
        total[BLOCKS] += 1
        total[RECORDS] += high - low
        total[WAITS] += blocks.wait_start[high] - blocks.wait_start[low]
        total[MAKES] += blocks.make_start[high] - blocks.make_start[low]
        total[MESSAGES] += last - first
        total[HOPS] += blocks.hop_start[last] - blocks.hop_start[first]
        total[NEEDS] += blocks.need_start[last] - blocks.need_start[first]
    return total
