"""Drafting: Blocks of Ops with their times, in stock, straight from the Flows of their Values.

It is what lowering and the costs of simulate.py give, for delta simulation: tasks in compiled code
(draft.py), costs looked up for all new tasks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from apportion import draft, flows, price, stock
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


class _Static(NamedTuple):
    """What is known of an Op, whatever its Choice."""

    call: int  # which operator
    alias: bool
    itemsize: int
    reads: int  # distinct inputs
    stages: Ints  # at which it reads these
    places: Ints  # for every argument which of these it is


class _Parts(NamedTuple):
    """What is known of the parts of a Split."""

    split: Split | None
    flops: Floats
    zeros: Ints  # part x argument; none if there are none


_NO_SPLIT = _Parts(None, np.zeros(0), np.zeros(0, np.int64))


class Drafting:
    """Flows and Blocks in stock, and what it takes to add more.

    `blocks` are those of the Ops that were drafted from Flows that were there at the beginning.
    """

    def __init__(self, lowering: Lowering, cluster: Cluster, cost: CostModel) -> None:
        self.lowering, self.cluster, self.cost = lowering, cluster, cost
        self.devices = len(cluster.devices)
        self.quiet = times_messages(cluster, cost)
        self.sizes = [value.itemsize for value in lowering.graph.values]
        self.sheet = draft.sheet(self.devices, np.full(7, SPARE))
        graph = lowering.graph
        self.kinds = tuple(dict.fromkeys(op.kind for op in graph.ops))
        of = {kind: number for number, kind in enumerate(self.kinds)}
        self.splits: dict[int, _Parts] = {}
        self.static = [self._static(op, of) for op in range(len(graph.ops))]
        alike: dict[Any, int] = {}
        self.same = [
            alike.setdefault((*it[:4], it.stages.tobytes(), it.places.tobytes()), len(alike))
            for it in self.static
        ]  # equal for Ops that do the same
        stages = [READ + len(graph.consumers[v]) for v in lowering.ending]
        self.ending = _Static(
            len(self.kinds), False, 1, len(stages), np.array(stages, np.int64), _new(0)
        )
        self.prices = price.prices()
        self.alike = _alike(cluster)
        self.lines = self._routes()
        self.profiled: dict[tuple[int, tuple[int, ...]], tuple[int, Floats, Floats]] = {}

        self.begin(0)

    def begin(self, span: int) -> None:
        """Nothing in stock; no stage of a Value has more pieces than the span."""
        self.span, self.longest = span, 0
        self.flows = flows.flows(np.full(5, SPARE))
        self.stock = stock.stock(self.devices, np.full(7, SPARE))
        self.numbers: dict[Flow, int] = {}
        self.known: dict[tuple[int, ...], int] = {}  # Blocks

    def _static(self, op: int, numbers: Mapping[str, int]) -> _Static:
        lowering, it = self.lowering, self.lowering.graph.ops[op]
        order = {v: j for j, v in enumerate(dict.fromkeys(it.inputs))}
        description = lookup(it.kind)
        return _Static(
            numbers[it.kind], description is not None and description.alias,
            lowering.graph.values[it.outputs[0]].itemsize if it.outputs else 4, len(order),
            np.array([stage for _, stage in lowering.feeds[op]], np.int64),
            np.array([order[v] for v in it.inputs], np.int64),
        )  # fmt: skip

    # Flows

    def number(self, flow: Flow, value: int) -> int:
        """The number of a Flow of a Value, which is added if it is new."""
        return self.number_all([flow], [value])[0]

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
        known, new = self.known, {}
        keys = [self._key(op, numbers) for op in ops]
        for op, key in zip(ops, keys, strict=True):
            if key not in known:
                new[key] = op
        if new:
            made = self._drafted([*new.values()], numbers)
            known.update(zip(new, made, strict=True))
        return np.array([known[key] for key in keys], np.int64)

    def _key(self, op: int, numbers: Sequence[int]) -> tuple[int, ...]:
        """All that a Block follows from."""
        lowering = self.lowering
        mine = [numbers[v] for v in lowering.values[op]]
        if op == len(self.static):
            return (-1, *mine)
        return (self.same[op], lowering.cut_of(op), op in lowering.termwise, *mine)

    def _drafted(self, ops: Sequence[int], numbers: Sequence[int]) -> range:
        calls = self._calls(ops, numbers)
        self.sheet.used[:] = 0
        self.sheet = draft.with_room(self.sheet, int(draft.room_for(self.flows, calls)))
        draft.draft(self.sheet, self.flows, calls)
        return self._stocked(len(ops))

    def _calls(self, ops: Sequence[int], numbers: Sequence[int]) -> draft.Calls:
        lowering, end = self.lowering, len(self.static)
        static = [self.static[op] if op < end else self.ending for op in ops]
        values = [lowering.values[op] for op in ops]
        fed = [
            numbers[v] for it, mine in zip(static, values, strict=True) for v in mine[: it.reads]
        ]
        made = [
            numbers[v] for it, mine in zip(static, values, strict=True) for v in mine[it.reads :]
        ]
        splits = [self._of_split(lowering.splits[op]) if op < end else _NO_SPLIT for op in ops]
        devices = [lowering.choices[op].devices if op < end else () for op in ops]
        zeros = [
            split.zeros[:0] if op in lowering.termwise else split.zeros
            for op, split in zip(ops, splits, strict=True)
        ]
        return draft.Calls(
            np.array([it.call for it in static]), np.array([it.alias for it in static], np.int64),
            np.array([it.itemsize for it in static]), _starts([it.reads for it in static]),
            np.array(fed, np.int64), np.concatenate([it.stages for it in static]),
            _starts([len(v) - it.reads for it, v in zip(static, values, strict=True)]),
            np.array(made, np.int64), _starts([len(d) for d in devices]),
            np.array([*chain.from_iterable(devices)], np.int64),
            _starts([len(split.flops) for split in splits]),
            np.concatenate([split.flops for split in splits]),
            _starts([len(it.places) for it in static]),
            np.concatenate([it.places for it in static]), _starts([len(z) for z in zeros]),
            np.concatenate(zeros),
        )  # fmt: skip

    def _of_split(self, split: Split) -> _Parts:
        """The flops of all parts, and which of their arguments are zeros."""
        found = self.splits.get(id(split))
        if found is None:
            flops = np.array([part.flops for part in split.parts], np.float64)
            zeros = np.zeros((len(split.parts), len(split.parts[0].inputs)), np.int64)
            for row, part in enumerate(split.parts):
                zeros[row, list(part.zeros)] = 1
            flat = zeros.reshape(-1) if zeros.any() else _new(0)
            found = self.splits[id(split)] = _Parts(split, flops, flat)
        return found

    def _stocked(self, count: int) -> range:
        """Puts the Ops of the sheet in stock; their Blocks."""
        sheet, on_device = self.sheet, self.cluster.communication_on_device
        n = int(sheet.used[draft.TASKS])
        duration, issue = self._costs(n)
        line = sheet.device[:n] * self.devices + sheet.peer[:n]
        hops = 0
        if not self.quiet:
            groups = np.flatnonzero(sheet.kind[:n] == COLLECTIVE).tolist()
            for task in groups:
                line[task] = self._line(task)
            moving = line[(sheet.kind[:n] == TRANSFER) | (sheet.kind[:n] == COLLECTIVE)]
            hops = int((self.lines.start[moving + 1] - self.lines.start[moving]).sum())
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
        return range(first, first + count)

    def _costs(self, n: int) -> tuple[Ints, Ints]:
        """What the tasks of the sheet take, and what it takes to issue them."""
        if self.quiet:  # what a message takes depends on others of its exchange
            tasks = self._tasks(np.arange(n))
            return (
                nanoseconds(tasks, self.cluster, self.cost),
                issue_nanoseconds(tasks, self.cluster, self.cost),
            )
        duration, issue, new = np.empty((3, n), np.int64)
        many = price.look_up(self.prices, self.sheet, self.alike, duration, issue, new)
        if many:
            rows = new[:many]
            tasks = self._tasks(rows)
            duration[rows] = nanoseconds(tasks, self.cluster, self.cost)
            issue[rows] = issue_nanoseconds(tasks, self.cluster, self.cost)
            price.learn(self.prices, self.sheet, self.alike, rows, duration[rows], issue[rows])
        return duration, issue

    def _tasks(self, rows: Ints) -> TaskGraph:
        """Tasks of the sheet as far as costs need them."""
        it = self.sheet
        members = it.member[: it.used[draft.MEMBERS]].tolist()
        edges = it.group_start[: it.used[draft.GROUPS] + 1].tolist()
        groups = tuple(tuple(members[a:b]) for a, b in pairwise(edges))
        return _bare(
            self.devices, it.kind[rows], it.device[rows], it.peer[rows], it.nbytes[rows],
            it.group[rows], it.pattern[rows], groups, op=it.call[rows], part=it.part[rows],
            position=2 * it.owner[rows] + it.late[rows], flops=it.flops[rows],
            itemsize=it.itemsize[rows], taken=it.taken[rows], kinds=self.kinds,
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

    def _line(self, task: int) -> int:
        """The line that a collective takes: of all algorithms the one that is cheapest for it."""
        it, pattern = self.sheet, int(self.sheet.pattern[task])
        low, high = it.group_start[it.group[task] : it.group[task] + 2].tolist()
        group = tuple(it.member[low:high].tolist())
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
        return first + int(np.argmin(alpha + beta * it.nbytes[task]))


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


def _alike(cluster: Cluster) -> Ints:
    """For every device a number, equal for those on which a task takes equally long."""
    numbers: dict[Any, int] = {}
    same = [
        (d.kind, d.flops, d.memory_bandwidth, d.launch_seconds, d.asynchronous)
        for d in cluster.devices
    ]
    return np.array([numbers.setdefault(each, len(numbers)) for each in same], np.int64)


def _starts(counts: Sequence[int]) -> Ints:
    return np.array([*accumulate(counts, initial=0)], np.int64)


def _new(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _nothing() -> Copies:
    raise AssertionError("costs need no copies")
