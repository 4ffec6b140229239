"""ArrayReference: where the body reads or writes which elements of an array.

Part of the room loops. A LoopBody comes in, with the names of the parameters that are arrays; out
go its references, one for each place, with the class of every subscript.

    x = W[k, u]            reads            W[k, u] = x      writes
    W[:, u] += g           reads and writes
    w = W[:, u]            w is another name of that part of W: `w += g` and `w[0] = x` write it
    f(W[:, u])             reads and writes, unless f is known to change nothing

A part of an array that goes anywhere else (into a tuple, say) counts as read and written, so that
whatever is done with it later is covered. An array is never handed on whole.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from apportion.loops.loop_body import LoopBody
from apportion.loops.subscripts import WHOLE, NameFacts, Subscript, Whole, name_facts

PURE_METHODS = frozenset(
    [
        "all",
        "any",
        "argmax",
        "argmin",
        "astype",
        "copy",
        "cumsum",
        "dot",
        "max",
        "mean",
        "min",
        "prod",
        "std",
        "sum",
        "var",
    ]
)
PURE_FUNCTIONS: Mapping[str, int] = {
    **dict.fromkeys(
        [
            "abs",
            "absolute",
            "all",
            "any",
            "argmax",
            "argmin",
            "arctan",
            "argsort",
            "array",
            "ceil",
            "copy",
            "cos",
            "count_nonzero",
            "cumsum",
            "exp",
            "expm1",
            "fabs",
            "floor",
            "isfinite",
            "isinf",
            "isnan",
            "log",
            "log10",
            "log1p",
            "log2",
            "max",
            "mean",
            "median",
            "min",
            "negative",
            "prod",
            "sign",
            "sin",
            "sort",
            "sqrt",
            "square",
            "std",
            "sum",
            "tan",
            "tanh",
            "var",
            "zeros_like",
            "empty_like",
            "ones_like",
        ],
        1,
    ),
    **dict.fromkeys(
        [
            "add",
            "arctan2",
            "dot",
            "divide",
            "equal",
            "greater",
            "hypot",
            "less",
            "maximum",
            "minimum",
            "multiply",
            "outer",
            "power",
            "subtract",
            "vdot",
            "searchsorted",
        ],
        2,
    ),
    "where": 3,
    "clip": 3,
}
"""NumPy's functions that change none of so many arguments; more would be an output."""
PURE_BUILTINS = frozenset(["abs", "bool", "float", "int", "len", "max", "min", "round", "sum"])
SHAPE_ATTRIBUTES = frozenset(("shape", "ndim", "size"))


@dataclass(frozen=True)
class ArrayReference:
    """One place of the body that touches an array."""

    array: str
    subscripts: tuple[Subscript, ...]
    reads: bool
    writes: bool
    line: int

    def subscript(self, dim: int) -> Subscript:
        """The class of a dim; what is not written is all of it."""
        return self.subscripts[dim] if dim < len(self.subscripts) else WHOLE

    def __str__(self) -> str:
        what = " and ".join(
            word for word, does in (("reads", self.reads), ("writes", self.writes)) if does
        )
        return f"line {self.line} {what} {self.array}[{', '.join(map(str, self.subscripts))}]"


@dataclass
class BodyReferences:
    """The references of a body, the facts about its names that they rest on, and the names that
    stand for a part of an array, each with the subscripted expression."""

    facts: NameFacts
    found: list[ArrayReference] = field(default_factory=list)
    parts: dict[str, ast.Subscript] = field(default_factory=dict)

    def of(self, array: str) -> list[ArrayReference]:
        """Those of one array."""
        return [each for each in self.found if each.array == array]


