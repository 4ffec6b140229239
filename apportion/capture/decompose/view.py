"""Views without aliases and defaults, and pieces that have the place where they belong.

Rules of capture/decompose/.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from apportion import graph as g
from apportion.capture.decompose.base import DECOMPOSITIONS, NodeBuilder, rule
from apportion.capture.normalise import Node
from apportion.capture.trace import dtype_name

_COPIES = {
    f"aten.{name}_copy.{overload}": f"aten.{name}.{overload}"
    for name, overload in (
        *((name, "default") for name in ("as_strided", "diagonal", "expand", "permute")),
        *((name, "default") for name in ("split_with_sizes", "t", "unfold", "unsqueeze", "view")),
        *(("view", "dtype"), ("view_as_complex", "default"), ("view_as_real", "default")),
        *(("select", "int"), ("slice", "Tensor"), ("split", "Tensor")),
        *(("transpose", "int"), ("unbind", "int")),
    )
}
"""In a Graph, where nothing is written twice, a copy of a view is as good as the view."""

_RENAMED = _COPIES | {
    "aten.unsafe_split.Tensor": "aten.split.Tensor",
    "aten.unsafe_split_with_sizes.default": "aten.split_with_sizes.default",
}


def _rename(node: Node, make: NodeBuilder) -> list[Node]:
    return [replace(node, kind=_RENAMED[node.kind])]


DECOMPOSITIONS.update(dict.fromkeys(_RENAMED, _rename))


def _shape(arg: g.Arg, make: NodeBuilder) -> tuple[int, ...]:
    assert isinstance(arg, g.Ref)
    return make.types[arg.index][0]


@rule(
    *(f"aten.squeeze{copy}.{overload}"
      for copy in ("", "_copy") for overload in ("default", "dim", "dims")),
)  # fmt: skip
def _squeeze(node: Node, make: NodeBuilder) -> list[Node]:
    """A part of extent 1 must not lose a dimension that the whole keeps."""
    shape = _shape(node.args[0], make)
    given: Any = node.args[1] if len(node.args) > 1 else tuple(range(len(shape)))
    listed = given if isinstance(given, tuple) else (given,)
    ones = {d % len(shape) for d in listed if shape[d] == 1} if shape else set()
    if node.kind == "aten.squeeze.dim" and ones:
        return [node]
    return [replace(node, kind="aten.squeeze.dims", args=(node.args[0], tuple(sorted(ones))))]


@rule("aten.narrow_copy.default")
def _narrow(node: Node, make: NodeBuilder) -> list[Node]:
    x, dim, start, length = _arguments(node)
    start = _place(start, _shape(x, make)[dim])
    return [replace(node, kind="aten.slice.Tensor", args=(x, dim, start, start + length, 1))]


@rule("aten._conj.default")
def _conjugate(node: Node, make: NodeBuilder) -> list[Node]:
    """Of a number, as autograd asks for where a constant multiplies: another number."""
    (x,) = _arguments(node)
    if isinstance(x, g.Ref):
        return [node]
    kind = g.Dtype(dtype_name(make.types[node.results[0]][1]))
    return [replace(node, kind="aten.scalar_tensor.default", args=(x.conjugate(), kind))]


def _arguments(node: Node) -> Any:
    return node.args


def _place(start: int | None, extent: int) -> int:
    """Where a slice begins; None and negative numbers are as in Python."""
    first = start or 0
    return min(max(first + extent if first < 0 else first, 0), extent)


@rule("aten.roll.default")
def _roll(node: Node, make: NodeBuilder) -> list[Node]:
    """A shift by the whole extent is none, which a part could not tell."""
    x, shifts, dims = _arguments(node)
    shape = _shape(x, make)
    extents = [shape[d] for d in dims] if dims else [math.prod(shape)]
    own = tuple(n % m if m else 0 for n, m in zip(shifts, extents, strict=True))
    return [replace(node, args=(x, own, dims))]


_FEW = 8
"""Padding may be an eighth of what is padded."""


@rule("aten.slice_backward.default")
def _slice_backward(node: Node, make: NodeBuilder) -> list[Node]:
    """Padding, where most elements are the gradient's: then a part along the dimension reads only
    what it needs. Else the gradient in its place."""
    grad, sizes, dim, start, _, step = _arguments(node)
    d, extent = dim % len(sizes), sizes[dim]
    first, length = _place(start, extent), _shape(grad, make)[dim]
    if step == 1 and length * (_FEW + 1) >= extent * _FEW:
        widths = (*[0] * (2 * (len(sizes) - 1 - d)), first, extent - length - first)
        return [replace(node, kind="aten.constant_pad_nd.default", args=(grad, widths, 0))]
    return [replace(node, kind="apportion.slice_place", args=(grad, sizes, d, first, step))]


@rule("aten.select_backward.default")
def _select_backward(node: Node, make: NodeBuilder) -> list[Node]:
    grad, sizes, dim, index = _arguments(node)
    args = (grad, sizes, dim % len(sizes), index % sizes[dim])
    return [replace(node, kind="apportion.select_place", args=args)]


@rule("aten.slice_scatter.default")
def _slice_scatter(node: Node, make: NodeBuilder) -> list[Node]:
    x, source, dim, start, _, step = _arguments(node)
    shape = _shape(x, make)
    args = (x, source, dim % len(shape), _place(start, shape[dim]), step)
    return [replace(node, kind="apportion.slice_scatter", args=args)]


@rule("aten.select_scatter.default")
def _select_scatter(node: Node, make: NodeBuilder) -> list[Node]:
    x, source, dim, index = _arguments(node)
    shape = _shape(x, make)
    args = (x, source, dim % len(shape), index % shape[dim])
    return [replace(node, kind="apportion.select_scatter", args=args)]


@rule("aten.diagonal_backward.default")
def _diagonal_backward(node: Node, make: NodeBuilder) -> list[Node]:
    grad, sizes, *where = _arguments(node)
    args = (grad, sizes, *_diagonal(len(sizes), *where))
    return [replace(node, kind="apportion.diagonal_place", args=args)]


@rule("aten.diag_embed.default")
def _diag_embed(node: Node, make: NodeBuilder) -> list[Node]:
    x, *where = _arguments(node)
    sizes = make.types[node.results[0]][0]
    args = (x, sizes, *_diagonal(len(sizes), *where))
    return [replace(node, kind="apportion.diagonal_place", args=args)]


@rule("aten.diagonal_scatter.default")
def _diagonal_scatter(node: Node, make: NodeBuilder) -> list[Node]:
    x, source, *where = _arguments(node)
    args = (x, source, *_diagonal(len(_shape(x, make)), *where))
    return [replace(node, kind="apportion.diagonal_scatter", args=args)]


def _diagonal(rank: int, offset: int, dim1: int, dim2: int) -> tuple[int, ...]:
    """The two dims, and the row and column where a diagonal begins."""
    return dim1 % rank, dim2 % rank, max(-offset, 0), max(offset, 0)
