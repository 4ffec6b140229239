"""Block: the tasks of one Op, in columns, with references that do not say which Op it is.

A Block names a slot by (j, p): piece p of the Flow of the Op's j-th Value, distinct inputs first,
then outputs. Ops that are cut alike and read and leave their Values alike have one Block; lowering
puts Blocks one after the other and resolves the names, and delta simulation replaces a few.

Tasks of a Block, in order: the exchange that fetches inputs, the assemblies of fetched regions, the
parts of the Op, the exchange that lays its results out, the assemblies of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from apportion.flow import LAID, Flow
from apportion.tasks import (
    ALL_GATHER,
    ALL_TO_ALL,
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    REDUCE_SCATTER,
    TRANSFER,
    Ends,
    Floats,
    Ints,
    distinct,
    ends_of,
)

EVEN = 2.0  # members of a collective send about equally much: the most over the least


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What the parts of an Op read and leave: (j, piece) of every argument of every part."""

    device: Ints  # n
    flops: Floats  # n
    argument_j: Ints  # n x inputs; -1 for a block of zeros
    argument_p: Ints  # n x inputs
    alias: bool  # the result shares the storage of the first argument
    itemsize: int


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


@dataclass(slots=True)
class _Columns:
    """Columns while they grow: one row per task, and what it refers to."""

    rows: list[tuple[Ints, ...]] = field(default_factory=list)
    flops: list[Floats] = field(default_factory=list)
    count: int = 0
    groups: list[tuple[int, ...]] = field(default_factory=list)
    ins: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)  # task, j, p
    outs: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)
    afters: list[tuple[Ints, Ints]] = field(default_factory=list)
    created: list[tuple[Ints, ...]] = field(default_factory=list)  # j p task fetched base_j base_p
    copies: list[tuple[Ints, ...]] = field(default_factory=list)
    """j, target, source, row, message, task; sender, receiver, bytes"""

    def add(
        self,
        kind: int,
        device: Ints,
        nbytes: Ints,
        *,
        part: Ints | int = -1,
        peer: Ints | int = -1,
        late: int = 0,
        itemsize: Ints | int = 1,
        group: Ints | int = -1,
        pattern: Ints | int = -1,
        flops: Floats | None = None,
    ) -> Ints:
        """New tasks; their numbers."""
        n = len(device)
        others = (part, peer, late, itemsize, group, pattern)
        full = [x if isinstance(x, np.ndarray) else np.full(n, x, np.int64) for x in others]
        self.rows.append((np.full(n, kind, np.int64), device, nbytes, *full))
        self.flops.append(np.zeros(n) if flops is None else flops)
        self.count += n
        return np.arange(self.count - n, self.count)


def block(
    feeds: Sequence[tuple[Flow, int]],
    parts: Parts | None,
    results: Sequence[Flow],
    itemsizes: Sequence[int],
    devices: int,
) -> Block:
    """The tasks of an Op that reads the given Flows at the given stages and leaves the others.

    `itemsizes` has an entry per Value. Without parts it is the end of the step.
    """
    columns = _Columns()
    fetched = [(j, flow, stage) for j, (flow, stage) in enumerate(feeds)]
    _fetch(columns, fetched, itemsizes, devices, late=0)
    if parts is not None:
        _compute(columns, parts, [flow for flow, _ in feeds], results)
    laid = [(len(feeds) + k, flow, LAID) for k, flow in enumerate(results)]
    _fetch(columns, laid, itemsizes, devices, late=1)
    return _freeze(columns)


# Fetching


def _fetch(
    columns: _Columns,
    fetched: Sequence[tuple[int, Flow, int]],
    itemsizes: Sequence[int],
    devices: int,
    late: int,
) -> None:
    rows = []
    for number, flow, stage in fetched:
        low, high = flow.made_at(stage)
        if low < high:
            rows.append(_rows(number, flow, low, high))
    if not rows:
        return
    columned = [np.concatenate(c) for c in zip(*rows, strict=True)]
    where, target, source, row, sender, receiver, nbytes = columned
    sent = np.flatnonzero(sender != receiver)
    message = np.full(len(where), -1)
    if len(sent):
        boxes = [flow.source_box[row[where == k]] for k, flow, _ in fetched]
        terms = np.concatenate([flow.source_term[row[where == k]] for k, flow, _ in fetched])
        kept = (where[sent], source[sent])
        message[sent] = _exchange(
            columns, kept, sender[sent], receiver[sent], nbytes[sent], terms[sent],
            _identity(boxes)[sent], devices, late,
        )  # fmt: skip
    _assemble(columns, fetched, itemsizes, late, (where, target, source, row, nbytes), message)
    columns.copies[-1] = (*columns.copies[-1], sender, receiver, nbytes)


