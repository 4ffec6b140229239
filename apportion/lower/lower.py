"""Graph + Strategy -> TaskGraph.

Ops are lowered in the Graph's order. For each: fetch the regions that its parts read (one
exchange), compute the parts, and, where the strategy or the form of the result asks for it, move
the result to its layout (a second exchange).

It is done in two halves, so that what is alike is worked out once and one changed Choice changes
little. Every Value has a **Flow** (flow.py): its pieces, and how they get to its readers. It
depends on the Choices of the Op that makes the Value and of those that read it, and on nothing
else. Every Op has a **Block** (block.py): its tasks, which follow from its Choice and the Flows of
its Values. stamp.py makes one TaskGraph of all of them.

A partial Value that no layout was chosen for is either fetched term by term by all its consumers or
first reduced onto a layout, whichever moves less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from apportion.columns import (
    Ints,
    offsets,
)
from apportion.describe import Factors, full, lookup
from apportion.graph import INPUT, Graph
from apportion.lower.op_tasks import Block, Parts, block, ending, parts, reading
from apportion.lower.task_columns import Lowered, stamp
from apportion.lower.task_graph import TaskGraph
from apportion.lower.termwise import Devices, Terms
from apportion.lower.value_flow import (
    ANY,
    READ,
    REGION,
    TERM,
    Asked,
    Flow,
    Rows,
    Told,
    boxes,
    first_rows,
    flows,
    table,
)
from apportion.split import Choice, Layout, Space, Split, Strategy, grid, verify


def lower(space: Space, strategy: Strategy, devices: int) -> TaskGraph:
    """The tasks of one step; raises ValueError if the strategy is not legal."""
    verify(space, strategy, devices)
    lowering = Lowering(space, strategy, devices)
    return stamp(lowering.lowered())


def bytes_moved(space: Space, strategy: Strategy, devices: int) -> int:
    """What `lower(...).bytes_moved` is, without the tasks; raises ValueError as it does."""
    verify(space, strategy, devices)
    lowering = Lowering(space, strategy, devices)
    return sum(flow.moved for flow in lowering.flows_of(range(len(lowering.graph.values))))


@dataclass(frozen=True, slots=True)
class _Of:
    """What is known of a Value before there are Choices. Values of equal `number` have one Flow if
    the Choices of the Ops that make and read them are equal."""

    number: int
    dims: tuple[Factors, ...]
    atoms: int
    itemsize: int
    maker: tuple[int, int] | None  # Op, and which of its outputs
    readers: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]  # for every reader: which of its inputs
    befores: tuple[int, ...]  # what it is in the next step
    loss: bool


@dataclass(frozen=True, slots=True)
class _Does:
    """What is known of an Op before there are Choices; Ops of equal `number` do the same."""

    number: int
    values: tuple[int, ...]
    places: tuple[int, ...]  # for every argument which of the distinct inputs it is
    told: Ints  # as a Block is told
    alias: bool
    itemsize: int


class Lowering:
    """The Flows of all Values and the Blocks of all Ops under a Strategy.

    Equal ones are made once and kept by what they follow from. `choices` may be changed, if then
    `flow_of` and `block_of` are asked again for what follows from them. So may `layouts`, by `lay`.
    """

    def __init__(self, space: Space, strategy: Strategy, devices: int) -> None:
        self.space = space
        self.graph: Graph = space.graph
        self.devices = devices
        self.layouts = dict(strategy.layouts)
        self.choices: list[Choice] = list(strategy.choices)
        self.splits: list[Split] = [
            space.split(index, choice.parts) for index, choice in enumerate(self.choices)
        ]
        self.terms = Terms(space, strategy.choices, self.layouts, self.splits)
        self.termwise: dict[int, Devices] = self.terms.settled()
        self.after = dict(self.graph.state)
        self.befores: dict[int, list[int]] = {}
        for before, after in self.graph.state:
            self.befores.setdefault(after, []).append(before)
        self._flows: dict[tuple[Any, ...], Flow] = {}
        self._blocks: dict[tuple[Any, ...], Block] = {}
        self._rows = Rows(devices)
        self._at: dict[Any, int] = {}  # where in these there is what
        self._asked: dict[tuple[Any, ...], Asked] = {}
        self._parts: dict[tuple[int, ...], Parts] = {}
        # Numbers of (Split, devices); for every Op that of the Choice that was seen last
        self._cuts: dict[tuple[int, Devices], int] = {}
        self._made_cuts = 0
        self._seen: list[Choice | None] = [None] * len(self.choices)
        self._cut: list[int] = [-1] * len(self.choices)

    def lay(self, value: int, layout: Layout | None) -> None:
        """Gives a Value another Layout, or none of its own."""
        if layout is None:
            self.layouts.pop(value, None)
        else:
            self.layouts[value] = layout

    def lowered(self) -> Lowered:
        """Everything, for `stamp`."""
        flows = self.flows_of(range(len(self.graph.values)))
        blocks = [self.block_of(op, flows) for op in range(len(self.graph.ops))]
        blocks.append(self.end_of(flows))
        return Lowered(
            self.graph, self.devices, self.values, flows, blocks, self.carried(flows),
            self.frozen(), self.loss_pieces(flows),
        )  # fmt: skip

    def forget(self, flows: Sequence[Flow], blocks: Sequence[Block]) -> None:
        """Keeps of all Flows and Blocks only these; they are known by the addresses of others."""
        kept = set(map(id, flows)) | set(map(id, blocks))
        self._flows = {key: made for key, made in self._flows.items() if id(made) in kept}
        self._blocks = {key: made for key, made in self._blocks.items() if id(made) in kept}
        now = {self.cut_of(op) for op in range(len(self.choices))}
        self._cuts = {key: number for key, number in self._cuts.items() if number in now}
        self._rows = Rows(self.devices)
        self._at.clear()
        self._asked.clear()
        self._parts.clear()

    @property
    def remembered(self) -> int:
        """How many Flows and Blocks are kept."""
        return len(self._flows) + len(self._blocks)

    @cached_property
    def values(self) -> list[tuple[int, ...]]:
        """The Values of every Op, distinct inputs first, and last those of the end of the step."""
        found = [(*dict.fromkeys(op.inputs), *op.outputs) for op in self.graph.ops]
        return [*found, self.ending]

    @cached_property
    def feeds(self) -> list[tuple[tuple[int, int], ...]]:
        """For every Op its distinct inputs, each with the stage at which it reads it."""
        order = [{op: k for k, op in enumerate(ops)} for ops in self.graph.consumers]
        return [
            tuple((v, READ + order[v][index]) for v in dict.fromkeys(op.inputs))
            for index, op in enumerate(self.graph.ops)
        ]

    @cached_property
    def near(self) -> tuple[Ints, Ints, Ints]:
        """For every Value the Op that makes it or -1, and where its readers are; these, and last of
        those of a Value the end of the step if it reads it."""
        end, ending = len(self.graph.ops), set(self.ending)
        makers = [-1 if made is None else made[0] for made in self.graph.producer]
        readers = [
            (*ops, end) if v in ending else ops for v, ops in enumerate(self.graph.consumers)
        ]
        flat = [op for ops in readers for op in ops]
        return (
            np.array(makers, np.int64), offsets(np.array([len(ops) for ops in readers])),
            np.array(flat, np.int64),
        )  # fmt: skip

    @cached_property
    def ending(self) -> tuple[int, ...]:
        """Values that the end of the step reads: state, and the loss."""
        loss = () if self.graph.loss is None else (self.graph.loss,)
        return tuple(dict.fromkeys((*(after for _, after in self.graph.state), *loss)))

    @cached_property
    def _of(self) -> list[_Of]:
        numbers: dict[tuple[Any, ...], int] = {}
        found = []
        for value, dims in enumerate(self.space.atoms.dims):
            readers = tuple(self.graph.consumers[value])
            places = tuple([self._inputs(op, value) for op in readers])
            made, befores = self.graph.producer[value], tuple(self.befores.get(value, ()))
            size, loss = self._sizes[value], value == self.graph.loss
            position = None if made is None else made[1]
            key = (dims, size, position, places, len(befores), loss, value in self.after)
            number = numbers.setdefault(key, len(numbers))
            atoms = sum(map(len, dims))
            found.append(_Of(number, dims, atoms, size, made, readers, places, befores, loss))
        return found

    def _inputs(self, op: int, value: int) -> tuple[int, ...]:
        inputs = self.graph.ops[op].inputs
        if inputs.count(value) == 1:
            return (inputs.index(value),)
        return tuple([k for k, v in enumerate(inputs) if v == value])

    @cached_property
    def _sizes(self) -> list[int]:
        return [value.itemsize for value in self.graph.values]

    @cached_property
    def _does(self) -> list[_Does]:
        numbers: dict[tuple[Any, ...], int] = {}
        told: dict[tuple[Any, ...], Ints] = {}
        found = []
        for index, op in enumerate(self.graph.ops):
            stages = tuple([stage for _, stage in self.feeds[index]])
            order = {v: j for j, v in enumerate(dict.fromkeys(op.inputs))}
            places = tuple([order[v] for v in op.inputs])
            sizes = tuple([self._sizes[v] for v in self.values[index]])
            key = (op.kind, stages, places, sizes)
            number = numbers.setdefault(key, len(numbers))
            if key not in told:
                told[key] = reading(stages, len(op.outputs), sizes, self.devices)
            description = lookup(op.kind)
            alias = description is not None and description.alias
            size = sizes[len(stages)] if op.outputs else 4
            found.append(_Does(number, self.values[index], places, told[key], alias, size))
        return found

    def cut_of(self, op: int) -> int:
        """The number of how an Op is cut, and where its parts are."""
        choice = self.choices[op]
        if self._seen[op] is not choice:
            key = (id(self.splits[op]), choice.devices)
            number = self._cuts.get(key)
            if number is None:
                number = self._cuts[key] = self._made_cuts
                self._made_cuts += 1
            self._seen[op], self._cut[op] = choice, number
        return self._cut[op]

    # Flows

    def flow_of(self, value: int) -> Flow:
        """Where a Value is, under the current Choices."""
        return self.flows_of((value,))[0]

    def flows_of(self, values: Sequence[int]) -> list[Flow]:
        """Where Values are, under the current Choices."""
        known = self._flows
        keys = [self._flow_key(value) for value in values]
        new = {key: value for key, value in zip(keys, values, strict=True) if key not in known}
        if new:
            known.update(zip(new, self._make_flows(new), strict=True))
        return [known[key] for key in keys]

    def _flow_key(self, value: int) -> tuple[Any, ...]:
        """All that a Flow follows from; second, how its readers are cut (~: term by term)."""
        of, cut, termwise = self._of[value], self.cut_of, self.termwise
        if termwise:
            readers = tuple([~cut(op) if op in termwise else cut(op) for op in of.readers])
        else:
            readers = tuple([cut(op) for op in of.readers])
        befores = tuple([self._begin_key(before) for before in of.befores])
        if of.maker is None:
            return of.number, readers, befores, self._begin_key(value)
        maker = of.maker[0]
        return (
            of.number, readers, befores, cut(maker), self.layouts.get(value), termwise.get(maker),
        )  # fmt: skip

    def _begin_key(self, value: int) -> tuple[Any, ...]:
        layout = self.layouts.get(value)
        if layout is not None:
            return ("layout", layout)
        if value in self.after:
            made = self.graph.producer[self.after[value]]
            if made is not None and self._is_whole(*made):
                return "left", self.cut_of(made[0]), made[1]
            return ("first device",)
        return ("needed",)

    def _terms(self, op: int, position: int) -> int:
        homes = self.termwise.get(op)
        return self.splits[op].terms[position] if homes is None else len(homes)

    def _is_whole(self, op: int, position: int) -> bool:
        return self._terms(op, position) == 1

    def _make_flows(self, new: Mapping[tuple[Any, ...], int]) -> list[Flow]:
        """Flows of Values, by what they follow from."""
        told = [self._told(value, key) for key, value in new.items()]
        found = flows(self._rows, told)
        again, laid = [], []
        for k, (value, it, direct) in enumerate(zip(new.values(), told, found, strict=True)):
            if it.terms > 1 and not it.layout and direct.moved and self._gathers(value):
                again.append(k)
                laid.append(it._replace(layout=self._spread_out(value, it)))
        for k, reduced in zip(again, flows(self._rows, laid) if laid else (), strict=True):
            if reduced.moved < found[k].moved:
                found[k] = reduced
        return found

    def _told(self, value: int, key: tuple[Any, ...]) -> Told:
        of, asked = self._of[value], self._asked
        wants: list[int] = []
        for op, places, cut in zip(of.readers, of.places, key[1], strict=True):
            wants += asked.get((cut, places)) or self._reads(op, places, cut < 0)
        wants += self._ends(value, of, key[2]) if of.befores or of.loss else self._rows.none
        layout = self.layouts.get(value) if of.maker is not None else None
        laid = () if layout is None else self._laid(value, layout, REGION)
        terms = 1 if of.maker is None else self._terms(*of.maker)
        return Told(
            self._dims(of), of.atoms, of.itemsize, terms, self._made(value, of), laid, wants
        )

    def _gathers(self, value: int) -> bool:
        """Whether the readers of a Value want all its terms."""
        return not self.termwise or self.termwise.keys().isdisjoint(self._of[value].readers)

    def _spread_out(self, value: int, told: Told) -> Asked:
        """A Layout on the devices of the terms of a partial Value, the first term's first."""
        rows = self._rows.placed(told.made, told.atoms)
        owners = rows[np.argsort(rows[:, 1], kind="stable"), 0].tolist()
        spread = _spread(self.space.factors(value), tuple(dict.fromkeys(owners)))
        return self._laid(value, spread, REGION)

    def _dims(self, of: _Of) -> int:
        found = self._at.get(of.number)
        if found is None:
            found = self._at[of.number] = self._rows.add_dims(of.dims)
        return found

    def _laid(self, value: int, layout: Layout, second: int) -> Asked:
        """The pieces of a Layout."""
        key = (self._of[value].number, layout.parts, second)
        found = self._at.get(key)
        if found is None:
            regions = grid(self.space.factors(value), layout.parts)
            rows = table(range(len(regions)), second, boxes(regions, len(layout.parts)))
            found = self._at[key] = self._rows.add(rows, len(regions))
        return found, self._devices(layout.devices)

    def _made(self, value: int, of: _Of) -> Asked:
        """The pieces that are there at first."""
        if of.maker is None:
            return self._begins(value)
        op, position = of.maker
        homes = self.termwise.get(op)
        if homes is None:
            return self._left(op, position)
        key = (self.cut_of(op), position, homes)
        found = self._asked.get(key)
        if found is None:
            rows = self._rows.placed(self._left(op, position), of.atoms)
            rows[:, 1] = [homes.index(device) for device in self.choices[op].devices]
            found = self._asked[key] = self._rows.add_placed(rows)
        return found

    def _left(self, op: int, position: int) -> Asked:
        """What the parts of an Op leave of an output, one for each."""
        key = (self.cut_of(op), position)
        found = self._asked.get(key)
        if found is None:
            split = self.splits[op]
            of = (id(split), position)
            at = self._at.get(of)
            if at is None:
                box = [part.outputs[position] for part in split.parts]
                term = np.array([part.terms[position] for part in split.parts], np.int64)
                rows = table(range(len(box)), term, boxes(box, len(box[0])))
                at = self._at[of] = self._rows.add(rows, len(box))
            found = self._asked[key] = at, self._devices(self.choices[op].devices)
        return found

    def _devices(self, devices: Devices) -> int:
        key = ("devices", devices)
        found = self._at.get(key)
        if found is None:
            found = self._at[key] = self._rows.add_devices(devices)
        return found

    def _begins(self, value: int) -> Asked:
        """Where the step finds a Value that nobody makes: distinct pieces."""
        layout = self.layouts.get(value)
        if layout is not None:
            return self._laid(value, layout, 0)
        of = self._of[value]
        key = (*self._begin_key(value), of.number)
        if key[0] == "needed":
            key = (*key, *map(self.cut_of, of.readers))
        found = self._asked.get(key)
        if found is None:
            rows = self._begin_rows(value, of)
            rows[:, 1] = 0
            found = self._asked[key] = self._rows.add_placed(first_rows(rows, self.devices))
        return found

    def _begin_rows(self, value: int, of: _Of) -> Ints:
        """The same without a Layout, not distinct."""
        if value in self.after:
            made = self.graph.producer[self.after[value]]
            if made is not None and self._is_whole(*made):
                return self._rows.placed(self._left(*made), of.atoms)
            whole = full(self.space.factors(value))
            return table([0], 0, boxes([whole], len(whole)))
        asked: list[int] = []
        for op, places in zip(of.readers, of.places, strict=True):
            asked += self._reads(op, places, False)
        return self._rows.placed(asked, of.atoms)

    def _reads(self, op: int, places: tuple[int, ...], termwise: bool) -> Asked:
        """What the parts of an Op want as these inputs: part by part, argument by argument."""
        cut = self.cut_of(op)
        key = (~cut if termwise else cut, places)
        found = self._asked.get(key)
        if found is None:
            devices = self._devices(self.choices[op].devices)
            found = self._asked[key] = self._read_rows(op, places, termwise), devices
        return found

    def _read_rows(self, op: int, places: tuple[int, ...], termwise: bool) -> int:
        split = self.splits[op]
        key = (id(split), places, termwise)
        found = self._at.get(key)
        if found is None:
            how, atoms = TERM if termwise else REGION, len(split.parts[0].inputs[places[0]])
            flat: list[int] = []
            for number, part in enumerate(split.parts):
                for k in places:
                    if termwise or k not in part.zeros:
                        flat += (number, how, *chain.from_iterable(part.inputs[k]))
            rows = np.array(flat, np.int64).reshape(-1, 2 + 2 * atoms)
            found = self._at[key] = self._rows.add(rows, len(split.parts))
        return found

    def _ends(self, value: int, of: _Of, begins: tuple[Any, ...]) -> Asked:
        """What the end of the step wants of a Value: state where it began, the loss somewhere."""
        key = (of.number, begins)
        found = self._asked.get(key)
        if found is None:
            asked = [at for before in of.befores for at in self._begins(before)]
            rows = self._rows.placed(asked, of.atoms)
            rows[:, 1] = REGION
            if of.loss:
                whole = full(self.space.factors(value))
                loss = table([0], ANY, boxes([whole], len(whole)))
                rows = np.concatenate([rows, loss])
            found = self._asked[key] = self._rows.add_placed(rows)
        return found

    # Blocks

    def block_of(self, op: int, flows: Sequence[Flow]) -> Block:
        """The tasks of an Op, under the current Choices and the Flows of its Values."""
        does = self._does[op]
        mine = [flows[v] for v in does.values]
        key = (does.number, self.cut_of(op), *map(id, mine))
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = block(does.told, self._parts_of(op, does), mine)
        return found

    def _parts_of(self, op: int, does: _Does) -> Parts:
        key = (does.number, self.cut_of(op), op in self.termwise)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._make_parts(op, does)
        return found

    def _make_parts(self, op: int, does: _Does) -> Parts:
        choice, split = self.choices[op], self.splits[op]
        argument = np.empty((len(choice.devices), len(does.places)), np.int64)
        argument[:] = does.places
        if op not in self.termwise:
            for number, part in enumerate(split.parts):
                for k in part.zeros:
                    argument[number :: choice.count, k] = -1
        flops = np.array([part.flops for part in split.parts] * choice.replicas, np.float64)
        results = len(self.graph.ops[op].outputs)
        return parts(choice.devices, flops, argument, results, does.alias, does.itemsize)

    def end_of(self, flows: Sequence[Flow]) -> Block:
        """The tasks that bring state back to where it began, and the loss together."""
        mine = [flows[v] for v in self.ending]
        key = (-1, *map(id, mine))
        found = self._blocks.get(key)
        if found is None:
            stages = [READ + len(self.graph.consumers[v]) for v in self.ending]
            sizes = [self._sizes[v] for v in self.ending]
            feeds = list(zip(mine, stages, strict=True))
            found = self._blocks[key] = ending(feeds, sizes, self.devices)
        return found

    # What survives the step

    def carried(self, flows: Sequence[Flow]) -> list[tuple[int, int, Ints]]:
        """(Value at the end, Value at the beginning, pieces of the first in the order of those of
        the second)."""
        found = []
        for after, befores in self.befores.items():
            answers = flows[after].answers(READ + len(self.graph.consumers[after]))
            at = 0
            for before in befores:
                low, high = flows[before].made_at(0)
                found.append((after, before, answers[at : at + high - low]))
                at += high - low
        return found

    def frozen(self) -> list[int]:
        """Values that nobody makes, that the step does not change and the next one needs."""
        return [
            value
            for value, made in enumerate(self.graph.producer)
            if made is None and value not in self.after and self.graph.values[value].role != INPUT
        ]

    def loss_pieces(self, flows: Sequence[Flow]) -> Ints:
        """Every whole copy of the loss that there is."""
        loss = self.graph.loss
        if loss is None:
            return np.zeros(0, np.int64)
        it = flows[loss]
        region = boxes([full(self.space.factors(loss))], it.box.shape[1])
        whole = (it.box == region.reshape(1, -1, 2)).all((1, 2))
        made = self.graph.producer[loss]
        partial = made is not None and self._terms(*made) > 1
        if it.laid_out:
            whole &= (it.stage > 0) | np.isin(np.arange(len(it.device)), it.answers(1))
        elif partial:
            whole &= it.stage > 0
        return np.flatnonzero(whole)


def _spread(factors: tuple[int, ...], devices: Devices) -> Layout:
    """Spread over the devices along the first atom that is long enough, else the whole on one."""
    for position, factor in enumerate(factors):
        if factor >= len(devices):
            parts = tuple([len(devices) if k == position else 1 for k in range(len(factors))])
            return Layout(parts, devices)
    return Layout((1,) * len(factors), devices[:1])
