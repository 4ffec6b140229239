"""sample_axis: which dimension of the batch is that of its samples.

In: a Space. Out: a SampleAxis, the classes of atoms that data parallelism cuts.

As a rule it is the first dimension, by the extent that most of the batch's tensors begin with. Of a
batch with its sequence first (recurrent networks and nn.Transformer take such by default) the first
dimension runs through next to none of the step, since it is sliced, or walked along. So each class
of atoms is judged by the share of the forward pass, in elements made, whose operators have it as an
axis; where another dimension of the batch has more than twice the share of the first one, it is
that of the samples. Dimensions that parameters have as well are features and no samples.

A loop that accumulates gradients takes micro-batches off the first dimension: by `split`, by slices
that do not overlap, or by a view whose first dimension it walks along. The samples of a micro-batch
are samples, and their classes belong to the axis; the batch itself is then on every device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from apportion.graph import FORWARD, INPUT, PARAMETER, Op
from apportion.split import Space

CLEARLY = 2.0  # how many times the share of the first dimension another one must have
MICRO = 1.05  # the same where the first dimension is that of micro-batches


@dataclass(frozen=True)
class SampleAxis:
    """The classes of the sample axis. `dim` is the dimension of the batch's tensors that it is,
    `extent` how many samples there are, `share` the share of the forward pass that has it.
    `one_sample`: there is none, because the batch has one sample."""

    classes: frozenset[int] = frozenset()
    dim: int = 0
    extent: int = 0
    share: float = 0.0
    one_sample: bool = False

    def note(self, devices: int, method: str = "data") -> str:
        """What the user should know of it, on so many devices; empty where it is as usual."""
        if devices == 1:
            return ""
        if self.share == 0:
            why = "no dimension of the batch runs through the step as one of samples"
            if self.one_sample:
                why = "the batch has one sample; give a larger one, or a method that cuts layers"
            return f"{method} cuts nothing, and every device computes the whole step: {why}"
        found = []
        if self.dim > 0:
            found.append(
                f"{method} cuts dimension {self.dim} of the batch, of extent {self.extent}: next "
                "to nothing of the step has the first one"
            )
        if self.extent < devices:
            found.append(
                f"there are {self.extent} samples for {devices} devices: {devices - self.extent} "
                "of them compute nothing that is cut by samples"
            )
        return "; ".join(found)


@dataclass(frozen=True)
class _BatchDim:
    """The leading atom of a dimension of one of the batch's tensors."""

    value: int
    dim: int
    extent: int
    group: int


def sample_axis(space: Space) -> SampleAxis:
    """The sample axis of a step; without classes where there is none."""
    dims, shares = list(_batch_dims(space)), _shares(space)
    first, clearly = _first_dim(dims, shares), CLEARLY
    micro = micro_batches(space, first.classes)
    if micro - first.classes:
        share = _share_of(space, micro)
        if share > first.share:
            first, clearly = replace(first, classes=micro, share=share), MICRO
    if not first.classes and _one_sample(space):
        return replace(first, one_sample=True)
    features = {
        group
        for value, meant in enumerate(space.graph.values)
        if meant.role == PARAMETER
        for group in space.atoms.value_classes[value]
    }
    others = [d for d in dims if d.dim > 0 and d.group not in features]
    best = max(others, key=lambda d: (shares.get(d.group, 0.0), -d.dim), default=None)
    if best is None or shares.get(best.group, 0.0) <= clearly * first.share:
        return first
    return SampleAxis(_alike(best, dims, features), best.dim, best.extent, shares[best.group])


def _one_sample(space: Space) -> bool:
    values = space.graph.values
    return any(v.role == INPUT and v.shape and v.shape[0] == 1 for v in values)


def _batch_dims(space: Space) -> Iterator[_BatchDim]:
    for value, meant in enumerate(space.graph.values):
        if meant.role == INPUT:
            place = 0
            for dim, factors in enumerate(space.atoms.dims[value]):
                if factors:
                    group = space.atoms.value_classes[value][place]
                    yield _BatchDim(value, dim, (meant.shape or ())[dim], group)
                place += len(factors)


