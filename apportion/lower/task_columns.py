"""Flows and Blocks -> one TaskGraph.

Equal Blocks are laid down once as columns; every column of the TaskGraph is a gather from them, and
a reference (j, p) of the Block of Op i becomes the slot of piece p of that Op's j-th Value. No loop
runs over tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.columns import (
    Ints,
    distinct,
    offsets,
)
from apportion.describe import Box
from apportion.graph import ROLES, Graph
from apportion.lower.op_tasks import Block
from apportion.lower.task_graph import (
    COMMUNICATION,
    Assemblies,
    Copies,
    Ends,
    Taken,
    TaskGraph,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
)
from apportion.lower.value_flow import Flow


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """What a TaskGraph is made of. The last Block is the end of the step."""

    graph: Graph
    devices: int
    values: Sequence[tuple[int, ...]]  # of every Block, as its references count them
    flows: Sequence[Flow]  # of every Value
    blocks: Sequence[Block]
    carried: Sequence[tuple[int, int, Ints]]  # Value after, Value before, pieces of the former
    frozen: Sequence[int]  # Values that survive as they are
    loss: Ints  # pieces of the loss that survive


class _Pool:
    """Distinct objects (Flows or Blocks) in a row, and which of them every item is."""

    def __init__(self, items: Sequence[Any]) -> None:
        order: dict[int, int] = {}
        which = [order.setdefault(id(item), len(order)) for item in items]
        self.which = np.array(which, np.int64)
        firsts = np.unique(self.which, return_index=True)[1]
        self.distinct = [items[k] for k in firsts.tolist()]

    def rows(self, count: Callable[[Any], int]) -> _Rows:
        """The rows of one kind (tasks, copies, ...) of all items."""
        sizes = np.array([count(item) for item in self.distinct], np.int64)
        return _Rows(self, sizes)

    def column(self, get: Callable[[Any], Any]) -> Any:
        """A column of all distinct objects, one after the other."""
        return np.concatenate([get(item) for item in self.distinct])


class _Rows:
    """Where the rows of each item are, among the distinct ones and among all."""

    def __init__(self, pool: _Pool, sizes: Ints) -> None:
        self.count = sizes[pool.which]
        self.start = offsets(self.count)
        inside = offsets(sizes)[:-1][pool.which]
        self.owner = np.repeat(np.arange(len(self.count)), self.count)
        self.index = np.arange(int(self.start[-1])) + np.repeat(
            inside - self.start[:-1], self.count
        )


def stamp(it: Lowered) -> TaskGraph:
    """The TaskGraph."""
    return _Stamp(it).tasks()


class _Stamp:
    def __init__(self, it: Lowered) -> None:
        self.it = it
        self.blocks, self.flows = _Pool(it.blocks), _Pool(it.flows)
        self.value_start = offsets(np.array([len(v) for v in it.values], np.int64))
        self.value = np.array([v for values in it.values for v in values], np.int64)
        self.pieces = self.flows.rows(lambda f: len(f.device))
        self.rows = self.blocks.rows(len)
        self.created = self.blocks.rows(lambda b: len(b.created_j))
        self.slot_of, self.piece_of = self._number_slots()

    def _piece(self, rows: _Rows, j: Ints, p: Ints) -> Ints:
        """The piece, counted through all Flows, that a reference (j, p) of each row means."""
        value = self.value[self.value_start[rows.owner] + np.maximum(j, 0)]
        return self.pieces.start[value] + p

    def _slot(self, rows: _Rows, j: Ints, p: Ints) -> Ints:
        """The slot that a reference means; -1 for none."""
        piece = self._piece(rows, j, np.maximum(p, 0))
        return np.where(j < 0, -1, self.slot_of[piece])

    def _number_slots(self) -> tuple[Ints, Ints]:
        """Slots in the order in which they come to be: those of the beginning, then by Block."""
        made = np.array([made is None for made in self.it.graph.producer], bool)
        begin = np.flatnonzero(made[self.pieces.owner] & (self._piece_column("stage") == 0))
        j = self.blocks.column(lambda b: b.created_j)[self.created.index]
        p = self.blocks.column(lambda b: b.created_p)[self.created.index]
        order = np.concatenate([begin, self._piece(self.created, j, p)])
        slot_of = np.full(len(self.pieces.index), -1)
        slot_of[order] = np.arange(len(order))
        self.begin = len(begin)
        return slot_of, order

    def _piece_column(self, name: str) -> Ints:
        column: Ints = self.flows.column(lambda f: getattr(f, name))[self.pieces.index]
        return column

    def _task_column(self, name: str) -> Any:
        return self.blocks.column(lambda b: getattr(b, name))[self.rows.index]

    def tasks(self) -> TaskGraph:
        graph, ops = self.it.graph, len(self.it.graph.ops)
        op = self.rows.owner
        n = len(op)
        in_start, in_rows, in_slot = self._references("in")
        out_start, _, out_slot = self._references("out")
        slots = self._slots(n, in_rows, in_slot)
        dep_start, dep = self._dependencies(n, in_rows, in_slot, slots["first"])
        boxes = _Boxes()
        group, groups = self._groups()
        return TaskGraph(
            self.it.devices,
            kind=self._task_column("kind"), op=op, part=self._task_column("part"),
            device=self._task_column("device"), peer=self._task_column("peer"),
            position=2 * op + 1 + self._task_column("late"), nbytes=self._task_column("nbytes"),
            flops=self._task_column("flops"), itemsize=self._task_column("itemsize"),
            dep_start=dep_start, dep=dep,
            slot_device=slots["device"], slot_value=slots["value"],
            slot_region=self._regions(boxes), slot_nbytes=slots["nbytes"],
            slot_category=slots["category"], slot_base=slots["base"],
            slot_first=slots["first"], slot_last=slots["last"],
            in_start=in_start, in_slot=in_slot, out_start=out_start, out_slot=out_slot,
            op_start=self.rows.start, copies=lambda: self._copies(boxes),
            taken=self._task_column("taken"), ends=self._ends(), carry=self._carry(),
            group=group, pattern=self._task_column("pattern"), groups=groups,
            kinds=tuple(o.kind for o in graph.ops[:ops]),
            make_assemblies=lambda: self._assemblies(boxes),
        )  # fmt: skip

    def _references(self, which: str) -> tuple[Ints, Ints, Ints]:
        """Offsets by task, the task of each reference, and its slot."""
        rows = self.blocks.rows(lambda b: len(getattr(b, f"{which}_j")))
        j = self.blocks.column(lambda b: getattr(b, f"{which}_j"))[rows.index]
        p = self.blocks.column(lambda b: getattr(b, f"{which}_p"))[rows.index]
        counts = self.blocks.column(lambda b: np.diff(getattr(b, f"{which}_start")))
        counts = counts[self.rows.index]
        task = np.repeat(np.arange(len(counts)), counts)
        return offsets(counts), task, self._slot(rows, j, p)

    def _slots(self, n: int, in_rows: Ints, in_slot: Ints) -> dict[str, Ints]:
        piece = self.piece_of
        made = self.blocks.column(lambda b: b.created_task)[self.created.index]
        begin = np.full(self.begin, -1)
        first = np.concatenate([begin, made + self.rows.start[self.created.owner]])
        fetched = self.blocks.column(lambda b: b.created_fetched)[self.created.index]
        fetched = np.concatenate([np.zeros(self.begin, np.int64), fetched])
        value = self.pieces.owner[piece]
        roles = np.array([ROLES.index(v.role) for v in self.it.graph.values], np.int64)
        category = np.where(fetched == 1, COMMUNICATION, roles[value])
        j = self.blocks.column(lambda b: b.base_j)[self.created.index]
        p = self.blocks.column(lambda b: b.base_p)[self.created.index]
        base = np.concatenate([begin, self._slot(self.created, j, p)])
        while True:  # to the slot that owns the storage
            above = np.where(base >= 0, base[np.maximum(base, 0)], -1)
            if (above < 0).all():
                break
            base = np.where(above >= 0, above, base)
        last = first.copy()
        real = in_slot >= 0
        np.maximum.at(last, in_slot[real], in_rows[real])
        last[self._kept()] = n
        shared = base >= 0
        np.maximum.at(last, base[shared], last[shared])
        return {
            "device": self._piece_column("device")[piece], "value": value,
            "nbytes": self._piece_column("nbytes")[piece], "category": category, "base": base,
            "first": first, "last": last,
        }  # fmt: skip

    def _kept(self) -> Ints:
        """Slots that survive the step."""
        starts = self.pieces.start
        found = [self.slot_of[starts[after] + pieces] for after, _, pieces in self.it.carried]
        for value in self.it.frozen:
            found.append(self.slot_of[starts[value] + np.arange(self._begun(value))])
        if self.it.graph.loss is not None:
            found.append(self.slot_of[starts[self.it.graph.loss] + self.it.loss])
        return np.concatenate([*found, np.zeros(0, np.int64)]).astype(np.int64)

    def _begun(self, value: int) -> int:
        low, high = self.it.flows[value].made_at(0)
        return high - low

    def _carry(self) -> Ints:
        starts = self.pieces.start
        found = [np.zeros((0, 2), np.int64)]
        for after, before, pieces in self.it.carried:
            there = self.slot_of[starts[before] + np.arange(self._begun(before))]
            found.append(np.stack([self.slot_of[starts[after] + pieces], there], axis=1))
        return np.concatenate(found)

    def _dependencies(self, n: int, in_rows: Ints, in_slot: Ints, first: Ints) -> tuple[Ints, Ints]:
        real = in_slot >= 0
        maker = first[in_slot[real]]
        task = in_rows[real]
        inside = maker >= 0
        rows = self.blocks.rows(lambda b: len(b.after))
        counts = self.blocks.column(lambda b: np.diff(b.after_start))[self.rows.index]
        waits = self.blocks.column(lambda b: b.after)[rows.index] + self.rows.start[rows.owner]
        task = np.concatenate([task[inside], np.repeat(np.arange(n), counts)])
        dep = np.concatenate([maker[inside], waits])
        key = distinct(task * max(n, 1) + dep)
        return offsets(np.bincount(key // max(n, 1), minlength=n)), key % max(n, 1)

    def _regions(self, boxes: _Boxes) -> Ints:
        numbers = self.flows.column(lambda f: boxes.number(f.box))[self.pieces.index]
        found: Ints = numbers[self.piece_of]
        return found

    def _ends(self) -> Ends:
        rows = self.blocks.rows(lambda b: len(b.ends.task))
        task, device, sent, received, taker = (
            np.concatenate(columns)[rows.index]
            for columns in zip(*(b.ends for b in self.blocks.distinct), strict=True)
        )
        begun = self.rows.start[rows.owner]
        return Ends(task + begun, device, sent, received, taker + begun)

    def _copies(self, boxes: _Boxes) -> Copies:
        rows = self.blocks.rows(lambda b: len(b.copy_j))
        column = self.blocks.column
        j = column(lambda b: b.copy_j)[rows.index]
        target = self._piece(rows, j, column(lambda b: b.copy_target)[rows.index])
        source = self._piece(rows, j, column(lambda b: b.copy_source)[rows.index])
        value = self.pieces.owner[target]
        source_start = offsets(np.array([len(f.source) for f in self.flows.distinct]))
        row = source_start[self.flows.which[value]] + column(lambda b: b.copy_row)[rows.index]
        here = self.flows.column(lambda f: boxes.number(_relative(f, f.source)))
        there = self.flows.column(lambda f: boxes.number(_relative(f, _targets(f))))
        message = column(lambda b: b.copy_message)[rows.index]
        begun = self.rows.start[rows.owner]
        return Copies(
            self.slot_of[source], self.slot_of[target], here[row], there[row],
            self.flows.column(lambda f: f.source_term)[row],
            np.where(message < 0, -1, message + begun),
            column(lambda b: b.copy_task)[rows.index] + begun,
            self.flows.column(lambda f: f.source_nbytes)[row],
            *_edges(rows.owner, value), boxes.all(),
        )  # fmt: skip

    def _assemblies(self, boxes: _Boxes) -> Assemblies:
        numbers: dict[bytes, int] = {}
        of_piece = self.flows.column(lambda f: _ways(f, numbers))
        j = self.blocks.column(lambda b: b.created_j)[self.created.index]
        p = self.blocks.column(lambda b: b.created_p)[self.created.index]
        task = self.blocks.column(lambda b: b.created_task)[self.created.index]
        task = task + self.rows.start[self.created.owner]
        which = np.full(len(self.rows.owner), -1)
        which[task] = of_piece[self.pieces.index][self._piece(self.created, j, p)]
        which[self._task_column("kind") != ASSEMBLE] = -1
        return Assemblies(boxes.all(), which, tuple(map(_taken, numbers)))

    def _groups(self) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
        numbers: dict[tuple[int, ...], int] = {}
        found = [
            np.array([*(numbers.setdefault(g, len(numbers)) for g in b.groups), -1], np.int64)
            for b in self.blocks.distinct
        ]
        column = self.blocks.column
        own = iter(found)
        group = column(lambda b: next(own)[b.group])[self.rows.index]
        return group, tuple(numbers)


class _Boxes:
    """Numbers of boxes; equal boxes have one."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.found: list[Ints] = []

    def number(self, rows: Ints) -> Ints:
        """The number of every row of boxes."""
        count, atoms = rows.shape[:2]
        if not count:
            return np.zeros(0, np.int64)
        flat = np.ascontiguousarray(rows.reshape(count, 2 * atoms))
        if atoms:
            distinct, which = np.unique(flat, axis=0, return_inverse=True)
        else:
            distinct, which = flat[:1], np.zeros(count, np.int64)
        numbers = []
        for box in distinct:
            text = box.tobytes()
            number = self.numbers.get(text)
            if number is None:
                number = self.numbers[text] = len(self.found)
                self.found.append(box)
            numbers.append(number)
        return np.array(numbers, np.int64)[which.reshape(-1)]

    def all(self) -> tuple[Box, ...]:
        """All of them, in order."""
        return tuple(
            tuple((low, high) for low, high in box.reshape(-1, 2).tolist()) for box in self.found
        )


