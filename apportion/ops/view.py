"""Views: operators that rename elements. Nearly all share the storage of their input."""

from __future__ import annotations

import math
from typing import Any

from apportion.formula import Undescribed
from apportion.interval import Affine
from apportion.tdl import ALL, Local, Output, axes, axis, describe, f, opaque


def _size(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], local.outputs[0], *args[2:])


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Groups of dimensions of two shapes with equal products, as short as they can be. Extents 1
    are left out."""
    groups = []
    left = [d for d, n in enumerate(a) if n != 1]
    right = [d for d, n in enumerate(b) if n != 1]
    while left or right:
        x, y = [left.pop(0)], [right.pop(0)]
        while (p := math.prod(a[d] for d in x)) != (q := math.prod(b[d] for d in y)):
            if p < q:
                x.append(left.pop(0))
            else:
                y.append(right.pop(0))
        groups.append((x, y))
    return groups


def _cuts(extents: list[int]) -> list[int]:
    products = [math.prod(extents[k:]) for k in range(len(extents))]
    return products


@describe("aten.view", "aten._unsafe_view", "aten.reshape", local=_size, alias=True, reshape=True)
def view(x: Any, size: Any, *rest: Any, out: Any) -> Any:
    """Dimensions that are merged or divided are products of common axes."""
    (shape,) = out
    if math.prod(shape) == 0:
        raise Undescribed("a view of an empty tensor")
    before: list[tuple[Affine, ...]] = [()] * x.ndim
    after: list[tuple[Affine, ...]] = [()] * len(shape)
    extents: dict[str, int] = {}
    for group, (left, right) in enumerate(_common(x.shape, shape)):
        _divide(group, x.shape, left, before, shape, right, after, extents)
    element = x[tuple(items or 0 for items in before)]
    return Output.of(
        [items or _one(d, extents) for d, items in enumerate(after)], element, **extents
    )


def _one(dim: int, extents: dict[str, int]) -> Affine:
    extents[f"one{dim}"] = 1
    return axis(f"one{dim}")


def _divide(
    group: int,
    a: tuple[int, ...],
    left: list[int],
    before: list[tuple[Affine, ...]],
    b: tuple[int, ...],
    right: list[int],
    after: list[tuple[Affine, ...]],
    extents: dict[str, int],
) -> None:
    """Axes for one group: the common refinement of both sides."""
    cuts = sorted({*_cuts([a[d] for d in left]), *_cuts([b[d] for d in right])})
    below, factors = 1, []
    for cut in cuts:
        if cut % below:
            raise Undescribed("a view whose dimensions have no common factors")
        factors.append(cut // below)
        below = cut
    factors.reverse()
    names = [axis(f"g{group}_{k}") for k in range(len(factors))]
    extents.update({f"g{group}_{k}": n for k, n in enumerate(factors)})
    for dims, shape, places in ((left, a, before), (right, b, after)):
        position = 0
        for d in dims:
            start, size = position, 1
            while size < shape[d]:
                size *= factors[position]
                position += 1
            places[d] = tuple(names[start:position])


@describe("aten.expand", local=_size, alias=True)
def expand(x: Any, size: Any) -> Any:
    return lambda *i: f("expand", x.at(i))


@describe("aten.t", alias=True)
def t(x: Any) -> Any:
    return (lambda i, j: x[j, i]) if x.ndim == 2 else (lambda *i: x[i])


@describe("aten.transpose.int", alias=True)
def transpose(x: Any, a: Any, b: Any) -> Any:
    order = list(range(x.ndim))
    if x.ndim:
        order[a], order[b] = order[b], order[a]
    return lambda *i: x[tuple(i[order[d]] for d in range(x.ndim))]


@describe("aten.permute", alias=True)
def permute(x: Any, dims: Any) -> Any:
    place = {d % x.ndim: k for k, d in enumerate(dims)}
    return lambda *i: x[tuple(i[place[d]] for d in range(x.ndim))]


@describe("aten.unsqueeze", alias=True)
def unsqueeze(x: Any, dim: Any) -> Any:
    new = dim % (x.ndim + 1)
    return lambda *i: x[tuple(axis for d, axis in enumerate(i) if d != new)]


@describe("aten.squeeze.dim", "aten.squeeze.dims", alias=True)
def squeeze(x: Any, dims: Any, *, out: Any) -> Any:
    listed = dims if isinstance(dims, tuple) else (dims,)
    gone = {d % x.ndim for d in listed if x.shape[d] == 1} if x.ndim else set()
    if x.ndim - len(gone) != len(out[0]):
        raise Undescribed("a part of extent 1 would be squeezed where the whole is not")

    def output(*i: Any) -> Any:
        names = iter(i)
        return x[tuple(0 if d in gone else next(names) for d in range(x.ndim))]

    return output


def _select_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], args[1], 0)


@describe("aten.select.int", local=_select_local, alias=True)
def select(x: Any, dim: Any, index: Any) -> Any:
    d, place = dim % x.ndim, index % x.shape[dim]
    return lambda *i: x[(*i[:d], place, *i[d:])]


def _slice_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], args[1], 0, local.inputs[0][args[1]], *args[4:])


@describe("aten.slice.Tensor", local=_slice_local, alias=True)
def slice_(x: Any, dim: Any, start: Any, end: Any, step: Any) -> Any:
    d, n = dim % x.ndim, x.shape[dim]
    first = min(max(start + n if (start or 0) < 0 else start or 0, 0), n)
    return lambda *i: x[tuple(step * a + first if k == d else a for k, a in enumerate(i))]


def _split_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], local.outputs[0][args[2]], *args[2:])


@describe("aten.split.Tensor", local=_split_local, alias=True)
def split(x: Any, size: Any, dim: Any) -> Any:
    d, n = dim % x.ndim, x.shape[dim]
    size = min(size, n) or 1
    count = -(-n // size)
    if n % size:
        whole = [opaque_dim(x, d, p) for p in range(count)]
        return tuple(whole)

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


def _split_sizes_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], tuple(shape[args[2]] for shape in local.outputs), *args[2:])


@describe("aten.split_with_sizes", local=_split_sizes_local, alias=True)
def split_with_sizes(x: Any, sizes: Any, dim: Any) -> Any:
    if len(set(sizes)) == 1:
        return split(x, sizes[0], dim)
    return tuple(opaque_dim(x, dim % x.ndim, p) for p in range(len(sizes)))


def opaque_dim(x: Any, d: int, p: int) -> Any:
    """Piece p of a split into unequal pieces: not cut along the split dimension, whose axis is the
    piece's own."""
    i = list(axes("i", x.ndim))
    i[d] = axis(f"piece{p}")
    source = x[tuple(slice(None) if k == d else a for k, a in enumerate(i))]
    return Output.of(i, f(f"piece {p}", opaque(source)[i[d]]))


