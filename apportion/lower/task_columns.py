"""A TaskGraph, from the tasks of Ops and the Flows of Values. The last step of lower/.

In: a Lowered: OpTasks (op_tasks.py), a FlowStore (value_flow.py), and which of them every Op and
Value has. Out: a TaskGraph.

Equal Ops have their tasks once. Every column of the TaskGraph is a gather from theirs, and the name
of a piece becomes the slot of that piece of the Value that the Op reads or makes. No loop runs over
tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from apportion.columns import (
    Ints,
    distinct,
    offsets,
)
from apportion.describe import FROM_HOST_KIND, HOST_UPDATE_KIND, TO_HOST_KIND, Box
from apportion.graph import ROLES, Graph
from apportion.lower.exchange import COPIES, GROUPS, MEMBERS, OPS, PIECE, SHIFT, TASKS, OpTasks
from apportion.lower.task_graph import (
    COMMUNICATION,
    AssembledBox,
    Assemblies,
    Copies,
    Ends,
    TaskGraph,
    ends_of,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COMPUTE,
    FROM_HOST,
    HOST_TASK_KINDS,
    HOST_WORK,
    TASK_KINDS,
    TO_HOST,
)
from apportion.lower.value_flow import (
    PIECES,
    SOURCES,
    FlowStore,
    end_piece,
    first_piece,
    piece_boxes,
    source_boxes,
    sources_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class LoweredStep:
    """What a TaskGraph is made of. The last Op is the end of the step."""

    graph: Graph
    devices: int
    values: Sequence[tuple[int, ...]]  # of every Op, as names of pieces count them
    store: FlowStore
    flows: Sequence[int]  # of every Value
    tasks: OpTasks  # of distinct Ops, with slots
    which: Ints  # for every Op which of these it is
    carried: Sequence[tuple[int, int, Ints]]  # Value after, Value before, pieces of the former
    frozen: Sequence[int]  # Values that survive as they are
    loss: Ints  # pieces of the loss that survive


class _GatheredRows:
    """The rows (tasks, pieces, ...) of all items, gathered from those of distinct ones."""

    def __init__(self, begin: Ints, end: Ints) -> None:
        """For every item where its rows begin and end."""
        count = end - begin
        self.start = offsets(count)  # of every item, among all rows
        self.owner = np.repeat(np.arange(len(count)), count)  # the item of every row
        self.index = np.arange(int(self.start[-1])) + np.repeat(begin - self.start[:-1], count)


def build_task_graph(it: LoweredStep) -> TaskGraph:
    """The TaskGraph."""
    return _TaskColumns(it).task_graph()


class _TaskColumns:
    """The columns of a TaskGraph. A piece of a Value is numbered through all Values."""

    def __init__(self, it: LoweredStep) -> None:
        self.it, self.store, self.tasks = it, it.store, it.tasks
        self.ops, self.n = int(it.tasks.used[OPS]), int(it.tasks.used[TASKS])
        self.value_start = offsets(np.array([len(v) for v in it.values], np.int64))
        self.value = np.array([v for values in it.values for v in values], np.int64)
        flows = np.array(it.flows, np.int64)
        ends = self.store.stage_start[flows + 1] - 1
        first = self.store.piece_start[self.store.stage_start[flows]]
        self.pieces = _GatheredRows(first, self.store.piece_start[ends])
        self.shift = self.pieces.start[:-1] - first  # from a piece of a Flow to one of its Value
        self.rows = self._op_rows(np.arange(self.n + 1))
        self.made = self._op_rows(self.tasks.make_start)
        self.made_name = self.tasks.make[self.made.index]
        self.slot_of, self.piece_of = self._number_slots()

    def _op_rows(self, start: Ints) -> _GatheredRows:
        """The rows of all Ops of something that begins so for every task."""
        begin = start[self.tasks.task_start[: self.ops + 1]]
        return _GatheredRows(begin[self.it.which], begin[self.it.which + 1])

    def _counted_rows(self, tasks: Ints) -> _GatheredRows:
        """The same of something that there is for these tasks, which rise."""
        counts = np.bincount(self.tasks.owner[tasks], minlength=self.ops)
        begin = offsets(counts)
        return _GatheredRows(begin[self.it.which], begin[self.it.which + 1])

    def _piece(self, rows: _GatheredRows, name: Ints) -> Ints:
        """The piece that a name means in every row; 0 for -1."""
        value = self.value[self.value_start[rows.owner] + np.maximum(name >> SHIFT, 0)]
        found: Ints = np.where(name < 0, 0, self.shift[value] + (name & PIECE))
        return found

    def _slot(self, rows: _GatheredRows, name: Ints) -> Ints:
        """The slot that a name means in every row; -1 for none."""
        return np.where(name < 0, -1, self.slot_of[self._piece(rows, name)])

    def _number_slots(self) -> tuple[Ints, Ints]:
        """Slots in the order in which they come to be: those of the beginning, then Op by Op."""
        begin = [
            np.arange(self.pieces.start[value], self.pieces.start[value] + self._begun(value))
            for value, made in enumerate(self.it.graph.producer) if made is None
        ]  # fmt: skip
        found = np.concatenate([np.zeros(0, np.int64), *begin])
        order = np.concatenate([found, self._piece(self.made, self.made_name)])
        slot_of = np.full(len(self.pieces.index), -1)
        slot_of[order] = np.arange(len(order))
        self.begin = len(found)
        return slot_of, order

    def task_graph(self) -> TaskGraph:
        graph, tasks, index = self.it.graph, self.tasks, self.rows.index
        op = self.rows.owner
        in_start, in_rows, in_slot = self._references(tasks.read_start, tasks.read)
        out_start, _, out_slot = self._references(tasks.make_start, tasks.make)
        slots = self._slots(len(op), in_rows, in_slot)
        kind = self._kinds()
        gates = self._gates(kind)
        dep_start, dep = self._dependencies(len(op), in_rows, in_slot, slots["first"], gates)
        boxes = _BoxNumbers()
        group, groups = self._groups()
        return TaskGraph(
            self.it.devices,
            kind=kind, op=op, part=tasks.part[index], device=tasks.device[index],
            peer=tasks.peer[index], position=self._positions(),
            nbytes=tasks.nbytes[index], flops=tasks.flops[index], itemsize=tasks.itemsize[index],
            dep_start=dep_start, dep=dep,
            slot_device=slots["device"], slot_value=slots["value"],
            slot_region=self._regions(boxes), slot_nbytes=slots["nbytes"],
            slot_category=slots["category"], slot_base=slots["base"],
            slot_first=slots["first"], slot_last=slots["last"],
            in_start=in_start, in_slot=in_slot, out_start=out_start, out_slot=out_slot,
            op_start=self.rows.start, copies=lambda: self._copies(boxes),
            taken=tasks.taken[index], ends=self._ends(), carry=self._carry(),
            group=group, pattern=tasks.pattern[index], groups=groups,
            kinds=tuple(o.kind for o in graph.ops),
            make_assemblies=lambda: self._assemblies(boxes),
            task_kinds=HOST_TASK_KINDS if (kind >= TO_HOST).any() else TASK_KINDS,
        )  # fmt: skip

    def _positions(self) -> Ints:
        """The places of tasks: for every Op its exchange, its parts, and the exchange of what they
        leave, each exchange hop by hop."""
        tasks, index = self.tasks, self.rows.index
        last = int(tasks.hop[: self.n].max(initial=0))
        hop = np.where(tasks.kind[index] == COMPUTE, last, tasks.hop[index])
        return (2 * self.rows.owner + 1 + tasks.late[index]) * (last + 1) + hop

    def _kinds(self) -> Ints:
        """The kinds of tasks: an Op that copies to the host or back, or that the host does, has a
        kind of its own."""
        kind = self.tasks.kind[self.rows.index]
        named = {TO_HOST_KIND: TO_HOST, FROM_HOST_KIND: FROM_HOST, HOST_UPDATE_KIND: HOST_WORK}
        of_op = np.array([*(named.get(op.kind, COMPUTE) for op in self.it.graph.ops), COMPUTE])
        return np.where(kind == COMPUTE, of_op[self.rows.owner], kind)

    def _gates(self, kind: Ints) -> tuple[Ints, Ints]:
        """What comes back from the host, and what its device computes just before in the order: it
        begins no sooner, or memory would not be what the order says."""
        back = np.flatnonzero(kind == FROM_HOST)
        if not len(back):
            return back, back
        device, computes = self.tasks.device[self.rows.index], np.flatnonzero(kind == COMPUTE)
        before = np.full(len(back), -1)
        for d in range(self.it.devices):
            mine, here = computes[device[computes] == d], device[back] == d
            place = np.searchsorted(mine, back[here]) - 1
            before[here] = np.append(mine, -1)[place]
        return back[before >= 0], before[before >= 0]

    def _references(self, start: Ints, names: Ints) -> tuple[Ints, Ints, Ints]:
        """Offsets by task, the task of each reference, and its slot."""
        rows = self._op_rows(start)
        counts = np.diff(start[: self.n + 1])[self.rows.index]
        task = np.repeat(np.arange(len(counts)), counts)
        return offsets(counts), task, self._slot(rows, names[rows.index])

    def _made_tasks(self) -> Ints:
        """The task that makes every slot which is made."""
        counts = np.diff(self.tasks.make_start[: self.n + 1])[self.rows.index]
        return np.repeat(np.arange(len(counts)), counts)

    def _slots(self, n: int, in_rows: Ints, in_slot: Ints) -> dict[str, Ints]:
        piece, made = self.piece_of, self._made_tasks()
        begin = np.full(self.begin, -1)
        first = np.concatenate([begin, made])
        fetched = self.tasks.kind[self.rows.index][made] == ASSEMBLE
        fetched = np.concatenate([np.zeros(self.begin, bool), fetched])
        value = self.pieces.owner[piece]
        roles = np.array([ROLES.index(v.role) for v in self.it.graph.values], np.int64)
        category = np.where(fetched, COMMUNICATION, roles[value])
        base = self._slot(self.made, self.tasks.base[self.made.index])
        base = np.concatenate([begin, base])
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
        of_flow = self.pieces.index[piece]
        return {
            "device": self.store.device[of_flow], "value": value,
            "nbytes": self.store.nbytes[of_flow], "category": category, "base": base,
            "first": first, "last": last,
        }  # fmt: skip

    def _kept(self) -> Ints:
        """Slots that survive the step."""
        starts, shift = self.pieces.start, self.shift
        found = [self.slot_of[shift[after] + pieces] for after, _, pieces in self.it.carried]
        for value in self.it.frozen:
            found.append(self.slot_of[starts[value] + np.arange(self._begun(value))])
        if self.it.graph.loss is not None:
            found.append(self.slot_of[shift[self.it.graph.loss] + self.it.loss])
        return np.concatenate([*found, np.zeros(0, np.int64)]).astype(np.int64)

    def _begun(self, value: int) -> int:
        """How many pieces of a Value there are when the step begins."""
        at = int(self.store.stage_start[self.it.flows[value]])
        return int(self.store.piece_start[at + 1] - self.store.piece_start[at])

    def _carry(self) -> Ints:
        starts, shift = self.pieces.start, self.shift
        found = [np.zeros((0, 2), np.int64)]
        for after, before, pieces in self.it.carried:
            there = self.slot_of[starts[before] + np.arange(self._begun(before))]
            found.append(np.stack([self.slot_of[shift[after] + pieces], there], axis=1))
        return np.concatenate(found)

    def _dependencies(
        self, n: int, in_rows: Ints, in_slot: Ints, first: Ints, gates: tuple[Ints, Ints]
    ) -> tuple[Ints, Ints]:
        real = in_slot >= 0
        maker = first[in_slot[real]]
        task = in_rows[real]
        inside = maker >= 0
        rows = self._op_rows(self.tasks.wait_start)
        counts = np.diff(self.tasks.wait_start[: self.n + 1])[self.rows.index]
        waits = self.tasks.wait[rows.index] + self.rows.start[rows.owner]
        task = np.concatenate([task[inside], np.repeat(np.arange(n), counts), gates[0]])
        dep = np.concatenate([maker[inside], waits, gates[1]])
        key = distinct(task * max(n, 1) + dep)
        return offsets(np.bincount(key // max(n, 1), minlength=n)), key % max(n, 1)

    def _each_flow(
        self, room: int, rows: Callable[[int], slice], of: Callable[[int], Ints]
    ) -> Ints:
        """A column of the store: for every Flow that a Value has, what `of` says of its rows."""
        found = np.full(int(self.store.used[room]), -1)
        for flow in dict.fromkeys(self.it.flows):
            found[rows(flow)] = of(flow)
        return found

    def _piece_rows(self, flow: int) -> slice:
        return slice(int(first_piece(self.store, flow)), int(end_piece(self.store, flow)))

    def _source_rows(self, flow: int) -> slice:
        return sources_of(self.store, flow)

    def _regions(self, boxes: _BoxNumbers) -> Ints:
        numbers = self._each_flow(
            PIECES, self._piece_rows, lambda f: boxes.number(piece_boxes(self.store, f))
        )
        found: Ints = numbers[self.pieces.index[self.piece_of]]
        return found

    def _own_task(self, rows: _GatheredRows, task: Ints) -> Ints:
        """Tasks of distinct Ops in every row, as tasks of the Op of the row."""
        shift = self.rows.start[:-1] - self.tasks.task_start[self.it.which]
        return task[rows.index] + shift[rows.owner]

    def _ends(self) -> Ends:
        """The ends of messages, worked out for distinct Ops."""
        tasks, store, copies = self.tasks, self.store, int(self.tasks.used[COPIES])
        source, target = tasks.copy_source[:copies], tasks.copy_target[:copies] & PIECE
        kind = tasks.kind[: self.n]
        found = ends_of(
            TASK_KINDS.is_pairwise[kind], TASK_KINDS.is_collective[kind],
            (
                *(c[: self.n] for c in (tasks.device, tasks.peer, tasks.nbytes)),
                tasks.group[: self.n], tasks.group_start[: tasks.used[GROUPS] + 1],
                tasks.member[: tasks.used[MEMBERS]],
            ),
            (
                tasks.copy_message[:copies], tasks.copy_task[:copies],
                store.device[store.source[source]], store.device[target],
                store.source_nbytes[source],
            ),
        )  # fmt: skip
        rows = self._counted_rows(found.task)
        return Ends(
            self._own_task(rows, found.task), found.device[rows.index], found.sent[rows.index],
            found.received[rows.index], self._own_task(rows, found.taker),
        )  # fmt: skip

    def _copies(self, boxes: _BoxNumbers) -> Copies:
        tasks, store = self.tasks, self.store
        rows = self._counted_rows(tasks.copy_task[: tasks.used[COPIES]])
        name, row = tasks.copy_target[rows.index], tasks.copy_source[rows.index]
        target = self._piece(rows, name)
        value = self.pieces.owner[target]
        source = self.shift[value] + store.source[row]
        here = self._box_numbers(boxes, _source_pieces)
        there = self._box_numbers(boxes, _target_pieces)
        message = tasks.copy_message[rows.index]
        return Copies(
            self.slot_of[source], self.slot_of[target], here[row], there[row],
            store.source_term[row],
            np.where(message < 0, -1, self._own_task(rows, tasks.copy_message)),
            self._own_task(rows, tasks.copy_task), store.source_nbytes[row],
            *_edges(rows.owner, value), boxes.all(),
        )  # fmt: skip

    def _box_numbers(self, boxes: _BoxNumbers, pieces: Callable[[FlowStore, int], Ints]) -> Ints:
        """For every source the number of its box, relative to the piece that `pieces` says."""
        return self._each_flow(
            SOURCES,
            self._source_rows,
            lambda f: boxes.number(_relative(self.store, f, pieces(self.store, f))),
        )

    def _assemblies(self, boxes: _BoxNumbers) -> Assemblies:
        numbers: dict[bytes, int] = {}
        of_piece = self._each_flow(
            PIECES, self._piece_rows, lambda f: _ways(self.store, f, numbers)
        )
        which = np.full(len(self.rows.owner), -1)
        which[self._made_tasks()] = of_piece[self.made_name & PIECE]
        which[self.tasks.kind[self.rows.index] != ASSEMBLE] = -1
        return Assemblies(boxes.all(), which, tuple(map(_taken, numbers)))

    def _groups(self) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
        """The group of every task, or -1, and the distinct groups."""
        tasks, numbers = self.tasks, dict[tuple[int, ...], int]()
        count = int(tasks.used[GROUPS])
        edges, members = (
            tasks.group_start[: count + 1].tolist(),
            tasks.member[: tasks.used[MEMBERS]].tolist(),
        )
        found = [
            numbers.setdefault(tuple(members[edges[k] : edges[k + 1]]), len(numbers))
            for k in range(count)
        ]
        group = np.array([*found, -1], np.int64)[tasks.group[self.rows.index]]
        return group, tuple(numbers)


class _BoxNumbers:
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


def _ways(store: FlowStore, flow: int, numbers: dict[bytes, int]) -> Ints:
    """For every piece of a Flow the number of the way that it is put together, new ones added; -1
    for a piece that is made."""
    first, rows, box = (
        int(first_piece(store, flow)),
        sources_of(store, flow),
        piece_boxes(store, flow),
    )
    source, target = _source_pieces(store, flow), _target_pieces(store, flow)
    device, term, pieces = store.device[first : first + len(box)], store.source_term[rows], len(box)
    source_box = source_boxes(store, flow)
    sizes = box[:, :, 1] - box[:, :, 0]
    local = device[source] == device[target]
    # an assembly reads its local sources in rising order, each once
    read, which = np.unique((target * pieces + source)[local], return_inverse=True)
    place = np.full(len(target), -1)
    place[local] = which - np.searchsorted(read, target[local] * pieces)
    ways = np.concatenate(
        [
            np.stack([np.full(len(target), sizes.shape[1]), term > 0, place], axis=1),
            source_box[:, :, 1] - source_box[:, :, 0],
            np.where(local[:, None], sizes[source], 0),
        ],
        axis=1,
    )
    ways = ways[np.lexsort((term, target))]
    found = np.full(pieces, -1)
    start = (store.source_start[first : first + pieces + 1] - rows.start).tolist()
    for piece in range(pieces):
        if start[piece] < start[piece + 1]:
            text = ways[start[piece] : start[piece + 1]].tobytes()
            found[piece] = numbers.setdefault(text, len(numbers))
    return found


def _taken(text: bytes) -> tuple[AssembledBox, ...]:
    atoms = int(np.frombuffer(text, np.int64, 1)[0])
    rows = np.frombuffer(text, np.int64).reshape(-1, 3 + 2 * atoms).tolist()
    return tuple(
        AssembledBox(
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


def _source_pieces(store: FlowStore, flow: int) -> Ints:
    """The piece that each source of a Flow is of, counted from its first piece."""
    found: Ints = store.source[sources_of(store, flow)] - first_piece(store, flow)
    return found


def _target_pieces(store: FlowStore, flow: int) -> Ints:
    """The piece that each source of a Flow is for, counted from its first piece."""
    first, end = int(first_piece(store, flow)), int(end_piece(store, flow))
    return np.repeat(np.arange(end - first), np.diff(store.source_start[first : end + 1]))


def _relative(store: FlowStore, flow: int, pieces: Ints) -> Ints:
    """The boxes of all sources of a Flow, counted from the low corners of the given pieces."""
    relative: Ints = source_boxes(store, flow) - piece_boxes(store, flow)[pieces][:, :, :1]
    return relative
