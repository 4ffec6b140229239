"""Drafting: Blocks of Ops with their times, in stock, straight from the Flows of their Values.

It is what lowering and the costs of simulate.py give, for delta simulation: tasks in compiled code
(draft.py), costs looked up for all new tasks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from apportion import draft, flows, stock
from apportion.cluster import Cluster
from apportion.collective import profile
from apportion.cost import CostModel, issue_nanoseconds, nanoseconds, times_messages
from apportion.flow import READ, Flow
from apportion.hops import Lines, message_lines
from apportion.lower import Lowering
from apportion.splits import Split
from apportion.tasks import COLLECTIVE, NO_ENDS, TRANSFER, Copies, Floats, Ints, TaskGraph
from apportion.tdl import lookup

SPARE = 1024


class Drafting:
    """Flows and Blocks in stock, and what it takes to add more.

    `blocks` are those of the Ops that were drafted from Flows that were there at the beginning.
    """

    def __init__(self, lowering: Lowering, cluster: Cluster, cost: CostModel, span: int) -> None:
        self.lowering, self.cluster, self.cost, self.span = lowering, cluster, cost, span
        self.devices = len(cluster.devices)
        self.quiet = times_messages(cluster, cost)
        self.flows = flows.flows(np.full(5, SPARE))
        self.stock = stock.stock(self.devices, np.full(7, SPARE))
        self.sheet = draft.sheet(self.devices, np.full(7, SPARE))
        self.numbers: dict[Flow, int] = {}
        graph = lowering.graph
        self.kinds = tuple(dict.fromkeys(op.kind for op in graph.ops))
        of = {kind: number for number, kind in enumerate(self.kinds)}
        self.calls = [of[op.kind] for op in graph.ops]
        self.splits: dict[int, tuple[Split, Floats, np.ndarray]] = {}
        self.static = [self._static(op) for op in range(len(graph.ops))]
        self.ending = (
            np.array([READ + len(graph.consumers[v]) for v in lowering.ending], np.int64),
            _new(0), len(self.kinds), _new(0), np.zeros(0), _new(0), np.zeros((0, 0), np.uint8),
            False, 1,
        )  # fmt: skip
        self.lines = self._routes()
        self.profiled: dict[tuple[int, tuple[int, ...]], tuple[int, Floats, Floats]] = {}

    def _static(self, op: int) -> tuple[Ints, int, Ints, bool, int]:
        """What is known of an Op: stages at which it reads, how many Values it reads, which of
        these every argument is, whether it is an alias, and the bytes of an element."""
        lowering, it = self.lowering, self.lowering.graph.ops[op]
        order = {v: j for j, v in enumerate(dict.fromkeys(it.inputs))}
        description = lookup(it.kind)
        return (
            np.array([stage for _, stage in lowering.feeds[op]], np.int64), len(order),
            np.array([order[v] for v in it.inputs], np.int64),
            description is not None and description.alias,
            lowering.itemsize(it.outputs[0]) if it.outputs else 4,
        )  # fmt: skip

    # Flows

    def number(self, flow: Flow, value: int) -> int:
        """The number of a Flow of a Value, which is added if it is new."""
        found = self.numbers.get(flow)
        if found is None:
            self.flows = flows.with_room(self.flows, flows.sizes(flow))
            size = self.lowering.itemsize(value)
            found = self.numbers[flow] = flows.add(self.flows, flow, size, self.span)
        return found

    # Blocks

    def blocks(self, ops: Iterable[int], numbers: Sequence[int]) -> Ints:
        """New Blocks of Ops whose Values have Flows of these numbers."""
        self.sheet.used[:] = 0
        count = 0
        for op in ops:
            self._draft(op, numbers)
            count += 1
        return self._stocked(count)

    def all_blocks(self, numbers: Sequence[int]) -> Ints:
        """Blocks of all Ops, and of the end of the step; one for those that are alike."""
        lowering, alike = self.lowering, {}
        which = []
        for op, static in enumerate(self.static):
            key = (
                id(lowering.splits[op]), lowering.choices[op].devices, self.calls[op], static[3:],
                op in lowering.termwise, static[0].tobytes(), static[2].tobytes(),
                *(numbers[v] for v in lowering.values[op]),
            )  # fmt: skip
            which.append(alike.setdefault(key, (len(alike), op))[0])
        first = [op for _, op in alike.values()]
        blocks = self.blocks([*first, len(self.static)], numbers)
        return blocks[np.array([*which, len(first)])]

    def _draft(self, op: int, numbers: Sequence[int]) -> None:
        lowering = self.lowering
        values = lowering.values[op]
        mine = np.array([numbers[v] for v in values], np.int64)
        if op == len(self.static):
            stages, made, fed = self.ending[0], mine[len(mine) :], mine
            rest = self.ending[2:]
        else:
            stages, reads, places, alias, size = self.static[op]
            fed, made = mine[:reads], mine[reads:]
            flops, zeros = self._of_split(lowering.splits[op])
            if op in lowering.termwise:
                zeros = zeros[:0]
            devices = np.array(lowering.choices[op].devices, np.int64)
            rest = (self.calls[op], devices, flops, places, zeros, alias, size)
        more = int(draft.room_for(self.flows, fed, stages, made))
        more += len(rest[1]) * (2 + len(made))
        self.sheet = draft.with_room(self.sheet, more)
        draft.draft(self.sheet, self.flows, fed, stages, made, *rest)

    def _of_split(self, split: Split) -> tuple[Floats, np.ndarray]:
        """The flops of all parts, and which of their arguments are zeros."""
        found = self.splits.get(id(split))
        if found is None:
            flops = np.array([part.flops for part in split.parts], np.float64)
            inputs = len(split.parts[0].inputs)
            zeros = np.zeros((len(split.parts), inputs), np.uint8)
            for row, part in enumerate(split.parts):
                zeros[row, list(part.zeros)] = 1
            found = self.splits[id(split)] = (split, flops, zeros if zeros.any() else zeros[:0])
        return found[1:]

    def _stocked(self, count: int) -> Ints:
        """Puts the Ops of the sheet in stock; their Blocks."""
        sheet, on_device = self.sheet, self.cluster.communication_on_device
        n = int(sheet.used[draft.TASKS])
        tasks = self._tasks(n)
        duration = nanoseconds(tasks, self.cluster, self.cost)
        issue = issue_nanoseconds(tasks, self.cluster, self.cost)
        line = sheet.device[:n] * self.devices + sheet.peer[:n]
        for task in np.flatnonzero(sheet.kind[:n] == COLLECTIVE).tolist():
            if not self.quiet:
                line[task] = self._line(tasks, task)
        moving = (sheet.kind[:n] == TRANSFER) | (sheet.kind[:n] == COLLECTIVE)
        lines = line[moving] if not self.quiet else _new(0)
        hops = int((self.lines.start[lines + 1] - self.lines.start[lines]).sum())
        many = sheet.used
        stands = n + (int(many[draft.MEMBERS]) + n if on_device else 0)
        more = np.array([
            count, stands, many[draft.WAITS], many[draft.MAKES], n, hops, many[draft.NEEDS],
        ])  # fmt: skip
        self.stock = stock.with_room(self.stock, more)
        first = int(self.stock.used[stock.BLOCKS])
        stock.add_all(
            self.stock, sheet, count, duration, issue, self.lines, line, self.quiet, on_device
        )
        return np.arange(first, first + count)

    def _tasks(self, n: int) -> TaskGraph:
        """The sheet as far as costs need it."""
        it = self.sheet
        members = it.member[: it.used[draft.MEMBERS]].tolist()
        edges = it.group_start[: it.used[draft.GROUPS] + 1].tolist()
        groups = tuple(tuple(members[a:b]) for a, b in pairwise(edges))
        return _bare(
            self.devices, it.kind[:n], it.device[:n], it.peer[:n], it.nbytes[:n], it.group[:n],
            it.pattern[:n], groups, op=it.call[:n], part=it.part[:n],
            position=2 * it.owner[:n] + it.late[:n], flops=it.flops[:n],
            itemsize=it.itemsize[:n], op_start=it.task_start[: it.used[draft.OPS] + 1],
            taken=it.taken[:n], kinds=self.kinds,
        )  # fmt: skip

    # What messages travel on

    def _routes(self) -> Lines:
        """A line for every pair of devices; the lines of collectives follow as they come."""
        pairs = np.arange(self.devices * self.devices)
        none = np.full(len(pairs), -1)
        sender, receiver = pairs // self.devices, pairs % self.devices
        kind = np.full(len(pairs), TRANSFER)
        tasks = _bare(self.devices, kind, sender, receiver, _new(len(pairs)), none, none, ())
        return message_lines(tasks, self.cluster)[0]

    def _line(self, tasks: TaskGraph, task: int) -> int:
        """The line that a collective takes: of all algorithms the one that is cheapest for it."""
        pattern, group = int(tasks.pattern[task]), tasks.groups[int(tasks.group[task])]
        found = self.profiled.get((pattern, group))
        if found is None:
            alone = _bare(
                self.devices, np.full(1, COLLECTIVE), np.full(1, group[0]), np.full(1, -1),
                _new(1), _new(1), np.full(1, pattern), (group,),
            )  # fmt: skip
            lines, old = message_lines(alone, self.cluster)[0], self.lines
            profiles = profile(pattern, group, self.cluster)
            alpha, beta = (np.array([p[k] for p in profiles]) for k in (1, 2))
            found = self.profiled[pattern, group] = (len(old.lag), alpha, beta)
            start = np.concatenate([old.start, lines.start[1:] + old.start[-1]])
            lag, drag, link, pace = (
                np.concatenate([getattr(old, name), getattr(lines, name)])
                for name in ("lag", "drag", "link", "pace")
            )
            self.lines = Lines(lag, drag, start, link, pace)
        first, alpha, beta = found
        return first + int(np.argmin(alpha + beta * tasks.nbytes[task]))


def _bare(
    devices: int,
    kind: Ints,
    device: Ints,
    peer: Ints,
    nbytes: Ints,
    group: Ints,
    pattern: Ints,
    groups: tuple[tuple[int, ...], ...],
    **others: Any,
) -> TaskGraph:
    """Tasks as far as costs need them: no slots, no dependencies."""
    none, n = _new(0), len(kind)
    asked = {
        "op": _new(n), "part": _new(n), "position": _new(n), "flops": np.zeros(n),
        "itemsize": np.ones(n, np.int64), "op_start": np.array([0, n]), "taken": _new(n),
    } | others  # fmt: skip
    return TaskGraph(
        devices, kind=kind, device=device, peer=peer, nbytes=nbytes, dep_start=none, dep=none,
        slot_device=none, slot_value=none, slot_region=none, slot_nbytes=none, slot_category=none,
        slot_base=none, slot_first=none, slot_last=none, in_start=none, in_slot=none,
        out_start=none, out_slot=none, copies=_nothing, ends=NO_ENDS, group=group,
        pattern=pattern, groups=groups, **asked,
    )  # fmt: skip


def _new(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _nothing() -> Copies:
    raise AssertionError("costs need no copies")
