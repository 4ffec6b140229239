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

from apportion.columns import Ints, compiled
from apportion.lower import COLLECTIVE, OPS, PIECE, SHIFT, TASKS, TRANSFER, OpTasks
from apportion.simulate.delta.task_prices import TaskPrices
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


class PricedTasks(NamedTuple):
    """The tasks of several Ops with all that their Blocks are made from."""

    tasks: OpTasks
    prices: TaskPrices
    lines: Lines  # what messages travel on
    place: Ints  # by piece (stage_names.py)
    device: Ints  # by piece
    on_device: bool  # whether messages stand in lanes
    on_links: bool  # whether messages occupy links


@compiled
def add_blocks(blocks, priced):  # type: ignore[no-untyped-def]
    """Adds the Blocks of PricedTasks to a BlockStore; whether there was room."""
    more = room_for(priced)
    columns = (
        blocks.tasks, blocks.duration, blocks.wait, blocks.make, blocks.latency, blocks.hop_link,
        blocks.need,
    )  # fmt: skip
    for k in range(len(columns)):
        if blocks.used[k] + more[k] >= len(columns[k]):
            return False
    for op in range(priced.tasks.used[OPS]):
        _add_block(blocks, priced, op)
    return True


@compiled
def room_for(priced):  # type: ignore[no-untyped-def]
    """No fewer than what of anything the Blocks of PricedTasks take."""
    tasks, lines = priced.tasks, priced.lines
    more, count = np.zeros(7, np.int64), tasks.used[TASKS]
    more[BLOCKS], more[MESSAGES] = tasks.used[OPS], count
    more[WAITS], more[MAKES] = tasks.wait_start[count], tasks.make_start[count]
    more[NEEDS] = tasks.need_start[count]
    for task in range(count):
        more[RECORDS] += _lane_count(tasks, task, priced.on_device)
        if priced.on_links and _is_message(tasks, task):
            line = priced.prices.line[task]
            more[HOPS] += lines.start[line + 1] - lines.start[line]
    return more


@compiled
def _add_block(blocks, priced, op):  # type: ignore[no-untyped-def]
    """Adds the Block of one Op; there must be room."""
    used, tasks, on_device = blocks.used, priced.tasks, priced.on_device
    low, high, block = tasks.task_start[op], tasks.task_start[op + 1], used[BLOCKS]
    begin, devices = block * (2 * blocks.devices + 1), blocks.devices
    blocks.tasks[block], blocks.message_start[block] = high - low, used[MESSAGES]
    place = _lane_places(blocks, tasks, low, high, begin, on_device)
    number, task_of = np.full(high - low, -1), np.empty(blocks.lane[begin + 2 * devices], np.int64)
    for task in range(low, high):
        if _is_message(tasks, task):
            number[task - low] = used[MESSAGES] - blocks.message_start[block]
            _add_message(blocks, priced, task, task - low)
        for k in range(_lane_count(tasks, task, on_device)):
            lane = tasks.late[task] * devices + _lane_device(tasks, task, k)
            task_of[place[lane]] = task
            place[lane] += 1
    for record in range(used[RECORDS], len(task_of)):
        _add_record(blocks, priced, record, task_of[record], low, number)
    used[RECORDS], used[BLOCKS] = len(task_of), block + 1
    blocks.message_start[block + 1] = used[MESSAGES]


@compiled
def _lane_places(blocks, tasks, low, high, begin, on_device):  # type: ignore[no-untyped-def]
    """Writes where the records of every lane begin, from lane[begin] on; a copy of that."""
    devices = blocks.devices
    count = np.zeros(2 * devices, np.int64)
    for task in range(low, high):
        for k in range(_lane_count(tasks, task, on_device)):
            count[tasks.late[task] * devices + _lane_device(tasks, task, k)] += 1
    blocks.lane[begin] = blocks.used[RECORDS]
    for k in range(2 * devices):
        blocks.lane[begin + k + 1] = blocks.lane[begin + k] + count[k]
        count[k] = blocks.lane[begin + k]
    return count


@compiled
def _add_record(blocks, priced, record, task, low, number):  # type: ignore[no-untyped-def]
    """Adds a task that stands in a lane; `number` is that of every message of the Op, else -1."""
    used, tasks = blocks.used, priced.tasks
    blocks.duration[record] = priced.prices.duration[task]
    blocks.issue[record] = priced.prices.issue[task]
    blocks.task[record], blocks.message[record] = task - low, number[task - low]
    if number[task - low] < 0:
        for w in range(tasks.wait_start[task], tasks.wait_start[task + 1]):
            blocks.wait[used[WAITS]] = number[tasks.wait[w]]
            used[WAITS] += 1
        for m in range(tasks.make_start[task], tasks.make_start[task + 1]):
            blocks.make[used[MAKES]] = _name(priced, tasks.make[m])
            used[MAKES] += 1
    blocks.wait_start[record + 1], blocks.make_start[record + 1] = used[WAITS], used[MAKES]


@compiled
def _add_message(blocks, priced, task, order):  # type: ignore[no-untyped-def]
    """Adds a message, which is the task `order` of its Op."""
    used, tasks, lines = blocks.used, priced.tasks, priced.lines
    message, nbytes = used[MESSAGES], tasks.nbytes[task]
    blocks.lasts[message], blocks.order[message] = priced.prices.duration[task], order
    blocks.stands[message] = _lane_count(tasks, task, priced.on_device)
    blocks.latency[message] = 0
    if priced.on_links:
        line = priced.prices.line[task]
        blocks.latency[message] = latency(nbytes, lines.lag[line], lines.drag[line])
        for h in range(lines.start[line], lines.start[line + 1]):
            blocks.hop_link[used[HOPS]] = lines.link[h]
            blocks.hop_occupancy[used[HOPS]] = occupancy(nbytes, lines.pace[h])
            used[HOPS] += 1
    for n in range(tasks.need_start[task], tasks.need_start[task + 1]):
        blocks.need[used[NEEDS]] = _name(priced, tasks.need[n])
        blocks.need_device[used[NEEDS]] = priced.device[tasks.need[n] & PIECE]
        used[NEEDS] += 1
    used[MESSAGES] = message + 1
    blocks.hop_start[message + 1], blocks.need_start[message + 1] = used[HOPS], used[NEEDS]


@compiled
def _name(priced, name):  # type: ignore[no-untyped-def]
    """The name of a piece, with its place instead of its number."""
    return name >> SHIFT << SHIFT | priced.place[name & PIECE]


@compiled
def _is_message(tasks, task):  # type: ignore[no-untyped-def]
    return tasks.kind[task] == TRANSFER or tasks.kind[task] == COLLECTIVE


@compiled
def _lane_count(tasks, task, on_device):  # type: ignore[no-untyped-def]
    """In how many lanes a task stands."""
    if tasks.kind[task] == TRANSFER:
        return 2 if on_device else 0
    if tasks.kind[task] == COLLECTIVE:
        group = tasks.group[task]
        return tasks.group_start[group + 1] - tasks.group_start[group] if on_device else 0
    return 1


@compiled
def _lane_device(tasks, task, k):  # type: ignore[no-untyped-def]
    """The k-th device in whose lane a task stands."""
    if tasks.kind[task] == COLLECTIVE:
        return tasks.member[tasks.group_start[tasks.group[task]] + k]
    return tasks.peer[task] if k else tasks.device[task]


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
