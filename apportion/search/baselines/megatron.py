"""megatron: the expert's strategy. Weights cut within a node, samples over nodes (Shoeybi 2019).

In: a Problem. Out: the Strategy of tensor parallelism within nodes and data parallelism across
them. What is cut is found in the Graph's classes, not in names:

    pair        a class that one weight makes and another sums over, and that every Op between them
                can be cut along: heads of attention, the inner width of a feed-forward layer. The
                first weight is stored by columns, the second by rows; their product is a sum over
                the group. Of two classes that one weight joins only one is cut.
    recurrent   a class that a weight both makes and sums over: the state of an LSTM. Stored by
                columns: the gates are cut by hidden unit, and the state is gathered for each step.
    vocabulary  the rows of an embedding of the batch, and the classes of the loss, whose softmax is
                opened.

Norms, residuals and what else has none of these are done by every device of a group. As many
devices form a group as a host has, at most 8, so that heads and widths divide evenly; if none do,
this is data parallelism. On convolutional networks the expert uses `owt`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from apportion.graph import FORWARD, PARAMETER
from apportion.lower import termwise
from apportion.machine import Cluster
from apportion.search.baselines.data import data, sample_classes
from apportion.search.baselines.owt import owt
from apportion.search.baselines.weights import (
    MATMULS,
    DeviceGroups,
    Weight,
    atoms_cut_with,
    grouped_choice,
    layouts_of_sums,
    sample_axis,
    tensor_axis,
    weights,
)
from apportion.search.problem import Problem, SearchResult, UnsuitableMethod
from apportion.split import PARTIAL, AxisEffects, Layout, Space, Strategy, composites

WIDEST = 8  # devices that share a layer
EMBEDDING, CONVOLUTION, ATTENTION = (
    "apportion.embedding",
    "aten.convolution.default",
    "apportion.sdpa",
)
LOSSES = ("aten._log_softmax.default", "apportion.log_sum_exp")


def megatron(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Weights cut within hosts, samples over them."""
    effects = AxisEffects(problem.space)
    found = weights(effects)
    inner, extents = _find_inner(effects, found), _extents(problem.space)
    if _convolutional(effects, found) and not inner.recurrent:
        return replace(owt(problem), notes=("a convolutional network: this is owt",))
    width = _width(problem.cluster, [extents[group] for group in inner.all])
    if width == 1:
        why = "no heads, widths and hosts divide evenly: this is data parallelism"
        return replace(data(problem), notes=(why,))
    return tensor_parallel(problem, _groups(problem.cluster, width))


def tensor_parallel(
    problem: Problem, groups: DeviceGroups, dims: Mapping[str, int] | None = None
) -> SearchResult:
    """Weights cut within the groups, samples over them. `dims` has by the name of a parameter the
    dimension along which it is stored, others being whole; None: as the expert stores them."""
    width = len(groups[0])
    effects = AxisEffects(problem.space)
    cuts = _weight_cuts(effects, width, dims)
    opening = _opening(problem.space, cuts.classes)
    if opening:
        effects = AxisEffects(Space(problem.space.source, problem.space.digits, opening))
        cuts = _weight_cuts(effects, width, dims)
    space, samples = effects.space, sample_classes(effects.space)
    stored_at = atoms_cut_with(effects, cuts.stored, samples)
    choices, layouts = [], dict[int, Layout]()
    for op in range(len(space.graph.ops)):
        sample = sample_axis(space, op, samples)
        tensor = tensor_axis(effects, op, stored_at, cuts.classes)
        choices.append(grouped_choice(space, op, groups, sample, tensor))
        if len(groups) > 1:
            layouts |= layouts_of_sums(effects, op, choices[op], groups, sample, tensor)
    strategy = Strategy(tuple(choices), digits=space.digits, opening=space.opening)
    strategy = replace(strategy, layouts=_needed_layouts(space, strategy, layouts))
    return SearchResult(strategy, space=space if opening else None)


@dataclass(frozen=True, slots=True)
class _WeightCuts:
    """At which atom parameters are stored, and the classes that are cut within a group."""

    stored: dict[int, int]
    classes: frozenset[int]


