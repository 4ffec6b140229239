"""units: Ops that are proposed together, and the Choices they get from one mesh of devices.

In: a Space. Out: for a layer or a cell and a mesh of devices the Choice of every Op in it.

A unit is a layer (layers.py, the steps of loops apart) or several of them. A mesh cuts the labels
of a layer into degrees and has a device for each place, the last label fastest. Each Op of the
layer is cut along those of its axes that are labels of the layer; along labels that it does not
have it is there several times, as weights are under data parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from apportion.graph import FORWARD
from apportion.search.baselines.op_placement import prefix
from apportion.search.layers.layers import UNMAPPED, Layer, find_layers
from apportion.split import Choice, Space, divisors, part_grids

Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""Degrees per label of a layer, and the device of every place."""

OpChoices = dict[int, Choice]
"""Choices of Ops."""

MappedOp = tuple[int, tuple[int, ...]]
"""An Op, and which of its axes each label of a mesh is."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops, and a finite list of options: `options[k][j]` is the Choice of `ops[j]`."""

    name: str
    ops: tuple[int, ...]
    options: tuple[tuple[Choice, ...], ...]


class LayerChoices:
    """The layers of a Space, and what their Ops do under a mesh."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.layers: list[Layer] = find_layers(space, apart=True)[0]
        self.home = [0] * len(space.graph.ops)
        self.positions: list[tuple[int, ...]] = [()] * len(space.graph.ops)
        for number, layer in enumerate(self.layers):
            for op, positions in zip(layer.ops, layer.positions, strict=True):
                self.home[op], self.positions[op] = number, positions
        self._choices: dict[Mesh, dict[tuple[int, tuple[int, ...]], Choice]] = {}
        self._equal: dict[Choice, Choice] = {}
        self._grids: dict[tuple[object, ...], tuple[tuple[int, ...], list[int]]] = {}
        self._classed: dict[tuple[int, tuple[int, ...]], tuple[MappedOp, ...]] = {}

    def choices(self, layer: int, mesh: Mesh) -> OpChoices:
        """The Choices of the Ops of a layer."""
        it = self.layers[layer]
        return self.mesh_choices(zip(it.ops, it.positions, strict=True), mesh)

    def choices_along(
        self, layers: Iterable[int], classes: tuple[int, ...], mesh: Mesh
    ) -> OpChoices:
        """The Choices of the Ops of several layers that are cut along classes of atoms: the mesh
        has a degree for each class."""
        return self.mesh_choices([cuts for n in layers for cuts in self._along(n, classes)], mesh)

    def _along(self, layer: int, classes: tuple[int, ...]) -> tuple[MappedOp, ...]:
        """For every Op of a layer its axes that are the labels of these classes."""
        found = self._classed.get((layer, classes))
        if found is None:
            it = self.layers[layer]
            taken: list[int] = []
            for meant in classes:
                able = [
                    k
                    for k, label in enumerate(it.labels)
                    if meant in label.classes and not label.reduced and k not in taken
                ]
                own = [k for k in able if it.labels[k].own == meant] or able
                taken.append(own[0] if own else UNMAPPED)
            found = self._classed[layer, classes] = tuple(
                (op, tuple([UNMAPPED if k == UNMAPPED else positions[k] for k in taken]))
                for op, positions in zip(it.ops, it.positions, strict=True)
            )
        return found

    def classes(self, layers: Iterable[int]) -> dict[int, int]:
        """The classes along which layers can be cut, each with the largest extent that it has."""
        found: dict[int, int] = {}
        for layer in layers:
            for label in self.layers[layer].labels:
                if not label.reduced:
                    found[label.own] = max(found.get(label.own, 1), label.extent)
        return found

    def mesh_choices(self, several: Iterable[MappedOp], mesh: Mesh) -> OpChoices:
        """The Choices of Ops, equal ones the same object. An Op that cannot be cut along all labels
        at once is cut along as many as it can, the longest degrees first; one of which a device
        would have two replicas is whole on all of them."""
        known = self._choices.get(mesh)
        if known is None:
            known = self._choices[mesh] = {}
        calls = self.space.call_ids
        choices: OpChoices = {}
        for op, positions in several:
            key = (calls[op], positions)
            found = known.get(key)
            if found is None:
                found = self._make(op, positions, *mesh)
                found = known[key] = self._equal.setdefault(found, found)
            choices[op] = found
        return choices

    def _make(
        self, op: int, positions: tuple[int, ...], degrees: tuple[int, ...], devices: Sequence[int]
    ) -> Choice:
        key = (self.space.call_ids[op], positions, degrees, len(devices))
        found = self._grids.get(key)
        if found is None:
            found = self._grids[key] = self._grid(op, positions, degrees, len(devices))
        parts, places = found
        where = tuple([devices[p] for p in places])
        if len(set(devices)) < len(devices):
            count = math.prod(parts)
            if any(len(set(where[k::count])) * count < len(where) for k in range(count)):
                return Choice((1,) * len(parts), tuple(dict.fromkeys(devices)))
        return Choice(parts, where)

    def _grid(
        self, op: int, positions: tuple[int, ...], degrees: tuple[int, ...], devices: int
    ) -> tuple[tuple[int, ...], list[int]]:
        """The parts of an Op under a mesh, and in the order of a Choice which place each takes."""
        parts = [1] * len(self.space.axes(op))
        kept: list[int] = []
        able = [k for k, p in enumerate(positions) if p != UNMAPPED and degrees[k] > 1]
        for label in sorted(able, key=lambda k: -degrees[k]):
            tried = list(parts)
            tried[positions[label]] = degrees[label]
            if self.space.allows(op, tried):
                parts = tried
                kept.append(label)
        return tuple(parts), _mesh_places(degrees, devices, kept, positions)

    # What goes together

    @cached_property
    def cells(self) -> list[tuple[int, ...]]:
        """Layers in runs: what one module does in one step of a loop."""
        graph = self.space.graph
        found: list[list[int]] = []
        module, loops = "", set[int]()
        for number, layer in enumerate(self.layers):
            mine = prefix(graph.ops[self.anchors[number]].module, 1)
            if not found or mine != module or layer.loop in loops:
                found.append([])
                loops = set()
            module = mine
            loops.add(layer.loop)
            found[-1].append(number)
        return [tuple(run) for run in found]

    @cached_property
    def loops(self) -> list[tuple[tuple[int, ...], ...]]:
        """Cells in sets: all steps of one loop, or one cell that is in none."""
        found: dict[object, list[tuple[int, ...]]] = {}
        for cell in self.cells:
            found.setdefault(tuple(self.layers[n].loop for n in cell), []).append(cell)
        return [tuple(several) for several in found.values()]

    @cached_property
    def alike(self) -> list[tuple[tuple[int, ...], ...]]:
        """Cells that are equal in all but their number: of one loop, and of one kind."""
        kinds: dict[object, list[tuple[int, ...]]] = {}
        for cell in self.cells:
            first = [self.anchors[n] for n in cell]
            kinds.setdefault(tuple(self.space.call_ids[op] for op in first), []).append(cell)
        found = {*self.loops, *(tuple(several) for several in kinds.values())}
        return sorted(several for several in found if len(several) > 1)

    @cached_property
    def neighbours(self) -> list[tuple[int, ...]]:
        """For every layer those that it exchanges Values with."""
        graph = self.space.graph
        found: list[set[int]] = [set() for _ in self.layers]
        for value, made in enumerate(graph.producer):
            if made is None:
                continue
            here = self.home[made[0]]
            for reader in graph.consumers[value]:
                there = self.home[reader]
                if there != here:
                    found[here].add(there)
                    found[there].add(here)
        return [tuple(sorted(them)) for them in found]

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Forward Ops with the backward Ops that differentiate them; the first Op of a layer also
        with what prepares its parameters and updates them. Each is of one layer."""
        graph = self.space.graph
        found: dict[int, list[int]] = {}
        for layer in self.layers:
            anchor = self.anchors[self.home[layer.ops[0]]]
            made = set(graph.ops[anchor].outputs)
            root: dict[int, int] = {}
            for op in layer.ops:
                it = graph.ops[op]
                if it.phase == FORWARD:
                    follows = op != anchor and not made.isdisjoint(it.inputs)
                    root[op] = op if follows else anchor
                    made.update(it.outputs if follows else ())
                else:
                    root[op] = root.get(-1 if it.forward is None else it.forward, anchor)
                found.setdefault(root[op], []).append(op)
        return [tuple(members) for members in found.values()]

    @cached_property
    def anchors(self) -> list[int]:
        """The Op that each layer began with and is named after."""
        graph = self.space.graph
        return [
            next((op for op in layer.ops if graph.ops[op].name == layer.name), layer.ops[0])
            for layer in self.layers
        ]