def _ways(flow: Flow, numbers: dict[bytes, int]) -> Ints:
    """For every piece the number of the way that it is put together, new ones added; -1 for a
    piece that is made."""
    target, pieces = _targets(flow), len(flow.device)
    sizes = flow.box[:, :, 1] - flow.box[:, :, 0]
    local = flow.device[flow.source] == flow.device[target]
    # an assembly reads its local sources in rising order, each once
    read, which = np.unique((target * pieces + flow.source)[local], return_inverse=True)
    source = np.full(len(target), -1)
    source[local] = which - np.searchsorted(read, target[local] * pieces)
    rows = np.concatenate(
        [
            np.stack([np.full(len(target), sizes.shape[1]), flow.source_term > 0, source], axis=1),
            flow.source_box[:, :, 1] - flow.source_box[:, :, 0],
            np.where(local[:, None], sizes[flow.source], 0),
        ],
        axis=1,
    )
    rows = rows[np.lexsort((flow.source_term, target))]
    found = np.full(pieces, -1)
    start = flow.source_start.tolist()
    for piece in np.flatnonzero(np.diff(flow.source_start)).tolist():
        text = rows[start[piece] : start[piece + 1]].tobytes()
        found[piece] = numbers.setdefault(text, len(numbers))
    return found


def _taken(text: bytes) -> tuple[Taken, ...]:
    atoms = int(np.frombuffer(text, np.int64, 1)[0])
    rows = np.frombuffer(text, np.int64).reshape(-1, 3 + 2 * atoms).tolist()
    return tuple(
        Taken(
            tuple(row[3 : 3 + atoms]), bool(row[1]), row[2],
            tuple(row[3 + atoms :]) if row[2] >= 0 else (),
        )
        for row in rows
    )  # fmt: skip


def _edges(owner: Ints, value: Ints) -> tuple[Ints, Ints, Ints]:
    """Stretches of copies for one Op and one Value: the Op, the Value, and where each begins."""
    change = (owner[1:] != owner[:-1]) | (value[1:] != value[:-1])
    start = np.flatnonzero(np.append(True, change))[: len(owner)]
    return owner[start], value[start], np.append(start, len(owner))


def _targets(flow: Flow) -> Ints:
    """The piece that each source is for."""
    return np.repeat(np.arange(len(flow.device)), np.diff(flow.source_start))


def _relative(flow: Flow, pieces: Ints) -> Ints:
    """The boxes of all sources, counted from the low corners of the given pieces."""
    relative: Ints = flow.source_box - flow.box[pieces][:, :, :1]
    return relative
