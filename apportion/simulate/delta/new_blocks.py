"""Drafting: Blocks of Ops with their times, in stock, straight from the Flows of their Values.

It is what lowering and the costs of simulate.py give, for delta simulation: tasks in compiled code
(draft.py), and so are their costs (price.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from apportion.columns import Ints, compiled
from apportion.describe import lookup
from apportion.lower import (
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    NO_ENDS,
    READ,
    TRANSFER,
    Copies,
    Flow,
    Lowering,
    TaskGraph,
    draft,
)
from apportion.lower import flow_store as flows
from apportion.machine import (
    Cluster,
    CostModel,
    profile,
    times_messages,
)
from apportion.simulate import prices as price
from apportion.simulate.delta import block_store as stock
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
)
from apportion.simulate.routes import Lines, message_lines

SPARE = 1024
UNCUT = -1
NOTHING, LINES, STOCK = range(3)  # what is missing


class Drafting:
    """Flows and Blocks in stock, and what it takes to add more.

    The book has a record of what every Op does, of every Split, and of every cut: a Split and the
    devices of its parts. A Block follows from two places in it and the numbers of Flows.
    """

    def __init__(self, lowering: Lowering, cluster: Cluster, cost: CostModel) -> None:
        self.lowering, self.cluster, self.cost = lowering, cluster, cost
        self.devices = len(cluster.devices)
        self.quiet = times_messages(cluster, cost)
        self.sizes = [value.itemsize for value in lowering.graph.values]
        self.pairs = draft.blank(self.devices)
        self.kinds = tuple(dict.fromkeys(op.kind for op in lowering.graph.ops))
        self.prices = price.prices(cost, cluster, self.kinds, self._issue())
        self.routes = price.routes(self._pairs())
        self.begin(0)

    def begin(self, span: int) -> None:
        """Nothing in stock; no stage of a Value has more pieces than the span."""
        self.span, self.longest = span, 0
        self.flows = flows.flows(np.full(5, SPARE))
        self.stock = stock.stock(self.devices, np.full(7, SPARE))
        self.numbers: dict[Flow, int] = {}
        self.known: dict[tuple[int, ...], int] = {}  # Blocks
        self.book, self.written = _new(SPARE), 0
        self.splits: dict[int, int] = {}
        self.does = self._write_ops()
        self.cuts = {UNCUT: self._write((0, 0))}

    # The book

    def _write(self, record: Sequence[int]) -> int:
        """Adds a record to the book; where it is."""
        at, end = self.written, self.written + len(record)
        if end > len(self.book):
            self.book = np.concatenate([self.book, _new(end)])
        self.book[at:end], self.written = record, end
        return at

    def _write_ops(self) -> list[int]:
        """The records of all Ops, one for those that do the same, and of the end of the step."""
        graph, feeds = self.lowering.graph, self.lowering.feeds
        of = {kind: number for number, kind in enumerate(self.kinds)}
        known: dict[tuple[int, ...], int] = {}
        found = []
        for op, it in enumerate(graph.ops):
            order = {v: j for j, v in enumerate(dict.fromkeys(it.inputs))}
            description = lookup(it.kind)
            alias = description is not None and description.alias
            size = self.sizes[it.outputs[0]] if it.outputs else 4
            stages, places = [stage for _, stage in feeds[op]], [order[v] for v in it.inputs]
            record = draft.op_record(of[it.kind], alias, size, len(it.outputs), stages, places)
            key = tuple(record)
            if key not in known:
                known[key] = self._write(record)
            found.append(known[key])
        stages = [READ + len(graph.consumers[v]) for v in self.lowering.ending]
        return [*found, self._write(draft.op_record(len(of), False, 1, 0, stages, ()))]

    def _write_cut(self, op: int) -> int:
        split, devices = self.lowering.splits[op], self.lowering.choices[op].devices
        at = self.splits.get(id(split))
        if at is None:
            zeros = [k in part.zeros for part in split.parts for k in range(len(part.inputs))]
            flops = [part.flops for part in split.parts]
            at = self._write(draft.split_record(flops, zeros if any(zeros) else ()))
            self.splits[id(split)] = at
        return self._write((at, len(devices), *devices))

    # Flows

    def number_all(self, given: Sequence[Flow], values: Sequence[int]) -> list[int]:
        """The numbers of the Flows of Values; those that are new are added."""
        numbers = self.numbers
        new = {flow: v for flow, v in zip(given, values, strict=True) if flow not in numbers}
        if new:
            cores = np.concatenate([flow.core for flow in new])
            sizes = np.array([self.sizes[v] for v in new.values()], np.int64)
            longest = flows.add(self.flows, cores, sizes, self.span)
            if longest < 0:
                self.flows = flows.with_room(self.flows, cores)
                longest = flows.add(self.flows, cores, sizes, self.span)
            self.longest = max(self.longest, longest)
            for flow in new:
                numbers[flow] = len(numbers)
        return [numbers[flow] for flow in given]

    # Blocks

    def blocks(self, ops: Sequence[int], numbers: Sequence[int]) -> Ints:
        """Blocks of Ops whose Values have Flows of these numbers; one for those that are alike."""
        known, cuts, does, lowering = self.known, self.cuts, self.does, self.lowering
        termwise, values, end = lowering.termwise, lowering.values, len(does) - 1
        new: list[int] = []
        found, number = [], numbers.__getitem__
        for op in ops:
            cut = lowering.cut_of(op) if op < end else UNCUT
            at = cuts.get(cut)
            if at is None:
                at = cuts[cut] = self._write_cut(op)
            key = (does[op], at, op in termwise, *map(number, values[op]))
            block = known.get(key)
            if block is None:
                block = known[key] = len(known)
                new += key
            found.append(block)
        if new:
            self._stock(np.array(new, np.int64))
        return np.array(found, np.int64)

    def _stock(self, asked: Ints) -> None:
        """Drafts Ops and puts them in stock."""
        make = self._make_quiet if self.quiet else self._make
        missing = make(asked)
        while missing != NOTHING:
            sheet = self._draft(asked)
            price.route(self.routes, sheet)
            if missing == LINES:
                self._learn_lines(sheet)
            else:
                more = stock.room_for(sheet, sheet.used[draft.OPS], *self._how)
                self.stock = stock.with_room(self.stock, more)
            missing = make(asked)

    def _make(self, asked: Ints) -> int:
        missing: int = _make(
            self.stock, self.flows, self.book, asked, self.prices, self.routes, self.pairs,
            self.cluster.communication_on_device,
        )  # fmt: skip
        return missing

    def _make_quiet(self, asked: Ints) -> int:
        """What a message takes depends on others of its exchange."""
        it = self._draft(asked)
        n, tasks = int(it.used[draft.TASKS]), self._tasks(it)
        it.duration[:n] = nanoseconds(tasks, self.cluster, self.cost)
        it.issue[:n] = issue_nanoseconds(tasks, self.cluster, self.cost)
        return NOTHING if stock.add_all(self.stock, it, it.used[draft.OPS], *self._how) else STOCK

    def _draft(self, asked: Ints) -> draft.Sheet:
        it: draft.Sheet = draft.draft(self.flows, self.book, asked, self.devices, self.pairs)
        return it

    @property
    def _how(self) -> tuple[Lines, bool, bool]:
        """How messages are put in stock."""
        return self.routes.lines, self.quiet, self.cluster.communication_on_device

    def _tasks(self, it: draft.Sheet) -> TaskGraph:
        """The tasks of a sheet as far as costs need them."""
        rows = slice(int(it.used[draft.TASKS]))
        members = it.member[: it.used[draft.MEMBERS]].tolist()
        edges = it.group_start[: it.used[draft.GROUPS] + 1].tolist()
        groups = tuple(tuple(members[a:b]) for a, b in pairwise(edges))
        return _bare(
            self.devices, it.kind[rows], it.device[rows], it.peer[rows], it.nbytes[rows],
            it.group[rows], it.pattern[rows], groups, op=it.call[rows], part=it.part[rows],
            position=2 * it.owner[rows] + it.late[rows], flops=it.flops[rows],
            itemsize=it.itemsize[rows], taken=it.taken[rows], kinds=self.kinds,
        )  # fmt: skip

    def _issue(self) -> Ints:
        """Nanoseconds to issue every operator, and last an assembly, to every device."""
        many = len(self.kinds) + 1
        shape = self.devices, many
        op, device = np.tile(np.arange(many), self.devices), np.repeat(np.arange(shape[0]), many)
        kind, none = np.where(op < many - 1, COMPUTE, ASSEMBLE), np.full(len(op), -1)
        tasks = _bare(
            self.devices, kind, device, none, _new(len(op)), none, none, (), op=op,
            kinds=self.kinds,
        )  # fmt: skip
        return issue_nanoseconds(tasks, self.cluster, self.cost).reshape(shape)

    # What messages travel on

    def _pairs(self) -> Lines:
        """A line for every pair of devices."""
        pairs = np.arange(self.devices * self.devices)
        none = np.full(len(pairs), -1)
        sender, receiver = pairs // self.devices, pairs % self.devices
        kind = np.full(len(pairs), TRANSFER)
        tasks = _bare(self.devices, kind, sender, receiver, _new(len(pairs)), none, none, ())
        return message_lines(tasks, self.cluster)[0]

    def _learn_lines(self, sheet: draft.Sheet) -> None:
        """Adds the lines of groups that the sheet has and none are known of."""
        for pattern, group in price.unknown(sheet):
            alone = _bare(
                self.devices, np.full(1, COLLECTIVE), np.full(1, group[0]), np.full(1, -1),
                _new(1), _new(1), np.full(1, pattern), (group,),
            )  # fmt: skip
            lines = message_lines(alone, self.cluster)[0]
            costs = [(each.alpha, each.beta) for each in profile(pattern, group, self.cluster)]
            self.routes = price.with_group(self.routes, pattern, group, lines, costs)


@compiled
def _make(  # type: ignore[no-untyped-def]
    held, flows, book, asked, prices, routes, pairs, on_device
):  # fmt: skip
    """Drafts Ops and puts them in stock, unless something is missing."""
    sheet = draft.draft(flows, book, asked, held.devices, pairs)
    if not price.route(routes, sheet):
        return LINES
    price.charge(prices, sheet)
    fits = stock.add_all(held, sheet, sheet.used[draft.OPS], routes.lines, False, on_device)
    return NOTHING if fits else STOCK


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