def _rows(j: int, flow: Flow, low: int, high: int) -> tuple[Ints, ...]:
    """The sources of the pieces low:high of a Flow, a row each."""
    first, last = int(flow.source_start[low]), int(flow.source_start[high])
    lengths = np.diff(flow.source_start[low : high + 1])
    target = np.repeat(np.arange(low, high), lengths)
    source = flow.source[first:last]
    return (
        np.full(last - first, j), target, source, np.arange(first, last), flow.device[source],
        flow.device[target], flow.source_nbytes[first:last],
    )  # fmt: skip


def _identity(boxes: Sequence[Ints]) -> Ints:
    """A number per box, equal for equal boxes of one Value."""
    found, offset = [], 0
    for rows in boxes:
        flat = rows.reshape(len(rows), 2 * rows.shape[1])
        if len(flat) and flat.shape[1]:
            mixed = np.zeros(len(flat), np.int64)
            for column in flat.T:
                mixed = mixed * 1_000_003 + column
            _, number = np.unique(mixed, return_inverse=True)
        else:
            number = np.zeros(len(flat), np.int64)
        found.append(number + offset)
        offset += len(flat)
    return np.concatenate(found)


def _exchange(
    columns: _Columns,
    kept: tuple[Ints, Ints],
    sender: Ints,
    receiver: Ints,
    nbytes: Ints,
    terms: Ints,
    identity: Ints,
    devices: int,
    late: int,
) -> Ints:
    """Messages of one exchange; for every row the task that carries it."""
    pairs, which = np.unique(sender * devices + receiver, return_inverse=True)
    size = np.bincount(which, nbytes, len(pairs)).astype(np.int64)
    carrier = np.full(len(pairs), -1)
    for members, inside in _groups(pairs, devices):
        if size[inside].max() > EVEN * size[inside].min():
            continue
        mine = np.isin(which, inside)
        pattern = _pattern(kept, identity, terms, mine, len(members))
        total = np.array([size[inside].sum()])
        first = np.array([members[0]])
        columns.groups.append(members)
        carrier[inside] = columns.add(
            COLLECTIVE, first, total, late=late, group=len(columns.groups) - 1, pattern=pattern
        )
    rest = np.flatnonzero(carrier < 0)
    if len(rest):
        sent, to = pairs[rest] // devices, pairs[rest] % devices
        carrier[rest] = columns.add(TRANSFER, sent, size[rest], peer=to, late=late)
    message: Ints = carrier[which]
    columns.ins.append(_distinct(message, *kept))  # slots that a message reads, each once
    return message


def _groups(pairs: Ints, devices: int) -> list[tuple[tuple[int, ...], Ints]]:
    """Groups of three or more that all send to all, each with the indices of its pairs."""
    if len(pairs) < 6:
        return []
    sender, receiver = pairs // devices, pairs % devices
    members = np.union1d(sender, receiver)
    if len(pairs) == len(members) * (len(members) - 1):
        return [(tuple(members.tolist()), np.arange(len(pairs)))]
    parent = np.arange(devices)
    while True:  # every device joins the smallest one it exchanges with
        before = parent.copy()
        np.minimum.at(parent, sender, before[receiver])
        np.minimum.at(parent, receiver, before[sender])
        if (parent == before).all():
            break
    found = []
    for root in np.unique(parent[members]).tolist():
        group = members[parent[members] == root]
        inside = np.flatnonzero(parent[sender] == root)
        if len(group) >= 3 and len(inside) == len(group) * (len(group) - 1):
            found.append((tuple(group.tolist()), inside))
    return found


def _pattern(
    kept: tuple[Ints, Ints], identity: Ints, terms: Ints, mine: np.ndarray, members: int
) -> int:
    """What the blocks of a collective are."""
    sent = (kept[0][mine], kept[1][mine], identity[mine])
    if len(_distinct(*sent)[0]) * (members - 1) == len(sent[0]):
        return ALL_GATHER
    return REDUCE_SCATTER if terms[mine].any() else ALL_TO_ALL


def _assemble(
    columns: _Columns,
    fetched: Sequence[tuple[int, Flow, int]],
    itemsizes: Sequence[int],
    late: int,
    rows: tuple[Ints, ...],
    message: Ints,
) -> None:
    j, target, source, row, nbytes = rows
    begins = np.flatnonzero(np.append(True, (j[1:] != j[:-1]) | (target[1:] != target[:-1])))
    which = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(j))))
    flows = {k: flow for k, flow, _ in fetched}
    piece_j, piece = j[begins], target[begins]
    base = np.concatenate([flows[k].base[piece[piece_j == k]] for k in dict.fromkeys(j.tolist())])
    device = np.concatenate(
        [flows[k].device[piece[piece_j == k]] for k in dict.fromkeys(j.tolist())]
    )
    moved = 2 * np.bincount(which, nbytes, len(begins)).astype(np.int64)
    moved[base >= 0] = 0
    sizes = np.array(itemsizes)[piece_j]
    tasks = columns.add(ASSEMBLE, device, moved, late=late, itemsize=sizes)
    columns.outs.append((tasks, piece_j, piece))
    local = message < 0
    columns.ins.append(_distinct(tasks[which[local]], j[local], source[local]))
    waits = _distinct(tasks[which[~local]], message[~local], message[~local])
    columns.afters.append(waits[:2])
    base_j = np.where(base >= 0, piece_j, -1)
    columns.created.append((piece_j, piece, tasks, np.ones(len(tasks), np.int64), base_j, base))
    columns.copies.append((j, target, source, row, message, tasks[which]))