def _first_dim(dims: list[_BatchDim], shares: Mapping[int, float]) -> SampleAxis:
    """The first dimension of the tensors that share the commonest first extent; of equally common
    ones that which has more of the step."""
    counts, most = Counter[int](), dict[int, float]()
    for d in dims:
        if d.dim == 0:
            counts[d.extent] += 1
            most[d.extent] = max(most.get(d.extent, 0.0), shares.get(d.group, 0.0))
    if not counts:
        return SampleAxis()
    extent = max(counts, key=lambda n: (counts[n], most[n], n))
    groups = frozenset(d.group for d in dims if d.dim == 0 and d.extent == extent)
    return SampleAxis(groups, 0, extent, most[extent])


def _alike(best: _BatchDim, dims: list[_BatchDim], features: set[int]) -> frozenset[int]:
    """The class, and the one of equal extent in tensors of the batch that have nothing of it."""
    groups, having = {best.group}, {d.value for d in dims if d.group == best.group}
    for value in {d.value for d in dims} - having:
        same = [d for d in dims if d.value == value and d.extent == best.extent]
        same = [d for d in same if d.group not in features]
        if len(same) == 1:
            groups.add(same[0].group)
    return frozenset(groups)


def _shares(space: Space) -> dict[int, float]:
    """By class of atoms, the share of the forward pass whose operators have it as an axis."""
    graph, found, total = space.graph, Counter[int](), 0
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD:
            size = sum(math.prod(graph.values[v].shape or ()) for v in op.outputs)
            total += size
            for group in {axis.group for axis in space.axes(index)}:
                found[group] += size
    return {group: size / total for group, size in found.items()} if total else {}


def _share_of(space: Space, groups: frozenset[int]) -> float:
    """The share of the forward pass whose operators have one of these classes as an axis."""
    graph, found, total = space.graph, 0, 0
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD:
            size = sum(math.prod(graph.values[v].shape or ()) for v in op.outputs)
            total += size
            found += size * any(axis.group in groups for axis in space.axes(index))
    return found / total if total else 0.0


# micro-batches

_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unsafe_split.Tensor")
_SLICE = "aten.slice.Tensor"


def micro_batches(space: Space, classes: frozenset[int]) -> frozenset[int]:
    """These classes of first dimensions, and those of the micro-batches that are taken off them."""
    found = set(classes)
    for value in range(len(space.graph.values)):
        own = _first_classes(space, value)
        if found.intersection(own[:1]) and space.graph.values[value].role == INPUT:
            found.update(own)  # where it is viewed as (micro-batches, samples)
    slices = _slices(space)
    for op in space.graph.ops:
        own = _first_classes(space, op.inputs[0])[:1] if op.inputs else ()
        if not found.intersection(own):
            continue
        taken = op.kind == _SLICE and _dim(op, 1) == 0 and _are_apart(slices.get(own[0], ()))
        if taken or (op.kind in _SPLITS and _dim(op, 2) == 0):
            for output in op.outputs:
                found.update(_first_classes(space, output)[:1])
    return frozenset(found)


def _first_classes(space: Space, value: int) -> tuple[int, ...]:
    """The classes of the atoms of a Value's first dimension."""
    dims = space.atoms.dims[value]
    return tuple(space.atoms.value_classes[value][: len(dims[0])]) if dims else ()


def _dim(op: Op, place: int) -> object:
    """The argument that says which dimension an operator takes pieces of."""
    return op.args[place] if len(op.args) > place else 0


def _slices(space: Space) -> dict[int, set[tuple[int, int]]]:
    """By class of a first dimension, the pieces that slices take off it."""
    graph, found = space.graph, dict[int, set[tuple[int, int]]]()
    for op in graph.ops:
        if op.kind == _SLICE and op.phase == FORWARD and _dim(op, 1) == 0:
            extent = (graph.values[op.inputs[0]].shape or (0,))[0]
            bounds = [x if isinstance(x, int) else None for x in (*op.args[2:4], None, None)[:2]]
            start, end, _ = slice(*bounds).indices(extent)
            for group in _first_classes(space, op.inputs[0])[:1]:
                found.setdefault(group, set()).add((start, end))
    return found


def _are_apart(pieces: Iterable[tuple[int, int]]) -> bool:
    """Whether there are several pieces, and none overlaps another."""
    ordered = sorted(pieces)
    return len(ordered) > 1 and all(a[1] <= b[0] for a, b in pairwise(ordered))
