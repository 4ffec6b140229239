"""draft: the tasks of Ops straight from their Flows, in compiled code; what block.py makes, for
delta simulation.

A Sheet has the tasks of several Ops in columns: what costs are looked up by, and what tasks wait
for and make. Tasks of an Op, in order: the exchange that fetches inputs, the assemblies of fetched
regions, the parts of the Op, the exchange that lays its results out, the assemblies of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from apportion.block import EVEN
from apportion.flow import LAID
from apportion.flows import Flows
from apportion.stock import SHIFT
from apportion.tasks import (
    ALL_GATHER,
    ALL_TO_ALL,
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    REDUCE_SCATTER,
    TRANSFER,
    Floats,
    Ints,
)

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
    need_start: Ints  # t + 1
    need: Ints  # pieces that a message reads
    need_device: Ints
    wait_start: Ints  # t + 1
    wait: Ints  # tasks of the Op
    make_start: Ints  # t + 1
    make: Ints  # pieces
    group_start: Ints  # g + 1
    member: Ints  # devices
    # for one exchange
    size: Ints  # by pair of devices
    carrier: Ints  # by pair of devices
    parent: Ints  # by device


def sheet(devices: int, room: int) -> Sheet:
    """An empty one with so much room for everything."""
    columns: dict[str, Any] = {name: np.zeros(room + 1, np.int64) for name in Sheet._fields[1:-3]}
    columns["flops"] = np.zeros(room + 1)
    pairs = devices * devices
    return Sheet(
        np.zeros(7, np.int64), **columns, size=np.zeros(pairs, np.int64),
        carrier=np.full(pairs, -1), parent=np.zeros(devices, np.int64),
    )  # fmt: skip


# A book has records of Ops and of cuts, in one array. What is to be drafted names for each Op the
# record of what it does, that of its cut, whether it is computed term by term, and its Flows.

CALL, ALIAS, ITEMSIZE, READS, MAKES, ARGUMENTS, STAGES = range(7)  # of Ops
DEVICES, FLOPS, ZEROS, PARTS = range(4)  # of cuts
ASKED = 3  # then the Flows


def op_record(
    call: int, alias: bool, itemsize: int, makes: int, stages: Sequence[int], places: Sequence[int]
) -> Ints:
    """An Op, whatever its Choice: which operator; the stages at which it reads its distinct inputs;
    for every argument which of these it is."""
    head = (call, alias, itemsize, len(stages), makes, len(places))
    return np.array([*head, *stages, *places], np.int64)


def cut_record(devices: Sequence[int], flops: Floats, zeros: Ints) -> Ints:
    """The device of every part of every replica; the flops of every part; part x argument: 1 for a
    block of zeros, none if there are none."""
    head = np.array([len(devices), len(flops), len(zeros), *devices], np.int64)
    return np.concatenate([head, flops.view(np.int64), zeros])


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
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
        total += 1 + book[cut + DEVICES]
        at += reads + makes
    return total


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def draft(sheet: Sheet, held: Flows, book: Ints, asked: Ints) -> bool:
    """Writes the tasks of Ops on an empty sheet; whether there was room."""
    if room_for(held, book, asked) > len(sheet.kind):
        return False
    used, numbers = sheet.used, book.view(np.float64)
    used[:] = 0
    at, op = 0, 0
    while at < len(asked):
        does, cut, termwise = asked[at], asked[at + 1], asked[at + 2]
        reads, makes, arguments = book[does + READS], book[does + MAKES], book[does + ARGUMENTS]
        fed = asked[at + ASKED : at + ASKED + reads]
        made = asked[at + ASKED + reads : at + ASKED + reads + makes]
        stages = book[does + STAGES : does + STAGES + reads]
        parts, first = book[cut + DEVICES], used[TASKS]
        _exchange(sheet, held, fed, stages, 0, 0, first)
        if parts:
            places = does + STAGES + reads
            flops = cut + PARTS + parts
            zeros = flops + book[cut + FLOPS]
            _compute(
                sheet, held, fed, stages, made, book[cut + PARTS : flops], numbers[flops:zeros],
                book[places : places + arguments],
                book[zeros : zeros + (0 if termwise else book[cut + ZEROS])],
                book[does + ALIAS], book[does + ITEMSIZE],
            )  # fmt: skip
            _exchange(sheet, held, made, np.full(makes, LAID), reads, 1, first)
        for task in range(first, used[TASKS]):
            sheet.call[task], sheet.owner[task] = book[does + CALL], op
        at, op = at + ASKED + reads + makes, op + 1
        sheet.task_start[op], used[OPS] = used[TASKS], op
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _task(sheet, kind, device, peer, late, nbytes, itemsize, taken):  # type: ignore[no-untyped-def]
    """Adds a task; what it needs, waits for and makes is added after it."""
    used = sheet.used
    task = used[TASKS]
    sheet.kind[task], sheet.device[task], sheet.peer[task] = kind, device, peer
    sheet.late[task], sheet.nbytes[task], sheet.itemsize[task] = late, nbytes, itemsize
    sheet.taken[task], sheet.flops[task], sheet.part[task] = taken, 0.0, -1
    sheet.group[task] = sheet.pattern[task] = -1
    sheet.need_start[task + 1] = used[NEEDS]
    sheet.wait_start[task + 1] = used[WAITS]
    sheet.make_start[task + 1] = used[MAKES]
    used[TASKS] = task + 1
    return task


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _exchange(sheet, held, flows, stages, shift, late, begun):  # type: ignore[no-untyped-def]
    """The messages and assemblies that make the pieces of Flows at stages."""
    size, devices, used = sheet.size, len(sheet.parent), sheet.used
    device, source_start, source = held.device, held.source_start, held.source
    remote = 0
    for k in range(len(flows)):
        at = held.stage_start[flows[k]] + stages[k]
        for piece in range(held.piece_start[at], held.piece_start[at + 1]):
            for q in range(source_start[piece], source_start[piece + 1]):
                remote += device[source[q]] != device[piece]
    if remote:
        _messages(sheet, held, flows, stages, shift, late, remote)
    for k in range(len(flows)):
        at = held.stage_start[flows[k]] + stages[k]
        for piece in range(held.piece_start[at], held.piece_start[at + 1]):
            low, high = source_start[piece], source_start[piece + 1]
            moved = 0
            for q in range(low, high):
                moved += 2 * held.source_nbytes[q]
            if held.viewed[piece]:
                moved = 0
            size_of = held.itemsize[flows[k]]
            task = _task(sheet, ASSEMBLE, device[piece], -1, late, moved, size_of, high - low)
            for q in range(low, high):
                if device[source[q]] != device[piece]:
                    carrier = sheet.carrier[device[source[q]] * devices + device[piece]] - begun
                    fresh = True
                    for w in range(sheet.wait_start[task], used[WAITS]):
                        fresh = fresh and sheet.wait[w] != carrier
                    if fresh:
                        sheet.wait[used[WAITS]] = carrier
                        used[WAITS] += 1
            sheet.make[used[MAKES]] = (k + shift) << SHIFT | held.place[piece]
            used[MAKES] += 1
            sheet.wait_start[task + 1], sheet.make_start[task + 1] = used[WAITS], used[MAKES]
    if remote:
        for k in range(len(flows)):
            at = held.stage_start[flows[k]] + stages[k]
            for piece in range(held.piece_start[at], held.piece_start[at + 1]):
                for q in range(source_start[piece], source_start[piece + 1]):
                    pair = device[source[q]] * devices + device[piece]
                    sheet.carrier[pair], size[pair] = -1, 0


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _messages(sheet, held, flows, stages, shift, late, remote):  # type: ignore[no-untyped-def]
    """The messages of one exchange, and what each reads."""
    size, carrier, devices, used = sheet.size, sheet.carrier, len(sheet.parent), sheet.used
    device, source_start, source = held.device, held.source_start, held.source
    rows, pair_of = np.empty((2, remote), np.int64)  # sources, and the Flow of each
    flow_of = np.empty(remote, np.int64)
    pairs = np.empty(remote, np.int64)
    n, many = 0, 0
    for k in range(len(flows)):
        at = held.stage_start[flows[k]] + stages[k]
        for piece in range(held.piece_start[at], held.piece_start[at + 1]):
            for q in range(source_start[piece], source_start[piece + 1]):
                if device[source[q]] == device[piece]:
                    continue
                pair = device[source[q]] * devices + device[piece]
                rows[n], pair_of[n], flow_of[n] = q, pair, k
                n += 1
                if carrier[pair] == -1:
                    carrier[pair] = -2
                    pairs[many] = pair
                    many += 1
                size[pair] += held.source_nbytes[q]
    pairs = np.sort(pairs[:many])
    _collectives(sheet, held, pairs, rows, pair_of, flow_of, late)
    for pair in pairs:
        if carrier[pair] == -2:
            carrier[pair] = _task(
                sheet, TRANSFER, pair // devices, pair % devices, late, size[pair], 1, 0
            )
    first = used[TASKS]
    for row in range(n):
        first = min(first, carrier[pair_of[row]])
    # what each reads, once
    reads = np.empty(n, np.int64)
    wide = used[TASKS] - first
    for row in range(n):
        task = carrier[pair_of[row]]
        sheet.taken[task] += 1
        reads[row] = (flow_of[row] * wide + task - first) << SHIFT | source[rows[row]]
    order = np.sort(reads)
    code = np.empty(n, np.int64)
    count = 0
    for k in range(n):
        if k == 0 or order[k] != order[k - 1]:
            code[count] = order[k]
            count += 1
    per = np.zeros(wide + 1, np.int64)
    for k in range(count):
        per[(code[k] >> SHIFT) % wide + 1] += 1
    for task in range(wide):
        per[task + 1] += per[task]
        sheet.need_start[first + task + 1] = used[NEEDS] + per[task + 1]
    base = used[NEEDS]
    used[NEEDS] += count
    for k in range(count):
        owner, piece = code[k] >> SHIFT, code[k] & ((1 << SHIFT) - 1)
        at = base + per[owner % wide]
        per[owner % wide] += 1
        sheet.need[at] = (owner // wide + shift) << SHIFT | held.place[piece]
        sheet.need_device[at] = device[piece]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _collectives(sheet, held, pairs, rows, pair_of, flow_of, late):  # type: ignore[no-untyped-def]
    """Groups of three or more that all send to all, about equally much, have one message."""
    if len(pairs) < 6:
        return
    size, carrier, devices, used = sheet.size, sheet.carrier, len(sheet.parent), sheet.used
    parent = sheet.parent
    for d in range(devices):
        parent[d] = d
    moved = True
    while moved:  # every device joins the smallest one it exchanges with
        moved = False
        for pair in pairs:
            a, b = pair // devices, pair % devices
            least = min(parent[a], parent[b])
            if parent[a] != least or parent[b] != least:
                parent[a] = parent[b] = least
                moved = True
    inside = np.zeros(devices, np.int64)
    most, least_size = np.zeros(devices, np.int64), np.full(devices, np.iinfo(np.int64).max)
    total = np.zeros(devices, np.int64)
    joined = np.zeros(devices, np.uint8)
    for pair in pairs:
        root = parent[pair // devices]
        inside[root] += 1
        most[root] = max(most[root], size[pair])
        least_size[root] = min(least_size[root], size[pair])
        total[root] += size[pair]
        joined[pair // devices] = joined[pair % devices] = 1
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
        sheet.pattern[task] = _pattern(held, parent, root, rows, pair_of, flow_of, devices, group)
        for pair in pairs:
            if parent[pair // devices] == root:
                carrier[pair] = task


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _pattern(  # type: ignore[no-untyped-def]
    held, parent, root, rows, pair_of, flow_of, devices, group
):  # fmt: skip
    """What the blocks of a collective are."""
    n = 0
    what, box = np.empty((2, len(rows)), np.int64)
    terms = False
    for k in range(len(rows)):
        if parent[pair_of[k] // devices] == root:
            q = rows[k]
            what[n] = flow_of[k] << SHIFT | held.source[q]
            box[n] = held.source_box[q]
            terms = terms or held.source_term[q] != 0
            n += 1
    order = np.argsort(box[:n], kind="mergesort")
    what, box = what[:n][order], box[:n][order]
    order = np.argsort(what, kind="mergesort")
    what, box = what[order], box[order]
    different = 1
    for k in range(1, n):
        different += what[k] != what[k - 1] or box[k] != box[k - 1]
    if different * (group - 1) == n:
        return ALL_GATHER
    return REDUCE_SCATTER if terms else ALL_TO_ALL


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _compute(  # type: ignore[no-untyped-def]
    sheet, held, fed, stages, made, devices, flops, places, zeros, alias, itemsize
):  # fmt: skip
    """The parts of an Op: each reads, of every argument, the next answer of its Flow."""
    used, inputs = sheet.used, len(places)
    taken = np.zeros(len(fed), np.int64)
    read = np.empty(inputs, np.int64)
    for row in range(len(devices)):
        nbytes = 0
        for k in range(inputs):
            read[k] = -1
            if len(zeros) and zeros[row * inputs % len(zeros) + k]:
                continue
            j = places[k]
            at = held.answer_start[held.stage_start[fed[j]] + stages[j]] + taken[j]
            taken[j] += 1
            read[k] = held.answer[at]
            fresh = True
            for other in range(k):  # a slot that is two arguments is read once
                fresh = fresh and not (places[other] == j and read[other] == read[k])
            if fresh:
                nbytes += held.nbytes[read[k]]
        for flow in made:
            nbytes += held.nbytes[held.first[flow] + row]
        if alias:
            nbytes = 0
        task = _task(sheet, COMPUTE, devices[row], -1, 0, nbytes, itemsize, 0)
        sheet.flops[task], sheet.part[task] = flops[row % len(flops)], row
        for r in range(len(made)):
            sheet.make[used[MAKES]] = (len(fed) + r) << SHIFT | held.place[
                held.first[made[r]] + row
            ]
            used[MAKES] += 1
        sheet.make_start[task + 1] = used[MAKES]
