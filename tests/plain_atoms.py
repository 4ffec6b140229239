"""Atoms node by node, in plain Python: the oracle of those that are found by patterns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence

from apportion.describe.formula import Formula
from apportion.describe.interval import Affine, Factors, refine
from apportion.describe.language import Access, All, Index
from apportion.graph import Graph
from apportion.split.atoms import Atoms, Digits

Node = tuple[Hashable, ...]


class _Union:
    """Union-find over hashable nodes."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        parent = self.parent.setdefault(node, node)
        while parent != node:
            grand = self.parent[parent]
            self.parent[node] = grand
            node, parent = grand, self.parent[grand]
        return node

    def join(self, a: Node, b: Node) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            low, high = (a, b) if a < b else (b, a)
            self.parent[high] = low


def find_atoms(graph: Graph, formulas: Sequence[Formula | None]) -> Atoms:
    """The atoms of a Graph, from the formula of every Op (None: not described)."""
    nodes = _Union()
    extents: dict[Node, int] = {}
    equations: list[tuple[Node, tuple[Node, ...]]] = []
    for value_index, value in enumerate(graph.values):
        for dim, extent in enumerate(value.shape or ()):
            extents[(0, value_index, dim)] = extent
    for op_index, formula in enumerate(formulas):
        if formula is not None:
            _collect(graph, op_index, formula, nodes, extents, equations)
    for before, after in graph.state:  # one layout for both
        for dim in range(len(graph.values[before].shape or ())):
            nodes.join((0, before, dim), (0, after, dim))
    factors = _solve(nodes, extents, equations)
    return _result(graph, formulas, nodes, equations, factors)


def _collect(
    graph: Graph,
    op_index: int,
    formula: Formula,
    nodes: _Union,
    extents: dict[Node, int],
    equations: list[tuple[Node, tuple[Node, ...]]],
) -> None:
    op = graph.ops[op_index]
    for name, extent in formula.extents.items():
        extents[(1, op_index, name)] = extent
    for position, output in enumerate(formula.outputs):
        for dim, names in enumerate(output.dims if output else ()):
            node = (0, op.outputs[position], dim)
            _equate(nodes, equations, extents, node, tuple((1, op_index, n) for n in names))
    for access in formula.accesses:
        value = op.inputs[access.tensor]
        for dim, index in enumerate(access.index):
            parts = _factor_nodes(op_index, access, dim, index, extents)
            if parts is not None:
                _equate(nodes, equations, extents, (0, value, dim), parts)


def _factor_nodes(
    op_index: int, access: Access, dim: int, index: tuple[Index, ...], extents: dict[Node, int]
) -> tuple[Node, ...] | None:
    found: list[Node] = []
    for place, item in enumerate(index):
        if isinstance(item, Affine) and item.axis is not None:
            found.append((1, op_index, item.axis))
        elif isinstance(item, All):
            node = (2, op_index, access.tensor, dim, place)
            extents[node] = item.extent
            found.append(node)
        else:
            return None
    return tuple(found)


def _equate(
    nodes: _Union,
    equations: list[tuple[Node, tuple[Node, ...]]],
    extents: dict[Node, int],
    dim: Node,
    parts: tuple[Node, ...],
) -> None:
    if extents[dim] != math.prod(extents[p] for p in parts):
        return
    parts = tuple(p for p in parts if extents[p] != 1)
    if len(parts) == 1:
        nodes.join(dim, parts[0])
    elif parts and extents[dim]:  # nothing has no factors
        equations.append((dim, parts))


def _solve(
    nodes: _Union, extents: dict[Node, int], equations: list[tuple[Node, tuple[Node, ...]]]
) -> dict[Node, Factors]:
    factors: dict[Node, Factors] = {}
    for node, extent in extents.items():
        factors[nodes.find(node)] = (extent,) if extent != 1 else ()
    rooted = [(nodes.find(d), tuple(nodes.find(p) for p in ps)) for d, ps in equations]
    touching: dict[Node, list[int]] = {}
    for number, (dim, parts) in enumerate(rooted):
        for node in {dim, *parts}:
            touching.setdefault(node, []).append(number)
    queue = deque(range(len(rooted)))
    waiting = set(queue)
    while queue:
        number = queue.popleft()
        waiting.discard(number)
        dim, parts = rooted[number]
        for node, new in _refined(dim, parts, factors, extents, nodes):
            if factors[node] != new:
                factors[node] = new
                for other in touching.get(node, ()):
                    if other not in waiting:
                        waiting.add(other)
                        queue.append(other)
    return factors


