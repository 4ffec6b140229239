"""weights: which parameters are weights, and what is cut along with them.

In: the AxisEffects of a Space. Out: Weights, and Choices and Layouts for Ops that follow how the
weights are stored. The strategies owt, megatron and expert are made of these.

A weight is a parameter that a matmul multiplies with. Its atoms are *out* (in the product), *inner*
(summed over) or neither. An expert says along which atom each weight is stored; the rest follows:
views of the weight, its gradient and its update are cut at the same place, a matmul along the axis
that reads the weight as it stored_at, and other Ops along an axis of a class that is cut anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from apportion.describe import IllegalCut
from apportion.graph import FORWARD, PARAMETER, Op, refs
from apportion.split import (
    PARTIAL,
    SEVERAL,
    WHOLE,
    AxisEffects,
    Choice,
    Layout,
    Space,
    unsplit_choice,
)

MATMULS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))
DeviceGroups = Sequence[Sequence[int]]
"""Devices: samples are divided over the groups, weights within each."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, the forward matmul that multiplies with it, and its atoms there by role."""

    value: int
    op: int
    out: tuple[int, ...]
    inner: tuple[int, ...]


# Weights


def weights(effects: AxisEffects) -> list[Weight]:
    """All weights of forward matmuls, a weight once for every matmul."""
    views = parameter_views(effects)
    found = []
    for index, op in enumerate(effects.space.graph.ops):
        if op.phase == FORWARD and op.kind in MATMULS:
            known = [v for v in operands(op) if v in views]
            if len(known) == 1:
                found.append(_weight(effects, index, known[0], views))
    return found


def operands(op: Op) -> list[int]:
    """The two Values that a matmul multiplies."""
    return [op.inputs[next(refs(arg))] for arg in op.args if any(True for _ in refs(arg))][-2:]


def parameter_views(effects: AxisEffects) -> dict[int, tuple[int, dict[int, int]]]:
    """Values of the forward pass that are a parameter seen in another shape: which one, and for
    each of their atoms the parameter's."""
    space, graph = effects.space, effects.space.graph
    found = {
        v: (v, {k: k for k in range(len(space.factors(v)))})
        for v, value in enumerate(graph.values)
        if value.role == PARAMETER and graph.producer[v] is None
    }
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD and len(op.inputs) == len(op.outputs) == 1 and op.inputs[0] in found:
            parameter, atoms = found[op.inputs[0]]
            mapped = {
                effect.outputs[0]: atoms[effect.inputs[0]]
                for _, effect in effects.legal(index)
                if effect.outputs[0] >= 0 and effect.inputs[0] in atoms
            }
            if math.prod(space.factors(op.outputs[0])) == math.prod(space.factors(parameter)):
                found[op.outputs[0]] = (parameter, mapped)
    return found


def _weight(
    effects: AxisEffects, index: int, operand: int, views: dict[int, tuple[int, dict[int, int]]]
) -> Weight:
    op = effects.space.graph.ops[index]
    parameter, atoms = views[operand]
    mine = op.inputs.index(operand)
    other = op.inputs.index(next(v for v in operands(op) if v != operand))
    out, inner = [], []
    for _, effect in effects.legal(index):
        atom = atoms.get(effect.inputs[mine])
        if atom is not None and effect.outputs[0] == PARTIAL:
            inner.append(atom)
        elif atom is not None and effect.inputs[other] == WHOLE:
            out.append(atom)
    return Weight(parameter, index, tuple(out), tuple(inner))


# What follows from how weights are stored


def atoms_cut_with(
    effects: AxisEffects, stored: dict[int, int], samples: Collection[int]
) -> dict[int, int]:
    """Values that are cut where a stored weight is, each with the atom: views of the weight,
    optimizer state, and the gradient back to the Op that sums it over samples."""
    graph = effects.space.graph
    found = dict(stored)
    for index, op in enumerate(graph.ops):
        if op.parameter in stored or (op.phase == FORWARD and len(op.inputs) == 1):
            _cut_alike(effects, index, found)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        sums = any(axis.group in samples for axis in effects.space.axes(index))
        if op.phase != FORWARD and len(op.outputs) == 1 and op.outputs[0] in found and not sums:
            _cut_alike(effects, index, found)
    return found


def _cut_alike(effects: AxisEffects, index: int, found: dict[int, int]) -> None:
    """All Values of an Op are cut alike if one of them is."""
    op = effects.space.graph.ops[index]
    for _, effect in effects.legal(index):
        ends = list(zip((*op.inputs, *op.outputs), (*effect.inputs, *effect.outputs), strict=True))
        if any(found.get(value) == atom for value, atom in ends):
            for value, atom in ends:
                if atom >= 0:
                    found.setdefault(value, atom)
            return