def _distinct(a: Ints, b: Ints, c: Ints) -> tuple[Ints, Ints, Ints]:
    """The distinct rows of three columns of numbers from 0 on, sorted."""
    wide_b, wide_c = (int(x.max(initial=0)) + 1 for x in (b, c))
    key = distinct((a * wide_b + b) * wide_c + c)
    return key // (wide_b * wide_c), key // wide_c % wide_b, key % wide_c


# The parts


def _compute(
    columns: _Columns, parts: Parts, feeds: Sequence[Flow], results: Sequence[Flow]
) -> None:
    n, inputs = parts.argument_j.shape
    nbytes = np.zeros(n, np.int64)
    for k in range(inputs):
        j, p = parts.argument_j[:, k], parts.argument_p[:, k]
        counts = j >= 0
        for other in range(k):  # a slot that is two arguments is read once
            same = (parts.argument_j[:, other] == j) & (parts.argument_p[:, other] == p)
            counts = counts & ~same
        if counts.any():
            flow = feeds[int(j[counts][0])]
            nbytes[counts] += flow.nbytes[p[counts]]
    for flow in results:
        nbytes += flow.nbytes[:n]
    if parts.alias:
        nbytes[:] = 0
    tasks = columns.add(
        COMPUTE, parts.device, nbytes, part=np.arange(n), itemsize=parts.itemsize, flops=parts.flops
    )
    columns.ins.append(
        (np.repeat(tasks, inputs), parts.argument_j.reshape(-1), parts.argument_p.reshape(-1))
    )
    made = len(results)
    first = len(feeds)
    out_j = np.tile(np.arange(first, first + made), n)
    out_p = np.repeat(np.arange(n), made)
    columns.outs.append((np.repeat(tasks, made), out_j, out_p))
    none = np.full(n * made, -1)
    base_j, base_p = none, none
    if parts.alias and inputs:
        base_j = np.repeat(parts.argument_j[:, 0], made)
        base_p = np.repeat(parts.argument_p[:, 0], made)
    fetched = np.zeros(n * made, np.int64)
    columns.created.append((out_j, out_p, np.repeat(tasks, made), fetched, base_j, base_p))


# Freezing


def _freeze(columns: _Columns) -> Block:
    n = columns.count
    empty = np.zeros(0, np.int64)
    rows = [np.concatenate(c) for c in zip(*columns.rows, strict=True)] or [empty] * 9
    kind, device, nbytes, part, peer, late, itemsize, group, pattern = rows
    in_start, in_j, in_p = _by_task(columns.ins, n, 2)
    out_start, out_j, out_p = _by_task(columns.outs, n, 2)
    after_start, after = _by_task(columns.afters, n, 1)
    created = [np.concatenate(c) for c in zip(*columns.created, strict=True)] or [empty] * 6
    copies = [np.concatenate(c) for c in zip(*columns.copies, strict=True)] or [empty] * 9
    message, task = copies[4:6]
    taken = np.bincount(task, minlength=n) + np.bincount(message[message >= 0], minlength=n)
    named = (kind, device, peer, nbytes, group)
    ends = ends_of(named, columns.groups, (message, task, *copies[6:]))
    flops = np.concatenate(columns.flops) if columns.flops else np.zeros(0)
    created_j, created_p, created_task, fetched, base_j, base_p = created
    copy_j, target, source, row, *_ = copies
    return Block(
        kind, part, device, peer, late, nbytes, flops, itemsize, group, pattern,
        tuple(columns.groups), in_start, in_j, in_p, out_start, out_j, out_p, after_start, after,
        created_j, created_p, created_task, fetched, base_j, base_p, copy_j, target, source, row,
        message, task, taken, ends,
    )  # fmt: skip


def _by_task(rows: Sequence[tuple[Ints, ...]], n: int, width: int) -> list[Ints]:
    """Rows (task, ...) as offsets and columns, in the order of tasks."""
    none = (np.zeros(0, np.int64),) * (width + 1)
    columns = [np.concatenate(c) for c in zip(*rows, none, strict=True)]
    task = columns[0]
    if (task[1:] < task[:-1]).any():
        order = np.argsort(task, kind="stable")
        columns = [c[order] for c in columns]
    start = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(task, minlength=n), out=start[1:])
    return [start, *columns[1:]]
