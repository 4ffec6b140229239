"""Delta: what one changed Choice does to the simulated step, without simulating the rest again.
The entrance of simulate/delta/.

In: a Space, a Strategy, a Cluster and a CostModel, and then changes. Out: step times.

    live = Delta(space, strategy, cluster, cost)
    live.step_seconds
    live.change({op: choice})   # lowers what is near the Op again, and looks again at what moves
    live.change({op: choice}, {value: layout}, limit)   # ... or stops if it is longer than `limit`
    live.undo()                 # as it was before; or live.keep()

Of a changed Op only its neighbourhood is lowered anew: the Flows of the Values that it reads and
makes, and the Blocks of the Ops that make or read them. The schedule is worked out again from the
first time on that can have changed (schedule_state.py, reschedule.py). The times are those of
`simulate(lower(...))` bit for bit.

Blocks know one lane of each device. Where a Graph copies to the host and back, which happens in
lanes beside it, the tasks are built and simulated anew after every change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from apportion.columns import CompiledFunction, Ints, offsets, seconds_to_compile
from apportion.describe import HOST_KINDS, HOST_UPDATE_KIND
from apportion.lower import READ, STAGES, Devices, Lowering, TaskGraph, build_task_graph
from apportion.machine import Cluster, CostModel, ahead_nanoseconds
from apportion.simulate.delta import block_store as stores
from apportion.simulate.delta import reschedule, schedule_state
from apportion.simulate.delta.held_bytes import HeldBytes
from apportion.simulate.delta.new_blocks import BlockMaker, make_blocks
from apportion.simulate.delta.schedule_state import ScheduleState
from apportion.simulate.delta.stage_names import differing_ops
from apportion.simulate.schedule import Times
from apportion.simulate.simulate import simulate
from apportion.split import Choice, Layout, Space, Split, Strategy, verify_choice, verify_strategy

ROOM = 3  # capacity of the arrays, as a multiple of what a strategy needs at first
SPARE = 1 << 16  # and so much more
CROWDED = 8  # changes leave so much behind, as a multiple, before all is built anew
PLENTY = 1 << 21  # and as a number
MEMORY = 8  # Flows and Blocks that are remembered, as a multiple of those of the Graph
LOOKS = 64  # changes between two looks at what they have left behind
NONE = np.zeros(0, np.int64)

LOOPS: tuple[CompiledFunction, ...] = (
    make_blocks, differing_ops, reschedule.begin, reschedule.change, schedule_state.undo_changes,
)  # fmt: skip
"""In which most of the time of changes goes."""


@dataclass(slots=True)
class _UndoRecord:
    """What a change replaced, outside of the arrays."""

    step: int
    termwise: dict[int, Devices]
    counters: Ints | None  # none if all was built anew
    choices: list[tuple[int, Choice, Split]]
    layouts: dict[int, Layout | None]
    flows: dict[int, int]
    ops: Ints


def delta_compile_seconds() -> float:
    """What compiling the loops of changes is expected to take yet."""
    return seconds_to_compile(LOOPS)


class Delta:
    """A simulated step under a Strategy whose Choices can be changed."""

    def __init__(self, space: Space, strategy: Strategy, cluster: Cluster, cost: CostModel) -> None:
        devices = len(cluster.devices)
        verify_strategy(space, strategy, devices)
        self.space, self.cluster, self.cost = space, cluster, cost
        self.given = strategy
        self.lowering = Lowering(space, strategy, devices)
        self.flows = self.lowering.flows_of(range(len(space.graph.values)))
        self.maker = BlockMaker(self.lowering, cluster, cost)
        self.ahead = ahead_nanoseconds(cluster, cost)
        self.verified: dict[int, set[Layout]] = {}
        self.legal: dict[tuple[int, int], tuple[Choice, Split]] = {}
        self.holding = HeldBytes(self.lowering, self.flows)
        self.makers = [-1 if made is None else made[0] for made in space.graph.producer]
        self.before: _UndoRecord | None = None
        own_lanes = (*HOST_KINDS, HOST_UPDATE_KIND)
        self.anew = any(op.kind in own_lanes for op in space.graph.ops)
        self.known_times: Times | None = None  # where all is simulated anew
        self.step_ns = 0
        self.changes = 0
        self.bounded = False  # the last change was given up: its step takes longer than the limit
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
        return replace(self.given, choices=choices, layouts=layouts)

    @property
    def held(self) -> Ints:
        """Bytes that every device holds across the step (held_bytes.py)."""
        return self.holding.nbytes()

    @property
    def bytes_moved(self) -> int:
        """Bytes that leave a device in one step."""
        return self.lowering.bytes_moved(self.flows)

    def times(self) -> Times:
        """Start and end of every task, in the order of the TaskGraph."""
        if self.anew:
            return self._times_anew()
        blocks = self.state.cells[self.state.at[schedule_state.BLOCK] :][: self.state.rows // 2]
        first = offsets(self.maker.blocks.tasks[blocks])
        start, end = np.full((2, int(first[-1])), schedule_state.ABSENT)
        reschedule.write_times(self.maker.blocks, self.state, first, start, end)
        return start, end

    def tasks(self) -> TaskGraph:
        """The TaskGraph as it is now."""
        return build_task_graph(self.lowering.lowered())

    # Changing it

    def change(
        self,
        choices: Mapping[int, Choice],
        layouts: Mapping[int, Layout | None] = MappingProxyType({}),
        limit: int | None = None,
    ) -> int:
        """Gives Ops other Choices and Values other Layouts (None: none of its own); the new step
        time in nanoseconds. Raises ValueError, and changes nothing, if one is not legal.

        If the step is longer than `limit`, only this is worked out. Then `bounded` is true, what is
        returned is above the limit and at most the step time, and the change can only be undone.
        """
        assert self.before is None, "the last change is neither kept nor undone"
        lowering = self.lowering
        legal = self._legal(choices)
        if layouts:
            self._verify_layouts(layouts)
        self.changes += 1
        if lowering.remembered > MEMORY * len(self.flows) + SPARE or (
            not self.changes % LOOKS and self._is_crowded()
        ):
            self._build()
        before = self.before = _UndoRecord(
            self.step_ns, lowering.termwise, self._counters(), [], {}, {}, NONE
        )
        for op, (choice, split) in zip(choices, legal, strict=True):
            before.choices.append((op, lowering.choices[op], lowering.splits[op]))
            lowering.choices[op], lowering.splits[op] = choice, split
        for value, layout in layouts.items():
            before.layouts[value] = lowering.layouts.get(value)
            lowering.set_layout(value, layout)
        touched = set(choices)
        if self._update_termwise(choices, layouts):
            touched |= _differing(before.termwise, lowering.termwise)
        values = self._new_flows(touched, layouts)
        if self.anew:
            self.known_times = None
            self.step_ns = int(self._times_anew()[1].max(initial=0))
            self.bounded = limit is not None and self.step_ns > limit
        else:
            self._replace_blocks(self._new_blocks(touched, values), limit)
        return self.step_ns

    def _counters(self) -> Ints | None:
        """What the counters of the arrays are, to undo a change."""
        if self.anew:
            return None
        self.state.counters[schedule_state.WRITTEN] = 0
        return self.state.counters.copy()

    def _times_anew(self) -> Times:
        """Start and end of every task, by a whole simulation."""
        if self.known_times is None:
            line = simulate(self.tasks(), self.cluster, self.cost)
            self.known_times = line.start_ns, line.end_ns
        return self.known_times

    def _used(self) -> tuple[Ints, Ints]:
        """How much there is of all that changes leave behind."""
        return self.lowering.store.used, self.maker.blocks.used

    def _is_crowded(self) -> bool:
        """Whether changes have left too much behind."""
        return any(
            (used > most).any() for used, most in zip(self._used(), self.crowded, strict=True)
        )

    def _legal(self, choices: Mapping[int, Choice]) -> list[tuple[Choice, Split]]:
        """The Choices with their Splits; raises ValueError unless all are legal. Those that were
        once are known, by their addresses: they are kept, so that no other can have one."""
        calls, legal = self.space.call_ids, self.legal
        if len(legal) > SPARE:
            legal.clear()
        found = []
        for op, choice in choices.items():
            key = (calls[op] if 0 <= op < len(calls) else -1, id(choice))
            known = legal.get(key)
            if known is None:
                verify_choice(self.space, op, choice, self.lowering.devices)
                known = legal[key] = choice, self.space.split(op, choice.parts)
            found.append(known)
        return found

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
            verify_strategy(self.space, given, self.lowering.devices)
        for value, layout in new.items():
            self.verified.setdefault(value, set()).add(layout)

    def undo(self) -> None:
        """As it was before the last change."""
        before = self.before
        assert before is not None, "there is nothing to undo"
        lowering = self.lowering
        for op, choice, split in before.choices:
            lowering.choices[op], lowering.splits[op] = choice, split
        for value, layout in before.layouts.items():
            lowering.set_layout(value, layout)
        lowering.terms.undo()
        lowering.termwise = before.termwise
        for value, flow in before.flows.items():
            self.flows[value] = flow
        self.holding.touch(before.flows)
        self.before, self.bounded = None, False
        if self.anew:
            self.step_ns, self.known_times = before.step, None
            return
        if before.counters is None:
            self._build()
            return
        schedule_state.undo_changes(self.maker.blocks, self.state, before.ops)
        self.state.counters[:] = before.counters
        self.step_ns = before.step

    def keep(self) -> None:
        """The last change stays."""
        assert not self.bounded, "a change that was given up can only be undone"
        assert self.before is not None, "there is nothing to keep"
        self.before = None

    def _update_termwise(self, ops: Iterable[int], values: Iterable[int]) -> bool:
        """What is computed term by term, after Ops got other Choices and Values other Layouts;
        whether that may be something else now."""
        lowering = self.lowering
        made = [self.makers[value] for value in values]
        looked = [*ops, *(op for op in made if op >= 0)] if made else ops
        different = lowering.terms.update(looked, lowering.choices, lowering.splits)
        if different:
            lowering.termwise = lowering.terms.settled()
        return different

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
        near, flows = sorted(values), self.flows
        found = dict(zip(near, lowering.flows_of(near), strict=True))
        changed = [value for value in near if found[value] != flows[value]]
        assert self.before is not None
        self.before.flows = {value: flows[value] for value in changed}
        for value in changed:
            flows[value] = found[value]
        self.holding.touch(changed)
        return changed

    def _new_blocks(self, touched: set[int], values: list[int]) -> Ints:
        """Ops whose tasks are other ones now."""
        assert self.before is not None
        was, now, maker = self.before.flows, self.flows, self.maker
        changed = np.array([(v, was[v], now[v]) for v in values], np.int64).reshape(-1, 3)
        found: Ints = differing_ops(
            self.lowering.store, maker.names_with_room(), maker.span, changed,
            *self.lowering.near, np.array([*touched]),
        )  # fmt: skip
        return found

    # The arrays

    def _replace_blocks(self, ops: Ints, limit: int | None) -> None:
        """Gives Ops their new Blocks, and works out what changes."""
        before, maker = self.before, self.maker
        assert before is not None
        before.ops = ops
        if not len(ops):
            return
        fits = maker.fits
        if fits:
            blocks = maker.blocks_of(ops.tolist(), self.flows)
            fits = self._reschedule(ops, blocks, schedule_state.NEVER if limit is None else limit)
        if not fits:
            before.counters = None
            self._build()

    def _reschedule(self, ops: Ints, blocks: Ints, limit: int) -> bool:
        """The schedule with the Blocks that these Ops have now; whether there was room."""
        held, state = self.maker.blocks, self.state
        ends = int(reschedule.change(held, state, ops, blocks, limit))
        if ends != schedule_state.ABSENT:
            self.step_ns, self.bounded = ends, ends > limit
        return ends != schedule_state.ABSENT

    def _build(self) -> None:
        """The arrays, from the Flows there are; all that changes have left behind is dropped."""
        self._drop_unused()
        store, maker = self.lowering.store, self.maker
        pieces = store.piece_start[: store.used[STAGES]]
        maker.restart(max(2 * len(self.cluster.devices), int(np.diff(pieces).max())))
        if self.anew:
            self.known_times = None
            self.step_ns = int(self._times_anew()[1].max(initial=0))
            self.crowded = [np.maximum(CROWDED * used, PLENTY) for used in self._used()]
            return
        blocks = maker.blocks_of(range(len(self.lowering.graph.ops) + 1), self.flows)
        self.state = self._room(stores.totals(maker.blocks, blocks))
        self.step_ns = int(reschedule.begin(maker.blocks, self.state, blocks))
        self.state.counters[schedule_state.WRITTEN] = 0
        self.crowded = [np.maximum(CROWDED * used, PLENTY) for used in self._used()]

    def _drop_unused(self) -> None:
        """Drops the Flows that no Value has, now or before the last change."""
        before = {} if self.before is None else self.before.flows
        numbers = self.lowering.drop_unused([*self.flows, *before.values()])
        self.flows[:] = [numbers[flow] for flow in self.flows]
        for value, flow in before.items():
            before[value] = numbers[flow]
        self.holding.renumber(numbers)

    def _room(self, used: Ints) -> ScheduleState:
        """Empty arrays with room for changes; now the Blocks of all Ops have so much."""
        graph, devices = self.lowering.graph, len(self.cluster.devices)
        ops = len(graph.ops) + 1
        stages = [3 + len(readers) for readers in graph.consumers]
        first = offsets(np.array(stages))
        maker = np.full(int(first[-1]), -1)
        for value, made in enumerate(graph.producer):
            at = int(first[value])
            if made is not None:
                maker[at : at + 2] = 2 * made[0], 2 * made[0] + 1
            for k, reader in enumerate((*graph.consumers[value], ops - 1)):
                maker[at + READ + k] = 2 * reader
        values = self.lowering.values
        rows, spare = 2 * ops, ROOM * used + SPARE
        messages, needs = int(spare[stores.MESSAGES]), int(spare[stores.NEEDS]) + 3 * SPARE
        hops = int(spare[stores.HOPS]) + 7 * SPARE
        lanes, links = devices * rows, max(len(self.cluster.links), 1)
        span = self.maker.span
        slots = int(first[-1]) * span
        cells = (slots, 2 * lanes, messages, messages, hops, ops, ops)
        journal = int(spare[stores.MAKES]) + 4 * lanes + hops + 8 * messages + 3 * ops
        marks = np.zeros((devices, rows), np.uint8)
        marks[:, :: schedule_state.APART] = schedule_state.STATION
        state = ScheduleState(
            devices, rows, span, _new(sum(cells)), offsets(np.array(cells)), _new(6),
            np.empty((journal, 2), np.int64), marks.ravel(),
            np.zeros(lanes, np.int32), np.zeros((lanes, 8), np.int64),
            offsets(np.array([len(v) for v in values])),
            np.array([first[v] * span for each in values for v in each], np.int64), maker,
            self.ahead, np.zeros((messages, schedule_state.FIELDS), np.int64),
            np.zeros(messages, np.uint8),
            _new(needs), _new(needs), _new(needs), _new(needs),
            _new(devices), _new(devices), _new(devices), _new(devices), _new(devices),
            np.full(lanes, -1), _new(devices), np.zeros((messages, 2), np.int64),
            _new(messages), _new(links),
        )  # fmt: skip
        blocks = state.at[schedule_state.BLOCK]
        state.cells[blocks : blocks + ops] = schedule_state.ABSENT
        return state


def _new(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _differing(a: dict[int, Devices], b: dict[int, Devices]) -> set[int]:
    return {op for op in a.keys() | b.keys() if a.get(op) != b.get(op)}
