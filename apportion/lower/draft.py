"""draft: the tasks of Ops straight from their Flows, in compiled code; what block.py makes, for
delta simulation.

A Sheet has the tasks of several Ops in columns: what costs are looked up by, and what tasks wait
for and make. Tasks of an Op, in order: the exchange that fetches inputs, the assemblies of fetched
regions, the parts of the Op, the exchange that lays its results out, the assemblies of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.columns import (
    Floats,
    Ints,
    compiled,
)
from apportion.lower.exchange import (
    EVEN,
)
from apportion.lower.flow_store import Flows
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
)
from apportion.lower.value_flow import LAID
from apportion.machine import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
)

SHIFT = 32  # a piece is named j << SHIFT | place

OPS, TASKS, NEEDS, WAITS, MAKES, GROUPS, MEMBERS = range(7)


class Sheet(NamedTuple):  # numba takes no dataclass
    """Ops o, tasks t, groups g."""

    used: Ints  # how many there are: OPS, TASKS, ...
    task_start: Ints  # o + 1
    kind: Ints  # t
    call: Ints  # t: which operator
    owner: Ints  # t: which Op of the sheet
    part: Ints  # t
    device: Ints  # t
    peer: Ints  # t
    late: Ints  # t
    nbytes: Ints  # t
    flops: Floats  # t
    itemsize: Ints  # t
    taken: Ints  # t
    group: Ints  # t
    pattern: Ints  # t
    line: Ints  # t: what a message travels on
    duration: Ints  # t
    issue: Ints  # t
    seen: Ints  # t: of those that wait for it the last
    need_start: Ints  # t + 1
    need: Ints  # pieces that a message reads
    need_device: Ints
    wait_start: Ints  # t + 1
    wait: Ints  # tasks of the Op
    make_start: Ints  # t + 1
    make: Ints  # pieces
    group_start: Ints  # g + 1
    member: Ints  # devices
    # for one exchange; between them as they were
    size: Ints  # by pair of devices: 0
    carrier: Ints  # by pair of devices: -1
    parent: Ints  # by device


def blank(devices: int) -> Ints:
    """What a Sheet has by pair of devices, before the first."""
    return np.array([[0], [-1]]).repeat(devices * devices, 1)


@compiled
def _sheet(room, devices, pairs):  # type: ignore[no-untyped-def]
    """An empty one with so much room for everything."""
    c = np.empty((27, room + 1), np.int64)
    c[:, 0] = 0
    return Sheet(
        np.zeros(7, np.int64), c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8],
        c[9].view(np.float64), c[10], c[11], c[12], c[13], c[14], c[15], c[16], c[17], c[18],
        c[19], c[20], c[21], c[22], c[23], c[24], c[25], c[26], pairs[0], pairs[1],
        np.empty(devices, np.int64),
    )  # fmt: skip


# A book has records of Ops, of Splits and of cuts, in one array. What is to be drafted names for
# each Op the record of what it does, that of its cut, whether it is computed term by term, and its
# Flows.

CALL, ALIAS, ITEMSIZE, READS, MAKES, ARGUMENTS, STAGES = range(7)  # of Ops
COUNT, ZEROS, FLOPS = range(3)  # of Splits
SPLIT, PARTS, DEVICES = range(3)  # of cuts: the device of every part of every replica
ASKED = 3  # then the Flows


def op_record(
    call: int, alias: bool, itemsize: int, makes: int, stages: Sequence[int], places: Sequence[int]
) -> list[int]:
    """An Op, whatever its Choice: which operator; the stages at which it reads its distinct inputs;
    for every argument which of these it is."""
    head = (call, alias, itemsize, len(stages), makes, len(places))
    return [*head, *stages, *places]


def split_record(flops: Sequence[float], zeros: Sequence[bool]) -> list[int]:
    """The flops of every part of a Split; part x argument: whether it is a block of zeros, none if
    there are none."""
    numbers = np.array(flops, np.float64).view(np.int64).tolist()
    return [len(flops), len(zeros), *numbers, *zeros]


@compiled
def room_for(held: Flows, book: Ints, asked: Ints) -> int:
    """No fewer than what of anything drafting these can take."""
    total, at = 16, 0
    while at < len(asked):
        does, cut = asked[at], asked[at + 1]
        reads, makes = book[does + READS], book[does + MAKES]
        at += ASKED
        for k in range(reads):
            stage = held.stage_start[asked[at + k]] + book[does + STAGES + k]
            low, high = held.piece_start[stage], held.piece_start[stage + 1]
            total += high - low + 2 * (held.source_start[high] - held.source_start[low])
            total += held.answer_start[stage + 1] - held.answer_start[stage]
        for k in range(reads, reads + makes):
            stage = held.stage_start[asked[at + k]]
            low, high = held.piece_start[stage], held.piece_start[stage + 2]
            total += 2 * (high - low) + 2 * (held.source_start[high] - held.source_start[low])
        total += 1 + book[cut + PARTS]
        at += reads + makes
    return total


@compiled
def draft(held: Flows, book: Ints, asked: Ints, devices: int, pairs: Ints) -> Sheet:
    """The tasks of Ops."""
    sheet: Sheet = _sheet(room_for(held, book, asked), devices, pairs)
    used, numbers = sheet.used, book.view(np.float64)
    at, op = 0, 0
    while at < len(asked):
        does, cut, termwise = asked[at], asked[at + 1], asked[at + 2]
        reads, makes, arguments = book[does + READS], book[does + MAKES], book[does + ARGUMENTS]
        fed = asked[at + ASKED : at + ASKED + reads]
        made = asked[at + ASKED + reads : at + ASKED + reads + makes]
        stages = book[does + STAGES : does + STAGES + reads]
        parts, first = book[cut + PARTS], used[TASKS]
        _exchange(sheet, held, fed, stages, 0, 0, first)
        if parts:
            split, places = book[cut + SPLIT], does + STAGES + reads
            zeros = split + FLOPS + book[split + COUNT]
            _compute(
                sheet, held, fed, stages, made, book[cut + DEVICES : cut + DEVICES + parts],
                numbers[split + FLOPS : zeros], book[places : places + arguments],
                book[zeros : zeros + (0 if termwise else book[split + ZEROS])],
                book[does + ALIAS], book[does + ITEMSIZE],
            )  # fmt: skip
            _exchange(sheet, held, made, np.full(makes, LAID), reads, 1, first)
        for task in range(first, used[TASKS]):
            sheet.call[task], sheet.owner[task] = book[does + CALL], op
        at, op = at + ASKED + reads + makes, op + 1
        sheet.task_start[op], used[OPS] = used[TASKS], op
    return sheet


@compiled
def _task(sheet, kind, device, peer, late, nbytes, itemsize, taken):  # type: ignore[no-untyped-def]
    """Adds a task; what it needs, waits for and makes is added after it."""
    used = sheet.used
    task = used[TASKS]
    sheet.kind[task], sheet.device[task], sheet.peer[task] = kind, device, peer
    sheet.late[task], sheet.nbytes[task], sheet.itemsize[task] = late, nbytes, itemsize
    sheet.taken[task], sheet.flops[task], sheet.part[task] = taken, 0.0, -1
    sheet.group[task] = sheet.pattern[task] = sheet.seen[task] = -1
    sheet.need_start[task + 1] = used[NEEDS]
    sheet.wait_start[task + 1] = used[WAITS]
    sheet.make_start[task + 1] = used[MAKES]
    used[TASKS] = task + 1
    return task


@compiled
def _exchange(sheet, held, flows, stages, shift, late, begun):  # type: ignore[no-untyped-def]
    """The messages and assemblies that make the pieces of Flows at stages."""
    carrier, devices, used = sheet.carrier, len(sheet.parent), sheet.used
    device, source_start, source = held.device, held.source_start, held.source
    remote = 0
    for k in range(len(flows)):
        at = held.stage_start[flows[k]] + stages[k]
        for piece in range(held.piece_start[at], held.piece_start[at + 1]):
            for q in range(source_start[piece], source_start[piece + 1]):
                remote += device[source[q]] != device[piece]
    pairs = np.empty((2, min(remote, devices * devices)), np.int64)
    many = _messages(sheet, held, flows, stages, shift, late, remote, pairs) if remote else 0
    for k in range(len(flows)):
        at, size_of = held.stage_start[flows[k]] + stages[k], held.itemsize[flows[k]]
        for piece in range(held.piece_start[at], held.piece_start[at + 1]):
            low, high, here = source_start[piece], source_start[piece + 1], device[piece]
            moved = 0
            if not held.viewed[piece]:
                for q in range(low, high):
                    moved += 2 * held.source_nbytes[q]
            task = _task(sheet, ASSEMBLE, here, -1, late, moved, size_of, high - low)
            if remote:
                for q in range(low, high):
                    there = device[source[q]]
                    if there != here:
                        message = carrier[there * devices + here]
                        if sheet.seen[message] != task:
                            sheet.seen[message] = task
                            sheet.wait[used[WAITS]] = message - begun
                            used[WAITS] += 1
            sheet.make[used[MAKES]] = (k + shift) << SHIFT | held.place[piece]
            used[MAKES] += 1
            sheet.wait_start[task + 1], sheet.make_start[task + 1] = used[WAITS], used[MAKES]
    for k in range(many):
        pair = pairs[0, k] * devices + pairs[1, k]
        carrier[pair], sheet.size[pair] = -1, 0


@compiled
def _messages(  # type: ignore[no-untyped-def]
    sheet, held, flows, stages, shift, late, remote, pairs
):  # fmt: skip
    """The messages of one exchange, and what each reads; writes the pairs of devices that have one,
    and says how many these are."""
    size, carrier, devices, used = sheet.size, sheet.carrier, len(sheet.parent), sheet.used
    device, source_start, source = held.device, held.source_start, held.source
    boxes = np.empty((4, remote), np.int64)  # each: source, piece, sender and receiver
    row, what, sender, receiver = boxes
    sends = np.zeros(devices, np.uint8)
    n = 0
    for k in range(len(flows)):
        at = held.stage_start[flows[k]] + stages[k]
        for piece in range(held.piece_start[at], held.piece_start[at + 1]):
            here = device[piece]
            for q in range(source_start[piece], source_start[piece + 1]):
                there = device[source[q]]
                if there != here:
                    row[n], what[n] = q, k << SHIFT | source[q]
                    sender[n], receiver[n] = there, here
                    sends[there], carrier[there * devices + here] = 1, -2
                    size[there * devices + here] += held.source_nbytes[q]
                    n += 1
    many = 0
    for a in range(devices):
        if sends[a]:
            for b in range(devices):
                if carrier[a * devices + b] == -2:
                    pairs[0, many], pairs[1, many] = a, b
                    many += 1
    first = used[TASKS]
    if many >= 6:
        _collectives(sheet, held, pairs[:, :many], boxes, late)
    for k in range(many):
        pair = pairs[0, k] * devices + pairs[1, k]
        if carrier[pair] == -2:
            carrier[pair] = _task(sheet, TRANSFER, pairs[0, k], pairs[1, k], late, size[pair], 1, 0)
    # what each reads, once
    wide = used[TASKS] - first
    per, table = np.zeros(wide + 1, np.int64), _table(n)
    for k in range(n):
        task = carrier[sender[k] * devices + receiver[k]]
        sheet.taken[task] += 1
        sender[k] = task - first
        if _is_new(table, what, sender, k):
            per[task - first + 1] += 1
        else:
            row[k] = -1
    for task in range(wide):
        per[task + 1] += per[task]
        sheet.need_start[first + task + 1] = used[NEEDS] + per[task + 1]
    base = used[NEEDS]
    used[NEEDS] += per[wide]
    for k in range(n):
        if row[k] >= 0:
            at, piece = base + per[sender[k]], source[row[k]]
            per[sender[k]] += 1
            sheet.need[at] = ((what[k] >> SHIFT) + shift) << SHIFT | held.place[piece]
            sheet.need_device[at] = device[piece]
    return many


@compiled
def _table(count):  # type: ignore[no-untyped-def]
    """Room for so many rows in a table with open addresses."""
    room = 16
    while room < 2 * count:
        room *= 2
    return np.full(room, -1)


@compiled
def _is_new(table, one, other, row):  # type: ignore[no-untyped-def]
    """Whether no row in the table is equal in both columns; then it is put there."""
    mixed = np.uint64(one[row]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(other[row])
    mixed = mixed * np.uint64(0xC2B2AE3D27D4EB4F)
    last = len(table) - 1
    place = np.int64(mixed >> np.uint64(33)) & last
    while table[place] >= 0:
        if one[table[place]] == one[row] and other[table[place]] == other[row]:
            return False
        place = (place + 1) & last
    table[place] = row
    return True


@compiled
def _collectives(sheet, held, pairs, boxes, late):  # type: ignore[no-untyped-def]
    """Groups of three or more that all send to all, about equally much, have one message."""
    size, carrier, devices, used = sheet.size, sheet.carrier, len(sheet.parent), sheet.used
    parent, many = sheet.parent, pairs.shape[1]
    for d in range(devices):
        parent[d] = d
    moved = True
    while moved:  # every device joins the smallest one it exchanges with
        moved = False
        for k in range(many):
            a, b = pairs[0, k], pairs[1, k]
            least = min(parent[a], parent[b])
            if parent[a] != least or parent[b] != least:
                parent[a] = parent[b] = least
                moved = True
    inside, most, total, joined = np.zeros((4, devices), np.int64)
    least_size = np.full(devices, np.iinfo(np.int64).max)
    for k in range(many):
        a, b = pairs[0, k], pairs[1, k]
        root, nbytes = parent[a], size[a * devices + b]
        inside[root] += 1
        most[root] = max(most[root], nbytes)
        least_size[root] = min(least_size[root], nbytes)
        total[root] += nbytes
        joined[a] = joined[b] = 1
    for root in range(devices):
        if inside[root] == 0:
            continue
        group = 0
        for d in range(devices):
            group += joined[d] and parent[d] == root
        if group < 3 or inside[root] != group * (group - 1):
            continue
        if most[root] > EVEN * least_size[root]:
            continue
        task = _task(sheet, COLLECTIVE, root, -1, late, total[root], 1, 0)
        number = used[GROUPS]
        sheet.group[task] = number
        sheet.group_start[number] = used[MEMBERS]
        for d in range(devices):
            if joined[d] and parent[d] == root:
                sheet.member[used[MEMBERS]] = d
                used[MEMBERS] += 1
        used[GROUPS] = number + 1
        sheet.group_start[number + 1] = used[MEMBERS]
        sheet.pattern[task] = _pattern(held, parent, root, boxes, group)
        for k in range(many):
            if parent[pairs[0, k]] == root:
                carrier[pairs[0, k] * devices + pairs[1, k]] = task


@compiled
def _pattern(held, parent, root, boxes, group):  # type: ignore[no-untyped-def]
    """What the blocks of a collective are."""
    row, what, sender, _ = boxes
    n, different, terms = 0, 0, False
    table, box = _table(len(row)), np.empty(len(row), np.int64)
    for k in range(len(row)):
        if parent[sender[k]] == root:
            n += 1
            box[k] = held.source_box[row[k]]
            different += _is_new(table, what, box, k)
            terms = terms or held.source_term[row[k]] != 0
    if different * (group - 1) == n:
        return ALL_GATHER
    return REDUCE_SCATTER if terms else ALL_TO_ALL


@compiled
def _compute(  # type: ignore[no-untyped-def]
    sheet, held, fed, stages, made, devices, flops, places, zeros, alias, itemsize
):  # fmt: skip
    """The parts of an Op: each reads, of every argument, the next answer of its Flow."""
    used, inputs = sheet.used, len(places)
    read, next_answer = np.empty(inputs, np.int64), np.empty(len(fed), np.int64)
    for j in range(len(fed)):
        next_answer[j] = held.answer_start[held.stage_start[fed[j]] + stages[j]]
    part, zero = 0, 0
    for row in range(len(devices)):
        nbytes = 0
        for k in range(inputs):
            read[k] = -1
            if len(zeros) and zeros[zero + k]:
                continue
            j = places[k]
            read[k] = held.answer[next_answer[j]]
            next_answer[j] += 1
            fresh = True
            for other in range(k):  # a slot that is two arguments is read once
                fresh = fresh and not (places[other] == j and read[other] == read[k])
            if fresh:
                nbytes += held.nbytes[read[k]]
        task = _task(sheet, COMPUTE, devices[row], -1, 0, 0, itemsize, 0)
        for r in range(len(made)):
            left = held.first[made[r]] + row
            nbytes += held.nbytes[left]
            sheet.make[used[MAKES]] = (len(fed) + r) << SHIFT | held.place[left]
            used[MAKES] += 1
        sheet.make_start[task + 1] = used[MAKES]
        sheet.nbytes[task] = 0 if alias else nbytes
        sheet.flops[task], sheet.part[task] = flops[part], row
        part, zero = part + 1, zero + inputs
        if part == len(flops):
            part, zero = 0, 0