def _weight_cuts(effects: AxisEffects, width: int, dims: Mapping[str, int] | None) -> _WeightCuts:
    space = effects.space
    if dims is None:
        found = weights(effects)
        inner, vocabulary = _find_inner(effects, found), _vocabulary(effects, found, width)
        classes = inner.all | vocabulary
        stored = _stored(space, found, inner.all, vocabulary)
        _check_width(space, stored, width)
        return _WeightCuts(stored, classes)
    stored = {
        value: _atom_of_dim(space, value, dims[meant.name], width)
        for value, meant in enumerate(space.graph.values)
        if meant.role == PARAMETER and space.graph.producer[value] is None and meant.name in dims
    }
    classes = frozenset(space.atoms.value_classes[value][atom] for value, atom in stored.items())
    return _WeightCuts(stored, classes)


def _check_width(space: Space, stored: dict[int, int], width: int) -> None:
    """Raises UnsuitableMethod unless parameters have enough of what is cut."""
    if not stored:
        raise UnsuitableMethod(f"no parameter has heads or widths to cut over {width} devices")
    for value, atom in stored.items():
        extent, name = space.factors(value)[atom], space.graph.values[value].name
        if extent < width:
            raise UnsuitableMethod(
                f"parameter {name!r} has {extent} heads or rows: too few for {width} tensor ranks"
            )


def _atom_of_dim(space: Space, value: int, dim: int, width: int) -> int:
    """The atom of a dimension that is cut: the outermost that divides evenly, else one that is long
    enough."""
    rows = space.atoms.dims[value]
    first = sum(len(row) for row in rows[:dim])
    row = rows[dim]
    even = [k for k, factor in enumerate(row) if factor % width == 0]
    able = even or [k for k, factor in enumerate(row) if factor >= width]
    if not able:
        name, extent = space.graph.values[value].name, math.prod(row)
        raise UnsuitableMethod(
            f"parameter {name!r} cannot be cut in {width} along dimension {dim}, of extent {extent}"
        )
    return first + able[0]


def _needed_layouts(
    space: Space, strategy: Strategy, layouts: dict[int, Layout]
) -> dict[int, Layout]:
    """Those layouts whose terms are not added up term by term first."""
    splits = [space.split(op, made.parts) for op, made in enumerate(strategy.choices)]
    added = termwise(space, strategy, splits)
    return {
        value: layout
        for value, layout in layouts.items()
        if not any(reader in added for reader in space.graph.consumers[value])
    }


def _convolutional(effects: AxisEffects, found: list[Weight]) -> bool:
    """Whether there are convolutions, and no attention."""
    graph = effects.space.graph
    kinds = {op.kind for op in graph.ops if op.phase == FORWARD}
    weighted = {weight.op for weight in found}
    attends = ATTENTION in kinds or any(
        op.kind in MATMULS and op.phase == FORWARD and index not in weighted
        for index, op in enumerate(graph.ops)
    )
    return CONVOLUTION in kinds and not attends


def _opening(space: Space, vocabulary: frozenset[int]) -> tuple[int, ...]:
    """The softmax over a vocabulary and its backward, to be opened; nothing if the Graph is opened
    already."""
    if space.opening:
        return ()
    graph = space.graph
    losses = {
        index
        for index in composites(graph)
        if graph.ops[index].kind in LOSSES
        and vocabulary.intersection(space.atoms.value_classes[graph.ops[index].inputs[0]])
    }
    several = (i for i in composites(graph) if i in losses or graph.ops[i].forward in losses)
    return tuple(several)


# Classes


@dataclass(frozen=True, slots=True)
class _InnerClasses:
    """Classes that are cut within a group, by why."""

    paired: frozenset[int]
    recurrent: frozenset[int]

    @property
    def all(self) -> frozenset[int]:
        return self.paired | self.recurrent


