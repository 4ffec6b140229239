"""Pieces of tensors: slices, diagonals and windows, and what puts a piece into a larger tensor."""

from __future__ import annotations

import math
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import ALL, Output, axes, axis, f, opaque


def _select_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], args[1], 0)


@describe("aten.select.int", local=_select_local, alias=True)
def select(x: Any, dim: Any, index: Any) -> Any:
    d, place = dim % x.ndim, index % x.shape[dim]
    return lambda *i: x[(*i[:d], place, *i[d:])]


def _slice_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], args[1], 0, local.inputs[0][args[1]], *args[4:])


@describe("aten.slice.Tensor", local=_slice_local, alias=True)
def slice_(x: Any, dim: Any, start: Any, end: Any, step: Any, *, out: Any) -> Any:
    _require_elements(out[0])
    d, n = dim % x.ndim, x.shape[dim]
    first = min(max(start + n if (start or 0) < 0 else start or 0, 0), n)
    return lambda *i: x[tuple(step * a + first if k == d else a for k, a in enumerate(i))]


def _require_elements(shape: tuple[int, ...]) -> None:
    if math.prod(shape) == 0:
        raise Undescribed("a result without elements")


def _split_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], local.outputs[0][args[2]], *args[2:])


@describe("aten.split.Tensor", local=_split_local, alias=True)
def split(x: Any, size: Any, dim: Any) -> Any:
    d, n = dim % x.ndim, x.shape[dim]
    size = min(size, n) or 1
    count = -(-n // size)
    if n % size or not n:
        return tuple(_piece(x, d, p) for p in range(max(count, 1)))

    def piece(p: int) -> Any:
        return lambda *i: f(
            f"piece {p}", x[tuple((ALL(count), a) if k == d else a for k, a in enumerate(i))]
        )

    return tuple(piece(p) for p in range(count))


@describe("aten.unbind", alias=True)
def unbind(x: Any, dim: Any) -> Any:
    d = dim % x.ndim

    def piece(p: int) -> Any:
        # All pieces read all of the dimension, so that they agree about what a part reads.
        return lambda *i: f(f"piece {p}", x[(*i[:d], ALL(x.shape[d]), *i[d:])])

    return tuple(piece(p) for p in range(x.shape[d]))


def _split_sizes_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], tuple(shape[args[2]] for shape in local.outputs), *args[2:])


@describe("aten.split_with_sizes", local=_split_sizes_local, alias=True)
def split_with_sizes(x: Any, sizes: Any, dim: Any) -> Any:
    if len(set(sizes)) == 1 and sizes[0]:
        return split(x, sizes[0], dim)
    return tuple(_piece(x, dim % x.ndim, p) for p in range(len(sizes)))


def _piece(x: Any, d: int, p: int) -> Any:
    """Piece p of a split into unequal pieces: not cut along the split dimension, whose axis is the
    piece's own."""
    i = list(axes("i", x.ndim))
    i[d] = axis(f"piece{p}")
    source = x[tuple(slice(None) if k == d else a for k, a in enumerate(i))]
    return Output.of(i, f(f"piece {p}", opaque(source)[i[d]]))


# Diagonals and windows


def _diagonal_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], 0, *args[2:])  # a part's region begins on the diagonal


@describe("aten.diagonal", local=_diagonal_local, alias=True)
def diagonal(x: Any, offset: Any, dim1: Any, dim2: Any, *, out: Any) -> Any:
    _require_elements(out[0])
    a, b = dim1 % x.ndim, dim2 % x.ndim

    def output(*i: Any) -> Any:
        rest = iter(i)
        places = {a: i[-1] + max(-offset, 0), b: i[-1] + max(offset, 0)}
        return x[tuple(places[d] if d in places else next(rest) for d in range(x.ndim))]

    return output


def _unfold_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (*args[:2], local.outputs[0][-1], *args[3:])