def _refined(
    dim: Node,
    parts: tuple[Node, ...],
    factors: dict[Node, Factors],
    extents: dict[Node, int],
    nodes: _Union,
) -> list[tuple[Node, Factors]]:
    joined = tuple(f for p in parts for f in factors[p])
    common = refine(factors[dim], joined)
    if common is None:
        return []
    found = [(dim, common)]
    rest = list(common)
    for part in parts:
        size = math.prod(factors[part])
        taken: list[int] = []
        while math.prod(taken) < size:
            taken.append(rest.pop(0))
        found.append((part, tuple(taken)))
    return found


def _result(
    graph: Graph,
    formulas: Sequence[Formula | None],
    nodes: _Union,
    equations: list[tuple[Node, tuple[Node, ...]]],
    factors: dict[Node, Factors],
) -> Atoms:
    ties = _Union()
    for dim, parts in equations:
        dim = nodes.find(dim)
        pieces = [(p, k) for p in map(nodes.find, parts) for k in range(len(factors[p]))]
        if factors[dim] == tuple(factors[p][k] for p, k in pieces):
            for k, piece in enumerate(pieces):
                ties.join((dim, k), piece)
    numbers: dict[Node, int] = {}

    def classes(node: Node) -> tuple[int, ...]:
        root = nodes.find(node)
        found = (ties.find((root, k)) for k in range(len(factors[root])))
        return tuple(numbers.setdefault(atom, len(numbers)) for atom in found)

    dims = tuple(
        tuple(factors[nodes.find((0, v, d))] for d in range(len(value.shape or ())))
        for v, value in enumerate(graph.values)
    )
    value_classes = tuple(
        tuple(c for d in range(len(value.shape or ())) for c in classes((0, v, d)))
        for v, value in enumerate(graph.values)
    )
    axes: list[dict[str, Factors]] = []
    axis_classes: list[dict[str, tuple[int, ...]]] = []
    for o, formula in enumerate(formulas):
        names = formula.extents if formula else {}
        axes.append({n: factors[nodes.find((1, o, n))] for n in names})
        axis_classes.append({n: classes((1, o, n)) for n in names})
    return Atoms(dims, value_classes, tuple(axes), tuple(axis_classes))


def divide(atoms: Atoms, digits: Digits) -> Atoms:
    """The atoms, those of the given classes divided further; raises ValueError if that is
    uneven."""
    finer = dict(digits)
    numbers: dict[tuple[int, int], int] = {}

    def parts(factor: int, group: int) -> Factors:
        found = finer.get(group, (factor,))
        if math.prod(found) != factor or (group in finer and min(found, default=0) < 2):
            raise ValueError(f"atoms of {factor} cannot be divided into {list(found)}")
        return found

    def divided(factors: Factors, groups: tuple[int, ...]) -> tuple[Factors, tuple[int, ...]]:
        pairs = [
            (part, numbers.setdefault((group, k), len(numbers)))
            for factor, group in zip(factors, groups, strict=True)
            for k, part in enumerate(parts(factor, group))
        ]
        return tuple(p for p, _ in pairs), tuple(n for _, n in pairs)

    dims, value_classes = [], []
    for value_dims, groups in zip(atoms.dims, atoms.value_classes, strict=True):
        place = 0
        new_dims: list[Factors] = []
        new_groups: list[int] = []
        for factors in value_dims:
            new, names = divided(factors, groups[place : place + len(factors)])
            place += len(factors)
            new_dims.append(new)
            new_groups += names
        dims.append(tuple(new_dims))
        value_classes.append(tuple(new_groups))
    axes, axis_classes = [], []
    for op_axes, op_groups in zip(atoms.axes, atoms.axis_classes, strict=True):
        made = {name: divided(factors, op_groups[name]) for name, factors in op_axes.items()}
        axes.append({name: f for name, (f, _) in made.items()})
        axis_classes.append({name: g for name, (_, g) in made.items()})
    return Atoms(tuple(dims), tuple(value_classes), tuple(axes), tuple(axis_classes))
