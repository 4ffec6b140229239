"""delta: what one changed Choice does to the simulated step, without simulating the rest again.

    live = Delta(space, strategy, cluster, cost)
    live.step_seconds
    live.change({op: choice})   # lowers what is near the Op again, and looks again at what moves
    live.change({op: choice}, {value: layout}, limit)   # ... or stops if it is longer than `limit`
    live.undo()                 # as it was before; or live.keep()

Of a changed Op only its neighbourhood is lowered anew: the Flows of the Values that it reads and
makes, and the Blocks of the Ops that make or read them. Of the schedule only what moves is worked
out again (relax.py, resume.py). The times are those of `simulate(lower(...))` bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from apportion import live as lives
from apportion import relax, resume
from apportion.block import Block
from apportion.cluster import Cluster
from apportion.cost import (
    CostModel,
    ahead_nanoseconds,
    issue_nanoseconds,
    nanoseconds,
    times_messages,
)
from apportion.flow import MADE, Flow
from apportion.held import Held
from apportion.hops import hops, no_hops
from apportion.live import Live
from apportion.lower import Lowering
from apportion.schedule import Times, schedule_compiled
from apportion.simulate import issued, stands
from apportion.splits import Space, Split
from apportion.stamp import stamp
from apportion.strategy import Choice, Layout, Strategy, verify, verify_choice
from apportion.tasks import NO_ENDS, Copies, Ints, TaskGraph, offsets
from apportion.termwise import Devices

ROOM = 3  # capacity of the arrays, as a multiple of what a strategy needs at first
SPARE = 4096  # and so much more
MEMORY = 8  # Flows and Blocks that are remembered, as a multiple of those of the Graph
PATIENCE = 0.03  # share of all tasks and hops that may move before everything is scheduled anew


@dataclass(frozen=True, slots=True, eq=False)
class _Costed:
    """A Block with its times: what is written into a Live schedule."""

    block: Block
    duration: Ints
    issue: Ints
    latency: Ints
    hop_start: Ints
    hop_link: Ints
    hop_occupancy: Ints
    stand_start: Ints
    stand: Ints


@dataclass(slots=True)
class _Before:
    """What a change replaced, outside of the arrays."""

    choices: dict[int, tuple[Choice, Split]] = field(default_factory=dict)
    layouts: dict[int, Layout | None] = field(default_factory=dict)
    termwise: dict[int, Devices] = field(default_factory=dict)
    flows: dict[int, tuple[Flow, int]] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    step: int = 0
    tops: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


class Delta:
    """A simulated step under a Strategy whose Choices can be changed."""

    def __init__(self, space: Space, strategy: Strategy, cluster: Cluster, cost: CostModel) -> None:
        devices = len(cluster.devices)
        verify(space, strategy, devices)
        self.space, self.cluster, self.cost = space, cluster, cost
        self.given = strategy
        self.lowering = Lowering(space, strategy, devices)
        self.flows = [self.lowering.flow_of(v) for v in range(len(space.graph.values))]
        self.blocks = self._blocks(range(len(space.graph.ops) + 1))
        self.costed: dict[int, _Costed] = {}
        self.asynchronous = any(d.asynchronous for d in cluster.devices)
        self.ahead = ahead_nanoseconds(cluster, cost)
        self.verified: dict[int, set[Layout]] = {}
        self.holding = Held(space.graph, self.flows, devices)
        self.before: _Before | None = None
        self.bounded = False  # the last change was given up: its step takes longer than the limit
        self.whole: Times | None = None  # times of all tasks, where they were all worked out
        self._build()

    # What it says

    @property
    def step_seconds(self) -> float:
        """The simulated step time."""
        return self.step_ns / 1e9

    @property
    def strategy(self) -> Strategy:
        """The Strategy as it is now."""
        choices, layouts = tuple(self.lowering.choices), dict(self.lowering.layouts)
        return Strategy(choices, layouts, self.given.digits, self.given.opening)

    @property
    def held(self) -> Ints:
        """Bytes that every device holds across the step (held.py)."""
        return self.holding.nbytes()

    def times(self) -> tuple[Ints, Ints]:
        """Start and end of every task, in the order of the TaskGraph."""
        if self.whole is not None:
            return self.whole
        return self._in_order(lives.START), self._in_order(lives.END)

    def _in_order(self, segment: int) -> Ints:
        """What `live` has for every task, in the order of the TaskGraph."""
        begin = self.live.at[segment]
        cells = self.live.cells[begin : begin + len(self.live.op)]
        found: Ints = lives.in_order(self.live, cells)
        return found

    def tasks(self) -> TaskGraph:
        """The TaskGraph as it is now."""
        return stamp(self.lowering.lowered())

    @property
    def looks(self) -> int:
        """How many times the tasks of an Op were worked out, since the beginning."""
        return int(self.live.counters[lives.LOOKS])

    # Changing it

    def change(
        self,
        choices: Mapping[int, Choice],
        layouts: Mapping[int, Layout | None] = MappingProxyType({}),
        limit: int | None = None,
    ) -> int:
        """Gives Ops other Choices and Values other Layouts (None: none of its own); the new step
        time in nanoseconds. Raises ValueError, and changes nothing, if one is not legal.

        If the step is longer than `limit`, it may be that only this is worked out. Then `bounded`
        is true, what is returned is above the limit and at most the step time, and the change can
        only be undone.
        """
        assert self.before is None, "the last change is neither kept nor undone"
        lowering = self.lowering
        for op, choice in choices.items():
            verify_choice(self.space, op, choice, lowering.devices)
        self._verify_layouts(layouts)
        if lowering.remembered > MEMORY * (len(self.flows) + len(self.blocks)) + SPARE:
            lowering.forget(self.flows, self.blocks)
            self.costed = {id(b): self.costed[id(b)] for b in self.blocks}
        if 4 * self.live.counters[lives.TASKS] > 3 * len(self.live.op):
            self._build()
        before = self.before = _Before(step=self.step_ns, termwise=lowering.termwise)
        before.tops = self.live.counters.copy()
        self.live.counters[lives.WRITTEN] = self.live.counters[lives.LEFT] = 0
        for op, choice in choices.items():
            before.choices[op] = (lowering.choices[op], lowering.splits[op])
            lowering.choices[op] = choice
            lowering.splits[op] = self.space.split(op, choice.parts)
        for value, layout in layouts.items():
            before.layouts[value] = lowering.layouts.get(value)
            lowering.lay(value, layout)
        self._retell(choices, layouts)
        touched = set(choices) | _differing(before.termwise, lowering.termwise)
        values = self._new_flows(touched, layouts)
        ops = self._new_blocks(touched, values)
        self._restamp(values, ops)
        return self.step_ns

    def _verify_layouts(self, layouts: Mapping[int, Layout | None]) -> None:
        """Raises ValueError unless all Layouts are legal; those that were once are known."""
        new: dict[int, Layout] = {}
        for value, layout in layouts.items():
            if layout is None and not 0 <= value < len(self.flows):
                new[value] = Layout((), (0,))
            elif layout is not None and layout not in self.verified.get(value, ()):
                new[value] = layout
        if new:
            choices = tuple(self.lowering.choices)
            given = Strategy(choices, new, self.given.digits, self.given.opening)
            verify(self.space, given, self.lowering.devices)
        for value, layout in new.items():
            self.verified.setdefault(value, set()).add(layout)

    def undo(self) -> None:
        """As it was before the last change."""
        before = self.before
        assert before is not None, "there is nothing to undo"
        lowering = self.lowering
        for op, (choice, split) in before.choices.items():
            lowering.choices[op], lowering.splits[op] = choice, split
        for value, layout in before.layouts.items():
            lowering.lay(value, layout)
        looked = [*before.choices, *self._makers(before.layouts)]
        lowering.terms.update(looked, lowering.choices, lowering.splits)
        lowering.termwise = before.termwise
        for op, block in before.blocks.items():
            self.blocks[op] = block
        for value, (flow, at) in before.flows.items():
            self.flows[value], self.flow_at[value] = flow, at
        self.holding.touch(before.flows)
        self.bounded = False
        self.before = self.whole = None
        if self.live.counters[lives.WRITTEN] > self.live.journal.shape[1] or len(before.tops) == 0:
            self._build()
            return
        lives.undo(self.live, 0)
        looks = self.live.counters[lives.LOOKS]
        self.live.counters[:] = before.tops
        self.live.counters[lives.LOOKS], self.live.counters[lives.WRITTEN] = looks, 0
        self.step_ns = before.step

    def keep(self) -> None:
        """The last change stays."""
        assert not self.bounded, "a change that was given up can only be undone"
        if self.whole is not None:
            resume.seed(self.live, *self.whole)
        self.before = self.whole = None

    def _retell(self, ops: Iterable[int], values: Iterable[int]) -> None:
        """What is computed term by term, after Ops got other Choices and Values other Layouts."""
        lowering = self.lowering
        looked = [*ops, *self._makers(values)]
        lowering.terms.update(looked, lowering.choices, lowering.splits)
        lowering.termwise = lowering.terms.settled()

    def _makers(self, values: Iterable[int]) -> list[int]:
        made = (self.lowering.graph.producer[value] for value in values)
        return [each[0] for each in made if each is not None]

    def _new_flows(self, touched: set[int], laid: Iterable[int]) -> list[int]:
        """Values whose Flow is another one now."""
        graph, lowering = self.lowering.graph, self.lowering
        values = {v for op in touched for v in lowering.values[op]}
        for op in touched:
            for value in graph.ops[op].outputs:
                values.update(lowering.befores.get(value, ()))
        for value in laid:
            values.add(value)
            values.add(lowering.after.get(value, value))
        changed = []
        for value in sorted(values):
            found = lowering.flow_of(value)
            if found is not self.flows[value]:
                assert self.before is not None
                self.before.flows[value] = (self.flows[value], self.flow_at[value])
                self.flows[value] = found
                changed.append(value)
        self.holding.touch(changed)
        return changed

    def _new_blocks(self, touched: set[int], values: list[int]) -> list[int]:
        """Ops whose tasks are other ones now."""
        graph, ops = self.lowering.graph, set(touched)
        for value in values:
            made = graph.producer[value]
            ops.update(graph.consumers[value])
            if made is not None:
                ops.add(made[0])
            if value in self.ending:
                ops.add(len(graph.ops))
        assert self.before is not None
        found = sorted(ops)
        for op, block in zip(found, self._blocks(found), strict=True):
            self.before.blocks[op] = self.blocks[op]
            self.blocks[op] = block
        return found

    def _blocks(self, ops: Iterable[int]) -> list[Block]:
        last = len(self.lowering.graph.ops)
        lowering = self.lowering
        return [
            lowering.end_of(self.flows) if op == last else lowering.block_of(op, self.flows)
            for op in ops
        ]

    # The arrays

    def _restamp(self, values: list[int], ops: list[int]) -> None:
        """Writes changed Flows and Blocks, and works out what moves."""
        assert self.before is not None
        if not ops:
            return
        self._cost(ops)
        if not self._fits(values, ops):
            self.before.tops = np.zeros(0, np.int64)
            self._build()
            return
        since = min(int(resume.first_ready(self.live, op)) for op in ops)
        for value in values:
            self._write_flow(value)
        for op in ops:
            first = self._write_block(op)
            lives.replace(self.live, op, first, len(self.blocks[op]))
        self._settle(since, ops)

    def _settle(self, since: int, ops: list[int]) -> None:
        """Works out what moves; if that is much, everything from the time on at which something
        changes. `since` is when the first of the tasks was ready that these Ops had."""
        live = self.live
        since = min(since, self._release())
        replaced = np.zeros(live.ops, np.int64)
        replaced[ops] = 1
        since = min(since, *(int(resume.first_entry(live, op, replaced)) for op in ops))
        since = min(since, int(resume.first_follower(live, replaced)))
        written = int(live.counters[lives.WRITTEN])
        if relax.relax(live, int(PATIENCE * self.size)):
            self.step_ns = int(relax.finish(live))
            return
        if live.counters[lives.WRITTEN] > live.journal.shape[1]:
            since, written = 0, -1  # too much to undo what was tried
        else:
            lives.undo(live, written)
        net, tasks, where = resume.current(live, since)
        times = schedule_compiled(net)
        start, end = self._in_order(lives.START), self._in_order(lives.END)
        assert len(times[0]) == len(live.queued) + len(tasks)
        start[where], end[where] = (x[len(live.queued) :] for x in times)
        self.whole = (start, end)
        self.step_ns = int(end.max(initial=0))

    def _release(self) -> int:
        """When hosts issue tasks; the first time that this changes anything."""
        live = self.live
        if not self.asynchronous:
            return lives.NEVER
        device, issue, duration = (
            lives.in_order(live, c) for c in (self.device, self.issue, live.duration)
        )
        return int(resume.release_all(live, issued(device, issue, duration, self.ahead)))

    def _build(self) -> None:
        """The arrays, from the Flows and Blocks there are."""
        ops = len(self.blocks)
        self._cost(range(ops))
        self.live, self.device, self.issue = self._room()
        self.ending = set(self.lowering.ending)
        self.flow_at = [0] * len(self.flows)
        for value in range(len(self.flows)):
            self._write_flow(value)
        _begin_lanes(self.live)
        for op in range(ops):
            first = self._write_block(op)
            lives.replace(self.live, op, first, len(self.blocks[op]))
        self._release()
        net, _, _ = resume.current(self.live, 0)
        self.size = len(net.duration) + len(net.hop_link)
        links = len(self.live.queued)
        start, end = (x[links:] for x in schedule_compiled(net))
        resume.seed(self.live, start, end)
        self.step_ns = int(relax.finish(self.live))
        self.whole = None
        self.live.counters[lives.WRITTEN] = 0

    def _room(self) -> tuple[Live, Ints, Ints]:
        """Empty arrays with room for changes."""
        costed = [self.costed[id(b)] for b in self.blocks]
        sizes = [ROOM * n + SPARE for n in _sizes(costed)]
        tasks, reads, waits, makes, stands, hop = sizes
        waits, hop = waits + tasks, hop + 2 * tasks  # a plan without messages may get many
        pieces = ROOM * sum(len(f.device) for f in self.flows) + SPARE
        devices, ops = len(self.cluster.devices), len(self.blocks)
        rows = (ops + 2) * devices
        cells = (tasks, tasks, tasks, tasks, pieces, hop, hop, ops, ops, rows, rows, rows)
        readers = [[*r] for r in self.lowering.graph.consumers]
        for value in self.lowering.ending:
            readers[value].append(ops - 1)
        links = max(len(self.cluster.links), 1)
        longest = int(_by_link(costed, links).max())
        live = Live(
            devices, ops, _new(sum(cells)), offsets(np.array(cells)), _new(12), _new(tasks),
            _new(tasks), _new(tasks), _new(tasks + 1), _new(reads), _new(tasks + 1), _new(waits),
            _new(tasks + 1), _new(makes), _new(tasks + 1), _new(stands), _new(tasks + 1),
            _new(hop), _new(hop), _new(hop), _new(pieces),
            offsets(np.array([len(r) for r in readers])),
            np.array([op for r in readers for op in r], np.int64),
            np.zeros((links, ROOM * longest + SPARE), np.int64), _new(links),
            np.zeros((2, 8 * tasks), np.int64), _new(ops + 1), _new(ops + 1),
            np.zeros((2, SPARE + 16 * devices), np.int64), _new(devices),
            np.full(devices, -1),
        )  # fmt: skip
        live.cells[live.at[lives.KEY] : live.at[lives.KEY] + hop] = lives.ABSENT
        return live, _new(tasks), _new(tasks)

    def _fits(self, values: list[int], ops: list[int]) -> bool:
        """Whether there is room for new Flows and Blocks."""
        live, used = self.live, self.live.counters
        costed = [self.costed[id(self.blocks[op])] for op in ops]
        columns = (live.op, live.read, live.wait, live.make, live.stand, live.hop_link)
        for which, (column, more) in enumerate(zip(columns, _sizes(costed), strict=True)):
            if used[which] + more > len(column):
                return False
        pieces = used[lives.PIECES] + sum(len(self.flows[v].device) for v in values)
        longest = (live.queued + _by_link(costed, len(live.queued))).max()
        return bool(pieces <= len(live.piece_value) and longest <= live.queue.shape[1])

    def _write_flow(self, value: int) -> None:
        live, flow = self.live, self.flows[value]
        at = int(live.counters[lives.PIECES])
        self.flow_at[value] = at
        live.counters[lives.PIECES] = at + len(flow.device)
        live.piece_value[at : at + len(flow.device)] = value
        available = live.at[lives.AVAILABLE] + at
        live.cells[available : available + len(flow.device)] = -1
        if self.lowering.graph.producer[value] is None:
            low, high = flow.made_at(MADE)
            live.cells[available + low : available + high] = 0

    def _write_block(self, op: int) -> int:
        """Adds the tasks of an Op; the first of them."""
        live, costed = self.live, self.costed[id(self.blocks[op])]
        block, used = costed.block, live.counters
        first, n = int(used[lives.TASKS]), len(costed.block)
        flow_at = np.array([self.flow_at[v] for v in self.lowering.values[op]], np.int64)
        real = block.in_j >= 0
        reads = np.where(real, block.in_p + flow_at[np.maximum(block.in_j, 0)], -1)[real]
        counts = np.diff(block.in_start)
        if not real.all():
            counts = np.bincount(np.repeat(np.arange(n), counts)[real], minlength=n)
        made = np.bincount(block.created_task, minlength=n)
        order = np.argsort(block.created_task, kind="stable")
        makes = (block.created_p + flow_at[block.created_j])[order]
        rows = slice(first, first + n)
        live.op[rows], live.duration[rows] = op, costed.duration
        live.latency[rows], self.device[rows] = costed.latency, block.device
        self.issue[rows] = costed.issue
        for which, starts, column, many, items in (
            (lives.READS, live.read_start, live.read, counts, reads),
            (lives.WAITS, live.wait_start, live.wait, np.diff(block.after_start),
             block.after + first),
            (lives.MAKES, live.make_start, live.make, made, makes),
            (lives.STANDS, live.stand_start, live.stand, np.diff(costed.stand_start),
             costed.stand),
            (lives.HOPS, live.hop_start, live.hop_link, np.diff(costed.hop_start),
             costed.hop_link),
        ):  # fmt: skip
            at = int(used[which])
            starts[first] = at
            np.cumsum(many, out=starts[first + 1 : first + n + 1])
            starts[first + 1 : first + n + 1] += at
            column[at : at + len(items)] = items
            used[which] = at + len(items)
        here = slice(int(live.hop_start[first]), int(live.hop_start[first + n]))
        live.hop_occupancy[here] = costed.hop_occupancy
        live.hop_task[here] = np.repeat(np.arange(first, first + n), np.diff(costed.hop_start))
        keys = live.at[lives.KEY]
        live.cells[keys + here.start : keys + here.stop] = lives.ABSENT
        for segment, value in ((lives.START, 0), (lives.END, 0), (lives.READY, lives.ABSENT),
                               (lives.RELEASE, 0)):  # fmt: skip
            low = live.at[segment] + first
            live.cells[low : low + n] = value
        used[lives.TASKS] = first + n
        return first

    def _cost(self, ops: Iterable[int]) -> None:
        """Times of the Blocks of Ops that have none yet."""
        last, graph = len(self.lowering.graph.ops), self.lowering.graph
        new: dict[int, tuple[Block, str]] = {}
        for op in ops:
            block = self.blocks[op]
            if id(block) not in self.costed:
                new[id(block)] = (block, "" if op == last else graph.ops[op].kind)
        if not new:
            return
        blocks = [block for block, _ in new.values()]
        tasks = _together(blocks, [kind for _, kind in new.values()], len(self.cluster.devices))
        duration = nanoseconds(tasks, self.cluster, self.cost)
        issue = issue_nanoseconds(tasks, self.cluster, self.cost)
        quiet = times_messages(self.cluster, self.cost)
        message = no_hops(len(tasks)) if quiet else hops(tasks, self.cluster)
        stand_start, stand = stands(tasks, self.cluster.communication_on_device)
        for k, block in enumerate(blocks):
            rows = slice(int(tasks.op_start[k]), int(tasks.op_start[k + 1]))
            edges = slice(rows.start, rows.stop + 1)
            hop_start, own_start = message.start[edges], stand_start[edges]
            hop, own = slice(hop_start[0], hop_start[-1]), slice(own_start[0], own_start[-1])
            self.costed[id(block)] = _Costed(
                block, duration[rows], issue[rows], message.latency[rows],
                hop_start - hop_start[0], message.link[hop], message.occupancy[hop],
                own_start - own_start[0], stand[own],
            )  # fmt: skip


def _new(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _sizes(costed: Sequence[_Costed]) -> list[int]:
    """How many tasks, reads, waits, makes, stands and hops these have."""
    columns = [
        (len(c.block), len(c.block.in_j), len(c.block.after), len(c.block.created_j), len(c.stand),
         len(c.hop_link)) for c in costed
    ]  # fmt: skip
    return [sum(column) for column in zip(*columns, strict=True)] or [0] * 6


def _by_link(costed: Sequence[_Costed], links: int) -> Ints:
    """How many hops every link has."""
    return np.bincount(np.concatenate([_new(0), *(c.hop_link for c in costed)]), minlength=links)


def _differing(a: dict[int, Devices], b: dict[int, Devices]) -> set[int]:
    return {op for op in a.keys() | b.keys() if a.get(op) != b.get(op)}


def _begin_lanes(live: Live) -> None:
    """All lanes empty: from the row before the first Op to the row after the last."""
    rows, devices = live.ops + 2, live.devices
    for segment in (lives.BEFORE, lives.AFTER):
        live.cells[live.at[segment] : live.at[segment] + rows * devices] = lives.ABSENT
    after, before = live.at[lives.AFTER], live.at[lives.BEFORE] + (rows - 1) * devices
    live.cells[after : after + devices] = rows - 1
    live.cells[before : before + devices] = 0


def _together(blocks: list[Block], kinds: list[str], devices: int) -> TaskGraph:
    """Blocks in a row as far as costs need them: no slots, no dependencies."""
    start = offsets(np.array([len(b) for b in blocks]))
    owner = np.repeat(np.arange(len(blocks)), np.diff(start))
    numbers: dict[tuple[int, ...], int] = {}
    groups = [
        np.array([*(numbers.setdefault(g, len(numbers)) for g in b.groups), -1], np.int64)[b.group]
        for b in blocks
    ]
    none = np.zeros(0, np.int64)

    def column(name: str) -> Any:
        return np.concatenate([getattr(b, name) for b in blocks])

    return TaskGraph(
        devices, kind=column("kind"), op=owner, part=column("part"), device=column("device"),
        peer=column("peer"), position=2 * owner + column("late"), nbytes=column("nbytes"),
        flops=column("flops"), itemsize=column("itemsize"), dep_start=none, dep=none,
        slot_device=none, slot_value=none, slot_region=none, slot_nbytes=none,
        slot_category=none, slot_base=none, slot_first=none, slot_last=none, in_start=none,
        in_slot=none, out_start=none, out_slot=none, op_start=start, copies=_nothing,
        taken=column("taken"), ends=NO_ENDS,
        group=np.concatenate(groups), pattern=column("pattern"), groups=tuple(numbers),
        kinds=tuple(kinds),
    )  # fmt: skip


def _nothing() -> Copies:
    raise AssertionError("costs need no copies")
