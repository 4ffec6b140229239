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

import numpy as np

from apportion.columns import (
    Floats,
    Ints,
    compiled,
)
from apportion.lower.exchange import (
    AFTERS,
    COPIES,
    CREATED,
    ENDS,
    GROUPS,
    INS,
    MEMBERS,
    OUTS,
    TASKS,
    Columns,
    add,
    answer_at,
    close,
    create,
    device_at,
    fetch,
    find,
    made_here,
    source_start_at,
)
from apportion.lower.exchange import EVEN as EVEN
from apportion.lower.task_graph import (
    Ends,
)
from apportion.lower.task_kinds import (
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
)
from apportion.lower.value_flow import HEAD, LAID, Flow


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of an Op: where they are, and which of its Values each of their arguments is."""

    told: Ints  # parts n, inputs, results, alias, itemsize; device: n; argument: n x inputs, or -1
    bits: Ints  # n: of the flops


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
    return Parts(
        np.concatenate([np.array(told, np.int64), argument.reshape(-1)]), flops.view(np.int64)
    )


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


NO_PARTS = Parts(np.zeros(5, np.int64), np.zeros(0, np.int64))


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
    return _sliced(_work(given, parts.bits))


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
    columns, at = [], SIZES
    for size, times in (
        (n, 11), (n + 1, 3), (ins, 2), (outs, 2), (afters, 1), (created, 6), (copies, 6), (ends, 5),
    ):  # fmt: skip
        for _ in range(times):
            columns.append(flat[at : at + size])
            at += size
    found: list[tuple[int, ...]] = []
    if groups:
        members = flat[at:].tolist()
        while members:
            many = 1 + members[0]
            found.append(tuple(members[1:many]))
            del members[:many]
    (
        kind, part, device, peer, late, nbytes, itemsize, group, pattern, taken, flops,
        in_start, out_start, after_start, in_j, in_p, out_j, out_p, after,
        created_j, created_p, created_task, created_fetched, base_j, base_p,
        copy_j, copy_target, copy_source, copy_row, copy_message, copy_task,
        *rest,
    ) = columns  # fmt: skip
    return Block(
        kind, part, device, peer, late, nbytes, flops.view(np.float64), itemsize, group, pattern,
        tuple(found), in_start, in_j, in_p, out_start, out_j, out_p, after_start, after,
        created_j, created_p, created_task, created_fetched, base_j, base_p, copy_j, copy_target,
        copy_source, copy_row, copy_message, copy_task, taken, Ends(*rest),
    )  # fmt: skip


# Compiled


SIZES = 8  # numbers of tasks, ins, outs, afters, created, copies, ends, groups


@compiled
def _work(given, bits):  # type: ignore[no-untyped-def]
    """A Block in one row."""
    feeds, values = given[1], given[2]
    parts = 3 + 3 * values
    n, inputs, results = given[parts], given[parts + 1], given[parts + 2]
    at = np.empty(values + 1, np.int64)
    at[0] = parts + 5 + n + n * inputs
    pieces, rows = 0, 0
    for v in range(values):
        at[v + 1] = at[v] + given[at[v]]
        low, high = made_here(given, at, v)
        start = source_start_at(given, at[v])
        pieces += high - low
        rows += given[start + high] - given[start + low]
    most, made = rows + pieces + n, pieces + n * results
    columns = Columns(
        np.zeros(9, np.int64), np.empty((10, most), np.int64), np.zeros((3, most + 1), np.int64),
        np.empty((2, 2 * rows + n * inputs), np.int64), np.empty((2, made), np.int64),
        np.empty((1, rows), np.int64), np.empty((6, made), np.int64),
        np.empty((10, rows), np.int64), np.empty(2 * rows, np.int64), np.empty(rows + 1, np.int64),
    )  # fmt: skip
    if rows:
        fetch(columns, given, at, 0, feeds, 0)
    first = columns.used[TASKS]
    if n:
        _compute(columns, given, at, parts)
    if rows:
        fetch(columns, given, at, feeds, values, 1)
    return _written(columns, _ends(columns), bits, first)


# The parts


@compiled
def _compute(columns, given, at, parts):  # type: ignore[no-untyped-def]
    feeds, values, used = given[1], given[2], columns.used
    n, inputs = given[parts], given[parts + 1]
    alias, itemsize, device = given[parts + 3] == 1, given[parts + 4], parts + 5
    answer = np.empty(feeds, np.int64)  # the next piece that each Value answered with
    for v in range(feeds):
        start = at[v] + HEAD + given[at[v] + 4] + 1
        answer[v] = answer_at(given, at[v]) + given[start + given[4 + 3 * v]]
    for part in range(n):
        task = add(columns, COMPUTE, given[device + part], -1, 0, 0, itemsize)
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
                    nbytes += given[device_at(given, at[j]) + given[at[j] + 1] + p]
            columns.ins[0, used[INS]], columns.ins[1, used[INS]] = j, p
            used[INS] += 1
        base_j, base = np.int64(-1), np.int64(-1)
        if alias and inputs:
            base_j, base = columns.ins[0, first], columns.ins[1, first]
        for v in range(feeds, values):
            nbytes += given[device_at(given, at[v]) + given[at[v] + 1] + part]
            create(columns, task, np.int64(v), part, 0, base_j, base)
        columns.task[5, task] = 0 if alias else nbytes
        close(columns, task)


# Writing


@compiled
def _ends(columns):  # type: ignore[no-untyped-def]
    """What `ends_of` says of the tasks."""
    used, task, copy = columns.used, columns.task, columns.copy
    begin, count = np.empty(used[TASKS], np.int64), 0
    ends = np.empty((5, 2 * used[COPIES]), np.int64)
    for t in range(used[TASKS]):
        begin[t] = count
        if task[0, t] == TRANSFER:
            count = _end(ends, count, t, task[2, t], task[5, t], 0)
            count = _end(ends, count, t, task[3, t], 0, task[5, t])
        elif task[0, t] == COLLECTIVE:
            group = task[7, t]
            for k in range(columns.member_start[group], columns.member_start[group + 1]):
                count = _end(ends, count, t, columns.member[k], 0, 0)
    for row in range(used[COPIES]):
        t = copy[4, row]
        if t < 0:
            continue
        at = begin[t] + 1
        if task[0, t] == COLLECTIVE:
            low, high = columns.member_start[task[7, t]], columns.member_start[task[7, t] + 1]
            members = columns.member[low:high]
            ends[2, begin[t] + find(members, copy[6, row])] += copy[8, row]
            at = begin[t] + find(members, copy[7, row])
            ends[3, at] += copy[8, row]
        ends[4, at] = max(ends[4, at], copy[5, row])
    used[ENDS] = count
    return ends


@compiled
def _end(ends, row, task, device, sent, received):  # type: ignore[no-untyped-def]
    ends[0, row], ends[1, row], ends[2, row] = task, device, sent
    ends[3, row], ends[4, row] = received, task
    return row + 1


@compiled
def _written(columns, ends, bits, first):  # type: ignore[no-untyped-def]
    """Everything in one row, as `_sliced` reads it."""
    used = columns.used
    n, groups, members = used[TASKS], used[GROUPS], used[MEMBERS]
    size = SIZES + 11 * n + 3 * (n + 1) + 2 * (used[INS] + used[OUTS]) + used[AFTERS]
    size += 6 * (used[CREATED] + used[COPIES]) + 5 * used[ENDS] + groups + members
    flat = np.empty(size, np.int64)
    for k in range(SIZES):
        flat[k] = used[k]
    at = _write(flat, SIZES, columns.task, 10, n)
    for k in range(n):
        flat[at + k] = 0
    for k in range(len(bits)):
        flat[at + first + k] = bits[k]
    at = _write(flat, at + n, columns.start, 3, n + 1)
    at = _write(flat, at, columns.ins, 2, used[INS])
    at = _write(flat, at, columns.outs, 2, used[OUTS])
    at = _write(flat, at, columns.after, 1, used[AFTERS])
    at = _write(flat, at, columns.created, 6, used[CREATED])
    at = _write(flat, at, columns.copy, 6, used[COPIES])
    at = _write(flat, at, ends, 5, used[ENDS])
    for group in range(groups):
        low, high = columns.member_start[group], columns.member_start[group + 1]
        flat[at] = high - low
        for k in range(low, high):
            flat[at + 1 + k - low] = columns.member[k]
        at += 1 + high - low
    return flat


@compiled
def _write(flat, at, rows, many, size):  # type: ignore[no-untyped-def]
    for row in range(many):
        for k in range(size):
            flat[at + k] = rows[row, k]
        at += size
    return at
