"""Stock: Blocks with their times, in flat arrays by number; what a Live schedule is run from.

The tasks of a Block that stand in a lane are its *records*, sorted by when (0 before the results
are laid out, 1 after) and device, so that a lane finds its own in a row. Messages that stand in no
lane are not records. What a record reads is not written down: it was made in the same lane before,
or a message brings it, for which the record waits. A piece is named by j, which of the Op's Values
it is of, and by its place among all that Value's pieces: stage * span + number within the stage. So
a name stays the same, whatever other stages do.

Blocks are only ever added at the end; what was added last can be taken back by its counters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled
from apportion.lower import COLLECTIVE, SHIFT, TRANSFER
from apportion.simulate.routes import latency, occupancy

BLOCKS, RECORDS, WAITS, MAKES, MESSAGES, HOPS, NEEDS = range(7)

PLACE = (1 << SHIFT) - 1

GROWTH = 4  # room that is not used takes no memory


class Stock(NamedTuple):  # numba takes no dataclass
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


COLUMNS = {  # as many as there are of what
    "tasks": BLOCKS, "message_start": BLOCKS, "duration": RECORDS, "issue": RECORDS,
    "task": RECORDS, "message": RECORDS, "wait_start": RECORDS, "wait": WAITS,
    "make_start": RECORDS, "make": MAKES, "latency": MESSAGES, "lasts": MESSAGES,
    "order": MESSAGES, "stands": MESSAGES, "hop_start": MESSAGES, "hop_link": HOPS,
    "hop_occupancy": HOPS, "need_start": MESSAGES, "need": NEEDS, "need_device": NEEDS,
}  # fmt: skip


def stock(devices: int, room: Ints) -> Stock:
    """An empty one with so much room."""
    columns = {name: np.zeros(int(room[of]) + 1, np.int64) for name, of in COLUMNS.items()}
    lane = np.zeros(int(room[BLOCKS]) * (2 * devices + 1), np.int64)
    return Stock(devices, np.zeros(7, np.int64), lane=lane, **columns)


def with_room(held: Stock, more: Ints) -> Stock:
    """A larger copy, so that there is so much room left."""
    new = stock(held.devices, GROWTH * (held.used + more))
    many = held.used.tolist()
    for name, of in COLUMNS.items():
        getattr(new, name)[: many[of] + 1] = getattr(held, name)[: many[of] + 1]
    lanes = many[BLOCKS] * (2 * held.devices + 1)
    new.lane[:lanes], new.used[:] = held.lane[:lanes], held.used
    return new


@compiled
def add(stock, sheet, op, lines, quiet, on_device):  # type: ignore[no-untyped-def]
    """Adds the Block of an Op of a sheet; its number. Messages take their lines, unless they are
    quiet; they stand in lanes, if they are on the device. There must be room."""
    used, devices = stock.used, stock.devices
    block, begin = used[BLOCKS], used[BLOCKS] * (2 * devices + 1)
    low, high = sheet.task_start[op], sheet.task_start[op + 1]
    stock.tasks[block], stock.message_start[block] = high - low, used[MESSAGES]
    count = np.zeros(2 * devices, np.int64)
    for task in range(low, high):
        for k in range(_stands(sheet, task, on_device)):
            count[sheet.late[task] * devices + _stand(sheet, task, k)] += 1
    stock.lane[begin] = used[RECORDS]
    for k in range(2 * devices):
        stock.lane[begin + k + 1] = stock.lane[begin + k] + count[k]
        count[k] = stock.lane[begin + k]
    number = np.full(high - low, -1)
    task_of, first = np.empty(stock.lane[begin + 2 * devices], np.int64), used[RECORDS]
    for task in range(low, high):
        if sheet.kind[task] == TRANSFER or sheet.kind[task] == COLLECTIVE:
            stands = _stands(sheet, task, on_device)
            number[task - low] = used[MESSAGES] - stock.message_start[block]
            _add_message(stock, sheet, task, task - low, stands, lines, quiet)
        for k in range(_stands(sheet, task, on_device)):
            lane = sheet.late[task] * devices + _stand(sheet, task, k)
            task_of[count[lane]] = task
            count[lane] += 1
    for record in range(first, len(task_of)):
        task = task_of[record]
        stock.duration[record], stock.issue[record] = sheet.duration[task], sheet.issue[task]
        stock.task[record], stock.message[record] = task - low, number[task - low]
        if number[task - low] < 0:
            for w in range(sheet.wait_start[task], sheet.wait_start[task + 1]):
                stock.wait[used[WAITS]] = number[sheet.wait[w]]
                used[WAITS] += 1
            for m in range(sheet.make_start[task], sheet.make_start[task + 1]):
                stock.make[used[MAKES]] = sheet.make[m]
                used[MAKES] += 1
        stock.wait_start[record + 1], stock.make_start[record + 1] = used[WAITS], used[MAKES]
    used[RECORDS], used[BLOCKS] = len(task_of), block + 1
    stock.message_start[block + 1] = used[MESSAGES]
    return block


@compiled
def add_all(stock, sheet, count, lines, quiet, on_device):  # type: ignore[no-untyped-def]
    """Adds the Blocks of the first Ops of a sheet; whether there was room."""
    more = room_for(sheet, count, lines, quiet, on_device)
    columns = (
        stock.tasks, stock.duration, stock.wait, stock.make, stock.latency, stock.hop_link,
        stock.need,
    )  # fmt: skip
    for k in range(len(columns)):
        if stock.used[k] + more[k] >= len(columns[k]):
            return False
    for op in range(count):
        add(stock, sheet, op, lines, quiet, on_device)
    return True


@compiled
def room_for(sheet, count, lines, quiet, on_device):  # type: ignore[no-untyped-def]
    """No fewer than what of anything the first Ops of a sheet take."""
    more, n = np.zeros(7, np.int64), sheet.task_start[count]
    more[BLOCKS], more[MESSAGES] = count, n
    more[WAITS], more[MAKES] = sheet.wait_start[n], sheet.make_start[n]
    more[NEEDS] = sheet.need_start[n]
    for task in range(n):
        more[RECORDS] += _stands(sheet, task, on_device)
        if not quiet and (sheet.kind[task] == TRANSFER or sheet.kind[task] == COLLECTIVE):
            more[HOPS] += lines.start[sheet.line[task] + 1] - lines.start[sheet.line[task]]
    return more


@compiled
def _stands(sheet, task, on_device):  # type: ignore[no-untyped-def]
    """In how many lanes a task stands."""
    if sheet.kind[task] == TRANSFER:
        return 2 if on_device else 0
    if sheet.kind[task] == COLLECTIVE:
        group = sheet.group[task]
        return sheet.group_start[group + 1] - sheet.group_start[group] if on_device else 0
    return 1


@compiled
def _stand(sheet, task, k):  # type: ignore[no-untyped-def]
    """The k-th device in whose lane a task stands."""
    if sheet.kind[task] == COLLECTIVE:
        return sheet.member[sheet.group_start[sheet.group[task]] + k]
    return sheet.peer[task] if k else sheet.device[task]


@compiled
def _add_message(stock, sheet, task, order, stands, lines, quiet):  # type: ignore[no-untyped-def]
    used = stock.used
    message, nbytes = used[MESSAGES], sheet.nbytes[task]
    stock.lasts[message], stock.order[message] = sheet.duration[task], order
    stock.stands[message], stock.latency[message] = stands, 0
    if not quiet:
        route = sheet.line[task]
        stock.latency[message] = latency(nbytes, lines.lag[route], lines.drag[route])
        for h in range(lines.start[route], lines.start[route + 1]):
            stock.hop_link[used[HOPS]] = lines.link[h]
            stock.hop_occupancy[used[HOPS]] = occupancy(nbytes, lines.pace[h])
            used[HOPS] += 1
    for n in range(sheet.need_start[task], sheet.need_start[task + 1]):
        stock.need[used[NEEDS]] = sheet.need[n]
        stock.need_device[used[NEEDS]] = sheet.need_device[n]
        used[NEEDS] += 1
    used[MESSAGES] = message + 1
    stock.hop_start[message + 1], stock.need_start[message + 1] = used[HOPS], used[NEEDS]


@compiled
def totals(stock: Stock, blocks: Ints) -> Ints:
    """How much these Blocks have together, each as often as it is named."""
    total, width = np.zeros(7, np.int64), 2 * stock.devices + 1
    for block in blocks:
        low, high = stock.lane[block * width], stock.lane[block * width + width - 1]
        first, last = stock.message_start[block], stock.message_start[block + 1]
        total[BLOCKS] += 1
        total[RECORDS] += high - low
        total[WAITS] += stock.wait_start[high] - stock.wait_start[low]
        total[MAKES] += stock.make_start[high] - stock.make_start[low]
        total[MESSAGES] += last - first
        total[HOPS] += stock.hop_start[last] - stock.hop_start[first]
        total[NEEDS] += stock.need_start[last] - stock.need_start[first]
    return total