def _mesh_places(
    degrees: Sequence[int], devices: int, kept: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """The places of a mesh in the order of a Choice: replicas first, then the cut axes."""
    strides, step = [0] * len(degrees), 1
    for label in range(len(degrees) - 1, -1, -1):
        strides[label] = step
        step *= degrees[label]
    order = [k for k in range(len(degrees)) if degrees[k] > 1 and k not in kept]
    order += sorted(kept, key=lambda k: positions[k])
    places = [0]
    for label in order:
        places = [p + n * strides[label] for p in places for n in range(degrees[label])]
    base = devices // step
    if base > 1:  # whole copies of the mesh
        places = [p + c * step for c in range(base) for p in places]
    return places


def layer_units(space: Space, devices: int, any_devices: bool = True) -> list[Unit]:
    """Every layer with all its grids over sample, attribute and parameter axes, of every number of
    parts that divides the devices, in every order on any of the devices; or only on blocks of
    neighbours. A whole layer is on one device, or on all of them."""
    members = LayerChoices(space)
    found = []
    for number, layer in enumerate(members.layers):
        extents = [1 if label.reduced else label.extent for label in layer.labels]
        several = [members.choices(number, mesh) for mesh in _meshes(extents, devices, any_devices)]
        found.append(_unit(layer.name, several))
    return found


def cell_units(space: Space, devices: int, any_devices: bool = True) -> list[Unit]:
    """The same for cells: what one module does in one step of a loop, cut along classes."""
    members = LayerChoices(space)
    found = []
    for cell in members.cells:
        classes = members.classes(cell)
        meshes = _meshes(list(classes.values()), devices, any_devices)
        several = [members.choices_along(cell, tuple(classes), mesh) for mesh in meshes]
        found.append(_unit(members.layers[cell[0]].name, several))
    return found


def _unit(name: str, several: Sequence[OpChoices]) -> Unit:
    ops = tuple(several[0])
    options = dict.fromkeys(tuple([made[op] for op in ops]) for made in several)
    return Unit(name, ops, tuple(options))


def _meshes(extents: Sequence[int], devices: int, any_devices: bool) -> list[Mesh]:
    found = [
        (degrees, where)
        for count in divisors(devices)
        for degrees in part_grids(extents, count)
        for where in _placements(devices, count, any_devices)
    ]
    return [*found, ((1,) * len(extents), tuple(range(devices)))]


def _placements(devices: int, count: int, any_devices: bool) -> list[tuple[int, ...]]:
    if any_devices:
        return list(permutations(range(devices), count))
    return [tuple(range(at, at + count)) for at in range(0, devices, count)]


def size_of(units: Sequence[Unit]) -> int:
    """How many combinations there are."""
    return math.prod(len(unit.options) for unit in units)
