"""What operators on windows share: which elements a window reads, and how a part reads them.

    x[s*i + d*k - p]       forwards: tap k of window i, with stride s, dilation d, padding p
    grad[(y + p - d*k)/s]  backwards: the window i that reads y with tap k, where there is one

A part that cuts i or y or k gets the padding around its elements as elements. Forwards it then asks
for none; backwards its padding says where the first window that it gets lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation
from apportion.describe.interval import Affine
from apportion.describe.language import (
    ALL,
    Operand,
    Output,
    Quotient,
    axes,
    axis,
    floor,
    opaque,
    over,
    reduce,
)

Ints = tuple[int, ...]


def each(setting: Sequence[int], rank: int) -> Ints:
    """One number per spatial dimension; torch takes one for all."""
    return tuple(setting) * rank if len(setting) == 1 else tuple(setting)


def reads(
    positions: Sequence[Affine], taps: Sequence[Affine], kernel: Ints, *settings: Sequence[int]
) -> list[Affine]:
    """s*i + d*k - p for each dimension; settings are stride, padding, dilation. A kernel of one tap
    has k = 0, so that i may be the index."""
    stride, padding, dilation = (each(setting, len(kernel)) for setting in settings)
    return [
        i * s - p if size == 1 else i * s + k * d - p
        for i, k, size, s, p, d in zip(
            positions, taps, kernel, stride, padding, dilation, strict=True
        )
    ]


def read_by(
    places: Sequence[Affine], taps: Sequence[Affine], kernel: Ints, *settings: Sequence[int]
) -> list[Affine | Quotient]:
    """(y + p - d*k)/s for each dimension."""
    stride, padding, dilation = (each(setting, len(kernel)) for setting in settings)
    return [
        over(y + p if size == 1 else y + p - k * d, s)
        for y, k, size, s, p, d in zip(places, taps, kernel, stride, padding, dilation, strict=True)
    ]


def unpadded(padding: Sequence[int], tensor: Any, local: PartLocation, rank: int) -> Ints:
    """The padding that a part asks for: none where it gets its own."""
    skip = len(local.inputs[tensor.index]) - rank
    return tuple(
        0 if (tensor.index, skip + d) in local.padded else p
        for d, p in enumerate(each(padding, rank))
    )


def padding_of(
    tensor: Any, local: PartLocation, names: Sequence[str], rank: int, *settings: Sequence[int]
) -> Ints:
    """p of a part that reads backwards: the local y and k and the windows that it gets obey the
    same equation with it. `names` are those of the axes y."""
    skip = len(local.inputs[tensor.index]) - rank
    stride, padding, dilation = (each(setting, rank) for setting in settings)
    found = []
    for dim, (s, p, d) in enumerate(zip(stride, padding, dilation, strict=True)):
        if (tensor.index, skip + dim) in local.padded:
            first, end = local.ranges.get(f"k{dim}", (0, 1))
            begin = -(-(local.first(names[dim]) + p - d * (end - 1)) // s)
            p += local.first(names[dim]) - d * first - s * begin
        found.append(p)
    return tuple(found)


def names(prefix: str, first: int, count: int) -> list[str]:
    """The names of `axes(prefix, first + count)[first:]`."""
    return [name for a in axes(prefix, first + count)[first:] for name, _ in a.terms]


def block(extent: int, other: int) -> int:
    """Into how many equal blocks two extents can be divided at once."""
    return math.gcd(extent, other) if extent and other else 1


def resized(x: Operand, made: Sequence[int], blocks: Sequence[int], *also: Operand) -> Output:
    """x with its last dimensions resized to `made`, alike in every block of each dimension; `also`
    are tensors of the result's shape. Where a block has one element before or after, it needs no
    name of its own, and is cut where parts happen to end with blocks."""
    rank = len(made)
    i, y = axes("i", x.ndim - rank), axes("y", rank)
    read: list[Any] = []
    dims: list[Any] = []
    taps, inner = [], []
    extents: dict[str, int] = {}
    for d, (n, m, g) in enumerate(zip(x.shape[-rank:], made, blocks, strict=True)):
        if n == g:
            read.append(floor(y[d], m // max(g, 1)))
            dims.append(y[d])
        elif m == g:
            taps.append(axis(f"k{d}"))
            read.append(y[d] * (n // g) + taps[-1])
            dims.append(y[d])
            extents[f"k{d}"] = n // g
        else:
            b = axis(f"b{d}")
            inner.append(y[d])
            read.append((b, ALL(n // g)))
            dims.append((b, y[d]))
            extents |= {f"b{d}": g, f"y{d}": m // g}
    same = tuple(
        dim if not isinstance(dim, tuple) else (dim[0], ALL(m // g))
        for dim, m, g in zip(dims, made, blocks, strict=True)
    )
    element: Any = opaque(x.padded(0)[(*i, *read)], *(z[(*i, *same)] for z in also))
    element = element[(*taps, *inner)]
    return Output.of((*i, *dims), reduce("sum", taps, element) if taps else element, **extents)