@describe("aten.cat")
def cat(tensors: Any, dim: Any) -> Any:
    first = tensors[0]
    d = dim % first.ndim
    i = list(axes("i", first.ndim))
    if len({x.shape for x in tensors}) == 1:
        p = axis("p")
        chosen = f("pick", p, *(x[tuple(i)] for x in tensors))
        dims = [(p, a) if k == d else a for k, a in enumerate(i)]
        return Output.of(dims, chosen, p=len(tensors))
    if any(x.ndim != first.ndim for x in tensors):
        raise Undescribed("a concatenation of tensors of several ranks")
    slices = [x[tuple(slice(None) if k == d else a for k, a in enumerate(i))] for x in tensors]
    return Output.of(i, opaque(*slices)[i[d]])


@describe("aten.stack")
def stack(tensors: Any, dim: Any) -> Any:
    d = dim % (tensors[0].ndim + 1)

    def output(*i: Any) -> Any:
        inner = (*i[:d], *i[d + 1 :])
        return f("pick", i[d], *(x[inner] for x in tensors))

    return output


def _pad_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    x, widths, *rest = args
    dims = len(local.inputs[x.index])
    cut = [2 * (dims - 1 - dim) for tensor, dim in local.padded if tensor == x.index]
    own = tuple(0 if k - k % 2 in cut else width for k, width in enumerate(widths))
    return (x, own, *rest)


@describe("aten.constant_pad_nd", local=_pad_local)
def constant_pad_nd(x: Any, widths: Any, value: Any) -> Any:
    before = dict(zip(reversed(range(x.ndim)), widths[::2], strict=False))
    return lambda *i: x.padded(value)[tuple(a - before.get(d, 0) for d, a in enumerate(i))]


def _backward_size(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    return (args[0], local.outputs[0], *args[2:])


@describe("aten.slice_backward", local=_backward_size)
def slice_backward(grad: Any, sizes: Any, dim: Any, start: Any, end: Any, step: Any) -> Any:
    d = dim % grad.ndim

    def output(*i: Any) -> Any:
        source = grad[tuple(slice(None) if k == d else a for k, a in enumerate(i))]
        return f("place", i[d], source)

    return output


@describe("aten.select_backward", local=_backward_size)
def select_backward(grad: Any, sizes: Any, dim: Any, index: Any) -> Any:
    d = dim % (grad.ndim + 1)
    return lambda *i: f("place", i[d], grad[(*i[:d], *i[d + 1 :])])


@describe("aten.tril", "aten.triu")
def triangle(x: Any) -> Any:
    return lambda *i: f("triangle", i[-2] - i[-1], x[i])
