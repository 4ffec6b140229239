"""The text of a loop's kernel: the body for all elements of a tile, on the parts of arrays at hand.

Part of the room loops. A LoopBody and, for each array, how its parts are stored come in; out goes
the text of a Python module with one function, which compile_kernel.py compiles.

The body stays as it is, inside a loop over elements. What changes: subscripts of arrays are those
of the part at hand (the storage may have another order of dims and begins at an origin), `return x`
puts x in the place of the element's value, `loops.accumulate` adds to a number, and subscripts that
are not known beforehand are checked against the array's extents.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field

import numpy as np

from apportion.loops.kernel_arrays import KERNEL_PREFIX, KernelArray, KernelLayout, mask_name
from apportion.loops.loop_body import FreeNames, LoopBody, LoopError
from apportion.loops.references import BodyReferences, subscript_list
from apportion.loops.subscripts import Fixed, Index
from apportion.loops.vector_statements import TOTAL, TURN, scalar_statements

OWN = KERNEL_PREFIX
REDUCTIONS = {"sum": "{0} + {1}", "max": "max({0}, {1})", "min": "min({0}, {1})"}
LONG_LOOP = 4  # turns, from which on a loop's length is an argument
NEUTRAL = {"sum": 0.0, "max": -np.inf, "min": np.inf}


@dataclass(frozen=True)
class KernelText:
    """The module's text, for each of its lines the line of the body that it comes from (or 0), the
    names of the kernel's arguments in their order, and for each code of a fault the array and the
    line that it is about. `draws`: the body draws random numbers; `lengths` are those of loops."""

    text: str
    lines: tuple[int, ...]
    arguments: tuple[str, ...]
    accumulators: tuple[tuple[str, str], ...]
    faults: tuple[tuple[str, int], ...]
    draws: bool
    lengths: tuple[int, ...] = ()


def kernel_text(body: LoopBody, references: BodyReferences, layout: KernelLayout) -> KernelText:
    """The text of a loop's kernel; LoopError if the body has something in it that has no meaning
    there."""
    _check_names(body)
    writer = _KernelWriter(body, references, layout)
    statements = writer.body()
    arguments = _arguments(body, layout, writer)
    before = [
        *preamble(body.free),
        *writer.functions,
        f"def {OWN}tile({', '.join(arguments)}):",
        *(f"    {line}" for line in writer.opening()),
        f"    for {OWN}e in range({OWN}begin, {OWN}end):",
        *(f"        {line}" for line in element_lines(body, layout, writer.draws)),
    ]
    lines = [(line, 0) for text in before for line in text.splitlines()]
    lines += written_lines(statements, 8, body.first_line)
    lines += [(f"    {line}", 0) for line in writer.closing()]
    return KernelText(
        "\n".join(text for text, _ in lines) + "\n",
        tuple(number for _, number in lines),
        tuple(arguments),
        tuple(writer.accumulators.items()),
        tuple(writer.faults),
        writer.draws,
        tuple(writer.lengths),
    )


def _check_names(body: LoopBody) -> None:
    for node in ast.walk(body.tree):
        if isinstance(node, ast.Name) and node.id.startswith(OWN):
            raise body.error(
                node, f"names that begin with {OWN} are taken; call {node.id} otherwise"
            )


def _arguments(body: LoopBody, layout: KernelLayout, writer: _KernelWriter) -> list[str]:
    found = [f"{OWN}begin", f"{OWN}end"]
    found += [f"{OWN}k{dim}" for dim in range(layout.dims)]
    found += [f"{OWN}f{k}" for k in range(layout.fields)]
    if layout.ragged:
        found += [f"{OWN}starts", *(f"{OWN}r{k}" for k in range(layout.ragged))]
    for name in body.parameters:
        found += layout.arrays[name].arguments() if name in layout.arrays else [name]
    found += [name for name, value in body.free.constants.items() if isinstance(value, np.ndarray)]
    found += [length_name(length) for length in writer.lengths]
    if writer.draws:
        found += [f"{OWN}numbers", f"{OWN}seed", f"{OWN}random"]
    return [*found, f"{OWN}sums", f"{OWN}fault"]


def element_lines(body: LoopBody, layout: KernelLayout, draws: bool) -> list[str]:
    """What the key and the value of an element are."""
    keys = ", ".join(f"{OWN}k{dim}[{OWN}e]" for dim in range(layout.dims))
    parts = [f"{OWN}f{k}[{OWN}e]" for k in range(layout.fields)]
    low, high = f"{OWN}starts[{OWN}e]", f"{OWN}starts[{OWN}e + 1]"
    parts += [f"{OWN}r{k}[{low}:{high}]" for k in range(layout.ragged)]
    found = [f"{body.key} = ({keys})" if layout.dims > 1 else f"{body.key} = {keys}"]
    if parts:
        value = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
        found.append(f"{body.value} = {value}")
    if draws:
        found.append(f"{OWN}random[0] = {OWN}mix({OWN}seed, {OWN}numbers[{OWN}e])")
    return found


def preamble(free: FreeNames) -> list[str]:
    """Imports, constants and helper functions."""
    known: dict[str, str] = {}
    _add_free(free, known)
    return [
        "import math",
        f"import numpy as {OWN}np",
        f"from apportion.loops.kernel_parts import at as {OWN}at, find as {OWN}find",
        f"from apportion.loops.kernel_parts import emit as {OWN}emit",
        f"from apportion.loops.kernel_parts import mix as {OWN}mix, uniform as {OWN}uniform",
        f"from apportion.loops.kernel_parts import compiled_helper as {OWN}helper",
        f"from apportion.loops.kernel_parts import compiled_sum as {OWN}sum",
        *known.values(),
    ]


def _add_free(free: FreeNames, known: dict[str, str]) -> None:
    for name, module in free.modules.items():
        parent, _, member = module.rpartition(".")
        text = (
            f"from {parent} import {member} as {name}" if parent else f"import {module} as {name}"
        )
        _add_text(known, name, text)
    for name, value in free.constants.items():
        if not isinstance(value, np.ndarray):
            _add_text(known, name, f"{name} = {_literal(value)}")
    for name, helper in free.helpers.items():
        if any(isinstance(value, np.ndarray) for value in helper.free.constants.values()):
            raise LoopError(f"{name} uses an array from outside; pass it as an argument")
        _add_free(helper.free, known)
        text = f"@{OWN}helper\n{helper.text}"
        _add_text(known, name, text if name == helper.name else f"{text}\n{name} = {helper.name}")


def _add_text(known: dict[str, str], name: str, text: str) -> None:
    if known.get(name, text) != text:
        raise LoopError(f"{name} means two things in the functions of a loop; rename one of them")
    known[name] = text


def _literal(value: object) -> str:
    if isinstance(value, np.generic):
        return f"{OWN}np.{value.dtype.name}({value.item()!r})"
    return repr(value).replace("inf", "math.inf").replace("nan", "math.nan")


def written_lines(statements: list[ast.stmt], columns: int, line: int) -> list[tuple[str, int]]:
    """The text of statements, each line with that of the body that it comes from; statements that
    were added are on the line of the one before."""
    found: list[tuple[str, int]] = []
    space = " " * columns
    for node in statements:
        line = getattr(node, "lineno", line)
        inner = columns + 4
        if isinstance(node, ast.If):
            found.append((f"{space}if {ast.unparse(node.test)}:", line))
            found += written_lines(node.body, inner, line)
            if node.orelse:
                found += [(f"{space}else:", line), *written_lines(node.orelse, inner, line)]
        elif isinstance(node, ast.For):
            head = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
            found += [(space + head, line), *written_lines(node.body, inner, line)]
            if node.orelse:
                found += [(f"{space}else:", line), *written_lines(node.orelse, inner, line)]
        elif isinstance(node, ast.While):
            found.append((f"{space}while {ast.unparse(node.test)}:", line))
            found += written_lines(node.body, inner, line)
        else:
            found.append((space + ast.unparse(ast.fix_missing_locations(node)), line))
    return found


@dataclass
class _KernelWriter(ast.NodeTransformer):
    """Rewrites a body."""

    source: LoopBody
    references: BodyReferences
    layout: KernelLayout
    accumulators: dict[str, str] = field(default_factory=dict)
    faults: list[tuple[str, int]] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    draws: bool = False
    lengths: dict[int, None] = field(default_factory=dict)  # of loops, in their order
    depth: int = 0  # loops around the statement
    masks: list[ast.stmt] = field(default_factory=list)  # that follow the statement

    def body(self) -> list[ast.stmt]:
        """The statements of the body, rewritten."""
        if not self.layout.turned:
            return self._block(copy.deepcopy(self.source.tree.body))
        arrays, value = self.layout.arrays, self.source.value
        numbers = {name for name in self.layout.numbers if name not in arrays}
        if self.layout.fields == 1 and not self.layout.ragged:
            numbers.add(value)
        return self._block(
            scalar_statements(self.source, self.references, self.layout, frozenset(numbers))
        )

    def opening(self) -> list[str]:
        return [f"{OWN}s{k} = {OWN}sums[{k}]" for k in range(len(self.accumulators))]

    def closing(self) -> list[str]:
        return [f"{OWN}sums[{k}] = {OWN}s{k}" for k in range(len(self.accumulators))]

    # Statements

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            outer, self.masks = self.masks, []
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made]
            found += self.masks
            self.masks = outer
        return found or [ast.Pass()]

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self.visit(node.test)
        node.body = self._block(node.body)
        node.orelse = self._block(node.orelse) if node.orelse else []
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        node.iter = self._range(node.iter) or self.visit(node.iter)
        self.depth += 1
        node.body = self._block(node.body)
        self.depth -= 1
        node.orelse = self._block(node.orelse) if node.orelse else []
        return node

    def _range(self, node: ast.expr) -> ast.expr | None:
        """`range(16)` with the number as an argument of the kernel; None if it is nothing like
        that. A loop whose length the compiler knows it takes apart instead of making vectors of it,
        which is half as fast or less."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return None
        if node.func.id != "range" or len(node.args) != 1:
            return None
        last = self.visit(node.args[0])
        length = last.value if isinstance(last, ast.Constant) else None
        if isinstance(last, ast.Name) and last.id not in self.references.facts.bound:
            length = self.references.facts.constants.get(last.id)
        if isinstance(last, ast.Subscript) and isinstance(last.value, ast.Tuple):  # of a shape
            at = last.slice.value if isinstance(last.slice, ast.Constant) else None
            part = last.value.elts[at] if isinstance(at, int) else None
            length = part.value if isinstance(part, ast.Constant) else None
        if type(length) is not int or length < LONG_LOOP:
            return ast.Call(node.func, [last], [])
        return ast.Call(node.func, [ast.Name(self._length(length), ast.Load())], [])

    def _length(self, length: int) -> str:
        self.lengths[length] = None
        return length_name(length)

    def visit_While(self, node: ast.While) -> ast.AST:
        node.test = self.visit(node.test)
        self.depth += 1
        node.body = self._block(node.body)
        self.depth -= 1
        return node

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        if self.depth:
            raise self.source.error(node, "return cannot stand within a loop here; use a flag")
        leave: list[ast.stmt] = [ast.Continue()]
        if node.value is None or (
            isinstance(node.value, ast.Constant) and node.value.value is None
        ):
            return leave
        if self.layout.fields != 1 or self.layout.ragged:
            raise self.source.error(
                node, "what a body returns takes the place of the element's value, and these "
                "elements do not have one value each"
            )  # fmt: skip
        target = _parsed(f"{OWN}f0[{OWN}e]")
        assert isinstance(target, ast.Subscript)
        target.ctx = ast.Store()
        return [ast.Assign([target], self.visit(node.value)), *leave]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id in self.references.parts:
                self._name_mask(target.id)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if isinstance(node.target, ast.Name) and node.target.id in self.references.parts:
            self._mask(self.references.parts[node.target.id])
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Constant):
            return ast.Pass()
        if isinstance(call, ast.Call) and self._special(call.func) == "accumulate":
            return self._accumulate(call)
        return self.generic_visit(node)

    def _accumulate(self, call: ast.Call) -> ast.stmt:
        texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
        names = [each for each in texts if isinstance(each, str)]
        right = len(call.args) in (2, 3) and len(names) == len(call.args) - 1
        how = names[1] if right and len(names) == 2 else "sum"
        if not right or call.keywords or how not in REDUCTIONS:
            raise self.source.error(
                call, f"write loops.accumulate(\"name\", number) or add one of "
                f"{', '.join(REDUCTIONS)} in quotes"
            )  # fmt: skip
        if self.accumulators.setdefault(names[0], how) != how:
            raise self.source.error(call, f"{names[0]} is accumulated in two ways")
        mine = f"{OWN}s{list(self.accumulators).index(names[0])}"
        text = REDUCTIONS[how].format(mine, f"{OWN}x")
        assign = ast.parse(f"{mine} = {text}").body[0]
        made = _with_value(assign, f"{OWN}x", self.visit(call.args[1]))
        assert isinstance(made, ast.stmt)
        return made

    # Expressions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == TOTAL:
            return self._total(node)
        special = self._special(node.func)
        if special == "uniform":
            self.draws = True
            return _parsed(f"{OWN}uniform({OWN}random)")
        if special:
            raise self.source.error(node, f"loops.{special} has to be a statement of its own")
        if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
            array = self._array(node.args[0])
            if array is not None:
                return ast.Constant(array.shape[0])
        for argument in node.args:
            if isinstance(argument, ast.Name) and argument.id in self.references.parts:
                self._mask(self.references.parts[argument.id])
            elif isinstance(argument, ast.Subscript) and self._array(argument.value) is not None:
                self._mask(argument)
        return self.generic_visit(node)

    def _total(self, node: ast.Call) -> ast.AST:
        """A sum over a vector: a function of its own, whose terms may be added in any order."""
        terms, length, whole = node.args
        assert isinstance(length, ast.Constant) and isinstance(whole, ast.Constant)
        terms = self.visit(terms)
        free = self.source.free
        known = {*free.modules, *free.constants, *free.helpers, TURN, f"{OWN}np"}
        known -= {name for name, value in free.constants.items() if isinstance(value, np.ndarray)}
        called = {each.func.id for each in ast.walk(terms)
                  if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)}  # fmt: skip
        names = dict.fromkeys(
            each.id for each in ast.walk(terms)
            if isinstance(each, ast.Name) and each.id not in known | called
        )  # fmt: skip
        last = self._length(int(str(length.value)))
        names[last] = None
        zero = "0" if whole.value else f"{OWN}np.float32(0)" if self.layout.single else "0.0"
        name = f"{OWN}sum{len(self.functions)}"
        text = ast.unparse(ast.fix_missing_locations(terms))
        self.functions.append(
            f"@{OWN}sum\ndef {name}({', '.join(names)}):\n    {OWN}t = {zero}\n"
            f"    for {TURN} in range({last}):\n        {OWN}t += {text}\n"
            f"    return {OWN}t"
        )
        return _parsed(f"{name}({', '.join(names)})")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        array = self._array(node.value)
        if array is None:
            return self.generic_visit(node)
        if node.attr == "shape":
            return ast.Tuple([ast.Constant(extent) for extent in array.shape], ast.Load())
        return ast.Constant(len(array.shape) if node.attr == "ndim" else int(np.prod(array.shape)))

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, float) and self.layout.single:
            return _parsed(f"{OWN}np.float32({_literal(node.value)})")
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        array = self._array(node.value)
        if array is None:
            if isinstance(node.ctx, ast.Store):
                self._mask_within(node)
            return self.generic_visit(node)
        if isinstance(node.ctx, ast.Store):
            self._mask(node)
        return self._stored(node, array, array.block)

    def _stored(self, node: ast.Subscript, array: KernelArray, block: str) -> ast.Subscript:
        """A subscript of an array as one of the part at hand."""
        written = subscript_list(node)
        written += [ast.Slice()] * (len(array.shape) - len(written))
        index = {dim: self._index(written[dim], array, dim, node) for dim in array.order}
        found = [index[dim] for dim in array.order if dim not in array.keyed]
        if array.keyed:
            row = ast.unparse(row_number(array, [index[dim] for dim in array.keyed]))
            slots, places = array.slots
            found = [_parsed(f"{OWN}find({slots}, {places}, {row})"), *found]
        inner = found[0] if len(found) == 1 else ast.Tuple(found, ast.Load())
        return ast.Subscript(ast.Name(block, ast.Load()), inner, node.ctx)

    def _index(
        self, written: ast.expr, array: KernelArray, dim: int, node: ast.Subscript
    ) -> ast.expr:
        """A subscript of one dim, checked where nothing is known of it, from the origin of the part
        at hand."""
        if isinstance(written, ast.Slice):
            return self.generic_visit(written)  # type: ignore[return-value]
        known = self.references.facts.classify(written)
        if isinstance(known, Fixed) and known.number >= array.shape[dim]:
            raise self.source.error(
                node, f"the subscript {known.number} is outside of dim {dim} of {array.name}, "
                f"which has {array.shape[dim]}"
            )  # fmt: skip
        index: ast.expr = self.visit(written)
        in_range = isinstance(known, Index | Fixed)
        in_range |= isinstance(written, ast.Name) and written.id == TURN
        if not in_range:
            index = self._checked(index, array, dim, node)
        if dim in array.origins:
            index = ast.BinOp(index, ast.Sub(), ast.Name(array.origin(dim), ast.Load()))
        return index

    def _checked(
        self, index: ast.expr, array: KernelArray, dim: int, node: ast.Subscript
    ) -> ast.expr:
        fault = (array.name, node.lineno)
        if fault not in self.faults:
            self.faults.append(fault)
        code = self.faults.index(fault)
        call = _parsed(f"{OWN}at({OWN}x, {array.shape[dim]}, {code}, {OWN}e, {OWN}fault)")
        made = _with_value(call, f"{OWN}x", index)
        assert isinstance(made, ast.expr)
        return made

    def _mask(self, node: ast.Subscript) -> None:
        """Note that elements are written, where that has to be known."""
        array = self._array(node.value)
        if array is None or not array.masked:
            return
        target = self._stored(copy.deepcopy(node), array, mask_name(array.name))
        target.ctx = ast.Store()
        self.masks.append(ast.Assign([target], ast.Constant(True)))

    def _name_mask(self, name: str) -> None:
        """A name stands for a part of an array: let another one stand for the same part of the
        mask."""
        part = self.references.parts[name]
        array = self._array(part.value)
        if array is not None and array.masked:
            mask = self._stored(copy.deepcopy(part), array, mask_name(array.name))
            target = ast.Name(f"{OWN}n_{name}", ast.Store())
            self.masks.append(ast.Assign([target], mask))

    def _mask_within(self, node: ast.Subscript) -> None:
        """Note that an element of a part of an array is written: `part[k] = x`. Not the whole part:
        others may write the rest of it at the same time."""
        inner = node.value
        mask: ast.expr | None = None
        if isinstance(inner, ast.Name) and inner.id in self.references.parts:
            array = self._array(self.references.parts[inner.id].value)
            mask = ast.Name(f"{OWN}n_{inner.id}", ast.Load())
        else:
            array = self._array(inner.value) if isinstance(inner, ast.Subscript) else None
            if array is not None and isinstance(inner, ast.Subscript):
                mask = self._stored(copy.deepcopy(inner), array, mask_name(array.name))
        if array is not None and array.masked and mask is not None:
            index = self.visit(copy.deepcopy(node.slice))
            target = ast.Subscript(mask, index, ast.Store())
            self.masks.append(ast.Assign([target], ast.Constant(True)))

    def _array(self, node: ast.expr) -> KernelArray | None:
        return self.layout.arrays.get(node.id) if isinstance(node, ast.Name) else None

    def _special(self, node: ast.expr) -> str:
        found = self.source.special.get(ast.unparse(node))
        return found.__name__ if found is not None else ""


def row_number(array: KernelArray, subscripts: list[ast.expr]) -> ast.expr:
    """The number of a row by the subscripts of the keyed dims."""
    found = subscripts[0]
    for dim, each in zip(array.keyed[1:], subscripts[1:], strict=True):
        scaled = ast.BinOp(found, ast.Mult(), ast.Constant(array.shape[dim]))
        found = ast.BinOp(scaled, ast.Add(), each)
    return ast.fix_missing_locations(found)


def length_name(length: int) -> str:
    """The argument of a kernel with the length of loops."""
    return f"{OWN}n{length}"


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _with_value(node: ast.AST, name: str, value: ast.AST) -> ast.AST:
    """A tree with another one in the place of a name."""

    class ReplaceName(ast.NodeTransformer):
        def visit_Name(self, found: ast.Name) -> ast.AST:
            return value if found.id == name else found

    return ReplaceName().visit(node)  # type: ignore[no-any-return]
