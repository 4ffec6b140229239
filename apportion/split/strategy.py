"""Choice, Layout, Strategy: how every Op is cut and where everything is.

The result of a search, in terms of a Space; lower/ makes tasks of it.

A Choice cuts each axis of an Op (each atom of each axis) into parts and names the device of every
part; the grid of parts may be there several times (replicas). Devices are listed replica by
replica, and in each replica part by part, the last axis fastest. A Layout says the same of a Value:
parts per atom, replicas, devices.

A Strategy has a Choice for every Op. Values lie where their producer leaves them unless it gives
them a Layout; state begins and ends the step in one layout: the given one, else what the Op that
updates it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.checked import (
    read_field,
    read_list,
    read_mapping,
    read_row,
    read_text,
    read_whole,
    read_wholes,
)
from apportion.describe import Box, Factors, IllegalCut, part_range
from apportion.graph import Graph
from apportion.split.atoms import Digits
from apportion.split.communication import WITHIN, Communication, read_communication
from apportion.split.space import Space


@dataclass(frozen=True, slots=True)
class Choice:
    """Parts per axis of an Op, and the device of each part of each replica."""

    parts: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def count(self) -> int:
        """Parts of one replica."""
        return math.prod(self.parts)

    @property
    def replicas(self) -> int:
        return len(self.devices) // self.count

    def __str__(self) -> str:
        cut = "x".join(str(p) for p in self.parts) or "1"
        return f"{cut} on {','.join(map(str, self.devices))}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts per atom of a Value, and the device of each part of each replica."""

    parts: tuple[int, ...]
    devices: tuple[int, ...]

    def pieces(self, factors: Factors) -> list[tuple[Box, int]]:
        """The regions of a Value with the given atoms, and their devices."""
        regions = grid_boxes(factors, self.parts)
        return [(regions[n % len(regions)], device) for n, device in enumerate(self.devices)]


@dataclass(frozen=True)
class Strategy:
    """A Choice per Op, and Layouts of the Values that do not lie where their producer left them."""

    choices: tuple[Choice, ...]
    layouts: dict[int, Layout] = field(default_factory=dict)
    digits: Digits = ()
    opening: tuple[int, ...] = ()
    """Ops of the captured Graph that are opened; Choices and Layouts are of the opened Graph."""
    wire: str = ""
    """The precision in which partial sums of gradients travel; "": the one that they are in."""
    refetched: tuple[int, ...] = ()
    """Values that the backward fetches anew from where they lie: what the forward has fetched of
    them is not kept. Of the opened Graph, as Layouts are."""
    communication: Communication = WITHIN
    """When gradients travel, and whether steps overlap."""


WIRES = {"": "", "bf16": "bfloat16", "bfloat16": "bfloat16"}
"""Precisions in which sums of gradients may travel, by their names."""


def space_of(graph: Graph, strategy: Strategy, near: Space | None = None) -> Space:
    """The Space that a strategy for a captured Graph is about; quickly, from one of that Graph
    opened alike."""
    if near is not None and near.source is graph and near.opening == strategy.opening:
        return near.with_digits(strategy.digits)
    return Space(graph, strategy.digits, strategy.opening)


