"""Builder: the columns of a TaskGraph while it is lowered.

Fetches are planned first (`assembly`) and become tasks at `flush`: one TRANSFER per pair of devices
with all boxes that go that way at this position, then the assemblies in the order planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from apportion.columns import Ints
from apportion.describe.interval import Box, relative, volume
from apportion.lower.task_graph import (
    NO_ENDS,
    Copies,
    TaskGraph,
    counted,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    TRANSFER,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A slot, and what it holds."""

    slot: int
    region: Box
    device: int


@dataclass(slots=True)
class _Planned:
    value: int
    piece: Piece
    sources: list[tuple[Piece, Box, int]]
    itemsize: int
    reducer: str | None
    aliased: bool


@dataclass(slots=True)
class Builder:
    """Grows the columns; `finish` freezes them."""

    devices: int
    tasks: list[tuple[int, int, int, int, int, int, int, float, int]] = field(default_factory=list)
    deps: list[list[int]] = field(default_factory=list)
    ins: list[list[int]] = field(default_factory=list)
    outs: list[list[int]] = field(default_factory=list)
    # rows: device value region nbytes category base first last
    slots: list[list[int]] = field(default_factory=list)
    copies: list[list[int]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    op_start: list[int] = field(default_factory=list)
    carry: list[tuple[int, int]] = field(default_factory=list)
    boxes: dict[Box, int] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    planned: list[_Planned] = field(default_factory=list)
    touched: dict[int, int] = field(default_factory=dict)
    op: int = 0
    position: int = 0

    def open_op(self, index: int) -> None:
        """All tasks from here belong to Op `index`."""
        self.op = index
        self.op_start.append(len(self.tasks))

    def open_position(self) -> None:
        """All transfers from here form a new exchange."""
        self.position += 1

    def box(self, box: Box) -> int:
        """The number of a box; equal boxes have one."""
        return self.boxes.setdefault(box, len(self.boxes))

    def slot(
        self,
        value: int,
        region: Box,
        device: int,
        nbytes: int,
        category: int,
        first: int,
        base: int,
    ) -> Piece:
        """A new slot."""
        while base >= 0 and self.slots[base][5] >= 0:
            base = self.slots[base][5]
        number = len(self.slots)
        row = [device, value, self.box(region), nbytes, category, base, first, max(first, -1)]
        self.slots.append(row)
        return Piece(number, region, device)

    def keep(self, slot: int) -> None:
        """The slot survives the step."""
        self.kept.append(slot)

    def task(
        self,
        kind: int,
        device: int,
        *,
        peer: int = -1,
        part: int = -1,
        nbytes: int = 0,
        flops: float = 0.0,
        itemsize: int = 1,
        slots_in: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> int:
        """A new task that reads the given slots and runs after the given tasks."""
        number = len(self.tasks)
        row = (kind, self.op, part, device, peer, self.position, nbytes, flops, itemsize)
        self.tasks.append(row)
        needs = {self.slots[s][6] for s in slots_in if s >= 0} | set(after)
        self.deps.append(sorted(t for t in needs if t >= 0))
        self.ins.append(list(slots_in))
        self.outs.append([])
        for slot in slots_in:
            self._use(slot, number)
        return number

    def _use(self, slot: int, task: int) -> None:
        while slot >= 0:
            row = self.slots[slot]
            row[7] = max(row[7], task)
            slot = row[5]

    def outputs(self, task: int, slots: Sequence[int]) -> None:
        """The task makes these slots."""
        self.outs[task] += slots
        for slot in slots:
            self.slots[slot][6] = task
            self._use(slot, task)

    def touch(self, task: int) -> None:
        """Counts the bytes of all slots that the task reads and makes."""
        slots = {s for s in (*self.ins[task], *self.outs[task]) if s >= 0}
        self.touched[task] = sum(self.slots[s][3] for s in slots)

    def assembly(
        self,
        value: int,
        piece: Piece,
        sources: list[tuple[Piece, Box, int]],
        itemsize: int,
        reducer: str | None,
        aliased: bool,
    ) -> None:
        """Plans the assembly of `piece` from boxes of other pieces, each of one term."""
        self.planned.append(_Planned(value, piece, sources, itemsize, reducer, aliased))

    def flush(self) -> None:
        """Turns what was planned into tasks."""
        # A region cut out of one assembled at this same position needs no message of its own.
        messages: dict[tuple[int, int], list[tuple[int, Piece, int]]] = {}
        first_copy = len(self.copies)
        rows: list[tuple[_Planned, list[int]]] = []
        for plan in self.planned:
            self.edges.append((self.op, plan.value, len(self.copies)))
            own = []
            for source, box, term in plan.sources:
                own.append(len(self.copies))
                nbytes = volume(box) * plan.itemsize
                here, there = relative(box, source.region), relative(box, plan.piece.region)
                boxes = (self.box(here), self.box(there))
                self.copies.append([source.slot, plan.piece.slot, *boxes, term, -1, -1, nbytes])
                if source.device != plan.piece.device:
                    pair = (source.device, plan.piece.device)
                    messages.setdefault(pair, []).append((own[-1], source, nbytes))
            rows.append((plan, own))
        for pair in sorted(messages):
            self._message(pair, messages[pair])
        for plan, own in rows:
            self._assemble(plan, own)
        self.planned.clear()
        assert all(c[6] >= 0 for c in self.copies[first_copy:])

    def _message(self, pair: tuple[int, int], boxes: list[tuple[int, Piece, int]]) -> None:
        slots = list(dict.fromkeys(source.slot for _, source, _ in boxes))
        nbytes = sum(n for _, _, n in boxes)
        task = self.task(TRANSFER, pair[0], peer=pair[1], nbytes=nbytes, slots_in=slots)
        for copy, _, _ in boxes:
            self.copies[copy][5] = task

    def _assemble(self, plan: _Planned, own: list[int]) -> None:
        messages = sorted({self.copies[c][5] for c in own} - {-1})
        local = [self.copies[c][0] for c in own if self.copies[c][5] < 0]
        moved = 0 if plan.aliased else 2 * sum(self.copies[c][7] for c in own)
        task = self.task(
            ASSEMBLE, plan.piece.device, nbytes=moved, itemsize=plan.itemsize,
            slots_in=list(dict.fromkeys(local)), after=messages,
        )  # fmt: skip
        for copy in own:
            self.copies[copy][6] = task
        self.outputs(task, [plan.piece.slot])

    def finish(self) -> TaskGraph:
        """The TaskGraph."""
        count = len(self.tasks)
        self.op_start.append(count)
        for slot in self.kept:
            self._use(slot, count)
        for task, nbytes in self.touched.items():
            row = list(self.tasks[task])
            row[6] = nbytes
            self.tasks[task] = tuple(row)  # type: ignore[assignment]
        columns = list(zip(*self.tasks, strict=True)) or [()] * 9
        slots = np.array(self.slots, np.int64).reshape(-1, 8)
        copies = np.array(self.copies, np.int64).reshape(-1, 8)
        edges = np.array(self.edges, np.int64).reshape(-1, 3)
        made = TaskGraph(
            self.devices,
            kind=np.array(columns[0], np.int64),
            op=np.array(columns[1], np.int64),
            part=np.array(columns[2], np.int64),
            device=np.array(columns[3], np.int64),
            peer=np.array(columns[4], np.int64),
            position=np.array(columns[5], np.int64),
            nbytes=np.array(columns[6], np.int64),
            flops=np.array(columns[7], np.float64),
            itemsize=np.array(columns[8], np.int64),
            dep_start=_offsets(self.deps),
            dep=_flat(self.deps),
            slot_device=slots[:, 0].copy(),
            slot_value=slots[:, 1].copy(),
            slot_region=slots[:, 2].copy(),
            slot_nbytes=slots[:, 3].copy(),
            slot_category=slots[:, 4].copy(),
            slot_base=slots[:, 5].copy(),
            slot_first=slots[:, 6].copy(),
            slot_last=slots[:, 7].copy(),
            in_start=_offsets(self.ins),
            in_slot=_flat(self.ins),
            out_start=_offsets(self.outs),
            out_slot=_flat(self.outs),
            copies=Copies(
                *(copies[:, k].copy() for k in range(8)),
                edge_op=edges[:, 0].copy(),
                edge_value=edges[:, 1].copy(),
                edge_start=np.append(edges[:, 2], len(self.copies)).astype(np.int64),
                boxes=tuple(self.boxes),
            ),
            op_start=np.array(self.op_start, np.int64),
            taken=np.zeros(0, np.int64),
            ends=NO_ENDS,
            carry=np.array(self.carry, np.int64).reshape(-1, 2),
        )
        return counted(made)


def _offsets(rows: list[list[int]]) -> Ints:
    return np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)


def _flat(rows: list[list[int]]) -> Ints:
    return np.array([item for row in rows for item in row], np.int64)