@describe("aten.unfold", local=_unfold_local, alias=True)
def unfold(x: Any, dim: Any, size: Any, step: Any, *, out: Any) -> Any:
    _require_elements(out[0])
    if not x.ndim:
        return lambda k: f("window", x[()], k)
    d = dim % x.ndim

    def output(*i: Any) -> Any:
        *rest, k = i
        return x[tuple(step * a + k if n == d else a for n, a in enumerate(rest))]

    return output


def _sizes_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (args[0], local.outputs[0], *args[2:])


@describe("aten.unfold_backward", local=_sizes_local)
def unfold_backward(grad: Any, sizes: Any, dim: Any, size: Any, step: Any) -> Any:
    if not sizes:
        raise Undescribed("a window of a number")
    d = dim % len(sizes)

    def output(*i: Any) -> Any:
        source = tuple(slice(None) if k == d else a for k, a in enumerate(i))
        return f("fold", i[d], grad[(*source, slice(None))])

    return output


# A piece in the place where it belongs. torch's own operators are not told where a part begins;
# ours, into which they are decomposed, take places outside of the part.


@describe("aten.slice_backward", local=_sizes_local)
def slice_backward(grad: Any, sizes: Any, dim: Any, start: Any, end: Any, step: Any) -> Any:
    return slice_place(grad, sizes, dim % grad.ndim, start, step)


@describe("aten.select_backward", local=_sizes_local)
def select_backward(grad: Any, sizes: Any, dim: Any, index: Any) -> Any:
    return select_place(grad, sizes, dim % (grad.ndim + 1), index)


def _place_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    source, _, dim, first, *rest = args
    return (source, local.outputs[0], dim, first - local.first(f"i{dim}"), *rest)


@describe("apportion.slice_place", local=_place_local)
def slice_place(source: Any, sizes: Any, dim: Any, start: Any, step: Any) -> Any:
    return lambda *i: f("place", i[dim] - start, step, _whole_along(source, i, dim))


@describe("apportion.select_place", local=_place_local)
def select_place(source: Any, sizes: Any, dim: Any, index: Any) -> Any:
    return lambda *i: f("place", i[dim] - index, source[(*i[:dim], *i[dim + 1 :])])


def _scatter_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, source, dim, first, *rest = args
    return (x, source, dim, first - local.first(f"i{dim}"), *rest)


@describe("apportion.slice_scatter", local=_scatter_local)
def slice_scatter(x: Any, source: Any, dim: Any, start: Any, step: Any) -> Any:
    return lambda *i: f("place", i[dim] - start, step, x[i], _whole_along(source, i, dim))


@describe("apportion.select_scatter", local=_scatter_local)
def select_scatter(x: Any, source: Any, dim: Any, index: Any) -> Any:
    return lambda *i: f("place", i[dim] - index, x[i], source[(*i[:dim], *i[dim + 1 :])])


def _whole_along(source: Any, i: Any, dim: int) -> Any:
    return source[tuple(slice(None) if k == dim else a for k, a in enumerate(i))]


def _diagonal_places(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    *given, dim1, dim2, row, column = args
    places = row - local.first(f"i{dim1}"), column - local.first(f"i{dim2}")
    return (*given, dim1, dim2, *places)


def _diagonal_sizes(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return _sizes_local(_diagonal_places(args, local), local)


@describe("apportion.diagonal_place", local=_diagonal_sizes)
def diagonal_place(source: Any, sizes: Any, dim1: Any, dim2: Any, row: Any, column: Any) -> Any:
    return lambda *i: f(
        "place", i[dim1] - row, i[dim2] - column, _diagonal_of(source, i, dim1, dim2)
    )


@describe("apportion.diagonal_scatter", local=_diagonal_places)
def diagonal_scatter(x: Any, source: Any, dim1: Any, dim2: Any, row: Any, column: Any) -> Any:
    return lambda *i: f(
        "place", i[dim1] - row, i[dim2] - column, x[i], _diagonal_of(source, i, dim1, dim2)
    )


def _diagonal_of(source: Any, i: Any, dim1: int, dim2: int) -> Any:
    rest = tuple(a for k, a in enumerate(i) if k not in (dim1, dim2))
    return source[(*rest, slice(None))]
