"""fetch: the tasks that bring regions to where they are wanted, in compiled code: the exchange, and
the assemblies of what it brings. A part of what block.py makes a Block of.

It is given the cores of Flows (flow.py) one after the other, behind a row of numbers that says of
each which Value it is, at which stage it is read and how many bytes an element has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COLLECTIVE,
    TRANSFER,
)
from apportion.lower.value_flow import HEAD
from apportion.machine import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
)

EVEN = 2.0  # members of a collective send about equally much: the most over the least

TASKS, INS, OUTS, AFTERS, CREATED, COPIES, ENDS, GROUPS, MEMBERS = range(9)


class Columns(NamedTuple):
    """Columns while they grow; a row of numbers for each."""

    used: Ints  # how many there are of each
    task: Ints  # 10 x: as in a Block, kind to pattern without flops, then taken
    start: Ints  # 3 x: ins, outs and afters of tasks
    ins: Ints  # 2 x
    outs: Ints  # 2 x
    after: Ints  # 1 x
    created: Ints  # 6 x
    copy: Ints  # 10 x: as in a Block; sender, receiver, bytes; the Value's index
    member: Ints  # groups: how many members, and the members
    member_start: Ints  # by group


@compiled
def made_here(given, at, v):  # type: ignore[no-untyped-def]
    """The range of the pieces of a Value that are made here."""
    stage = at[v] + HEAD + given[4 + 3 * v]
    return given[stage], given[stage + 1]


@compiled
def device_at(given, core):  # type: ignore[no-untyped-def]
    """Where the devices of a core are."""
    return core + HEAD + 2 * (given[core + 4] + 1)


@compiled
def source_start_at(given, core):  # type: ignore[no-untyped-def]
    return device_at(given, core) + 3 * given[core + 1]


@compiled
def answer_at(given, core):  # type: ignore[no-untyped-def]
    return source_start_at(given, core) + given[core + 1] + 1


@compiled
def _source_at(given, core):  # type: ignore[no-untyped-def]
    return answer_at(given, core) + given[core + 3]


@compiled
def add(columns, kind, device, peer, late, nbytes, itemsize):  # type: ignore[no-untyped-def]
    """A new task; its number."""
    number = columns.used[TASKS]
    columns.used[TASKS] = number + 1
    task = columns.task
    task[0, number], task[1, number], task[2, number] = kind, -1, device
    task[3, number], task[4, number], task[5, number] = peer, late, nbytes
    task[6, number], task[7, number], task[8, number], task[9, number] = itemsize, -1, -1, 0
    return number


@compiled
def close(columns, task):  # type: ignore[no-untyped-def]
    """Everything that a task refers to is there."""
    for k in range(3):
        columns.start[k, task + 1] = columns.used[INS + k]


# What an exchange brings


@compiled
def fetch(columns, given, at, begin, end, late):  # type: ignore[no-untyped-def]
    """The exchange and the assemblies of the Values begin:end."""
    used, copy = columns.used, columns.copy
    first, sent = used[COPIES], 0
    row = first
    for v in range(begin, end):
        core = at[v]
        low, high = made_here(given, at, v)
        device, start = device_at(given, core), source_start_at(given, core)
        source, sources = _source_at(given, core), given[core + 2]
        for piece in range(low, high):
            for k in range(given[start + piece], given[start + piece + 1]):
                own = given[source + k]
                copy[0, row], copy[1, row], copy[2, row] = given[3 + 3 * v], piece, own
                copy[3, row], copy[4, row] = k, -1
                copy[6, row], copy[7, row] = given[device + own], given[device + piece]
                copy[8, row], copy[9, row] = given[source + sources + k], v
                sent += copy[6, row] != copy[7, row]
                row += 1
    if row == first:
        return
    used[COPIES] = row
    if sent:
        _exchange(columns, given, at, first, sent, late)
    _assemble(columns, given, at, first, late)


@compiled
def _exchange(columns, given, at, first, sent, late):  # type: ignore[no-untyped-def]
    """The messages that carry the copies from `first` on."""
    devices, used, copy = given[0], columns.used, columns.copy
    last = used[COPIES]
    keys, count = np.empty(sent, np.int64), 0
    for row in range(first, last):
        if copy[6, row] != copy[7, row]:
            keys[count] = copy[6, row] * devices + copy[7, row]
            count += 1
    pairs = _distinct(keys.copy())
    size, carrier = np.zeros(len(pairs), np.int64), np.full(len(pairs), -1)
    which = np.full(last - first, -1)
    for row in range(first, last):
        if copy[6, row] != copy[7, row]:
            pair = find(pairs, copy[6, row] * devices + copy[7, row])
            which[row - first] = pair
            size[pair] += copy[8, row]
    if len(pairs) >= 6:
        _join(columns, given, at, first, which, pairs, size, carrier, late)
    for pair in range(len(pairs)):
        if carrier[pair] < 0:
            key = pairs[pair]
            carrier[pair] = add(
                columns, TRANSFER, key // devices, key % devices, late, size[pair], 1
            )
    most_j, most_p, count = 0, 0, 0
    for row in range(first, last):
        most_j, most_p = max(most_j, copy[0, row] + 1), max(most_p, copy[2, row] + 1)
    for row in range(first, last):
        if which[row - first] >= 0:
            message = carrier[which[row - first]]
            copy[4, row] = message
            columns.task[9, message] += 1
            keys[count] = (message * most_j + copy[0, row]) * most_p + copy[2, row]
            count += 1
    message = -1
    for key in _distinct(keys):  # slots that a message reads, each once
        if key // (most_j * most_p) != message:
            if message >= 0:
                close(columns, message)
            message = key // (most_j * most_p)
        columns.ins[0, used[INS]] = key // most_p % most_j
        columns.ins[1, used[INS]] = key % most_p
        used[INS] += 1
    close(columns, message)


@compiled
def _distinct(numbers):  # type: ignore[no-untyped-def]
    """The distinct numbers, rising."""
    _sort(numbers)
    count = min(len(numbers), 1)
    for k in range(1, len(numbers)):
        if numbers[k] != numbers[count - 1]:
            numbers[count] = numbers[k]
            count += 1
    return numbers[:count]


@compiled
def _sort(numbers):  # type: ignore[no-untyped-def]
    """Sorts numbers, most of which are in order: they are compared over falling distances."""
    far = 1
    while 3 * far < len(numbers):
        far = 3 * far + 1
    while far > 0:
        for k in range(far, len(numbers)):
            number, place = numbers[k], k
            while place >= far and numbers[place - far] > number:
                numbers[place] = numbers[place - far]
                place -= far
            numbers[place] = number
        far //= 3


@compiled
def find(numbers, number):  # type: ignore[no-untyped-def]
    """Where a number is among rising ones."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _join(columns, given, at, first, which, pairs, size, carrier, late):  # type: ignore[no-untyped-def]
    """Collectives: groups of three or more that all send to all, and about equally much."""
    devices, used = given[0], columns.used
    root = np.full(devices, -1)
    for pair in pairs:
        for device in (pair // devices, pair % devices):
            if root[device] < 0:
                root[device] = device
    for pair in pairs:  # to the smallest device that it is connected with
        a, b = _top(root, pair // devices), _top(root, pair % devices)
        root[max(a, b)] = min(a, b)
    for device in range(devices):
        if root[device] >= 0:
            root[device] = _top(root, device)
    for one in range(devices):
        if root[one] != one:
            continue
        members, inside, low, high, total = 0, 0, np.int64(-1), np.int64(0), 0
        for device in range(devices):
            members += root[device] == one
        for pair in range(len(pairs)):
            if root[pairs[pair] // devices] == one:
                inside += 1
                total += size[pair]
                high = max(high, size[pair])
                low = size[pair] if low < 0 else min(low, size[pair])
        if members < 3 or inside != members * (members - 1) or high > EVEN * low:
            continue
        task = add(columns, COLLECTIVE, one, -1, late, total, 1)
        columns.task[7, task] = used[GROUPS]
        columns.task[8, task] = _pattern(
            columns, given, at, first, which, pairs, root, one, members
        )
        columns.member_start[used[GROUPS]] = used[MEMBERS]
        for device in range(devices):
            if root[device] == one:
                columns.member[used[MEMBERS]] = device
                used[MEMBERS] += 1
        used[GROUPS] += 1
        columns.member_start[used[GROUPS]] = used[MEMBERS]
        for pair in range(len(pairs)):
            if root[pairs[pair] // devices] == one:
                carrier[pair] = task


@compiled
def _top(root, device):  # type: ignore[no-untyped-def]
    while root[device] != device:
        device = root[device]
    return device


@compiled
def _pattern(columns, given, at, first, which, pairs, root, one, members):  # type: ignore[no-untyped-def]
    """What the blocks of a collective are."""
    copy, devices = columns.copy, given[0]
    sent, count, adds = np.empty(len(which), np.int64), 0, False
    for row in range(first, first + len(which)):
        pair = which[row - first]
        if pair < 0 or root[pairs[pair] // devices] != one:
            continue
        core = at[copy[9, row]]
        term = _source_at(given, core) + 2 * given[core + 2] + copy[3, row]
        adds = adds or given[term] > 0
        mixed = given[term + given[core + 2]] ^ (copy[2, row] + 1) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        sent[count] = (mixed ^ (mixed >> 32)) + copy[0, row] * 0x14D049BB133111EB
        count += 1
    if len(_distinct(sent[:count])) * (members - 1) == count:
        return ALL_GATHER
    return REDUCE_SCATTER if adds else ALL_TO_ALL


@compiled
def _assemble(columns, given, at, first, late):  # type: ignore[no-untyped-def]
    """A task for every piece that is put together of the copies from `first` on."""
    used, copy, row = columns.used, columns.copy, first
    while row < used[COPIES]:
        v, j, piece, end, nbytes = copy[9, row], copy[0, row], copy[1, row], row, 0
        while end < used[COPIES] and copy[9, end] == v and copy[1, end] == piece:
            nbytes += copy[8, end]
            end += 1
        device = device_at(given, at[v])
        base = given[device + 2 * given[at[v] + 1] + piece]
        task = add(
            columns, ASSEMBLE, given[device + piece], -1, late, 0 if base >= 0 else 2 * nbytes,
            given[5 + 3 * v],
        )  # fmt: skip
        columns.task[9, task] = end - row
        reads, waits = used[INS], used[AFTERS]
        for k in range(row, end):
            copy[5, k] = task
            if copy[4, k] < 0:
                used[INS] = _insert(columns.ins, reads, used[INS], copy[2, k])
            else:
                used[AFTERS] = _insert(columns.after, waits, used[AFTERS], copy[4, k])
        for k in range(reads, used[INS]):
            columns.ins[0, k] = j
        create(columns, task, j, piece, 1, j if base >= 0 else -1, base)
        close(columns, task)
        row = end


@compiled
def _insert(rows, begin, end, number):  # type: ignore[no-untyped-def]
    """Puts a number among the rising ones begin:end of the last row, once; their new end."""
    last, place = len(rows) - 1, end
    while place > begin and rows[last, place - 1] > number:
        place -= 1
    if place > begin and rows[last, place - 1] == number:
        return end
    for k in range(end, place, -1):
        rows[last, k] = rows[last, k - 1]
    rows[last, place] = number
    return end + 1


@compiled
def create(columns, task, j, piece, fetched, base_j, base):  # type: ignore[no-untyped-def]
    """A slot that a task makes."""
    out, slot = columns.used[OUTS], columns.used[CREATED]
    columns.outs[0, out], columns.outs[1, out] = j, piece
    made = columns.created
    made[0, slot], made[1, slot], made[2, slot] = j, piece, task
    made[3, slot], made[4, slot], made[5, slot] = fetched, base_j, base
    columns.used[OUTS], columns.used[CREATED] = out + 1, slot + 1
