"""Statements on parts of arrays become loops over single numbers, which the compiler makes fast.

Part of the room loops. `W[:, u] += rate * error * H[:, i]` would allocate an array for every
operation, which takes ten times as long as the operations. So runs of such statements become one
loop:

    error = rating - W[:, u] @ H[:, i]          error = rating - total(W[v, u] * H[v, i])
    gw = error * H[:, i]                        for v in range(16):
    gh = error * W[:, u]                            gw = error * H[v, i]
    W[:, u] += rate * gw                            gh = error * W[v, u]
    H[:, i] += rate * gh                            W[v, u] += rate * gw
                                                    H[v, i] += rate * gh

Every element goes through the same operations in the same order as before. A statement is left
alone if anything in it is not certainly a number or a one-dimensional part: then the compiler does
what it does. Within a run no element may be needed that another turn of the loop changes: numbers
that are read from arrays, and totals, are computed before the run, and an array that it changes has
its parts along one dim only. A name for an array that is computed has to be used up within its run.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from apportion.loops.kernel_arrays import KERNEL_PREFIX, KernelLayout
from apportion.loops.loop_body import LoopBody
from apportion.loops.references import BodyReferences, subscript_list

TURN, TOTAL = f"{KERNEL_PREFIX}v", f"{KERNEL_PREFIX}total"
ELEMENTWISE = frozenset(
    [
        "abs",
        "absolute",
        "arctan",
        "ceil",
        "cos",
        "exp",
        "expm1",
        "fabs",
        "floor",
        "log",
        "log10",
        "log1p",
        "log2",
        "maximum",
        "minimum",
        "negative",
        "sign",
        "sin",
        "sqrt",
        "square",
        "tan",
        "tanh",
    ]
)
SUMS = frozenset(("sum",))
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
NUMBER, OTHER, OPEN = 0, -1, -2
"""What an expression is: a number, something else, not found out yet, or a vector, whose length
then says so."""


def scalar_statements(
    body: LoopBody, references: BodyReferences, layout: KernelLayout, numbers: frozenset[str]
) -> list[ast.stmt]:
    """The statements of a body with loops in the place of vector statements. `numbers` are the
    parameters that are certainly numbers."""
    lowering = _VectorLowering(body, references, layout, numbers)
    while True:
        lowering.infer()
        found = lowering.block(copy.deepcopy(body.tree.body))
        spilled = lowering.spilled()
        if not spilled:
            return _without_unused_parts(found, references)
        lowering.refused |= spilled


@dataclass
class _VectorRun:
    """Vector statements that become one loop, and what is computed before it."""

    length: int
    before: list[ast.stmt] = field(default_factory=list)
    inside: list[ast.stmt] = field(default_factory=list)
    written: dict[str, set[int]] = field(default_factory=dict)  # array: dims that are taken whole
    read: dict[str, set[int]] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)


@dataclass
class _VectorLowering:
    source: LoopBody
    references: BodyReferences
    layout: KernelLayout
    numbers: frozenset[str]
    refused: set[str] = field(default_factory=set)  # names that have to stay arrays
    kinds: dict[str, int] = field(default_factory=dict)
    runs: list[_VectorRun] = field(default_factory=list)
    temporaries: int = 0

    # What names are

    def infer(self) -> None:
        """Finds out what every name of the body is: by what it is assigned, until nothing
        changes."""
        facts = self.references.facts
        self.runs = []
        self.kinds = dict.fromkeys(facts.bound, OTHER)
        self.kinds |= dict.fromkeys(self.numbers, NUMBER)
        self.kinds |= dict.fromkeys(facts.unpacked, NUMBER)
        self.kinds |= {name: NUMBER for name in facts.ranges if facts.bound[name] == 1}
        self.kinds |= self._unpacked_values()
        if self.layout.dims == 1:
            self.kinds[self.source.key] = NUMBER
        local = self._local_values()
        self.kinds |= dict.fromkeys(local, OPEN)
        changed = True
        while changed:
            changed = False
            for name, values in local.items():
                known = {self.kind(value) for value in values} - {OPEN}
                kind = OPEN if not known else known.pop() if len(known) == 1 else OTHER
                changed |= self.kinds[name] not in (kind, OTHER)
                self.kinds[name] = OTHER if self.kinds[name] == OTHER else kind
        for name in local:
            if self.kinds[name] == OPEN or name in self.refused:
                self.kinds[name] = OTHER

    def _unpacked_values(self) -> dict[str, int]:
        """Names that are bound to the single values of an element: `label, ids = row`."""
        found = {}
        for node in self.source.tree.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == self.source.value:
                for name in node.targets[0].elts[: self.layout.fields]:
                    if isinstance(name, ast.Name) and self.references.facts.bound[name.id] == 1:
                        found[name.id] = NUMBER
        return found

    def _local_values(self) -> dict[str, list[ast.expr]]:
        """The names that only assignments bind, with everything that they are assigned; what
        `name += x` makes of a name is `name + x`."""
        facts, parameters = self.references.facts, self.source.parameters
        found = {
            name: list(values) for name, values in facts.assigned.items()
            if name not in (*parameters, self.source.key, self.source.value)
        }  # fmt: skip
        bindings = {name: len(values) for name, values in found.items()}
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                if name in found and name not in self.references.parts:
                    before = ast.Name(name, ast.Load())
                    found[name].append(ast.BinOp(before, node.op, node.value))
                    bindings[name] += 2
        return {
            name: values for name, values in found.items() if facts.bound[name] == bindings[name]
        }

    def kind(self, node: ast.expr) -> int:
        """NUMBER, OTHER, or the length of a vector."""
        if isinstance(node, ast.Constant):
            return NUMBER if isinstance(node.value, bool | int | float) else OTHER
        if isinstance(node, ast.Name):
            return self._name_kind(node.id)
        if isinstance(node, ast.Subscript):
            return self._subscript_kind(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            sides = [self.kind(node.left), self.kind(node.right)]
            return OPEN if OPEN in sides else NUMBER if sides[0] == sides[1] > 0 else OTHER
        if isinstance(node, ast.BinOp):
            sides = [self.kind(node.left), self.kind(node.right)]
            known = isinstance(node.op, OPERATORS) or max(sides) <= NUMBER
            return _together(sides) if known else OTHER
        if isinstance(node, ast.UnaryOp):
            return self.kind(node.operand)
        if isinstance(node, ast.Compare | ast.BoolOp | ast.IfExp):
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            kind = _together([self.kind(each) for each in inner])
            return kind if kind <= NUMBER else OTHER
        return self._call_kind(node) if isinstance(node, ast.Call) else OTHER

    def _name_kind(self, name: str) -> int:
        if name in self.references.parts:
            return self._subscript_kind(self.references.parts[name]) if self._stays(name) else OTHER
        if name in self.kinds:
            return self.kinds[name]
        return NUMBER if name in self.references.facts.constants or self._is_number(name) else OTHER

    def _is_number(self, name: str) -> bool:
        value = self.source.free.constants.get(name)
        return value is not None and getattr(value, "ndim", 0) == 0

    def _stays(self, name: str) -> bool:
        """Whether the subscripts of the part that a name stands for are the same wherever it is
        used."""
        bound = self.references.facts.bound
        part = self.references.parts[name]
        names = [node.id for node in ast.walk(part.slice) if isinstance(node, ast.Name)]
        return all(bound.get(each, 1) == 1 for each in names) and bound[name] == 1

    def _subscript_kind(self, node: ast.Subscript) -> int:
        if isinstance(node.value, ast.Name) and node.value.id in self.layout.arrays:
            shape = self.layout.arrays[node.value.id].shape
            whole = list(_whole_dims(node, len(shape)))
            single = [each for each in subscript_list(node) if not isinstance(each, ast.Slice)]
            if any(self.kind(each) != NUMBER for each in single) or _is_partial(node):
                return OTHER
            return (
                (NUMBER, shape[whole[0]] if whole else 0)[len(whole)] if len(whole) < 2 else OTHER
            )
        inner = self.kind(node.value)
        alone = not isinstance(node.slice, ast.Slice | ast.Tuple)
        if inner > 0 and alone and self.kind(node.slice) == NUMBER:
            return NUMBER
        if isinstance(node.value, ast.Name) and node.value.id == self.source.key:
            return NUMBER if self.layout.dims > 1 and alone else OTHER
        return OTHER

    def _call_kind(self, node: ast.Call) -> int:
        if node.keywords:
            return OTHER
        name = self._function(node.func)
        kinds = [self.kind(each) for each in node.args]
        if isinstance(node.func, ast.Attribute) and self.kind(node.func.value) > 0:
            return NUMBER if node.func.attr in SUMS and not kinds else OTHER
        if name == "numpy.dot":
            return NUMBER if len(kinds) == 2 and kinds[0] == kinds[1] > 0 else OTHER
        if name == "numpy.sum":
            return NUMBER if len(kinds) == 1 and kinds[0] > 0 else OTHER
        if name.startswith("numpy.") and name[6:] in ELEMENTWISE:
            return _together(kinds)
        plain = name.startswith("math.") or name in ("abs", "float", "int", "max", "min", "round")
        special = ast.unparse(node.func) in self.source.special
        helper = isinstance(node.func, ast.Name) and node.func.id in self.source.free.helpers
        known = plain or special or helper
        kind = _together(kinds)
        return kind if known and kind <= NUMBER else OTHER

    def _function(self, node: ast.expr) -> str:
        modules = self.source.free.modules
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"{modules.get(node.value.id, '?')}.{node.attr}"
        if isinstance(node, ast.Name) and node.id not in self.references.facts.bound:
            return modules.get(node.id, node.id)
        return ""

    # Statements

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of a block, with loops."""
        found: list[ast.stmt] = []
        run: _VectorRun | None = None
        for statement in statements:
            made = self._vector_statement(statement)
            if made is None:
                found += self._closed(run)
                run = None
                found += self._other(statement)
                continue
            if run is not None and not _joins(run, made):
                found += self._closed(run)
                run = None
            run = _merged(run, made)
        return found + self._closed(run)

    def _closed(self, run: _VectorRun | None) -> list[ast.stmt]:
        if run is None:
            return []
        self.runs.append(run)
        loop = ast.parse(f"for {TURN} in range({run.length}): pass").body[0]
        assert isinstance(loop, ast.For)
        loop.body = run.inside
        ast.copy_location(loop, run.inside[0])
        return [*run.before, loop]

    def _other(self, statement: ast.stmt) -> list[ast.stmt]:
        """A statement that is not on vectors; totals in it become calls."""
        for name in ("body", "orelse"):
            inner = getattr(statement, name, None)
            if inner:
                setattr(statement, name, self.block(inner))
        if isinstance(statement, ast.While | ast.For):
            return [statement]
        if isinstance(statement, ast.If):
            statement.test = self._totals(statement.test)
            return [statement]
        for name in ("value",):
            inner = getattr(statement, name, None)
            if isinstance(inner, ast.expr):
                setattr(statement, name, self._totals(inner))
        return [statement]

    def _totals(self, node: ast.expr) -> ast.expr:
        """An expression with calls of TOTAL in the place of sums over vectors."""
        lowering = self

        class ReplaceTotals(ast.NodeTransformer):
            def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
                if not isinstance(node.op, ast.MatMult) or lowering.kind(node) != NUMBER:
                    return self.generic_visit(node)
                if _has_totals(node.left) or _has_totals(node.right):
                    return node
                return lowering._total(ast.BinOp(node.left, ast.Mult(), node.right), node)

            def visit_Call(self, node: ast.Call) -> ast.AST:
                vectors = [each for each in node.args if lowering.kind(each) > 0]
                if isinstance(node.func, ast.Attribute) and lowering.kind(node.func.value) > 0:
                    vectors = [node.func.value]
                if not vectors or lowering.kind(node) != NUMBER:
                    return self.generic_visit(node)
                if any(map(_has_totals, vectors)):
                    return node
                if len(vectors) == 2:
                    return lowering._total(ast.BinOp(vectors[0], ast.Mult(), vectors[1]), node)
                return lowering._total(vectors[0], node)

        return ReplaceTotals().visit(node)  # type: ignore[no-any-return]

    def _total(self, terms: ast.expr, place: ast.expr) -> ast.expr:
        length = self.kind(terms)
        turned = self._turned(terms)
        used = [
            self.layout.arrays[each.id].dtype
            for each in ast.walk(turned)
            if isinstance(each, ast.Name) and each.id in self.layout.arrays
        ]
        whole = all(not dtype.startswith("float") for dtype in used)
        call = ast.Call(
            ast.Name(TOTAL, ast.Load()),
            [turned, ast.Constant(length), ast.Constant(whole)],
            [],
        )
        return ast.copy_location(call, place)

    # Runs

    def _vector_statement(self, node: ast.stmt) -> _VectorRun | None:
        """The run of a single vector statement; None if it is none."""
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AugAssign):
            target, value = node.target, node.value
        else:
            return None
        stored = self._stored_part(target, isinstance(node, ast.AugAssign))
        right = self.kind(value)
        if stored is not None:
            length = self.kind(stored)
            if right not in (NUMBER, length):
                return None
        elif isinstance(target, ast.Name) and self.kinds.get(target.id, OTHER) > 0:
            length = self.kinds[target.id]
            if right not in (length, NUMBER) or (right == NUMBER and isinstance(node, ast.Assign)):
                return None
        else:
            return None
        run = _VectorRun(length)
        node = copy.deepcopy(node)
        node.value = self._turned(self._hoisted(self._totals(node.value), run))
        if stored is not None:
            new = self._turned(self._hoisted_subscripts(copy.deepcopy(stored), run))
            assert isinstance(new, ast.Subscript) and isinstance(stored.value, ast.Name)
            new.ctx = ast.Store()
            if isinstance(node, ast.Assign):
                node.targets = [new]
            elif isinstance(node, ast.AugAssign):
                node.target = new
            shape = self.layout.arrays[stored.value.id].shape
            run.written[stored.value.id] = set(_whole_dims(stored, len(shape)))
        elif isinstance(target, ast.Name):
            run.assigned.add(target.id)
        for array, dim in self._parts_read(value):
            run.read.setdefault(array, set()).add(dim)
        run.inside.append(node)
        return run if _is_safe(run) else None

    def _stored_part(self, target: ast.expr, changed: bool) -> ast.Subscript | None:
        """The vector that an assignment stores into: `A[:, i]`, `a[:]` or `a += x` of a part a."""
        if isinstance(target, ast.Name) and changed and target.id in self.references.parts:
            found = self.references.parts[target.id]
            bound = self.references.facts.bound[target.id]
            return found if bound == 3 and self._part_stays(target.id) else None
        if not isinstance(target, ast.Subscript):
            return None
        inner = target.value
        whole = isinstance(target.slice, ast.Slice) and not _is_partial(target)
        if isinstance(inner, ast.Name) and inner.id in self.references.parts:
            part = self.references.parts[inner.id]
            return part if whole and self._stays(inner.id) and self.kind(part) > 0 else None
        return target if self.kind(target) > 0 and self._is_array(inner) else None

    def _part_stays(self, name: str) -> bool:
        part = self.references.parts[name]
        bound = self.references.facts.bound
        names = [node.id for node in ast.walk(part.slice) if isinstance(node, ast.Name)]
        return all(bound.get(each, 1) == 1 for each in names) and self.kind(part) > 0

    def _is_array(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.layout.arrays

    def _hoisted(self, node: ast.expr, run: _VectorRun) -> ast.expr:
        """An expression with names in the place of the numbers in it that are read from arrays or
        computed from vectors: they are computed before the run."""
        if self.kind(node) == NUMBER or _is_total(node):
            return self._hoisted_number(node, run)
        if isinstance(node, ast.Subscript):
            return self._hoisted_subscripts(node, run)
        for name, inner in ast.iter_fields(node):
            if isinstance(inner, ast.expr) and name != "func":
                setattr(node, name, self._hoisted(inner, run))
            elif isinstance(inner, list):
                new = [self._hoisted(e, run) if isinstance(e, ast.expr) else e for e in inner]
                setattr(node, name, new)
        return node

    def _hoisted_number(self, node: ast.expr, run: _VectorRun) -> ast.expr:
        simple = not any(
            isinstance(each, ast.Subscript | ast.Call | ast.Name)
            and not (isinstance(each, ast.Name) and each.id not in self.layout.arrays)
            for each in ast.walk(node)
        )
        if simple:
            return node
        self.temporaries += 1
        name = f"{KERNEL_PREFIX}h{self.temporaries}"
        assign = ast.Assign([ast.Name(name, ast.Store())], node)
        run.before.append(ast.copy_location(assign, node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _hoisted_subscripts(self, node: ast.Subscript, run: _VectorRun) -> ast.expr:
        new = [
            each if isinstance(each, ast.Slice | ast.Name | ast.Constant) or self._is_index(each)
            else self._hoisted_number(each, run)
            for each in subscript_list(node)
        ]  # fmt: skip
        node.slice = new[0] if len(new) == 1 else ast.Tuple(new, ast.Load())
        return node

    def _is_index(self, node: ast.expr) -> bool:
        """Whether a subscript is a sum of names and numbers, whose class has to stay known."""
        return all(
            isinstance(each, ast.BinOp | ast.Name | ast.Constant | ast.operator | ast.expr_context)
            for each in ast.walk(node)
        )

    def _turned(self, node: ast.expr) -> ast.expr:
        """An expression on vectors as one on their elements in a turn of the loop."""
        lowering = self

        class ReplaceVectors(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                if node.id in lowering.references.parts and lowering.kind(node) > 0:
                    part: ast.AST = self.visit(copy.deepcopy(lowering.references.parts[node.id]))
                    return part
                return node

            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                if lowering._is_array(node.value) and lowering.kind(node) > 0:
                    return lowering._element(node)
                return self.generic_visit(node)

        return ReplaceVectors().visit(copy.deepcopy(node))  # type: ignore[no-any-return]

    def _element(self, node: ast.Subscript) -> ast.Subscript:
        assert isinstance(node.value, ast.Name)
        shape = self.layout.arrays[node.value.id].shape
        written = subscript_list(node)
        written += [ast.Slice()] * (len(shape) - len(written))
        turned = [
            ast.Name(TURN, ast.Load()) if isinstance(each, ast.Slice) else each for each in written
        ]
        index = turned[0] if len(turned) == 1 else ast.Tuple(turned, ast.Load())
        return ast.copy_location(ast.Subscript(node.value, index, ast.Load()), node)

    def _parts_read(self, node: ast.expr) -> Iterator[tuple[str, int]]:
        """(array, dim that is taken whole) of every vector in an expression."""
        for each in ast.walk(node):
            part = self.references.parts.get(each.id) if isinstance(each, ast.Name) else each
            if isinstance(part, ast.Subscript) and self._is_array(part.value):
                assert isinstance(part.value, ast.Name)
                shape = self.layout.arrays[part.value.id].shape
                for dim in _whole_dims(part, len(shape)):
                    yield part.value.id, dim

    def spilled(self) -> set[str]:
        """Names of vectors that are used outside of the run that computes them."""
        homes: dict[str, list[_VectorRun]] = {}
        for run in self.runs:
            for name in run.assigned:
                homes.setdefault(name, []).append(run)
        found = {name for name, runs in homes.items() if len(runs) > 1}
        found |= {name for name, kind in self.kinds.items() if kind > 0 and name not in homes}
        for name, runs in homes.items():
            inside = sum(_occurrences(statement, name) for statement in runs[0].inside)
            if inside != _occurrences(self.source.tree, name):
                found.add(name)
        return found


def _occurrences(tree: ast.AST, name: str) -> int:
    return sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def _together(kinds: Sequence[int]) -> int:
    if OTHER in kinds:
        return OTHER
    if OPEN in kinds:
        return OPEN
    lengths = {kind for kind in kinds if kind > 0}
    return NUMBER if not lengths else lengths.pop() if len(lengths) == 1 else OTHER


def _whole_dims(node: ast.Subscript, dims: int) -> Iterator[int]:
    """The dims that a subscript takes whole; those that are not written are."""
    written = subscript_list(node)
    for dim in range(dims):
        if dim >= len(written) or isinstance(written[dim], ast.Slice):
            yield dim


def _is_partial(node: ast.Subscript) -> bool:
    """Whether a slice has bounds."""
    return any(
        isinstance(each, ast.Slice) and (each.lower or each.upper or each.step)
        for each in subscript_list(node)
    )


def _has_totals(node: ast.expr) -> bool:
    """Whether there is a sum within the terms of another one."""
    return any(
        isinstance(each, ast.Call)
        or (isinstance(each, ast.BinOp) and isinstance(each.op, ast.MatMult))
        for each in ast.walk(node)
    )


def _is_total(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == TOTAL


def _is_safe(run: _VectorRun) -> bool:
    """Whether no element that a run changes is needed in another turn of its loop."""
    return all(run.read.get(array, dims) | dims == dims and len(dims) == 1
               for array, dims in run.written.items())  # fmt: skip


def _joins(run: _VectorRun, new: _VectorRun) -> bool:
    """Whether a statement can be in a run with those before it."""
    if run.length != new.length or new.before:
        return False
    both = _merged(copy.copy(run), new)
    return _is_safe(both)


def _merged(run: _VectorRun | None, new: _VectorRun) -> _VectorRun:
    if run is None:
        return new
    written = {array: set(dims) for array, dims in run.written.items()}
    read = {array: set(dims) for array, dims in run.read.items()}
    for array, dims in new.written.items():
        written.setdefault(array, set()).update(dims)
    for array, dims in new.read.items():
        read.setdefault(array, set()).update(dims)
    return _VectorRun(
        run.length, run.before, [*run.inside, *new.inside], written, read,
        run.assigned | new.assigned,
    )  # fmt: skip


def _without_unused_parts(statements: list[ast.stmt], references: BodyReferences) -> list[ast.stmt]:
    """Leaves out names for parts of arrays that nothing uses any more."""
    used = {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }

    class DropUnusedParts(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            target = node.targets[0]
            alone = len(node.targets) == 1 and isinstance(target, ast.Name)
            if alone and target.id in references.parts and target.id not in used:  # type: ignore[attr-defined]
                return ast.copy_location(ast.Pass(), node)
            return node

    return [DropUnusedParts().visit(statement) for statement in statements]
