"""A Graph under a Strategy, lowered to a TaskGraph. The entrance of lower/.

In: a Space, a Strategy and a number of devices. Out: a TaskGraph (task_graph.py).

Ops are lowered in the Graph's order. For each: fetch the regions that its parts read (one
exchange), compute the parts, and, where the strategy or the form of the result asks for it, move
the result to its layout (a second exchange).

It is done in two halves, so that what is alike is worked out once and one changed Choice changes
little. Every Value has a **Flow** (value_flow.py): its pieces, and how they get to its readers. It
depends on the Choices of the Op that makes the Value and of those that read it, and on nothing
else. The tasks of an Op (op_tasks.py) follow from its Choice and the Flows of its Values.
task_columns.py makes one TaskGraph of all of them.

A partial Value that no layout was chosen for is either fetched term by term by all its consumers or
first reduced onto a layout, whichever moves less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from apportion.columns import Floats, Ints, offsets
from apportion.describe import Factors, full
from apportion.graph import BACKWARD, INPUT, Graph
from apportion.lower.exchange import pair_columns
from apportion.lower.flow_requests import (
    ANYWHERE,
    REGION,
    TERM,
    FlowRequest,
    Reference,
    RegionTable,
    boxes,
    table,
)
from apportion.lower.op_records import OpRecords
from apportion.lower.op_tasks import lower_ops
from apportion.lower.pair_bytes import flow_pair_bytes
from apportion.lower.relay_flows import relay_flows
from apportion.lower.serve_flows import add_flows, first_rows
from apportion.lower.task_columns import LoweredStep, build_task_graph
from apportion.lower.task_graph import TaskGraph
from apportion.lower.termwise import Devices, Terms
from apportion.lower.value_flow import (
    LAID_OUT,
    MADE,
    READ,
    answers_at,
    bytes_arriving,
    empty_store,
    first_piece,
    piece_boxes,
    pieces_made,
    with_only,
)
from apportion.split import Choice, Layout, Space, Split, Strategy, grid_boxes, verify_strategy

UNCUT = -1  # the cut of the end of the step


def lower(space: Space, strategy: Strategy, devices: int) -> TaskGraph:
    """The tasks of one step; raises ValueError if the strategy is not legal."""
    return build_task_graph(verified_lowering(space, strategy, devices).lowered())


def verified_lowering(space: Space, strategy: Strategy, devices: int) -> Lowering:
    """What a strategy is lowered by; raises ValueError if it is not legal."""
    verify_strategy(space, strategy, devices)
    return Lowering(space, strategy, devices)


def bytes_moved(space: Space, strategy: Strategy, devices: int) -> int:
    """What `lower(...).bytes_moved` is, without the tasks; raises ValueError as it does."""
    lowering = verified_lowering(space, strategy, devices)
    return lowering.bytes_moved(lowering.all_flows())


@dataclass(frozen=True, slots=True)
class _ValueFacts:
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


class Lowering:
    """The Flows of all Values and the tasks of all Ops under a Strategy.

    Equal Flows are made once and kept by what they follow from. `choices` may be changed, if then
    `flows_of` is asked again for what follows from them; so may Layouts, by `set_layout`.
    """

    def __init__(self, space: Space, strategy: Strategy, devices: int) -> None:
        self.space = space
        self.graph: Graph = space.graph
        self.devices = devices
        self.layouts = dict(strategy.layouts)
        self.levels = strategy.communication.levels
        self.choices: list[Choice] = list(strategy.choices)
        self.splits: list[Split] = [
            space.split(index, choice.parts) for index, choice in enumerate(self.choices)
        ]
        self.terms = Terms(space, strategy.choices, self.layouts, self.splits)
        self.termwise: dict[int, Devices] = self.terms.settled()
        self.after = dict(self.graph.state)
        self._again = _fetched_again(self.graph, strategy)
        self.befores: dict[int, list[int]] = {}
        for before, after in self.graph.state:
            self.befores.setdefault(after, []).append(before)
        self.store = empty_store()
        self._flows: dict[tuple[Any, ...], int] = {}
        # Numbers of (Split, devices); for every Op that of the Choice that was seen last
        self._cuts: dict[tuple[int, Devices], int] = {}
        self._made_cuts = 0
        self._seen: list[Choice | None] = [None] * len(self.choices)
        self._cut: list[int] = [-1] * len(self.choices)
        self._clear()

    def _clear(self) -> None:
        """Forgets what can be found again: regions, and the records of Ops and cuts."""
        self._regions = RegionTable(self.devices)
        self._at: dict[Any, int] = {}  # where in the table there is what
        self._references: dict[tuple[Any, ...], Reference] = {}
        self.records = OpRecords(
            self.graph, self.feeds, [READ + len(self.graph.consumers[v]) for v in self.ending]
        )
        self._cut_records = {UNCUT: self.records.uncut}

    def set_layout(self, value: int, layout: Layout | None) -> None:
        """Gives a Value another Layout, or none of its own."""
        if layout is None:
            self.layouts.pop(value, None)
        else:
            self.layouts[value] = layout

    def lowered(self) -> LoweredStep:
        """Everything, for `build_task_graph`. Equal Ops are lowered once."""
        flows = self.all_flows()
        self.relay()
        numbers: dict[tuple[int, ...], int] = {}
        which = [
            numbers.setdefault(request, len(numbers))
            for request in self.requests_of(range(len(self.graph.ops) + 1), flows)
        ]
        requests = np.fromiter(chain.from_iterable(numbers), np.int64)
        tasks = lower_ops(
            self.store, self.records.flat, requests, self.devices, pair_columns(self.devices), 1
        )
        return LoweredStep(
            self.graph, self.devices, self.values, self.store, flows, tasks, np.array(which),
            self.carried(flows), self.frozen(), self.loss_pieces(flows),
        )  # fmt: skip

    def relay(self) -> None:
        """Lets the Flows that are known go through the relays that the Strategy's Communication
        has. Those that are asked for later are direct."""
        if self.levels:
            self.store = relay_flows(self.store, np.array(self.levels, np.int64))
            self.levels = ()

    def relayed(self, levels: Sequence[Sequence[int]]) -> Lowering:
        """The same, whose Flows, which are direct so far, go through other relays."""
        self.all_flows()
        other = copy(self)
        other.levels = tuple(map(tuple, levels))
        other.relay()
        return other

    def pair_bytes(self) -> Floats:
        """Bytes by sender and receiver, as its tasks send them."""
        flows = self.all_flows()
        return flow_pair_bytes(self.store, flows, self.devices)

    def drop_unused(self, flows: Sequence[int]) -> dict[int, int]:
        """Drops all Flows but these, and what was remembered to make them. The new number of each,
        by its old one."""
        new = {flow: number for number, flow in enumerate(dict.fromkeys(flows))}
        self.store = with_only(self.store, list(new))
        self._flows = {key: new[flow] for key, flow in self._flows.items() if flow in new}
        now = {self.cut_of(op) for op in range(len(self.choices))}
        self._cuts = {key: number for key, number in self._cuts.items() if number in now}
        self._clear()
        return new

    @property
    def remembered(self) -> int:
        """How many Flows are kept."""
        return len(self._flows)

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
    def _facts(self) -> list[_ValueFacts]:
        numbers: dict[tuple[Any, ...], int] = {}
        found = []
        for value, dims in enumerate(self.space.atoms.dims):
            readers = tuple(self.graph.consumers[value])
            places = tuple([self._inputs(op, value) for op in readers])
            made, befores = self.graph.producer[value], tuple(self.befores.get(value, ()))
            size, loss = self.graph.values[value].itemsize, value == self.graph.loss
            position = None if made is None else made[1]
            key = (dims, size, position, places, len(befores), loss, value in self.after)
            number = numbers.setdefault(key, len(numbers))
            atoms = sum(map(len, dims))
            found.append(
                _ValueFacts(number, dims, atoms, size, made, readers, places, befores, loss)
            )
        return found

    def _inputs(self, op: int, value: int) -> tuple[int, ...]:
        inputs = self.graph.ops[op].inputs
        if inputs.count(value) == 1:
            return (inputs.index(value),)
        return tuple([k for k, v in enumerate(inputs) if v == value])

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

    def flow_of(self, value: int) -> int:
        """The Flow of a Value, under the current Choices: a number in the store."""
        return self.flows_of((value,))[0]

    def flows_of(self, values: Sequence[int]) -> list[int]:
        """The Flows of Values, under the current Choices."""
        known = self._flows
        keys = [self._flow_key(value) for value in values]
        new = {key: value for key, value in zip(keys, values, strict=True) if key not in known}
        if new:
            known.update(zip(new, self._make_flows(new), strict=True))
        return [known[key] for key in keys]

    def all_flows(self) -> list[int]:
        """The Flows of all Values."""
        return self.flows_of(range(len(self.graph.values)))

    def bytes_moved(self, flows: Sequence[int]) -> int:
        """Bytes that Flows bring from device to device, each as often as it is named."""
        return int(self.store.moved[np.array(flows, np.int64)].sum())

    def bytes_read(self, value: int, stage: int) -> int:
        """Bytes that one reader of a Value, or its layout, gets from other devices."""
        return bytes_arriving(self.store, self.flow_of(value), stage)

    def _flow_key(self, value: int) -> tuple[Any, ...]:
        """All that a Flow follows from; second, how its readers are cut (~: term by term)."""
        of, cut, termwise = self._facts[value], self.cut_of, self.termwise
        if termwise:
            readers = tuple([~cut(op) if op in termwise else cut(op) for op in of.readers])
        else:
            readers = tuple([cut(op) for op in of.readers])
        befores = tuple([self._begin_key(before) for before in of.befores])
        again = self._again.get(value, 0)
        if of.maker is None:
            return of.number, readers, befores, self._begin_key(value), again
        maker = of.maker[0]
        return (
            of.number, readers, befores, cut(maker), self.layouts.get(value), termwise.get(maker),
            again,
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

    def _make_flows(self, new: Mapping[tuple[Any, ...], int]) -> list[int]:
        """Flows of Values, by what they follow from."""
        requests = [self._request(value, key) for key, value in new.items()]
        found = self._add_flows(requests)
        again, laid, moved = [], [], self.store.moved
        for k, (value, it) in enumerate(zip(new.values(), requests, strict=True)):
            if it.terms > 1 and not it.layout and moved[found[k]] and self._gathers(value):
                again.append(k)
                laid.append(it._replace(layout=self._spread_out(value, it)))
        for k, reduced in zip(again, self._add_flows(laid) if laid else (), strict=True):
            if self.store.moved[reduced] < moved[found[k]]:
                found[k] = reduced
        return found

    def _add_flows(self, requests: Sequence[FlowRequest]) -> list[int]:
        self.store, numbers = add_flows(self.store, self._regions, requests)
        return list(numbers)

    def _request(self, value: int, key: tuple[Any, ...]) -> FlowRequest:
        of, known = self._facts[value], self._references
        reads: list[int] = []
        for op, places, cut in zip(of.readers, of.places, key[1], strict=True):
            reads += known.get((cut, places)) or self._reads(op, places, cut < 0)
        reads += self._ends(value, of, key[2]) if of.befores or of.loss else self._regions.none
        layout = self.layouts.get(value) if of.maker is not None else None
        laid = () if layout is None else self._laid(value, layout, REGION)
        terms = 1 if of.maker is None else self._terms(*of.maker)
        return FlowRequest(
            self._dims(of), of.atoms, of.itemsize, terms, self._made(value, of), laid, reads,
            self._again.get(value, 0),
        )  # fmt: skip

    def _gathers(self, value: int) -> bool:
        """Whether the readers of a Value want all its terms."""
        return not self.termwise or self.termwise.keys().isdisjoint(self._facts[value].readers)

    def _spread_out(self, value: int, request: FlowRequest) -> Reference:
        """A Layout on the devices of the terms of a partial Value, the first term's first."""
        rows = self._regions.placed(request.made, request.atoms)
        owners = rows[np.argsort(rows[:, 1], kind="stable"), 0].tolist()
        spread = _spread(self.space.factors(value), tuple(dict.fromkeys(owners)))
        return self._laid(value, spread, REGION)

    def _dims(self, of: _ValueFacts) -> int:
        found = self._at.get(of.number)
        if found is None:
            found = self._at[of.number] = self._regions.add_dims(of.dims)
        return found

    def _laid(self, value: int, layout: Layout, second: int) -> Reference:
        """The pieces of a Layout."""
        key = (self._facts[value].number, layout.parts, second)
        found = self._at.get(key)
        if found is None:
            regions = grid_boxes(self.space.factors(value), layout.parts)
            rows = table(range(len(regions)), second, boxes(regions, len(layout.parts)))
            found = self._at[key] = self._regions.add(rows, len(regions))
        return found, self._devices(layout.devices)

    def _made(self, value: int, of: _ValueFacts) -> Reference:
        """The pieces that are there at first."""
        if of.maker is None:
            return self._begins(value)
        op, position = of.maker
        homes = self.termwise.get(op)
        if homes is None:
            return self._left(op, position)
        key = (self.cut_of(op), position, homes)
        found = self._references.get(key)
        if found is None:
            rows = self._regions.placed(self._left(op, position), of.atoms)
            rows[:, 1] = [homes.index(device) for device in self.choices[op].devices]
            found = self._references[key] = self._regions.add_placed(rows)
        return found

    def _left(self, op: int, position: int) -> Reference:
        """What the parts of an Op leave of an output, one for each."""
        key = (self.cut_of(op), position)
        found = self._references.get(key)
        if found is None:
            split = self.splits[op]
            of = (id(split), position)
            at = self._at.get(of)
            if at is None:
                box = [part.outputs[position] for part in split.parts]
                term = np.array([part.terms[position] for part in split.parts], np.int64)
                rows = table(range(len(box)), term, boxes(box, len(box[0])))
                at = self._at[of] = self._regions.add(rows, len(box))
            found = self._references[key] = at, self._devices(self.choices[op].devices)
        return found

    def _devices(self, devices: Devices) -> int:
        key = ("devices", devices)
        found = self._at.get(key)
        if found is None:
            found = self._at[key] = self._regions.add_devices(devices)
        return found

    def _begins(self, value: int) -> Reference:
        """Where the step finds a Value that nobody makes: distinct pieces."""
        layout = self.layouts.get(value)
        if layout is not None:
            return self._laid(value, layout, 0)
        of = self._facts[value]
        key = (*self._begin_key(value), of.number)
        if key[0] == "needed":
            key = (*key, *map(self.cut_of, of.readers))
        found = self._references.get(key)
        if found is None:
            rows = self._begin_rows(value, of)
            rows[:, 1] = 0
            found = self._references[key] = self._regions.add_placed(first_rows(rows, self.devices))
        return found

    def _begin_rows(self, value: int, of: _ValueFacts) -> Ints:
        """The same without a Layout, not distinct."""
        if value in self.after:
            made = self.graph.producer[self.after[value]]
            if made is not None and self._is_whole(*made):
                return self._regions.placed(self._left(*made), of.atoms)
            whole = full(self.space.factors(value))
            return table([0], 0, boxes([whole], len(whole)))
        references: list[int] = []
        for op, places in zip(of.readers, of.places, strict=True):
            references += self._reads(op, places, False)
        return self._regions.placed(references, of.atoms)

    def _reads(self, op: int, places: tuple[int, ...], termwise: bool) -> Reference:
        """What the parts of an Op want as these inputs: part by part, argument by argument."""
        cut = self.cut_of(op)
        key = (~cut if termwise else cut, places)
        found = self._references.get(key)
        if found is None:
            devices = self._devices(self.choices[op].devices)
            found = self._references[key] = self._read_rows(op, places, termwise), devices
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
            found = self._at[key] = self._regions.add(rows, len(split.parts))
        return found

    def _ends(self, value: int, of: _ValueFacts, begins: tuple[Any, ...]) -> Reference:
        """What the end of the step wants of a Value: state where it began, the loss somewhere."""
        key = (of.number, begins)
        found = self._references.get(key)
        if found is None:
            references = [at for before in of.befores for at in self._begins(before)]
            rows = self._regions.placed(references, of.atoms)
            rows[:, 1] = REGION
            if of.loss:
                whole = full(self.space.factors(value))
                loss = table([0], ANYWHERE, boxes([whole], len(whole)))
                rows = np.concatenate([rows, loss])
            found = self._references[key] = self._regions.add_placed(rows)
        return found

    # Tasks

    def requests_of(self, ops: Sequence[int], flows: Sequence[int]) -> list[tuple[int, ...]]:
        """What `lower_ops` is asked for the tasks of Ops, under the current Choices and the Flows
        of all Values. Equal requests give equal tasks; the last Op is the end of the step."""
        known, records, values = self._cut_records, self.records.of_op, self.values
        termwise, end, found, flow = self.termwise, len(records) - 1, [], flows.__getitem__
        for op in ops:
            cut = self.cut_of(op) if op < end else UNCUT
            if cut not in known:
                known[cut] = self.records.add_cut(self.splits[op], self.choices[op].devices)
            found.append((records[op], known[cut], op in termwise, *map(flow, values[op])))
        return found

    # What survives the step

    def carried(self, flows: Sequence[int]) -> list[tuple[int, int, Ints]]:
        """(Value at the end, Value at the beginning, pieces of the first in the order of those of
        the second)."""
        found = []
        for after, befores in self.befores.items():
            answers = answers_at(self.store, flows[after], READ + len(self.graph.consumers[after]))
            at = 0
            for before in befores:
                low, high = pieces_made(self.store, flows[before], MADE)
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

    def loss_pieces(self, flows: Sequence[int]) -> Ints:
        """Every whole copy of the loss that there is."""
        loss = self.graph.loss
        if loss is None:
            return np.zeros(0, np.int64)
        store, flow = self.store, flows[loss]
        box, first = piece_boxes(store, flow), int(first_piece(store, flow))
        region = boxes([full(self.space.factors(loss))], box.shape[1])
        whole = (box == region.reshape(1, -1, 2)).all((1, 2))
        pieces = first + np.arange(len(box))
        made = self.graph.producer[loss]
        readers = len(self.graph.consumers[loss]) + 1
        given = [answers_at(store, flow, stage) for stage in range(LAID_OUT, READ + readers)]
        later = pieces >= pieces_made(store, flow, MADE)[1]
        later &= np.isin(pieces, np.concatenate(given))  # the others are sums of some terms
        if store.laid_out[flow]:
            whole &= later | np.isin(pieces, answers_at(store, flow, LAID_OUT))
        elif made is not None and self._terms(*made) > 1:
            whole &= later
        found: Ints = pieces[whole]
        return found


def _fetched_again(graph: Graph, strategy: Strategy) -> dict[int, int]:
    """The Values that the backward fetches anew, each with the stage of its first reader there, if
    something has read it before."""
    found = {}
    for value in strategy.refetched:
        phases = [graph.ops[op].phase for op in graph.consumers[value]]
        if BACKWARD in phases and phases[0] != BACKWARD:
            found[value] = READ + phases.index(BACKWARD)
    return found


def _spread(factors: tuple[int, ...], devices: Devices) -> Layout:
    """Spread over the devices along the first atom that is long enough, else the whole on one."""
    for position, factor in enumerate(factors):
        if factor >= len(devices):
            parts = tuple([len(devices) if k == position else 1 for k in range(len(factors))])
            return Layout(parts, devices)
    return Layout((1,) * len(factors), devices[:1])