def _find_inner(effects: AxisEffects, found: list[Weight]) -> _InnerClasses:
    space = effects.space
    stuck, summed = _uncuttable_classes(effects, found)
    makes = [[g for g in _classes(space, w.value, w.out) if g not in stuck] for w in found]
    sums = [[g for g in _classes(space, w.value, w.inner) if g not in stuck] for w in found]
    both = {g for side in makes for g in side} & {g for side in sums for g in side}
    sides = [[g for g in side if g in both] for side in (*makes, *sums)]
    both -= {g for side in sides for g in side[1:]} - {side[0] for side in sides if side}
    joined = [both.intersection(m) | both.intersection(s) for m, s in zip(makes, sums, strict=True)]
    recurrent = {g for m, s in zip(makes, sums, strict=True) for g in both.intersection(m, s)}
    uses = Counter(group for ends in joined for group in ends)
    chosen = set[int]()
    for group in sorted(both - recurrent - summed, key=lambda g: (uses[g], g)):
        near = set[int]().union(*(ends for ends in joined if group in ends))
        if not near & (chosen | recurrent):
            chosen.add(group)
    return _InnerClasses(frozenset(chosen), frozenset(recurrent))


def _uncuttable_classes(effects: AxisEffects, found: list[Weight]) -> tuple[set[int], set[int]]:
    """Classes that some forward Op without a weight cannot be cut along, with those of samples; and
    those that one multiplies and sums over."""
    space = effects.space
    weighted = {weight.op for weight in found}
    stuck, summed = set(sample_classes(space)), set[int]()
    for index, op in enumerate(space.graph.ops):
        if op.phase == FORWARD and index not in weighted:
            for position, axis in enumerate(space.axes(index)):
                effect = effects.of(index, position)
                if effect is None or not space.cuttable(index)[position]:
                    stuck.add(axis.group)
                elif op.kind in MATMULS and PARTIAL in effect.outputs:
                    summed.add(axis.group)
    return stuck, summed


def _vocabulary(effects: AxisEffects, found: list[Weight], width: int) -> frozenset[int]:
    """Rows of embeddings of the batch, and what the loss chooses among."""
    space = effects.space
    samples, several = sample_classes(space), set[int]()
    for index, op in enumerate(space.graph.ops):
        if op.kind == EMBEDDING and sample_axis(space, index, samples) is not None:
            several |= {
                space.axes(index)[axis].group
                for axis, effect in effects.legal(index)
                if effect.outputs[0] == PARTIAL
            }
    judged = {
        group
        for op in space.graph.ops
        if op.kind in LOSSES and op.phase == FORWARD
        for group in space.atoms.value_classes[op.inputs[0]]
    }
    several |= {g for w in found for g in _classes(space, w.value, w.out)} & judged
    return frozenset(g for g in several - samples if _extents(space)[g] >= width)


def _classes(space: Space, value: int, atoms: Iterable[int]) -> list[int]:
    """Classes of atoms of a Value, the outermost first."""
    return [space.atoms.value_classes[value][atom] for atom in sorted(atoms)]


def _extents(space: Space) -> dict[int, int]:
    return {
        axis.group: axis.extent for op in range(len(space.graph.ops)) for axis in space.axes(op)
    }


def _stored(
    space: Space, found: list[Weight], inner: frozenset[int], vocabulary: frozenset[int]
) -> dict[int, int]:
    """At which atom each parameter is stored: a weight rather by columns, others where they have a
    class that is cut."""
    stored: dict[int, int] = {}
    for weight in found:
        groups = space.atoms.value_classes[weight.value]
        for atoms in (weight.out, weight.inner):
            cut = [a for a in sorted(atoms) if groups[a] in inner | vocabulary]
            if cut:
                stored.setdefault(weight.value, cut[0])
    for before, _ in space.graph.state:
        groups = space.atoms.value_classes[before]
        for classes in (vocabulary, inner):
            cut = [atom for atom, group in enumerate(groups) if group in classes]
            if cut and space.graph.values[before].role == PARAMETER:
                stored.setdefault(before, cut[0])
    return stored


# The machine


def _width(cluster: Cluster, extents: Iterable[int]) -> int:
    """Devices that share a layer: as many as all hosts can be divided into, and all extents by."""
    hosts = [len(host.devices) for host in cluster.hosts] or [len(cluster.devices)]
    even = math.gcd(*hosts, *extents) if extents else 1
    return max(n for n in range(1, min(even, WIDEST) + 1) if even % n == 0)


def _groups(cluster: Cluster, width: int) -> DeviceGroups:
    """The devices of every host, `width` by `width`."""
    hosts = [host.devices for host in cluster.hosts] or [tuple(range(len(cluster.devices)))]
    return [host[k : k + width] for host in hosts for k in range(0, len(host), width)]
