"""Views: operators that rename elements. Nearly all share the storage of their input.

Those that take a piece of a tensor are in slice.py, those that put pieces together in join.py.
"""

from __future__ import annotations

import math
from typing import Any

from apportion.describe.descriptions import PartLocation, describe, unsplit
from apportion.describe.errors import IllegalCut, Undescribed
from apportion.describe.interval import Affine
from apportion.describe.language import ALL, Output, axes, axis, f, opaque


def _size(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
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


@describe(
    *("aten.view.default", "aten._unsafe_view", "aten.reshape"),
    local=_size,
    alias=True,
    reshape=True,
)
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
            _divide_outside(group, a, left, before, b, right, after, extents)
            return
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


def _divide_outside(
    group: int,
    a: tuple[int, ...],
    left: list[int],
    before: list[Any],
    b: tuple[int, ...],
    right: list[int],
    after: list[tuple[Affine, ...]],
    extents: dict[str, int],
) -> None:
    """Axes for a group without common refinement: [4, 9] and [6, 6] still have two halves."""
    outer = math.gcd(a[left[0]], b[right[0]])
    if outer == 1:
        raise Undescribed("a view whose dimensions have no common factors")
    shared, inner = axis(f"g{group}_0"), axis(f"g{group}_1")
    before[left[0]] = (shared, ALL(a[left[0]] // outer))
    before[left[0] + 1 : left[-1] + 1] = [slice(None)] * (left[-1] - left[0])
    after[right[0]] = (shared, inner)
    extents.update({f"g{group}_0": outer, f"g{group}_1": b[right[0]] // outer})
    for k, d in enumerate(right[1:], start=2):
        after[d] = (axis(f"g{group}_{k}"),)
        extents[f"g{group}_{k}"] = b[d]


@describe("aten.expand", local=_size, alias=True)
def expand(x: Any, size: Any) -> Any:
    return lambda *i: f("expand", x.at(i))


@describe("aten._conj", "aten._neg_view", alias=True)
def lazy(x: Any) -> Any:
    return lambda *i: f("lazily", x[i])


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


@describe("aten.flip")
def flip(x: Any, dims: Any) -> Any:
    gone = {d % x.ndim for d in dims} if x.ndim else set()
    return lambda *i: x[tuple(x.shape[d] - 1 - a if d in gone else a for d, a in enumerate(i))]


@describe("aten.rot90")
def rot90(x: Any, k: Any, dims: Any) -> Any:
    a, b = (d % x.ndim for d in dims)
    rows, columns = x.shape[a] - 1, x.shape[b] - 1

    def output(*i: Any) -> Any:
        turned = {
            0: (i[a], i[b]),
            1: (i[b], columns - i[a]),
            2: (rows - i[a], columns - i[b]),
            3: (rows - i[b], i[a]),
        }[k % 4]
        index = list(i)
        index[a], index[b] = turned
        return x[tuple(index)]

    return output


@describe("aten.roll")
def roll(x: Any, shifts: Any, dims: Any) -> Any:
    """A part along a rolled dimension would read its end and its beginning: no box."""
    if math.prod(x.shape) == 0:
        raise Undescribed("a result without elements")
    if not dims and shifts[0] % math.prod(x.shape):
        raise Undescribed("a roll over all elements in a row")
    moved = [d % x.ndim for d, n in zip(dims, shifts, strict=False) if n % x.shape[d]]

    def output(*i: Any) -> Any:
        source = x[tuple(slice(None) if d in moved else a for d, a in enumerate(i))]
        return opaque(source)[tuple(i[d] for d in moved)] if moved else source

    return output


def _repeat_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    (shape,), (source, *_) = local.outputs, local.inputs
    extents = (*[1] * (len(shape) - len(source)), *source)
    return (args[0], tuple(n // m for n, m in zip(shape, extents, strict=True)))


@describe("aten.repeat", local=_repeat_local)
def repeat(x: Any, repeats: Any, *, out: Any) -> Any:
    if math.prod(out[0]) == 0:
        raise Undescribed("a result without elements")
    new = len(repeats) - x.ndim
    i = axes("i", len(repeats))
    dims = [(axis(f"p{d}"), i[d]) if d >= new else axis(f"p{d}") for d in range(len(repeats))]
    extents = {f"p{d}": n for d, n in enumerate(repeats)}
    return Output.of(dims, f("repeat", x[i[new:]]), **extents)


@describe("aten.pixel_shuffle")
def pixel_shuffle(x: Any, factor: Any, *, out: Any) -> Any:
    *_, c, height, width = out[0]
    _require_shape(x.shape[-3:], (c * factor * factor, height // factor, width // factor))
    lead = axes("i", x.ndim - 3)
    c, h, w, a, b = map(axis, "chwab")
    return Output.of([*lead, c, (h, a), (w, b)], x[(*lead, (c, a, b), h, w)], a=factor, b=factor)


@describe("aten.pixel_unshuffle")
def pixel_unshuffle(x: Any, factor: Any, *, out: Any) -> Any:
    *_, channels, height, width = x.shape
    _require_shape(out[0][-3:], (channels * factor * factor, height // factor, width // factor))
    lead = axes("i", x.ndim - 3)
    c, h, w, a, b = map(axis, "chwab")
    return Output.of([*lead, (c, a, b), h, w], x[(*lead, c, (h, a), (w, b))], a=factor, b=factor)


def _require_shape(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise Undescribed("the pixels of a block belong together")


def _shuffle_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    if "g" not in local.ranges:
        raise IllegalCut("aten.channel_shuffle: a part's groups are not contiguous")
    low, high = local.ranges["g"]
    return (args[0], high - low)


@describe("aten.channel_shuffle", "aten.native_channel_shuffle", local=_shuffle_local)
def channel_shuffle(x: Any, groups: Any) -> Any:
    n, *rest = axes("i", x.ndim - 1)
    g, c = axis("g"), axis("c")
    return Output.of([n, (c, g), *rest], x[(n, (g, c), *rest)], g=groups)


@describe("aten.view_as_real", alias=True)
def view_as_real(x: Any) -> Any:
    return lambda *i: f("part", i[-1], x[i[:-1]])


@describe("aten.view_as_complex", alias=True)
def view_as_complex(x: Any) -> Any:
    return lambda *i: f("complex", x[(*i, slice(None))])


@describe("aten.view.dtype", alias=True)
def view_dtype(x: Any, dtype: Any, *, out: Any) -> Any:
    """Other bits of the same bytes: one element becomes several, or several one."""
    if out[0] == x.shape:
        return lambda *i: f("bits", x[i])
    if math.prod(out[0]) == 0:
        raise Undescribed("a result without elements")
    *rest, last = axes("i", x.ndim)
    if out[0][-1] > x.shape[-1]:
        k, several = axis("k"), out[0][-1] // x.shape[-1]
        return Output.of([*rest, (last, k)], f("bits", k, x[(*rest, last)]), k=several)
    several = x.shape[-1] // out[0][-1]
    return Output.of([*rest, last], f("bits", x[(*rest, (last, ALL(several)))]))


@describe(
    "aten.alias", "aten.detach", "aten.alias_copy", "aten.detach_copy", "aten.lift_fresh_copy"
)
def same(x: Any) -> Any:
    return lambda *i: x[i]


_MEMORY = "it addresses memory, not elements"
unsplit("aten.as_strided", "aten.as_strided_scatter", why=_MEMORY)
unsplit("aten.repeat_interleave.Tensor", why="the result's shape depends on data")


@describe("aten.resize", local=_size)
def resize(x: Any, size: Any, *, out: Any) -> Any:
    if x.shape != out[0]:
        raise Undescribed(_MEMORY)
    return lambda *i: x[i]


@describe("aten.resize_as")
def resize_as(x: Any, like: Any) -> Any:
    if x.shape != like.shape:
        raise Undescribed(_MEMORY)
    return lambda *i: f("like", x[i], like[i])
