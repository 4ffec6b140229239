"""Lowering Op by Op, in plain Python: the oracle of the one that works by patterns.

Fetches, compute and layouts are worked out one after another as they happen, with a TRANSFER for
every pair of devices. Which partial Values are reduced onto a layout before they are read can be
told (`reduced`); else it is guessed from what each consumer would fetch by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from plain_builder import Builder, Piece

from apportion.describe.descriptions import find_description
from apportion.describe.interval import Box, full, intersect, lengths, subtract, volume
from apportion.graph import INPUT, ROLES, Graph
from apportion.lower.task_graph import (
    COMMUNICATION,
    TaskGraph,
)
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.lower.termwise import termwise
from apportion.split.part import Part, Split
from apportion.split.space import Space
from apportion.split.strategy import Layout, Strategy, verify_strategy

Source = tuple[Piece, Box, int]
"""A piece, the box taken from it, and the term that it is of."""


def lower(
    space: Space, strategy: Strategy, devices: int, reduced: set[int] | None = None
) -> TaskGraph:
    """The tasks of one step; raises ValueError if the strategy is not legal."""
    verify_strategy(space, strategy, devices)
    return _Lowering(space, strategy, devices, reduced).run()


@dataclass(slots=True)
class _Holding:
    """Where a Value is: its pieces by term, and the whole pieces on each device, fetched ones
    included."""

    terms: list[list[Piece]]
    reducer: str | None
    local: dict[int, list[Piece]]

    @property
    def partial(self) -> bool:
        return len(self.terms) > 1


class _Lowering:
    def __init__(
        self, space: Space, strategy: Strategy, devices: int, chosen: set[int] | None
    ) -> None:
        self.chosen = chosen
        self.space = space
        self.graph: Graph = space.graph
        self.strategy = strategy
        self.devices = devices
        self.splits: list[Split] = [
            space.split(index, choice.parts) for index, choice in enumerate(strategy.choices)
        ]
        self.termwise = termwise(space, strategy, self.splits)
        self.build = Builder(devices)
        self.held: dict[int, _Holding] = {}
        self.after = dict(self.graph.state)
        self.begun: dict[int, list[Piece]] = {}

    def run(self) -> TaskGraph:
        for value, made in enumerate(self.graph.producer):
            if made is None:
                self._begin(value)
        for index in range(len(self.graph.ops)):
            self.build.open_op(index)
            self._fetch_inputs(index)
            self._compute(index)
            self._lay_out(index)
        self.build.open_op(len(self.graph.ops))
        self._end()
        return self.build.finish()

    # The beginning and the end of the step

    def _begin(self, value: int) -> None:
        """Puts a Value that nobody makes where the step finds it."""
        pieces = []
        for region, device in dict.fromkeys(self._begin_regions(value)):
            pieces.append(self._new_piece(value, region, device, first=-1))
            if value not in self.after and self.graph.values[value].role != INPUT:
                self.build.keep(pieces[-1].slot)  # frozen, and needed again by the next step
        self.begun[value] = pieces
        self.held[value] = _Holding([pieces], None, _by_device(pieces))

    def _begin_regions(self, value: int) -> Iterable[tuple[Box, int]]:
        layout = self.strategy.layouts.get(value)
        if layout is not None:
            return layout.pieces(self.space.factors(value))
        if value in self.after:
            made = self.graph.producer[self.after[value]]
            if made is not None and self._is_whole(*made):
                return self._left(*made)
            return [(full(self.space.factors(value)), 0)]
        return self._needed(value)

    def _is_whole(self, op: int, position: int) -> bool:
        return self.splits[op].terms[position] == 1 and op not in self.termwise

    def _left(self, op: int, position: int) -> list[tuple[Box, int]]:
        choice, split = self.strategy.choices[op], self.splits[op]
        return [
            (split.parts[n % choice.count].outputs[position], device)
            for n, device in enumerate(choice.devices)
        ]

    def _needed(self, value: int) -> list[tuple[Box, int]]:
        """The regions that consumers read, where they read them."""
        found = []
        for op in self.graph.consumers[value]:
            choice, split = self.strategy.choices[op], self.splits[op]
            for n, device in enumerate(choice.devices):
                part = split.parts[n % choice.count]
                for k, v in enumerate(self.graph.ops[op].inputs):
                    if v == value and k not in part.zeros:
                        found.append((part.inputs[k], device))
        return found

    def _end(self) -> None:
        """Brings state back to where it began, and the loss together."""
        self.build.open_position()
        wanted: list[tuple[int, Piece]] = []
        for before, after in self.graph.state:
            wanted += [(after, piece) for piece in self.begun[before]]
        final = [self._fetch(after, piece.region, piece.device) for after, piece in wanted]
        if self.graph.loss is not None:
            self._keep_loss(self.graph.loss)
        self.build.flush()
        for (_, begun), piece in zip(wanted, final, strict=True):
            self.build.keep(piece.slot)
            self.build.carry.append((piece.slot, begun.slot))

    def _keep_loss(self, loss: int) -> None:
        """Keeps every whole copy of the loss that there is, and sees to it that there is one."""
        held = self.held[loss]
        whole = full(self.space.factors(loss))
        if not any(p.region == whole for pieces in held.local.values() for p in pieces):
            self._fetch(loss, whole, held.terms[0][0].device)
        for pieces in held.local.values():
            for piece in pieces:
                if piece.region == whole:
                    self.build.keep(piece.slot)

    # One Op

    def _fetch_inputs(self, index: int) -> None:
        self.build.open_position()
        op, choice, split = self.graph.ops[index], self.strategy.choices[index], self.splits[index]
        self.arguments: list[list[int]] = []
        for n, device in enumerate(choice.devices):
            part = split.parts[n % choice.count]
            if index in self.termwise:
                self.arguments.append([self._term(v, device).slot for v in op.inputs])
                continue
            self.arguments.append(
                [
                    -1 if k in part.zeros else self._fetch(v, part.inputs[k], device).slot
                    for k, v in enumerate(op.inputs)
                ]
            )
        self.build.flush()

    def _term(self, value: int, device: int) -> Piece:
        """The term of a partial Value that is on a device."""
        return next(p for term in self.held[value].terms for p in term if p.device == device)

    def _compute(self, index: int) -> None:
        op, choice, split = self.graph.ops[index], self.strategy.choices[index], self.splits[index]
        description = find_description(op.kind)
        alias = description is not None and description.alias
        homes = self.termwise.get(index)
        counts = split.terms if homes is None else (len(homes),) * len(split.terms)
        made: list[list[list[Piece]]] = [[[] for _ in range(n)] for n in counts]
        for n, device in enumerate(choice.devices):
            part = split.parts[n % choice.count]
            arguments = self.arguments[n]
            task = self.build.task(
                COMPUTE, device, part=n, flops=part.flops, nbytes=0, slots_in=arguments,
                itemsize=self._itemsize(op.outputs[0]) if op.outputs else 4,
            )  # fmt: skip
            base = arguments[0] if alias and arguments and arguments[0] >= 0 else -1
            outputs = self._outputs(op.outputs, part, device, task, base)
            self.build.outputs(task, [piece.slot for piece in outputs])
            if not alias:
                self.build.touch(task)
            for position, piece in enumerate(outputs):
                term = part.terms[position] if homes is None else homes.index(device)
                made[position][term].append(piece)
        for position, value in enumerate(op.outputs):
            terms = [_distinct(pieces) for pieces in made[position]]
            local = _by_device(terms[0]) if len(terms) == 1 else {}
            reducer = split.reducers[position] if homes is None else "sum"
            self.held[value] = _Holding(terms, reducer, local)

    def _outputs(
        self, values: tuple[int, ...], part: Part, device: int, task: int, base: int
    ) -> list[Piece]:
        return [
            self._new_piece(value, region, device, first=task, base=base)
            for value, region in zip(values, part.outputs, strict=True)
        ]

    def _lay_out(self, index: int) -> None:
        """Moves results to their layouts."""
        self.build.open_position()
        moved: list[tuple[int, list[Piece]]] = []
        for value in self.graph.ops[index].outputs:
            layout = self.strategy.layouts.get(value) or self._layout_of_partial(value)
            if layout is not None:
                wanted = dict.fromkeys(layout.pieces(self.space.factors(value)))
                moved.append((value, [self._fetch(value, r, device) for r, device in wanted]))
        self.build.flush()
        for value, pieces in moved:
            self.held[value] = _Holding([pieces], None, _by_device(pieces))

    def _layout_of_partial(self, value: int) -> Layout | None:
        """A layout onto which to reduce a partial Value, if that moves less than fetching all its
        terms."""
        held = self.held[value]
        if not held.partial or self.termwise.keys() & set(self.graph.consumers[value]):
            return None
        itself = self._wanted_of(value)
        owners = list(dict.fromkeys(p.device for term in held.terms for p in term))
        layout = _spread(self.space.factors(value), owners)
        if self.chosen is not None:
            return layout if value in self.chosen else None
        direct = sum(self._cost(value, region, device) for region, device in itself)
        pieces = layout.pieces(self.space.factors(value))
        reduced = sum(self._cost(value, region, device) for region, device in pieces)
        for region, device in itself:
            near = [p for p, d in pieces if d == device]
            reduced += volume(region) - sum(volume(c) for p in near if (c := intersect(region, p)))
        return layout if reduced < direct else None

    def _wanted_of(self, value: int) -> list[tuple[Box, int]]:
        found = self._needed(value)
        for before, after in self.graph.state:
            if after == value:
                found += [(p.region, p.device) for p in self.begun[before]]
        return list(dict.fromkeys(found))

    def _cost(self, value: int, region: Box, device: int) -> int:
        return sum(
            volume(box)
            for piece, box, _ in self._cover(self.held[value], region, device)
            if piece.device != device
        )

    # Fetching

    def _fetch(self, value: int, region: Box, device: int) -> Piece:
        """The piece that holds exactly `region` on `device`; its assembly is planned if need be."""
        held = self.held[value]
        here = held.local.get(device, [])
        for piece in here:
            if piece.region == region:
                return piece
        for piece in here:
            if intersect(piece.region, region) == region and self._sliceable(value, piece, region):
                return self._assembly(value, region, device, [(piece, region, 0)], base=piece.slot)
        return self._assembly(value, region, device, self._cover(held, region, device))

    def _assembly(
        self, value: int, region: Box, device: int, sources: list[Source], base: int = -1
    ) -> Piece:
        piece = self._new_piece(value, region, device, first=-2, base=base)
        reducer = self.held[value].reducer
        self.build.assembly(
            value, piece, sources, self._itemsize(value), reducer, aliased=base >= 0
        )
        self.held[value].local.setdefault(device, []).append(piece)
        return piece

    def _cover(self, held: _Holding, region: Box, device: int) -> list[Source]:
        """Disjoint boxes that make up the region, once per term."""
        sources: list[Source] = []
        missing = _cover_from(held.local.get(device, []), 0, [region], sources)
        for term, pieces in enumerate(held.terms if missing else ()):
            near = sorted(pieces, key=lambda p: ((p.device - device) % self.devices, p.slot))
            rest = _cover_from(near, term, missing, sources)
            assert not rest, "a region is nowhere"
        return sources

    def _sliceable(self, value: int, piece: Piece, region: Box) -> bool:
        """Whether a slice of the piece's tensor can be a view: one range of every dimension."""
        position = 0
        for factors in self.space.atoms.dims[value]:
            stop = position + len(factors)
            outer, inner = piece.region[position:stop], region[position:stop]
            places = (
                np.arange(volume(outer))
                .reshape(lengths(outer))[
                    tuple(slice(a - o, b - o) for (o, _), (a, b) in zip(outer, inner, strict=True))
                ]
                .ravel()
            )
            if len(places) and places[-1] - places[0] != len(places) - 1:
                return False
            position = stop
        return True

    # Slots

    def _new_piece(
        self, value: int, region: Box, device: int, *, first: int, base: int = -1
    ) -> Piece:
        meant = self.graph.values[value]
        category = COMMUNICATION if first == -2 else ROLES.index(meant.role)
        nbytes = volume(region) * self._itemsize(value)
        return self.build.slot(value, region, device, nbytes, category, first, base)

    def _itemsize(self, value: int) -> int:
        meant = self.graph.values[value]
        return meant.nbytes // max(math.prod(meant.shape or (1,)), 1) or 1


def _cover_from(
    pieces: Iterable[Piece], term: int, rest: list[Box], sources: list[Source]
) -> list[Box]:
    """Takes what the pieces have of the boxes; returns what they have not."""
    for piece in pieces:
        if not rest:
            break
        rest = _take(piece, term, rest, sources)
    return rest


def _take(piece: Piece, term: int, rest: list[Box], sources: list[Source]) -> list[Box]:
    left: list[Box] = []
    for box in rest:
        common = intersect(box, piece.region)
        if common is None:
            left.append(box)
        else:
            sources.append((piece, common, term))
            left += subtract(box, common)
    return left


def _distinct(pieces: list[Piece]) -> list[Piece]:
    """Of equal pieces on one device only the first."""
    return list({(p.region, p.device): p for p in reversed(pieces)}.values())[::-1]


def _by_device(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.device, []).append(piece)
    return found


def _spread(factors: tuple[int, ...], devices: list[int]) -> Layout:
    """Spread over the devices along the first atom that is long enough, else the whole on one."""
    for position, factor in enumerate(factors):
        if factor >= len(devices):
            parts = tuple(len(devices) if k == position else 1 for k in range(len(factors)))
            return Layout(parts, tuple(devices))
    return Layout((1,) * len(factors), (devices[0],))
