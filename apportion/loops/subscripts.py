"""What a subscript of an array is known to be: the classes that dependence analysis works with.

Part of the room loops. An expression of the body comes in, out goes one of

    Whole        `:`, any slice, a missing subscript, or the variable of an inner `range` loop
    Fixed(c)     a number that is the same in all iterations
    Index(d, c)  the loop's own index number d, plus c
    Unknown      anything else: it may be any number in any iteration

Only copies and sums with whole numbers are followed. `c - i` is not `i + c`, and is Unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Whole:
    """All elements along a dim."""

    def __str__(self) -> str:
        return ":"


@dataclass(frozen=True)
class Fixed:
    """One number in all iterations."""

    number: int

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True)
class Index:
    """The loop's index `dim` plus a number."""

    dim: int
    offset: int = 0

    def __str__(self) -> str:
        shift = f"{self.offset:+d}" if self.offset else ""
        return f"k{self.dim}{shift}"


@dataclass(frozen=True)
class Unknown:
    """Any number."""

    def __str__(self) -> str:
        return "?"


Subscript = Whole | Fixed | Index | Unknown
WHOLE, UNKNOWN = Whole(), Unknown()


@dataclass
class NameFacts:
    """What the names of a body are bound to. `bound` counts bindings, parameters among them;
    `assigned` has the expressions that a name is assigned, as far as it is not unpacked from
    something or bound by a loop.

    key        the parameter with the key, dims the loop's number of dims
    unpacked   names that are bound to one index of the key
    ranges     names that only `for name in range(...)` binds
    constants  whole numbers from outside of the body
    """

    key: str
    dims: int
    constants: Mapping[str, int]
    bound: dict[str, int] = field(default_factory=dict)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    unpacked: dict[str, int] = field(default_factory=dict)
    ranges: set[str] = field(default_factory=set)

    def classify(self, node: ast.expr | None) -> Subscript:
        """The class of a subscript; None is one that is not written."""
        if node is None or isinstance(node, ast.Slice):
            return WHOLE
        if isinstance(node, ast.Name) and node.id in self.ranges and self.bound[node.id] == 1:
            return WHOLE
        return self.scalar(node, frozenset())

    def scalar(self, node: ast.expr, seen: frozenset[str]) -> Subscript:
        """The class of an expression that is one number; `seen` are names being followed."""
        if isinstance(node, ast.Constant):
            return Fixed(node.value) if type(node.value) is int else UNKNOWN
        if isinstance(node, ast.Name):
            return self._named(node.id, seen)
        if isinstance(node, ast.Subscript) and self._is_key(node.value):
            return self._part_of_key(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.scalar(node.operand, seen)
            return Fixed(-inner.number) if isinstance(inner, Fixed) else UNKNOWN
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left, right = self.scalar(node.left, seen), self.scalar(node.right, seen)
            return _sum(left, right, -1 if isinstance(node.op, ast.Sub) else 1)
        return UNKNOWN

    def _is_key(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.key and self.bound[self.key] == 1

    def _part_of_key(self, node: ast.Subscript) -> Subscript:
        part = self.scalar(node.slice, frozenset())
        known = isinstance(part, Fixed) and 0 <= part.number < self.dims and self.dims > 1
        return Index(part.number) if known and isinstance(part, Fixed) else UNKNOWN

    def _named(self, name: str, seen: frozenset[str]) -> Subscript:
        if name not in self.bound:
            return Fixed(self.constants[name]) if name in self.constants else UNKNOWN
        if self.bound[name] > 1 or name in seen:
            return UNKNOWN
        if name == self.key and self.dims == 1:
            return Index(0)
        if name in self.unpacked and self.bound[self.key] == 1 and self.dims > 1:
            return Index(self.unpacked[name])
        if name in self.assigned:
            return self.scalar(self.assigned[name][0], seen | {name})
        return UNKNOWN


def _sum(left: Subscript, right: Subscript, sign: int) -> Subscript:
    if isinstance(right, Fixed):
        if isinstance(left, Index):
            return Index(left.dim, left.offset + sign * right.number)
        if isinstance(left, Fixed):
            return Fixed(left.number + sign * right.number)
    if isinstance(left, Fixed) and isinstance(right, Index) and sign == 1:
        return Index(right.dim, right.offset + left.number)
    return UNKNOWN


def name_facts(
    tree: ast.FunctionDef, key: str, dims: int, constants: Mapping[str, int]
) -> NameFacts:
    """The NameFacts of a body."""
    facts = NameFacts(key, dims, constants)
    for argument in (*tree.args.posonlyargs, *tree.args.args):
        facts.bound[argument.arg] = 1
    for statement in tree.body:
        for node in ast.walk(statement):
            _note_binding(facts, node)
    return facts


def _note_binding(facts: NameFacts, node: ast.AST) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        facts.bound[node.id] = facts.bound.get(node.id, 0) + 1
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        facts.bound[node.target.id] = facts.bound.get(node.target.id, 0) + 1
    if isinstance(node, ast.AnnAssign) and node.value:
        _note_assignment(facts, node.target, node.value)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            _note_assignment(facts, target, node.value)
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_range(node.iter):
        facts.ranges.add(node.target.id)


def _note_assignment(facts: NameFacts, target: ast.expr, value: ast.expr) -> None:
    if isinstance(target, ast.Name):
        facts.assigned.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List):
        names = target.elts
        if isinstance(value, ast.Name) and value.id == facts.key and len(names) == facts.dims:
            for dim, name in enumerate(names):
                if isinstance(name, ast.Name):
                    facts.unpacked[name.id] = dim
        elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(names):
            for name, part in zip(names, value.elts, strict=True):
                _note_assignment(facts, name, part)


def _is_range(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    )
