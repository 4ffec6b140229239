"""The slice of a body that computes which rows of an array it is going to touch.

Part of the room loops. A body and the arrays whose rows are wanted come in; out goes the text of a
function that runs over elements, keeps only the statements that subscripts depend on (with the
branches and loops around them), and notes the number of every row. Where a subscript depends on the
elements of an array, or on a random number, there is no such slice.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from apportion.loops.kernel_arrays import KERNEL_PREFIX as OWN
from apportion.loops.kernel_arrays import KernelArray, KernelLayout
from apportion.loops.kernel_text import (
    KernelText,
    element_lines,
    preamble,
    row_number,
    written_lines,
)
from apportion.loops.loop_body import LoopBody
from apportion.loops.references import BodyReferences, subscript_list


class _NoSlice(Exception):
    """A subscript depends on what is in an array."""


def index_slice(
    body: LoopBody, references: BodyReferences, layout: KernelLayout
) -> KernelText | None:
    """The text of the function that notes the rows of all keyed arrays of a layout; None if it
    cannot be written."""
    keyed = {name: array for name, array in layout.arrays.items() if array.keyed}
    slicer = _Slicer(body, references, layout, keyed)
    try:
        statements = slicer.settled()
    except _NoSlice:
        return None
    counts = [f"{OWN}n{k}" for k in range(len(keyed))]
    arguments = _arguments(body, layout, len(keyed))
    before = [
        *preamble(body.free),
        f"def {OWN}tile({', '.join(arguments)}):",
        *(f"    {count} = 0" for count in counts),
        f"    for {OWN}e in range({OWN}begin, {OWN}end):",
        *(f"        {line}" for line in element_lines(body, layout, False)),
    ]
    lines = [(line, 0) for text in before for line in text.splitlines()]
    lines += written_lines(statements, 8, body.first_line)
    lines += [(f"    {OWN}counts[{k}] = {count}", 0) for k, count in enumerate(counts)]
    return KernelText(
        "\n".join(text for text, _ in lines) + "\n",
        tuple(number for _, number in lines),
        tuple(arguments), (), (), False,
    )  # fmt: skip


def _arguments(body: LoopBody, layout: KernelLayout, keyed: int) -> list[str]:
    found = [f"{OWN}begin", f"{OWN}end"]
    found += [f"{OWN}k{dim}" for dim in range(layout.dims)]
    found += [f"{OWN}f{k}" for k in range(layout.fields)]
    if layout.ragged:
        found += [f"{OWN}starts", *(f"{OWN}r{k}" for k in range(layout.ragged))]
    found += [name for name in body.parameters if name not in layout.arrays]
    found += [name for name, value in body.free.constants.items() if isinstance(value, np.ndarray)]
    return [*found, *(f"{OWN}rows{k}" for k in range(keyed)), f"{OWN}counts"]


@dataclass
class _Slicer:
    source: LoopBody
    references: BodyReferences
    layout: KernelLayout
    keyed: Mapping[str, KernelArray]
    needed: set[str] = field(default_factory=set)

    def settled(self) -> list[ast.stmt]:
        """The slice, once the names that it needs do not grow any more."""
        while True:
            before = set(self.needed)
            found = self._block(copy.deepcopy(self.source.tree.body), 0)
            if self.needed == before:
                return found or [ast.Pass()]

    def _block(self, statements: list[ast.stmt], depth: int) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in statements:
            if isinstance(node, ast.If | ast.While | ast.For):
                found += self._compound(node, depth)
                continue
            found += self._notes(node)
            if isinstance(node, ast.Break | ast.Continue):
                found.append(node)
            elif isinstance(node, ast.Return):
                found.append(ast.copy_location(ast.Continue(), node))
            elif self._binds_needed(node):
                self._need(node.value)  # type: ignore[attr-defined]
                found.append(node)
        return found

    def _compound(self, node: ast.If | ast.While | ast.For, depth: int) -> list[ast.stmt]:
        head = node.iter if isinstance(node, ast.For) else node.test
        found = self._notes(head)
        node.body = self._block(node.body, depth + 1)
        node.orelse = self._block(node.orelse, depth + 1)
        binds = isinstance(node, ast.For) and _names(node.target) & self.needed
        if not node.body and not node.orelse and not binds:
            return found
        if found and isinstance(node, ast.While):
            raise _NoSlice
        self._need(head)
        node.body = node.body or [ast.Pass()]
        return [*found, node]

    def _binds_needed(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            return any(_names(target) & self.needed for target in node.targets)
        if isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            return bool(_names(node.target) & self.needed)
        return False

    def _need(self, node: ast.expr) -> None:
        """An expression has to be computed: refuse it if that takes elements of arrays."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                if each.id in self.references.parts or each.id in self.layout.arrays:
                    raise _NoSlice
                self.needed.add(each.id)
            elif isinstance(each, ast.Call) and ast.unparse(each.func) in self.source.special:
                raise _NoSlice

    def _notes(self, node: ast.AST) -> list[ast.stmt]:
        """Statements that note the rows of keyed arrays that a statement touches."""
        found = []
        for each in ast.walk(node):
            base = each
            if isinstance(each, ast.Name):
                base = self.references.parts.get(each.id, each)
            if not isinstance(base, ast.Subscript) or not isinstance(base.value, ast.Name):
                continue
            array = self.keyed.get(base.value.id)
            if array is None:
                continue
            found.append(self._note(base, array))
        return found

    def _note(self, node: ast.Subscript, array: KernelArray) -> ast.stmt:
        written = subscript_list(node)
        for dim in array.keyed:
            self._need(written[dim])
        number = list(self.keyed).index(array.name)
        row = ast.unparse(row_number(array, [copy.deepcopy(written[dim]) for dim in array.keyed]))
        count, rows = f"{OWN}n{number}", f"{OWN}rows{number}"
        text = f"{count} = {OWN}emit({rows}, {count}, {row}, {array.rows})"
        return ast.copy_location(ast.parse(text).body[0], node)


def _names(node: ast.expr) -> set[str]:
    """The names that a target binds."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}