def tensor_axis(
    effects: AxisEffects, op: int, stored_at: dict[int, int], classes: Collection[int]
) -> int | None:
    """The axis of an Op to cut within a group: the one that meets weights where they lie; without
    weights, one of the classes that are cut, rather in slices than in terms."""
    space = effects.space
    at = space.graph.ops[op]
    ends = (*at.inputs, *at.outputs)
    bound = any(value in stored_at for value in ends)
    best: tuple[float, bool, int] | None = None
    for axis, effect in effects.legal(op):
        score = 0
        for value, atom in zip(ends, (*effect.inputs, *effect.outputs), strict=True):
            if value in stored_at:
                size = space.graph.values[value].nbytes
                score += size if stored_at[value] == atom else -size
        if score > 0 if bound else space.axes(op)[axis].group in classes:
            best = max(best or (score, False, -axis), (score, PARTIAL not in effect.outputs, -axis))
    return -best[2] if best else None


def grouped_choice(
    space: Space, op: int, groups: DeviceGroups, sample: int | None, tensor: int | None
) -> Choice:
    """The Op cut along one axis over the groups and along another within each; what cannot be cut
    is done by all."""
    for cut in ((sample, tensor), (None, tensor), (sample, None)):
        if cut != (None, None):
            try:
                return _grouped_choice(space, op, groups, *cut)
            except IllegalCut:
                continue
    return unsplit_choice(space, op, sorted(device for group in groups for device in group))


def _grouped_choice(
    space: Space, op: int, groups: DeviceGroups, sample: int | None, tensor: int | None
) -> Choice:
    axes = space.axes(op)
    parts = [1] * len(axes)
    if sample is not None:
        parts[sample] = min(len(groups), axes[sample].extent)
    if tensor is not None:
        parts[tensor] = min(len(groups[0]), axes[tensor].extent)
    space.split(op, parts)
    across = [0] if sample is not None else range(len(groups))
    within = [0] if tensor is not None else range(len(groups[0]))
    samples = range(1 if sample is None else parts[sample])
    tensors = range(1 if tensor is None else parts[tensor])
    first_is_sample = tensor is None or (sample is not None and sample < tensor)
    grid = (
        [(s, t) for s in samples for t in tensors]
        if first_is_sample
        else [(s, t) for t in tensors for s in samples]
    )
    return Choice(
        tuple(parts), tuple(groups[a + s][w + t] for a in across for w in within for s, t in grid)
    )


def layouts_of_sums(
    effects: AxisEffects,
    op: int,
    made: Choice,
    groups: DeviceGroups,
    sample: int | None,
    tensor: int | None,
) -> dict[int, Layout]:
    """Layouts of what an Op leaves in terms: summed where the terms are, each device its share.

    A product of a group is summed within the group, a gradient of several groups among the devices
    that hold the same of it; lowering would spread either over all devices.
    """
    space = effects.space
    rows, width = len(groups), len(groups[0])
    count = [1 if axis is None else made.parts[axis] for axis in (sample, tensor)]
    effect = [
        None if axis is None or n == 1 else effects.of(op, axis)
        for axis, n in zip((sample, tensor), count, strict=True)
    ]
    found = {}
    for position, value in enumerate(space.graph.ops[op].outputs):
        at = [WHOLE if m is None else m.outputs[position] for m in effect]
        if at.count(PARTIAL) != 1 or SEVERAL in at:
            continue
        summed = at.index(PARTIAL)
        kept = at[1 - summed]
        terms, others = (rows, width) if summed == 0 else (width, rows)
        if count[summed] == terms and count[1 - summed] in (1, others):
            atom = _atom_to_share(space.factors(value), terms, kept)
            if atom is not None:
                found[value] = _layout(space, value, groups, summed, atom, kept)
    return found


def _atom_to_share(factors: Sequence[int], count: int, kept: int) -> int | None:
    """The atom to share a sum along: one that divides evenly, else any that is long enough."""
    able = [k for k, factor in enumerate(factors) if factor >= count and k != kept]
    return min(able, key=lambda k: bool(factors[k] % count), default=None)


def _layout(
    space: Space, value: int, groups: DeviceGroups, summed: int, atom: int, kept: int
) -> Layout:
    table = np.array(groups) if summed == 0 else np.array(groups).T  # terms by others
    terms, others = table.shape
    parts = [1] * len(space.factors(value))
    parts[atom] = terms
    if kept == WHOLE:
        return Layout(tuple(parts), tuple(table.T.ravel().tolist()))
    parts[kept] = others
    return Layout(tuple(parts), tuple((table if atom < kept else table.T).ravel().tolist()))


def sample_axis(space: Space, op: int, samples: Collection[int]) -> int | None:
    """The first axis of an Op that runs over samples and can be cut."""
    able = zip(space.axes(op), space.cuttable(op), strict=True)
    return next((k for k, (axis, yes) in enumerate(able) if yes and axis.group in samples), None)