def grid_boxes(factors: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """All boxes of a grid over atoms, the last fastest."""
    boxes: list[Box] = [()]
    for factor, count in zip(factors, parts, strict=True):
        ranges = [part_range(factor, count, k) for k in range(count)]
        boxes = [(*box, r) for box in boxes for r in ranges]
    return boxes


def unsplit_choice(space: Space, op: int, devices: Sequence[int]) -> Choice:
    """The Op unsplit, once on every device named."""
    return Choice((1,) * len(space.axes(op)), tuple(devices))


def verify_strategy(space: Space, strategy: Strategy, devices: int) -> None:
    """Raises ValueError, naming the Op or Value, unless every Choice and Layout is legal on that
    many devices."""
    graph = space.graph
    if (space.digits, space.opening) != (strategy.digits, strategy.opening):
        raise ValueError(
            "the strategy divides or opens the graph in another way than the space it is for"
        )
    if len(strategy.choices) != len(graph.ops):
        raise ValueError(
            f"the strategy has {len(strategy.choices)} choices for {len(graph.ops)} operators"
        )
    known: set[Choice] = set()  # whose devices are right; many Ops have one Choice
    for index, choice in enumerate(strategy.choices):
        if choice not in known:
            _verify_devices(_op_in_words(space, index), choice.parts, choice.devices, devices)
            known.add(choice)
        _verify_split(space, index, choice)
    for value, layout in strategy.layouts.items():
        if not 0 <= value < len(graph.values):
            raise ValueError(
                f"the strategy lays out value {value}, of which there are {len(graph.values)}"
            )
        name = f"value {graph.values[value].name!r}"
        factors = space.factors(value)
        if len(layout.parts) != len(factors):
            raise ValueError(
                f"{name} has {len(factors)} atoms, its layout cuts {len(layout.parts)}"
            )
        for factor, count in zip(factors, layout.parts, strict=True):
            if not 1 <= count <= max(factor, 1):
                raise ValueError(f"{name}: an atom of {factor} cannot be cut into {count} parts")
        _verify_devices(name, layout.parts, layout.devices, devices)
    for value in strategy.refetched:
        if not 0 <= value < len(graph.values):
            raise ValueError(
                f"the strategy fetches value {value} again, of which there are {len(graph.values)}"
            )
    for value in strategy.communication.ranking:
        if value >= len(graph.values):
            raise ValueError(
                f"the communication ranks value {value}, of which there are {len(graph.values)}"
            )
    for level in strategy.communication.levels:
        if len(level) != devices:
            raise ValueError(
                f"the communication has groups of {len(level)} devices, and there are {devices}"
            )
        if max(level) >= devices:
            raise ValueError(
                f"the communication has a group {max(level)}; {devices} devices have groups from 0 "
                f"to {devices - 1}"
            )


def verify_choice(space: Space, op: int, choice: Choice, devices: int) -> None:
    """Raises ValueError, naming the Op, unless the Choice is legal on that many devices."""
    if not 0 <= op < len(space.graph.ops):
        raise ValueError(f"there is no operator {op}; there are {len(space.graph.ops)}")
    _verify_devices(_op_in_words(space, op), choice.parts, choice.devices, devices)
    _verify_split(space, op, choice)


def _op_in_words(space: Space, op: int) -> str:
    return f"operator {space.graph.ops[op].name!r}"


def _verify_split(space: Space, op: int, choice: Choice) -> None:
    try:
        space.split(op, choice.parts)
    except IllegalCut as refusal:
        raise ValueError(f"{_op_in_words(space, op)} cannot be cut so: {refusal}") from None


def _verify_devices(
    what: str, parts: tuple[int, ...], chosen: tuple[int, ...], devices: int
) -> None:
    count = math.prod(parts)
    if min(parts, default=1) < 1:
        raise ValueError(f"{what} has {min(parts)} parts of an axis; there must be at least 1")
    if not chosen or len(chosen) % count:
        raise ValueError(f"{what} has {count} parts and {len(chosen)} devices, not a multiple")
    for device in chosen:
        if not 0 <= device < devices:
            raise ValueError(f"{what} is on device {device}, of which there are {devices}")
    for part in range(count):
        if len(set(chosen[part::count])) < len(chosen[part::count]):
            raise ValueError(f"{what} has two replicas of part {part} on one device")


def check_wire(name: str) -> str:
    """The precision that sums of gradients travel in; raises ValueError if it is none."""
    if name not in WIRES:
        known = " and ".join(wire for wire in WIRES if wire)
        raise ValueError(f"sums of gradients cannot travel in {name!r}; known are {known}")
    return WIRES[name]


def to_json(strategy: Strategy) -> dict[str, Any]:
    """The Strategy as plain JSON data."""
    more: dict[str, Any] = {"wire": strategy.wire, "refetched": list(strategy.refetched)}
    if strategy.communication != WITHIN:
        more["communication"] = strategy.communication.to_json()
    return {key: value for key, value in more.items() if value} | {
        "choices": [[list(c.parts), list(c.devices)] for c in strategy.choices],
        "layouts": [[v, list(y.parts), list(y.devices)] for v, y in strategy.layouts.items()],
        "digits": [[group, list(factors)] for group, factors in strategy.digits],
        "opening": list(strategy.opening),
    }


def from_json(data: Any) -> Strategy:
    """The Strategy written by `to_json`; raises ValueError on anything else."""
    what = "the strategy"
    data = read_mapping(data, what)
    parts, devices = f"the parts in {what}", f"the devices in {what}"
    choices = [
        read_row(choice, "a choice", 2)
        for choice in read_list(read_field(data, "choices", what), "its choices")
    ]
    layouts = [
        read_row(layout, "a layout", 3)
        for layout in read_list(read_field(data, "layouts", what), "its layouts")
    ]
    digits = [
        read_row(digit, "a digit", 2)
        for digit in read_list(read_field(data, "digits", what), "its digits")
    ]
    return Strategy(
        tuple(Choice(read_wholes(p, parts, 1), read_wholes(d, devices)) for p, d in choices),
        {
            read_whole(v, "the value of a layout"): Layout(
                read_wholes(p, parts, 1), read_wholes(d, devices)
            )
            for v, p, d in layouts
        },
        tuple(
            (read_whole(group, "a digit"), read_wholes(factors, "a digit", 1))
            for group, factors in digits
        ),
        read_wholes(data.get("opening", []), "what the strategy opens"),
        check_wire(read_text(data.get("wire", ""), "the wire")),
        read_wholes(data.get("refetched", []), "what the strategy fetches again"),
        read_communication(data.get("communication")),
    )
