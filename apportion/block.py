"""Block: the tasks of one Op, in columns, with references that do not say which Op it is.

A Block names a slot by (j, p): piece p of the Flow of the Op's j-th Value, distinct inputs first,
then outputs. Ops that are cut alike and read and leave their Values alike have one Block; lowering
puts Blocks one after the other and resolves the names, and delta simulation replaces a few.

Tasks of a Block, in order: the exchange that fetches inputs, the assemblies of fetched regions, the
parts of the Op, the exchange that lays its results out, the assemblies of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.flow import HEAD, LAID, Flow
from apportion.tasks import (
    ALL_GATHER,
    ALL_TO_ALL,
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    REDUCE_SCATTER,
    TRANSFER,
    Copied,
    Ends,
    Floats,
    Ints,
    Messages,
    fill_ends,
)

EVEN = 2.0  # members of a collective send about equally much: the most over the least


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of an Op: where they are, and which of its Values each of their arguments is."""

    told: Ints  # parts n, inputs, results, alias, itemsize; device: n; argument: n x inputs, or -1
    flops: Floats  # n


def parts(
    devices: Sequence[int],
    flops: Floats,
    argument: Ints,
    results: int,
    alias: bool,
    itemsize: int,
) -> Parts:
    """The parts of an Op on the given devices. An argument that is -1 is a block of zeros; with
    `alias` the result shares the storage of the first argument."""
    n, inputs = argument.shape
    told = [n, inputs, results, alias, itemsize, *devices]
    return Parts(np.concatenate([np.array(told, np.int64), argument.reshape(-1)]), flops)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Lengths: tasks n. References are (j, p)."""

    kind: Ints  # n
    part: Ints  # n
    device: Ints  # n
    peer: Ints  # n
    late: Ints  # n: 1 for tasks that lay results out
    nbytes: Ints  # n
    flops: Floats  # n
    itemsize: Ints  # n
    group: Ints  # n: index into groups, or -1
    pattern: Ints  # n
    groups: tuple[tuple[int, ...], ...]
    in_start: Ints  # n + 1
    in_j: Ints
    in_p: Ints
    out_start: Ints  # n + 1
    out_j: Ints
    out_p: Ints
    after_start: Ints  # n + 1
    after: Ints  # messages of the Block that an assembly waits for
    created_j: Ints
    created_p: Ints
    created_task: Ints
    created_fetched: Ints  # 1 if an assembly makes it
    base_j: Ints  # for each created slot the one whose storage it shares, or -1
    base_p: Ints
    copy_j: Ints
    copy_target: Ints
    copy_source: Ints
    copy_row: Ints  # the source's row in the Flow
    copy_message: Ints  # task, or -1
    copy_task: Ints
    taken: Ints  # n: boxes that a message carries, or that an assembly puts together
    ends: Ends  # of messages

    def __len__(self) -> int:
        return len(self.kind)


NO_PARTS = Parts(np.zeros(5, np.int64), np.zeros(0))


def reading(stages: Sequence[int], results: int, itemsizes: Sequence[int], devices: int) -> Ints:
    """What a Block is told of the Values of an Op: the stages at which it reads its inputs, how
    many results there are, and bytes of an element of each of them."""
    rows = [
        (j, stage, size)
        for j, (stage, size) in enumerate(
            zip((*stages, *(LAID,) * results), itemsizes, strict=True)
        )
    ]
    return _told(devices, len(stages), rows)


def block(told: Ints, parts: Parts, flows: Sequence[Flow]) -> Block:
    """The tasks of an Op that reads Flows and leaves others, as `reading` tells."""
    given = np.concatenate([told, parts.told, *(flow.core for flow in flows)])
    return _sliced(_work(given, parts.flops))


def ending(feeds: Sequence[tuple[Flow, int]], itemsizes: Sequence[int], devices: int) -> Block:
    """The tasks of the end of the step, which reads Flows at the given stages."""
    rows, flows = [], []
    for j, (flow, stage) in enumerate(feeds):
        low, high = flow.made_at(stage)
        if low < high:
            rows.append((j, stage, itemsizes[j]))
            flows.append(flow)
    return block(_told(devices, len(rows), rows), NO_PARTS, flows)


def _told(devices: int, feeds: int, rows: Sequence[tuple[int, int, int]]) -> Ints:
    return np.array([devices, feeds, len(rows), *(x for row in rows for x in row)], np.int64)


def _sliced(flat: Ints) -> Block:
    """What compiled code made, column by column."""
    n, ins, outs, afters, created, copies, ends, groups = flat[:SIZES].tolist()
    edges, at = [], SIZES
    for size, times in (
        (n, 11), (n + 1, 3), (ins, 2), (outs, 2), (afters, 1), (created, 6), (copies, 6), (ends, 5),
    ):  # fmt: skip
        for _ in range(times):
            edges.append(flat[at : at + size])
            at += size
    found: list[tuple[int, ...]] = []
    if groups:
        rest = flat[at:].tolist()
        while rest:
            many = 1 + rest[0]
            found.append(tuple(rest[1:many]))
            del rest[:many]
    kind, part, device, peer, late, nbytes, itemsize, group, pattern, taken, flops = edges[:11]
    in_start, out_start, after_start, in_j, in_p, out_j, out_p, after = edges[11:19]
    return Block(
        kind, part, device, peer, late, nbytes, flops.view(np.float64), itemsize, group, pattern,
        tuple(found), in_start, in_j, in_p, out_start, out_j, out_p, after_start, after,
        *edges[19:31], taken, Ends(*edges[31:]),
    )  # fmt: skip


# Compiled


SIZES = 8  # numbers of tasks, ins, outs, afters, created, copies, ends, groups
TASKS, INS, OUTS, AFTERS, CREATED, COPIES, ENDS, GROUPS, MEMBERS = range(9)


class _Columns(NamedTuple):
    """Columns while they grow; a row of numbers for each."""

    used: Ints  # how many there are of each
    task: Ints  # 10 x: as in a Block, kind to pattern without flops, then taken
    start: Ints  # 3 x: ins, outs and afters of tasks
    ins: Ints  # 2 x
    outs: Ints  # 2 x
    after: Ints
    created: Ints  # 6 x
    copy: Ints  # 10 x: as in a Block; sender, receiver, bytes; the Value's index
    member: Ints  # groups: how many members, and the members
    member_start: Ints  # by group


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _work(given: Ints, flops: Floats) -> Ints:
    """A Block in one row."""
    feeds, values = given[1], given[2]
    parts = 3 + 3 * values
    n, inputs, results = given[parts], given[parts + 1], given[parts + 2]
    at = np.empty(values + 1, np.int64)
    at[0] = parts + 5 + n + n * inputs
    pieces, rows = 0, 0
    for v in range(values):
        at[v + 1] = at[v] + given[at[v]]
        low, high = _made(given, at, v)
        start = _source_start(given, at[v])
        pieces += high - low
        rows += given[start + high] - given[start + low]
    most, made = rows + pieces + n, pieces + n * results
    none = np.empty(0, np.int64)
    columns = _Columns(
        np.zeros(9, np.int64), np.empty((10, most), np.int64), np.zeros((3, most + 1), np.int64),
        np.empty((2, 2 * rows + n * inputs), np.int64), np.empty((2, made), np.int64),
        np.empty(rows, np.int64), np.empty((6, made), np.int64), np.empty((10, rows), np.int64),
        np.empty(2 * rows, np.int64), np.empty(rows + 1, np.int64),
    )  # fmt: skip
    if rows:
        _fetch(columns, given, at, 0, feeds, 0)
    first = columns.used[TASKS]
    if n:
        _compute(columns, given, at, parts)
    if rows:
        _fetch(columns, given, at, feeds, values, 1)
    ends = _ends(columns) if rows else Ends(none, none, none, none, none)
    return _written(columns, ends, flops, first)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _made(given, at, v):  # type: ignore[no-untyped-def]
    """The range of the pieces of a Value that are made here."""
    stage = at[v] + HEAD + given[4 + 3 * v]
    return given[stage], given[stage + 1]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _device(given, core):  # type: ignore[no-untyped-def]
    """Where the devices of a core are."""
    return core + HEAD + 2 * (given[core + 4] + 1)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _source_start(given, core):  # type: ignore[no-untyped-def]
    return _device(given, core) + 3 * given[core + 1]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _answer(given, core):  # type: ignore[no-untyped-def]
    return _source_start(given, core) + given[core + 1] + 1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _source(given, core):  # type: ignore[no-untyped-def]
    return _answer(given, core) + given[core + 3]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _add(columns, kind, device, peer, late, nbytes, itemsize):  # type: ignore[no-untyped-def]
    """A new task; its number."""
    number = columns.used[TASKS]
    columns.used[TASKS] = number + 1
    task = columns.task[:, number]
    task[0], task[1], task[2], task[3], task[4] = kind, -1, device, peer, late
    task[5], task[6], task[7], task[8], task[9] = nbytes, itemsize, -1, -1, 0
    return number


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _close(columns, task):  # type: ignore[no-untyped-def]
    """Everything that a task refers to is there."""
    for k in range(3):
        columns.start[k, task + 1] = columns.used[INS + k]


# Fetching


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _fetch(columns, given, at, begin, end, late):  # type: ignore[no-untyped-def]
    """The exchange and the assemblies of the Values begin:end."""
    used, copy = columns.used, columns.copy
    first, sent = used[COPIES], 0
    row = first
    for v in range(begin, end):
        core = at[v]
        low, high = _made(given, at, v)
        device, start = _device(given, core), _source_start(given, core)
        source, sources = _source(given, core), given[core + 2]
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


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _exchange(columns, given, at, first, sent, late):  # type: ignore[no-untyped-def]
    """The messages that carry the copies from `first` on."""
    devices, used, copy = given[0], columns.used, columns.copy
    last = used[COPIES]
    keys, count = np.empty(sent, np.int64), 0
    for row in range(first, last):
        if copy[6, row] != copy[7, row]:
            keys[count] = copy[6, row] * devices + copy[7, row]
            count += 1
    pairs = _distinct(keys)
    size, carrier = np.zeros(len(pairs), np.int64), np.full(len(pairs), -1)
    which = np.full(last - first, -1)
    for row in range(first, last):
        if copy[6, row] != copy[7, row]:
            pair = np.searchsorted(pairs, copy[6, row] * devices + copy[7, row])
            which[row - first] = pair
            size[pair] += copy[8, row]
    if len(pairs) >= 6:
        _join(columns, given, at, first, which, pairs, size, carrier, late)
    for pair in range(len(pairs)):
        if carrier[pair] < 0:
            key = pairs[pair]
            carrier[pair] = _add(
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
                _close(columns, message)
            message = key // (most_j * most_p)
        columns.ins[0, used[INS]] = key // most_p % most_j
        columns.ins[1, used[INS]] = key % most_p
        used[INS] += 1
    _close(columns, message)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _distinct(numbers):  # type: ignore[no-untyped-def]
    """The distinct numbers, rising."""
    found, count = np.sort(numbers), 1
    for k in range(1, len(found)):
        if found[k] != found[count - 1]:
            found[count] = found[k]
            count += 1
    return found[: min(count, len(found))]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
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
        task = _add(columns, COLLECTIVE, one, -1, late, total, 1)
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


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _top(root, device):  # type: ignore[no-untyped-def]
    while root[device] != device:
        device = root[device]
    return device


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _pattern(columns, given, at, first, which, pairs, root, one, members):  # type: ignore[no-untyped-def]
    """What the blocks of a collective are."""
    copy, devices = columns.copy, given[0]
    sent, count, adds = np.empty(len(which), np.int64), 0, False
    for row in range(first, first + len(which)):
        pair = which[row - first]
        if pair < 0 or root[pairs[pair] // devices] != one:
            continue
        core = at[copy[9, row]]
        term = _source(given, core) + 2 * given[core + 2] + copy[3, row]
        adds = adds or given[term] > 0
        mixed = given[term + given[core + 2]] ^ (copy[2, row] + 1) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        sent[count] = (mixed ^ (mixed >> 32)) + copy[0, row] * 0x14D049BB133111EB
        count += 1
    if len(_distinct(sent[:count])) * (members - 1) == count:
        return ALL_GATHER
    return REDUCE_SCATTER if adds else ALL_TO_ALL


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _assemble(columns, given, at, first, late):  # type: ignore[no-untyped-def]
    """A task for every piece that is put together of the copies from `first` on."""
    used, copy, row = columns.used, columns.copy, first
    while row < used[COPIES]:
        v, j, piece, end, nbytes = copy[9, row], copy[0, row], copy[1, row], row, 0
        while end < used[COPIES] and copy[9, end] == v and copy[1, end] == piece:
            nbytes += copy[8, end]
            end += 1
        device = _device(given, at[v])
        base = given[device + 2 * given[at[v] + 1] + piece]
        task = _add(
            columns, ASSEMBLE, given[device + piece], -1, late, 0 if base >= 0 else 2 * nbytes,
            given[5 + 3 * v],
        )  # fmt: skip
        columns.task[9, task] = end - row
        reads, waits = used[INS], used[AFTERS]
        for k in range(row, end):
            copy[5, k] = task
            if copy[4, k] < 0:
                used[INS] = _insert(columns.ins[1], reads, used[INS], copy[2, k])
            else:
                used[AFTERS] = _insert(columns.after, waits, used[AFTERS], copy[4, k])
        columns.ins[0, reads : used[INS]] = j
        _create(columns, task, j, piece, 1, j if base >= 0 else -1, base)
        _close(columns, task)
        row = end


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _insert(column, begin, end, number):  # type: ignore[no-untyped-def]
    """Puts a number into the rising numbers begin:end unless it is there; their new end."""
    place = end
    while place > begin and column[place - 1] > number:
        place -= 1
    if place > begin and column[place - 1] == number:
        return end
    for k in range(end, place, -1):
        column[k] = column[k - 1]
    column[place] = number
    return end + 1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _create(columns, task, j, piece, fetched, base_j, base):  # type: ignore[no-untyped-def]
    """A slot that a task makes."""
    out, slot = columns.used[OUTS], columns.used[CREATED]
    columns.outs[0, out], columns.outs[1, out] = j, piece
    made = columns.created[:, slot]
    made[0], made[1], made[2], made[3], made[4], made[5] = (
        j,
        piece,
        task,
        fetched,
        base_j,
        base,
    )
    columns.used[OUTS], columns.used[CREATED] = out + 1, slot + 1


# The parts


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _compute(columns, given, at, parts):  # type: ignore[no-untyped-def]
    feeds, values, used = given[1], given[2], columns.used
    n, inputs = given[parts], given[parts + 1]
    alias, itemsize, device = given[parts + 3] == 1, given[parts + 4], parts + 5
    answer = np.empty(feeds, np.int64)  # the next piece that each Value answered with
    for v in range(feeds):
        start = at[v] + HEAD + given[at[v] + 4] + 1
        answer[v] = _answer(given, at[v]) + given[start + given[4 + 3 * v]]
    for part in range(n):
        task = _add(columns, COMPUTE, given[device + part], -1, 0, 0, itemsize)
        columns.task[1, task] = part
        first, nbytes = used[INS], 0
        for k in range(inputs):
            j, p = given[device + n + part * inputs + k], np.int64(-1)
            if j >= 0:
                p = given[answer[j]]
                answer[j] += 1
                twice = False  # a slot that is two arguments is read once
                for other in range(first, used[INS]):
                    twice = twice or (columns.ins[0, other] == j and columns.ins[1, other] == p)
                if not twice:
                    nbytes += given[_device(given, at[j]) + given[at[j] + 1] + p]
            columns.ins[0, used[INS]], columns.ins[1, used[INS]] = j, p
            used[INS] += 1
        base_j, base = np.int64(-1), np.int64(-1)
        if alias and inputs:
            base_j, base = columns.ins[0, first], columns.ins[1, first]
        for v in range(feeds, values):
            nbytes += given[_device(given, at[v]) + given[at[v] + 1] + part]
            _create(columns, task, np.int64(v), part, 0, base_j, base)
        columns.task[5, task] = 0 if alias else nbytes
        _close(columns, task)


# Writing


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _ends(columns: _Columns) -> Ends:
    n, copies, task, copy = (
        columns.used[TASKS],
        columns.used[COPIES],
        columns.task,
        columns.copy,
    )
    start = np.zeros(n + 1, np.int64)
    for k in range(n):
        many = 2 if task[0, k] == TRANSFER else 0
        if task[0, k] == COLLECTIVE:
            group = task[7, k]
            many = columns.member_start[group + 1] - columns.member_start[group]
        start[k + 1] = start[k] + many
    return fill_ends(
        Messages(
            task[0, :n], task[2, :n], task[3, :n], task[5, :n], task[7, :n],
            columns.member_start, columns.member,
        ),
        Copied(copy[4, :copies], copy[5, :copies], copy[6, :copies], copy[7, :copies],
               copy[8, :copies]),
        start,
    )  # fmt: skip


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _written(columns: _Columns, ends: Ends, flops: Floats, first: int) -> Ints:
    """Everything in one row, as `_sliced` reads it."""
    used = columns.used
    used[ENDS] = len(ends.task)
    n, groups, members = used[TASKS], used[GROUPS], used[MEMBERS]
    size = SIZES + 11 * n + 3 * (n + 1) + 2 * (used[INS] + used[OUTS]) + used[AFTERS]
    size += 6 * (used[CREATED] + used[COPIES]) + 5 * used[ENDS] + groups + members
    flat = np.empty(size, np.int64)
    flat[:SIZES] = used[:SIZES]
    at = _write(flat, SIZES, columns.task, 10, n)
    flat[at : at + n] = 0
    if len(flops):
        flat[at + first : at + first + len(flops)] = flops.view(np.int64)
    at = _write(flat, at + n, columns.start, 3, n + 1)
    at = _write(flat, at, columns.ins, 2, used[INS])
    at = _write(flat, at, columns.outs, 2, used[OUTS])
    flat[at : at + used[AFTERS]] = columns.after[: used[AFTERS]]
    at = _write(flat, at + used[AFTERS], columns.created, 6, used[CREATED])
    at = _write(flat, at, columns.copy, 6, used[COPIES])
    for column in (ends.task, ends.device, ends.sent, ends.received, ends.taker):
        flat[at : at + len(column)] = column
        at += len(column)
    for group in range(groups):
        low, high = columns.member_start[group], columns.member_start[group + 1]
        flat[at] = high - low
        flat[at + 1 : at + 1 + high - low] = columns.member[low:high]
        at += 1 + high - low
    return flat


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _write(flat, at, rows, many, size):  # type: ignore[no-untyped-def]
    for row in range(many):
        flat[at : at + size] = rows[row, :size]
        at += size
    return at