def subscripted_parameters(body: LoopBody) -> list[str]:
    """The parameters that the body subscripts, in their order: arrays, as far as one can see."""
    used = {
        node.value.id
        for node in ast.walk(body.tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    }
    return [name for name in body.parameters if name in used]


def subscript_list(node: ast.Subscript) -> list[ast.expr]:
    """The subscripts of `A[i, j]`, one by one."""
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def collect_references(
    body: LoopBody, arrays: Mapping[str, int | None], dims: int
) -> BodyReferences:
    """All references to `arrays` (by name, with their number of dims where it is known) in the body
    of a loop over `dims` indices. Raises LoopError where one cannot be followed."""
    constants = {
        name: int(value)
        for name, value in body.free.constants.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    facts = name_facts(body.tree, body.key, dims, constants)
    result = BodyReferences(facts)
    _find_parts(body, arrays, result)
    _Collector(body, arrays, result).visit_body()
    return result


def _find_parts(body: LoopBody, arrays: Mapping[str, int | None], result: BodyReferences) -> None:
    """Note every name that stands for a part of an array, or for another such name."""
    parts, bound = result.parts, result.facts.bound
    waiting = [(name, value) for name, all in result.facts.assigned.items() for value in all]
    grown = True
    while grown:
        grown = False
        for name, value in waiting:
            part = parts.get(value.id) if isinstance(value, ast.Name) else value
            if name in parts or not isinstance(part, ast.Subscript):
                continue
            if not _is_part(part, arrays):
                continue
            if bound[name] > 1 and not _only_changed_in_place(body.tree, name, bound[name]):
                raise body.error(
                    value, f"{name} names a part of an array and is bound again; use two names"
                )
            parts[name], grown = part, True


def _only_changed_in_place(tree: ast.FunctionDef, name: str, bound: int) -> bool:
    """Whether a name is bound by one assignment, and otherwise by `name += ...` only, which changes
    the part in place. Each of those counts twice: as a target, and as a binding."""
    in_place = sum(
        isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == name
        for node in ast.walk(tree)
    )
    return bound == 1 + 2 * in_place


def _is_part(node: ast.Subscript, arrays: Mapping[str, int | None]) -> bool:
    """Whether an expression is a part of an array, not one element."""
    if not isinstance(node.value, ast.Name) or node.value.id not in arrays:
        return False
    written = subscript_list(node)
    dims = arrays[node.value.id]
    return (dims is not None and dims > len(written)) or any(
        isinstance(each, ast.Slice) for each in written
    )


class _Collector(ast.NodeVisitor):
    """Walks a body and notes what each place does to an array."""

    def __init__(
        self, body: LoopBody, arrays: Mapping[str, int | None], result: BodyReferences
    ) -> None:
        self.body, self.arrays, self.result = body, arrays, result

    def visit_body(self) -> None:
        for statement in self.body.tree.body:
            self.visit(statement)

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._target(target, node.value)
        self._value(node.value, [t for t in node.targets if isinstance(t, ast.Name)])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._target(node.target, node.value)
            self._value(node.value, [node.target] if isinstance(node.target, ast.Name) else [])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        target = node.target
        if isinstance(target, ast.Name) and target.id in self.result.parts:
            self._note(self.result.parts[target.id], target, reads=True, writes=True)
        elif isinstance(target, ast.Name) and target.id in self.arrays:
            raise self._whole(target)
        elif isinstance(target, ast.Subscript):
            self._element(target, reads=True, writes=True)
        self._operand(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._operand(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, tuple(_REFUSED)):
            raise self.body.error(node, f"{_REFUSED[type(node)]} cannot be in the body of a loop")
        super().generic_visit(node)

    # Expressions

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.arrays:
            raise self._whole(node)
        if node.id in self.result.parts and isinstance(node.ctx, ast.Load):
            self._note(self.result.parts[node.id], node, reads=True, writes=True)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        one = self._base(node) is node and not _is_part(node, self.arrays)
        self._element(node, reads=True, writes=not one)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id in self.arrays:
            if node.attr not in SHAPE_ATTRIBUTES:
                raise self._whole(node.value)
        elif self._is_part_of_array(node.value) and node.attr in SHAPE_ATTRIBUTES:
            self._operand(node.value)
        else:
            self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._operand(node.left)
        self._operand(node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._operand(node.operand)

    def visit_Compare(self, node: ast.Compare) -> None:
        for each in (node.left, *node.comparators):
            self._operand(each)

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_pure(node):
            function = node.func
            if isinstance(function, ast.Attribute) and self._is_part_of_array(function.value):
                self._operand(function.value)
            for argument in node.args:
                if isinstance(argument, ast.Name) and argument.id in self.arrays and _is_len(node):
                    continue
                self._operand(argument)
            for keyword in node.keywords:
                self._operand(keyword.value)
            return
        if isinstance(node.func, ast.Attribute) and self._is_part_of_array(node.func.value):
            raise self.body.error(
                node,
                f"the method {node.func.attr} of a part of an array may change it in ways that are "
                "not followed; write a loop or use a function of numpy",
            )
        self.generic_visit(node)

    # What places do

    def _value(self, node: ast.expr, names: list[ast.Name]) -> None:
        """The right side of an assignment: a part of an array that a name is given is not read by
        that."""
        if names and self._is_part_of_array(node):
            inner = node if isinstance(node, ast.Subscript) else None
            for each in subscript_list(inner) if inner is not None else []:
                self._subscript(each)
            return
        self._operand(node)

    def _target(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            self._element(target, reads=False, writes=True)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._target(each, value)
        elif isinstance(target, ast.Starred | ast.Attribute):
            raise self.body.error(target, f"{ast.unparse(target)} cannot be assigned to in a loop")
        elif isinstance(target, ast.Name) and target.id in self.arrays:
            raise self.body.error(target, f"{target.id} is an array of the loop; do not rebind it")

    def _operand(self, node: ast.expr) -> None:
        """An expression that is only read."""
        if isinstance(node, ast.Subscript) and self._base(node) is not None:
            self._element(node, reads=True, writes=False)
        elif isinstance(node, ast.Name) and node.id in self.result.parts:
            self._note(self.result.parts[node.id], node, reads=True, writes=False)
        else:
            self.visit(node)

    def _element(self, node: ast.Subscript, *, reads: bool, writes: bool) -> None:
        """A subscripted expression: of an array, of a part of one, or of something else."""
        for each in subscript_list(node):
            self._subscript(each)
        base = self._base(node)
        if base is None:
            inner = node.value
            if isinstance(inner, ast.Subscript) and self._base(inner) is not None:
                self._element(inner, reads=reads, writes=writes)
            else:
                self.visit(inner)
            return
        self._note(base, node, reads=reads, writes=writes)

    def _base(self, node: ast.Subscript) -> ast.Subscript | None:
        """The subscripted array: of `A[i]` itself, of `a[k]` the part of A that `a` names."""
        if not isinstance(node.value, ast.Name):
            return None
        if node.value.id in self.arrays:
            return node
        return self.result.parts.get(node.value.id)

    def _is_part_of_array(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.result.parts
        return isinstance(node, ast.Subscript) and _is_part(node, self.arrays)

    def _subscript(self, node: ast.expr) -> None:
        if isinstance(node, ast.Slice):
            for part in (node.lower, node.upper, node.step):
                if part is not None:
                    self._operand(part)
        else:
            self._operand(node)

    def _note(self, base: ast.Subscript, at: ast.expr, *, reads: bool, writes: bool) -> None:
        assert isinstance(base.value, ast.Name)
        name = base.value.id
        classes = tuple(self.result.facts.classify(each) for each in subscript_list(base))
        known = self.arrays[name]
        if known is not None and len(classes) > known:
            raise self.body.error(
                at,
                f"{name} has {known} dims, and {ast.unparse(base)} has {len(classes)} subscripts",
            )
        for each, written in zip(classes, subscript_list(base), strict=True):
            if getattr(each, "number", 0) < 0:
                raise self.body.error(
                    at, f"the subscript {ast.unparse(written)} of {name} is negative; subscripts "
                    "count from 0 and do not wrap"
                )  # fmt: skip
        self.result.found.append(ArrayReference(name, classes, reads, writes, at.lineno))

    def _is_pure(self, node: ast.Call) -> bool:
        function = node.func
        if any(keyword.arg == "out" for keyword in node.keywords):
            return False
        if isinstance(function, ast.Attribute) and self._is_part_of_array(function.value):
            return function.attr in PURE_METHODS and len(node.args) <= 1
        name = self.known_function(function)
        if name.startswith("math."):
            return True
        if name in PURE_BUILTINS or ast.unparse(function) in self.body.special:
            return True
        return len(node.args) <= PURE_FUNCTIONS.get(name.removeprefix("numpy."), -1)

    def known_function(self, node: ast.expr) -> str:
        """`numpy.sqrt` for `np.sqrt`; the name itself for a builtin; '' for anything else."""
        free = self.body.free
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = free.modules.get(node.value.id, "")
            return f"{module}.{node.attr}" if module else ""
        if isinstance(node, ast.Name) and node.id not in self.result.facts.bound:
            return free.modules.get(node.id, "" if node.id in free.helpers else node.id)
        return ""

    def _whole(self, node: ast.Name) -> Exception:
        return self.body.error(
            node,
            f"{node.id} is used as a whole; only its elements and parts can be followed, as in "
            f"{node.id}[i] or {node.id}[:, i]",
        )


_REFUSED: Mapping[type, str] = {
    ast.FunctionDef: "a function",
    ast.AsyncFunctionDef: "a function",
    ast.ClassDef: "a class",
    ast.Lambda: "a lambda",
    ast.Delete: "del",
    ast.Try: "try",
    ast.With: "with",
    ast.Import: "an import",
    ast.ImportFrom: "an import",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Await: "await",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator",
    ast.NamedExpr: "an assignment within an expression",
    ast.Raise: "raise",
    ast.Starred: "a starred expression",
    ast.JoinedStr: "a text",
}


def _is_len(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "len"


def written_arrays(references: Collection[ArrayReference]) -> list[str]:
    """The arrays that some reference writes, in the order of the first one."""
    return list(dict.fromkeys(each.array for each in references if each.writes))


def index_dims(references: Collection[ArrayReference], array: str) -> list[int]:
    """The dims of an array that some reference subscripts with anything but all of it."""
    mine = [each for each in references if each.array == array]
    width = max((len(each.subscripts) for each in mine), default=0)
    return [
        dim
        for dim in range(width)
        if any(not isinstance(each.subscript(dim), Whole) for each in mine)
    ]
