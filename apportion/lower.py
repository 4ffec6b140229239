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

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from apportion.block import Block, Parts, block
from apportion.flow import ANY, READ, REGION, TERM, Flow, Made, Wants, boxes, flow, no_wants
from apportion.graph import INPUT, Graph
from apportion.interval import Box, full
from apportion.splits import Space, Split
from apportion.stamp import Lowered, stamp
from apportion.strategy import Choice, Layout, Strategy, verify
from apportion.tasks import Ints, TaskGraph
from apportion.tdl import lookup
from apportion.termwise import Devices, Terms


def lower(space: Space, strategy: Strategy, devices: int) -> TaskGraph:
    """The tasks of one step; raises ValueError if the strategy is not legal."""
    verify(space, strategy, devices)
    lowering = Lowering(space, strategy, devices)
    return stamp(lowering.lowered())


def bytes_moved(space: Space, strategy: Strategy, devices: int) -> int:
    """What `lower(...).bytes_moved` is, without the tasks; raises ValueError as it does."""
    verify(space, strategy, devices)
    lowering = Lowering(space, strategy, devices)
    return sum(lowering.flow_of(value).moved for value in range(len(lowering.graph.values)))


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
        self._regions: dict[tuple[int, int], Ints] = {}
        self._shapes: dict[int, tuple[Any, ...]] = {}
        self._wants: dict[tuple[Any, ...], Wants] = {}

    def lay(self, value: int, layout: Layout | None) -> None:
        """Gives a Value another Layout, or none of its own."""
        if layout is None:
            self.layouts.pop(value, None)
        else:
            self.layouts[value] = layout

    def lowered(self) -> Lowered:
        """Everything, for `stamp`."""
        flows = [self.flow_of(value) for value in range(len(self.graph.values))]
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
        self._wants.clear()

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
    def ending(self) -> tuple[int, ...]:
        """Values that the end of the step reads: state, and the loss."""
        loss = () if self.graph.loss is None else (self.graph.loss,)
        return tuple(dict.fromkeys((*(after for _, after in self.graph.state), *loss)))

    def itemsize(self, value: int) -> int:
        """Bytes of an element of a Value."""
        meant = self.graph.values[value]
        return meant.nbytes // max(math.prod(meant.shape or (1,)), 1) or 1

    # Flows

    def flow_of(self, value: int) -> Flow:
        """Where a Value is, under the current Choices."""
        readers = self.graph.consumers[value]
        reads = [self._read_key(op, value) for op in readers]
        shape = self._shape(value)
        key = (shape, self._made_key(value), self._layout_key(value), *reads, self._end_key(value))
        found = self._flows.get(key)
        if found is None:
            found = self._flows[key] = self._make_flow(value, readers)
        return found

    def _shape(self, value: int) -> tuple[Any, ...]:
        found = self._shapes.get(value)
        if found is None:
            found = self._shapes[value] = (self.space.atoms.dims[value], self.itemsize(value))
        return found

    def _read_key(self, op: int, value: int) -> tuple[Any, ...]:
        inputs = self.graph.ops[op].inputs
        places = tuple(k for k, v in enumerate(inputs) if v == value) if len(inputs) > 1 else (0,)
        return id(self.splits[op]), places, self.choices[op].devices, op in self.termwise

    def _made_key(self, value: int) -> tuple[Any, ...]:
        made = self.graph.producer[value]
        if made is not None:
            op, position = made
            choice = self.choices[op]
            return id(self.splits[op]), position, choice.devices, self.termwise.get(op)
        return self._begin_key(value)

    def _begin_key(self, value: int) -> tuple[Any, ...]:
        layout = self.layouts.get(value)
        if layout is not None:
            return ("layout", layout)
        if value in self.after:
            made = self.graph.producer[self.after[value]]
            if made is not None and self._is_whole(*made):
                op, position = made
                return "left", id(self.splits[op]), position, self.choices[op].devices
            return ("first device",)
        return ("needed",)

    def _layout_key(self, value: int) -> Layout | bool | None:
        """The layout; whether a partial Value may be given one."""
        made = self.graph.producer[value]
        if made is None:
            return None
        return self.layouts.get(value) or self._terms(*made) > 1

    def _end_key(self, value: int) -> tuple[Any, ...]:
        ends = [self._begin_key(before) for before in self.befores.get(value, ())]
        return (*ends, value == self.graph.loss)

    def _terms(self, op: int, position: int) -> int:
        homes = self.termwise.get(op)
        return self.splits[op].terms[position] if homes is None else len(homes)

    def _is_whole(self, op: int, position: int) -> bool:
        return self._terms(op, position) == 1

    def _make_flow(self, value: int, readers: Sequence[int]) -> Flow:
        dims, itemsize = self._shape(value)
        made = self._made(value)
        wants = [self._reads(op, value) for op in readers]
        wants.append(self._ends(value))
        layout = self.layouts.get(value) if self.graph.producer[value] is not None else None
        atoms = made.box.shape[1]
        if layout is not None:
            laid = _asked(dict.fromkeys(layout.pieces(self.space.factors(value))), atoms)
            return flow(dims, itemsize, self.devices, made, laid, wants)
        direct = flow(dims, itemsize, self.devices, made, None, wants)
        if made.terms == 1 or any(op in self.termwise for op in readers) or not direct.moved:
            return direct
        owners = made.device[np.argsort(made.term, kind="stable")].tolist()
        spread = _spread(self.space.factors(value), list(dict.fromkeys(owners)))
        laid = _asked(spread.pieces(self.space.factors(value)), atoms)
        reduced = flow(dims, itemsize, self.devices, made, laid, wants)
        return reduced if reduced.moved < direct.moved else direct

    def _made(self, value: int) -> Made:
        made = self.graph.producer[value]
        atoms = sum(map(len, self.space.atoms.dims[value]))
        if made is None:
            pieces = list(dict.fromkeys(self.begin_regions(value)))
            devices = np.array([device for _, device in pieces], np.int64)
            return Made(
                boxes([r for r, _ in pieces], atoms), devices, np.zeros(len(pieces), np.int64), 1
            )
        op, position = made
        choice, split, homes = self.choices[op], self.splits[op], self.termwise.get(op)
        if homes is None:
            term = [part.terms[position] for part in split.parts] * choice.replicas
        else:
            term = [homes.index(device) for device in choice.devices]
        return Made(
            np.tile(self._split_boxes(split, -1 - position, atoms), (choice.replicas, 1, 1)),
            np.array(choice.devices, np.int64),
            np.array(term, np.int64),
            self._terms(op, position),
        )

    def begin_regions(self, value: int) -> Iterable[tuple[Box, int]]:
        """Where the step finds a Value that nobody makes."""
        layout = self.layouts.get(value)
        if layout is not None:
            return layout.pieces(self.space.factors(value))
        if value in self.after:
            made = self.graph.producer[self.after[value]]
            if made is not None and self._is_whole(*made):
                return self._left(*made)
            return [(full(self.space.factors(value)), 0)]
        return self._needed(value)

    def _left(self, op: int, position: int) -> list[tuple[Box, int]]:
        choice, split = self.choices[op], self.splits[op]
        return [
            (split.parts[n % choice.count].outputs[position], device)
            for n, device in enumerate(choice.devices)
        ]

    def _needed(self, value: int) -> list[tuple[Box, int]]:
        """The regions that consumers read, where they read them."""
        found = []
        for op in self.graph.consumers[value]:
            choice, split = self.choices[op], self.splits[op]
            for n, device in enumerate(choice.devices):
                part = split.parts[n % choice.count]
                for k, v in enumerate(self.graph.ops[op].inputs):
                    if v == value and k not in part.zeros:
                        found.append((part.inputs[k], device))
        return found

    def _split_boxes(self, split: Split, place: int, atoms: int) -> Ints:
        """Regions of all parts: of input `place`, or of output -1 - `place`."""
        key = (id(split), place)
        found = self._regions.get(key)
        if found is None:
            if place >= 0:
                regions = [part.inputs[place] for part in split.parts]
            else:
                regions = [part.outputs[-1 - place] for part in split.parts]
            found = self._regions[key] = boxes(regions, atoms)
        return found

    def _reads(self, op: int, value: int) -> Wants:
        """What the parts of an Op want of a Value: part by part, argument by argument."""
        key = self._read_key(op, value)
        found = self._wants.get(key)
        if found is None:
            found = self._wants[key] = self._make_reads(op, value, key[1])
        return found

    def _make_reads(self, op: int, value: int, places: tuple[int, ...]) -> Wants:
        choice, split = self.choices[op], self.splits[op]
        atoms = sum(map(len, self.space.atoms.dims[value]))
        box = np.stack([self._split_boxes(split, k, atoms) for k in places], axis=1)
        device = np.repeat(np.array(choice.devices, np.int64), len(places))
        box = np.tile(box, (choice.replicas, 1, 1, 1)).reshape(len(device), atoms, 2)
        if op in self.termwise:
            return Wants(box, device, np.full(len(device), TERM))
        zeros = [[k in part.zeros for k in places] for part in split.parts] * choice.replicas
        read = ~np.array(zeros, bool).reshape(-1)
        if not read.all():
            box, device = box[read], device[read]
        return Wants(box, device, np.full(len(device), REGION))

    def _ends(self, value: int) -> Wants:
        """What the end of the step wants of a Value: state where it began, the loss somewhere."""
        atoms = sum(map(len, self.space.atoms.dims[value]))
        found = [no_wants(atoms)]
        for before in self.befores.get(value, ()):
            found.append(_asked(dict.fromkeys(self.begin_regions(before)), atoms))
        if value == self.graph.loss:
            whole = boxes([full(self.space.factors(value))], atoms)
            found.append(Wants(whole, np.zeros(1, np.int64), np.full(1, ANY)))
        return Wants(
            np.concatenate([w.box for w in found]),
            np.concatenate([w.device for w in found]),
            np.concatenate([w.how for w in found]),
        )

    # Blocks

    def block_of(self, op: int, flows: Sequence[Flow]) -> Block:
        """The tasks of an Op, under the current Choices and the Flows of its Values."""
        mine = [flows[v] for v in self.values[op]]
        stages = tuple(stage for _, stage in self.feeds[op])
        places = self._places(op)
        outputs = self.graph.ops[op].outputs
        size = self.itemsize(outputs[0]) if outputs else 4
        key = (
            id(self.splits[op]), self.choices[op].devices, *map(id, mine), stages, places, size,
            self.graph.ops[op].kind,
        )  # fmt: skip
        found = self._blocks.get(key)
        if found is None:
            feeds = list(zip(mine, stages, strict=False))
            sizes = [self.itemsize(v) for v in self.values[op]]
            parts = self._parts(op, feeds, places, size)
            found = block(feeds, parts, mine[len(feeds) :], sizes, self.devices)
            self._blocks[key] = found
        return found

    def _places(self, op: int) -> tuple[int, ...]:
        """For every argument which of the distinct inputs it is."""
        inputs = self.graph.ops[op].inputs
        order = {v: j for j, v in enumerate(dict.fromkeys(inputs))}
        return tuple(order[v] for v in inputs)

    def _parts(
        self, op: int, feeds: Sequence[tuple[Flow, int]], places: tuple[int, ...], size: int
    ) -> Parts:
        choice, split = self.choices[op], self.splits[op]
        n = len(choice.devices)
        argument_j = np.tile(np.array(places, np.int64), (n, 1)).reshape(n, len(places))
        argument_p = np.zeros((n, len(places)), np.int64)
        if op not in self.termwise and any(part.zeros for part in split.parts):
            for row in range(n):
                for k in split.parts[row % choice.count].zeros:
                    argument_j[row, k] = -1
        for j, (fed, stage) in enumerate(feeds):
            mine = argument_j == j
            argument_p[mine] = fed.answers(stage)
        argument_p[argument_j < 0] = -1
        description = lookup(self.graph.ops[op].kind)
        flops = np.tile(np.array([part.flops for part in split.parts], np.float64), choice.replicas)
        return Parts(
            np.array(choice.devices, np.int64), flops, argument_j, argument_p,
            alias=description is not None and description.alias, itemsize=size,
        )  # fmt: skip

    def end_of(self, flows: Sequence[Flow]) -> Block:
        """The tasks that bring state back to where it began, and the loss together."""
        feeds = [(flows[v], READ + len(self.graph.consumers[v])) for v in self.ending]
        sizes = [self.itemsize(v) for v in self.ending]
        return block(feeds, None, [], sizes, self.devices)

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
        whole = (it.box == boxes([full(self.space.factors(loss))], it.box.shape[1])).all((1, 2))
        made = self.graph.producer[loss]
        partial = made is not None and self._terms(*made) > 1
        if it.laid_out:
            whole &= (it.stage > 0) | np.isin(np.arange(len(it.device)), it.answers(1))
        elif partial:
            whole &= it.stage > 0
        return np.flatnonzero(whole)


def _asked(pieces: Iterable[tuple[Box, int]], atoms: int) -> Wants:
    pieces = list(pieces)
    device = np.array([device for _, device in pieces], np.int64)
    return Wants(boxes([r for r, _ in pieces], atoms), device, np.full(len(device), REGION))


def _spread(factors: tuple[int, ...], devices: list[int]) -> Layout:
    """Spread over the devices along the first atom that is long enough, else the whole on one."""
    for position, factor in enumerate(factors):
        if factor >= len(devices):
            parts = tuple(len(devices) if k == position else 1 for k in range(len(factors)))
            return Layout(parts, tuple(devices))
    return Layout((1,) * len(factors), (devices[0],))
