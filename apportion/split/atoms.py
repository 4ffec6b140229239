"""Atoms: the factors of dimensions that make every view an alias, and the classes that tie them.

The step of split/ that comes before splits: a Graph and its formulas go in, Atoms come out.

Each operator's formula says which dimensions are which axes: in `aten.view` from [B, T, D] to
[B*T, D] the first dimension of the result is the product of two axes. Every (Value, dim) and every
(Op, axis) is a node with a list of factors; every dimension that is one axis joins two nodes; every
dimension that is a product of axes is an equation

    factors(dim) = factors(axis 1) + factors(axis 2) + ...

whose two sides are refined to their coarsest common refinement until nothing changes. Where two
views factor one dimension in ways that have no common refinement (12 as 3*4 and as 4*3), the later
one is left alone and derive.py refuses to cut there. Atoms that are the same by a node or an
equation form a class.

Ops of equal formula and shapes relate their tensors alike: that is found once (DimRelations) and
spread over all of them in arrays, so that a repeated layer costs little. Nodes that are joined
share one row of atoms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from apportion.describe import Access, Affine, All, Factors, Formula, Index, refine
from apportion.graph import Graph

TieNode = tuple[Hashable, ...]
"""What is tied: a dim of a tensor, an axis, or one atom of either."""
Shape = tuple[int, ...]
Place = tuple[int, int]
"""A tensor of a call (inputs, outputs, then one more for what is no dim of any), and a dim."""


@dataclass(frozen=True, slots=True)
class Atoms:
    """Factors and classes of every Value's dims and every Op's axes."""

    dims: tuple[tuple[Factors, ...], ...]
    """Per Value and dimension its factors; a dimension of extent 1 has none."""
    value_classes: tuple[tuple[int, ...], ...]
    """Per Value the class of each of its atoms, all dimensions in a row."""
    axes: tuple[dict[str, Factors], ...]
    """Per Op the factors of each axis."""
    axis_classes: tuple[dict[str, tuple[int, ...]], ...]
    """Per Op the class of each atom of each axis."""


@dataclass(frozen=True, slots=True)
class AtomRows:
    """The atoms of a Graph, each row of them once."""

    values: tuple[int, ...]
    """Per Value which of `dims` it has."""
    dims: tuple[tuple[int, ...], ...]
    """The distinct rows of all dims of a Value."""
    ops: tuple[int, ...]
    """Per Op which of `axes` it has."""
    axes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
    """The distinct names and rows of all axes of an Op."""
    factors: dict[int, Factors]
    classes: dict[int, tuple[int, ...]]

    def atoms(self) -> Atoms:
        """Spelled out for every Value and Op; what is equal is shared."""
        known: dict[tuple[Factors, ...], tuple[Factors, ...]] = {}
        factors, classes = self.factors, self.classes
        dims = []
        for rows in self.dims:
            made = tuple([factors[row] for row in rows])
            dims.append(known.setdefault(made, made))
        ties = [tuple([c for row in rows for c in classes[row]]) for rows in self.dims]
        of, tie = factors.__getitem__, classes.__getitem__
        axes = [dict(zip(names, map(of, rows), strict=True)) for names, rows in self.axes]
        tied = [dict(zip(names, map(tie, rows), strict=True)) for names, rows in self.axes]
        return Atoms(
            tuple([dims[k] for k in self.values]),
            tuple([ties[k] for k in self.values]),
            tuple([axes[k] for k in self.ops]),
            tuple([tied[k] for k in self.ops]),
        )


class _UnionFind:
    """Union-find over hashable nodes; the least of a set stands for it."""

    def __init__(self) -> None:
        self.parent: dict[TieNode, TieNode] = {}

    def find(self, node: TieNode) -> TieNode:
        parent = self.parent.setdefault(node, node)
        while parent != node:
            grand = self.parent[parent]
            self.parent[node] = grand
            node, parent = grand, self.parent[grand]
        return node

    def join(self, a: TieNode, b: TieNode) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            low, high = (a, b) if a < b else (b, a)
            self.parent[high] = low


# What the formula of one call ties


@dataclass(frozen=True, slots=True)
class DimRelations:
    """What a formula says about the dims of its call's tensors: which are equal or products.

    axes       names, and the place that stands for each
    loose      extents of the nodes that are no dim, in the order of their places
    joins      pairs of places that are the same
    equations  a place, and those whose product it is
    """

    axes: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    loose: tuple[int, ...] = ()
    joins: tuple[tuple[Place, Place], ...] = ()
    equations: tuple[tuple[Place, ...], ...] = ()


def dim_relations(
    formula: Formula | None, inputs: Sequence[Shape], outputs: Sequence[Shape]
) -> DimRelations:
    """The DimRelations of a call (None: not described)."""
    return (
        DimRelations()
        if formula is None
        else _RelationCollector(formula, inputs, outputs).relations()
    )


class _RelationCollector:
    """Collects the relations of one formula. Its nodes are (0, tensor, dim), (1, axis) and, for the
    whole of a factor, (2, tensor, dim, place)."""

    def __init__(self, formula: Formula, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> None:
        self.formula = formula
        self.nodes = _UnionFind()
        self.extents: dict[TieNode, int] = {}
        self.equations: list[tuple[TieNode, ...]] = []
        shapes = (*inputs, *outputs)
        self.tensors = len(shapes)
        for tensor, shape in enumerate(shapes):
            for dim, extent in enumerate(shape):
                self.extents[(0, tensor, dim)] = extent
        for name, extent in formula.extents.items():
            self.extents[(1, name)] = extent
        for position, output in enumerate(formula.outputs):
            for dim, names in enumerate(output.dims if output else ()):
                self._equate((0, len(inputs) + position, dim), [(1, n) for n in names])
        for access in formula.accesses:
            for dim, index in enumerate(access.index):
                parts = self._factor_nodes(access, dim, index)
                if parts is not None:
                    self._equate((0, access.tensor, dim), parts)

    def _factor_nodes(
        self, access: Access, dim: int, index: tuple[Index, ...]
    ) -> list[TieNode] | None:
        found: list[TieNode] = []
        for place, item in enumerate(index):
            if isinstance(item, Affine) and item.axis is not None:
                found.append((1, item.axis))
            elif isinstance(item, All):
                node = (2, access.tensor, dim, place)
                self.extents[node] = item.extent
                found.append(node)
            else:
                return None
        return found

    def _equate(self, dim: TieNode, parts: list[TieNode]) -> None:
        extents = self.extents
        if extents[dim] != math.prod([extents[p] for p in parts]):
            return
        parts = [p for p in parts if extents[p] != 1]
        if len(parts) == 1:
            self.nodes.join(dim, parts[0])
        elif parts and extents[dim]:  # nothing has no factors
            self.equations.append((dim, *parts))

    def relations(self) -> DimRelations:
        loose: dict[TieNode, int] = {}

        def place(node: TieNode) -> Place:
            root = self.nodes.find(node)
            if root[0] == 0:
                return root[1], root[2]  # type: ignore[return-value]
            return self.tensors, loose.setdefault(root, len(loose))

        names = tuple(self.formula.extents)
        places = tuple([place((1, name)) for name in names])
        equations = tuple([tuple([place(n) for n in nodes]) for nodes in self.equations])
        joins = []
        for node in self.extents:
            if node[0] == 0 and place(node) != node[1:]:
                joins.append((place(node), node[1:]))
        extents = tuple([self.extents[node] for node in loose])
        return DimRelations(names, places, extents, tuple(joins), equations)  # type: ignore[arg-type]


# The nodes of a Graph, in arrays

Integers = NDArray[np.int64]


class _NodeTable:
    """All nodes by number: dims of Values, then what is no dim, Op by Op."""

    def __init__(
        self, graph: Graph, kinds: Sequence[int], relations: Sequence[DimRelations]
    ) -> None:
        shapes = [value.shape or () for value in graph.values]
        self.kinds = np.array(kinds, np.int64)
        loose = [relations[kind].loose for kind in kinds]
        self.extents = list(chain.from_iterable(shapes))
        self.extents += chain.from_iterable(loose)
        counts = np.array([len(row) for row in chain(shapes, loose)], np.int64)
        self.first = np.cumsum(counts) - counts
        tensors: list[int] = []
        for own, op in enumerate(graph.ops, len(shapes)):
            tensors += op.inputs
            tensors += op.outputs
            tensors.append(own)
        lengths = np.array([len(op.inputs) + len(op.outputs) + 1 for op in graph.ops], np.int64)
        self.begin = np.cumsum(lengths) - lengths
        self.base = self.first[np.array(tensors, np.int64)] if tensors else self.first[:0]

    def spread(self, places: Sequence[Sequence[Place]]) -> Integers:
        """The nodes of the places, given per pattern, for all Ops in a row."""
        counts = np.array([len(row) for row in places], np.int64)
        flat = np.array(list(chain.from_iterable(places)), np.int64).reshape(-1, 2)
        each = counts[self.kinds]
        ends = np.cumsum(each)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - each, each)
        index = within + np.repeat((np.cumsum(counts) - counts)[self.kinds], each)
        tensors = np.repeat(self.begin, each) + flat[index, 0]
        found: Integers = self.base[tensors] + flat[index, 1]
        return found


def _components(count: int, pairs: Integers) -> Integers:
    """For every node the least one that pairs connect it with."""
    label = np.arange(count)
    while len(pairs):
        ends = label[pairs]
        pairs = np.stack([ends.min(1), ends.max(1)], 1)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        np.minimum.at(label, pairs[:, 1], pairs[:, 0])
        while True:
            further = label[label]
            if np.array_equal(further, label):
                break
            label = further
    return label


def find_rows(graph: Graph, kinds: Sequence[int], relations: Sequence[DimRelations]) -> AtomRows:
    """The atoms of a Graph; `kinds` says which DimRelations every Op has."""
    nodes = _NodeTable(graph, kinds, relations)
    pairs = nodes.spread([tuple(chain.from_iterable(p.joins)) for p in relations]).reshape(-1, 2)
    count = len(nodes.extents)
    roots = _components(count, np.concatenate([pairs, _state_pairs(graph, nodes)]))
    single = np.array(nodes.extents, np.int64) == 1
    if single.any():
        roots[single] = np.flatnonzero(single)[0]  # no atoms, one row
    equations = _equations(nodes, roots, kinds, relations)
    factors = _solve(nodes.extents, equations)
    return _rows(graph, nodes, roots, kinds, relations, equations, factors)


def _state_pairs(graph: Graph, nodes: _NodeTable) -> Integers:
    """One layout for what a state begins and ends the step with."""
    values, first = graph.values, nodes.first.tolist()
    pairs = [
        (first[before] + dim, first[after] + dim)
        for before, after in graph.state
        for dim, _ in enumerate(
            zip(values[before].shape or (), values[after].shape or (), strict=False)
        )
    ]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _equations(
    nodes: _NodeTable, roots: Integers, kinds: Sequence[int], relations: Sequence[DimRelations]
) -> list[tuple[int, ...]]:
    flat = nodes.spread([tuple(chain.from_iterable(p.equations)) for p in relations])
    lengths = [[len(e) for e in p.equations] for p in relations]
    row = iter(roots[flat].tolist())
    return [tuple(islice(row, n)) for kind in kinds for n in lengths[kind]]


def _solve(extents: list[int], equations: list[tuple[int, ...]]) -> dict[int, Factors]:
    """The factors of all nodes that are in equations."""
    touching: dict[int, list[int]] = {}
    for number, nodes in enumerate(equations):
        for node in set(nodes):
            touching.setdefault(node, []).append(number)
    factors: dict[int, Factors] = {
        node: (extents[node],) if extents[node] != 1 else () for node in touching
    }
    queue = deque(range(len(equations)))
    waiting = set(queue)
    while queue:
        number = queue.popleft()
        waiting.discard(number)
        for node, new in _refined(equations[number], factors):
            if factors[node] != new:
                factors[node] = new
                for other in touching[node]:
                    if other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    return factors


def _refined(
    equation: tuple[int, ...], factors: dict[int, Factors]
) -> Iterator[tuple[int, Factors]]:
    dim, *parts = equation
    joined = tuple([f for p in parts for f in factors[p]])
    if factors[dim] == joined:
        return
    common = refine(factors[dim], joined)
    if common is None:
        return
    sizes = [math.prod(factors[part]) for part in parts]
    yield dim, common
    begin = end = 0
    for part, size in zip(parts, sizes, strict=True):
        while math.prod(common[begin:end]) < size:
            end += 1
        yield part, common[begin:end]
        begin = end


def _rows(
    graph: Graph,
    nodes: _NodeTable,
    roots: Integers,
    kinds: Sequence[int],
    relations: Sequence[DimRelations],
    equations: list[tuple[int, ...]],
    solved: dict[int, Factors],
) -> AtomRows:
    dims: dict[tuple[int, ...], int] = {}
    row = iter(roots.tolist())
    values = [
        dims.setdefault(tuple(islice(row, len(value.shape or ()))), len(dims))
        for value in graph.values
    ]
    axes: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    row = iter(roots[nodes.spread([p.places for p in relations])].tolist())
    names = [p.axes for p in relations]
    ops = [
        axes.setdefault((names[kind], tuple(islice(row, len(names[kind])))), len(axes))
        for kind in kinds
    ]
    ties = _ties(equations, solved)
    numbers: dict[TieNode, int] = {}
    factors: dict[int, Factors] = {}
    classes: dict[int, tuple[int, ...]] = {}
    every = chain(chain.from_iterable(dims), chain.from_iterable([r for _, r in axes]))
    for root in dict.fromkeys(every):
        extent = nodes.extents[root]
        own = solved.get(root, (extent,) if extent != 1 else ())
        factors[root] = own
        found = [ties.find((root, k)) for k in range(len(own))]
        classes[root] = tuple([numbers.setdefault(atom, len(numbers)) for atom in found])
    return AtomRows(tuple(values), tuple(dims), tuple(ops), tuple(axes), factors, classes)


def _ties(equations: list[tuple[int, ...]], factors: dict[int, Factors]) -> _UnionFind:
    """The atoms that equations make the same."""
    ties = _UnionFind()
    for dim, *parts in dict.fromkeys(equations):
        pieces = [(part, k) for part in parts for k in range(len(factors[part]))]
        if factors[dim] == tuple([factors[part][k] for part, k in pieces]):
            for k, piece in enumerate(pieces):
                ties.join((dim, k), piece)
    return ties


Digits = tuple[tuple[int, Factors], ...]
"""Classes that are divided further, each with the factors its atoms are divided into."""


def divide(rows: AtomRows, digits: Digits) -> AtomRows:
    """The atoms, those of the given classes divided further; raises ValueError if that is uneven.

    Cuts made at several levels of a recursion then name different atoms (digits) of a class, and
    commute.
    """
    finer = dict(digits)
    numbers: dict[tuple[int, int], int] = {}
    new_factors: dict[int, Factors] = {}
    new_classes: dict[int, tuple[int, ...]] = {}
    for row, factors in rows.factors.items():
        parts: list[int] = []
        names: list[int] = []
        for factor, group in zip(factors, rows.classes[row], strict=True):
            found = finer.get(group, (factor,))
            if math.prod(found) != factor or (group in finer and min(found, default=0) < 2):
                raise ValueError(f"atoms of {factor} cannot be divided into {list(found)}")
            parts += found
            names += [numbers.setdefault((group, k), len(numbers)) for k in range(len(found))]
        new_factors[row], new_classes[row] = tuple(parts), tuple(names)
    return replace(rows, factors=new_factors, classes=new_classes)
