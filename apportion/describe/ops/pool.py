"""Pooling over the trailing two or three dimensions, the planes.

A pool that neither pads nor counts unevenly is a sum like a convolution's. The others are divided
so that what depends on a window's place is an argument (capture/decompose/pool.py): the indices of
a maximum count in the whole plane, and a window at the edge is divided by how much of it lies
inside. Taps are the kernel's own and never cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe, unsplit
from apportion.describe.language import Operand, Output, axes, f, opaque, reduce
from apportion.describe.ops.window import (
    block,
    each,
    names,
    padding_of,
    read_by,
    reads,
    resized,
    unpadded,
)


def planes(rank: int, *tensors: Operand, outputs: int = 1) -> Any:
    """Results that depend on whole planes of `rank` dims: cut along what lies before them."""
    i = axes("i", tensors[0].ndim)
    whole = (slice(None),) * rank
    made = Output.of(i, opaque(*(x[(*i[:-rank], *whole)] for x in tensors))[i[-rank:]])
    return (made,) * outputs


def _taps(kernel: Sequence[int]) -> Any:
    """The taps' axes, their extents, and a factor that forbids to cut them."""
    k = axes("k", len(kernel))
    return k, {f"k{d}": n for d, n in enumerate(kernel)}, opaque()[k]


# Maximum


def _max_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, kernel, stride, padding, dilation, ceil, origin, plane = args
    rank = len(kernel)
    own = unpadded(padding, x, local, rank)
    along = names("i", len(local.inputs[x.index]) - rank, rank)
    begin = tuple(
        o + s * local.first(name) - p + q
        for o, s, name, p, q in zip(origin, stride, along, padding, own, strict=True)
    )
    return (x, kernel, stride, own, dilation, ceil, begin, plane)


@describe("apportion.max_pool", local=_max_local)
def max_pool(
    x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, origin: Any,
    plane: Any,
) -> Any:  # fmt: skip
    """The maxima of windows, and their places in the whole plane, in which x begins at origin."""
    rank = len(kernel)
    i, (k, extents, tap) = axes("i", x.ndim), _taps(kernel)
    read = reads(i[-rank:], k, kernel, stride, padding, dilation)
    most = reduce("max", k, f("tap", x.padded(-math.inf)[(*i[:-rank], *read)], tap))
    place = [a * s - p + o for a, s, p, o in zip(i[-rank:], stride, padding, origin, strict=True)]
    return Output.of(i, most, **extents), Output.of(i, f("place", most, *place, plane), **extents)


def _max_backward_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    grad, found, _, kernel, stride, padding, dilation, origin, plane = args
    rank, size = len(kernel), local.outputs[0]
    along = names("y", len(size) - rank, rank)
    own = padding_of(grad, local, along, rank, stride, padding, dilation)
    begin = tuple(o + local.first(name) for o, name in zip(origin, along, strict=True))
    return (grad, found, size, kernel, stride, own, dilation, begin, plane)


@describe("apportion.max_pool_backward", local=_max_backward_local)
def max_pool_backward(
    grad: Any, found: Any, size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any,
    origin: Any, plane: Any,
) -> Any:  # fmt: skip
    """What the windows give to the element that was their maximum."""
    rank = len(kernel)
    y, (k, extents, tap) = axes("y", len(size)), _taps(kernel)
    read = (*y[:-rank], *read_by(y[-rank:], k, kernel, stride, padding, dilation))
    place = [a + o for a, o in zip(y[-rank:], origin, strict=True)]
    element = f("if found", grad.padded(0)[read], found.padded(0)[read], *place, plane, tap)
    return Output.of(y, reduce("sum", k, element), **extents)


def _plane_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    grad, found, _, origin, plane = args
    rank, size = len(plane), local.outputs[0]
    along = names("y", len(size) - rank, rank)
    begin = tuple(o + local.first(name) for o, name in zip(origin, along, strict=True))
    return (grad, found, size, begin, plane)


@describe("apportion.plane_add", local=_plane_local)
def plane_add(grad: Any, found: Any, size: Any, origin: Any, plane: Any) -> Any:
    """Zeros, and each element added at its place in the whole plane."""
    rank = len(plane)
    y, k = axes("y", len(size)), axes("k", rank)
    place = [a + o for a, o in zip(y[-rank:], origin, strict=True)]
    read = (*y[:-rank], *k)
    return Output.of(y, reduce("sum", k, f("if found", grad[read], found[read], *place, plane)))


@describe("aten.max_pool2d_with_indices", "aten.adaptive_max_pool2d")
def max_pool2d(x: Any) -> Any:
    return planes(2, x, outputs=2)


@describe("aten.max_pool3d_with_indices", "aten.adaptive_max_pool3d")
def max_pool3d(x: Any) -> Any:
    return planes(3, x, outputs=2)


@describe("aten.max_pool2d_with_indices_backward")
def max_pool2d_backward(
    grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, found: Any
) -> Any:
    return planes(2, grad, x, found)


@describe("aten.max_pool3d_with_indices_backward")
def max_pool3d_backward(
    grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, found: Any
) -> Any:
    return planes(3, grad, x, found)


# Where several elements have one place, the last one is kept: parts of them do not add up.
@describe("aten.max_unpool2d")
def max_unpool2d(x: Any, found: Any) -> Any:
    return planes(2, x, found)


@describe("aten.max_unpool3d")
def max_unpool3d(x: Any, found: Any) -> Any:
    return planes(3, x, found)


def _fractional(rank: int, x: Operand, samples: Operand) -> Any:
    i = axes("i", x.ndim)
    before = i[:-rank]
    drawn = (0,) * (samples.ndim - 1 - len(before)) + before
    read = x[(*before, *(slice(None),) * rank)], samples[(*drawn, slice(None))]
    made = Output.of(i, opaque(*read)[i[-rank:]])
    return made, made


@describe("aten.fractional_max_pool2d")
def fractional_max_pool2d(x: Any, kernel: Any, size: Any, samples: Any) -> Any:
    return _fractional(2, x, samples)


@describe("aten.fractional_max_pool3d")
def fractional_max_pool3d(x: Any, kernel: Any, size: Any, samples: Any) -> Any:
    return _fractional(3, x, samples)


# Average


def _average_local(rank: int) -> Any:
    def local_args(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
        x, kernel, stride, padding, *rest = args
        return (x, kernel, stride, unpadded(padding, x, local, rank), *rest)

    return local_args


def _average(rank: int, x: Operand, *args: Any) -> Any:
    kernel, stride, padding, ceil, with_padding, divisor = args
    size, around = each(kernel, rank), each(padding, rank)
    step = each(stride, rank) if stride else size
    if ceil or (any(around) and not with_padding and divisor is None):
        return planes(rank, x)  # windows at the edges: apportion.avg_pool
    i, (k, extents, tap) = axes("i", x.ndim), _taps(size)
    read = reads(i[-rank:], k, size, step, around, (1,) * rank)
    total = reduce("sum", k, x.padded(0)[(*i[:-rank], *read)] * tap)
    return Output.of(i, total / (divisor or math.prod(size)), **extents)


@describe("aten.avg_pool2d", local=_average_local(2))
def avg_pool2d(
    x: Any, kernel: Any, stride: Any, padding: Any, ceil: Any, with_padding: Any, divisor: Any
) -> Any:
    return _average(2, x, kernel, stride, padding, ceil, with_padding, divisor)


@describe("aten.avg_pool3d", local=_average_local(3))
def avg_pool3d(
    x: Any, kernel: Any, stride: Any, padding: Any, ceil: Any, with_padding: Any, divisor: Any
) -> Any:
    return _average(3, x, kernel, stride, padding, ceil, with_padding, divisor)


def _uneven_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, kernel, stride, padding, _, origin, plane, margin = args
    rank = len(kernel)
    own = unpadded(padding, x, local, rank)
    along = names("i", len(local.inputs[x.index]) - rank, rank)
    begin = tuple(
        o + s * local.first(name) - p + q
        for o, s, name, p, q in zip(origin, stride, along, padding, own, strict=True)
    )
    windows = local.outputs[0][-rank:]
    return (x, kernel, stride, own, windows, begin, plane, margin)


@describe("apportion.avg_pool", local=_uneven_local)
def avg_pool(
    x: Any, kernel: Any, stride: Any, padding: Any, windows: Any, origin: Any, plane: Any,
    margin: Any,
) -> Any:  # fmt: skip
    """Sums of windows over how much of each lies inside of the plane."""
    rank = len(kernel)
    i, (k, extents, tap) = axes("i", x.ndim), _taps(kernel)
    read = reads(i[-rank:], k, kernel, stride, padding, (1,) * rank)
    total = reduce("sum", k, x.padded(0)[(*i[:-rank], *read)] * tap)
    first = [a * s - p + o for a, s, p, o in zip(i[-rank:], stride, padding, origin, strict=True)]
    return Output.of(i, total / f("inside", *first, kernel, plane, margin), **extents)


def _average_backward_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    grad, _, kernel, stride, padding, origin, plane, margin, divisor = args
    rank, size = len(kernel), local.outputs[0]
    along = names("y", len(size) - rank, rank)
    own = padding_of(grad, local, along, rank, stride, padding, (1,) * rank)
    begin = tuple(o + local.first(name) for o, name in zip(origin, along, strict=True))
    return (grad, size, kernel, stride, own, begin, plane, margin, divisor)


@describe("apportion.avg_pool_backward", local=_average_backward_local)
def avg_pool_backward(
    grad: Any, size: Any, kernel: Any, stride: Any, padding: Any, origin: Any, plane: Any,
    margin: Any, divisor: Any,
) -> Any:  # fmt: skip
    """What the windows give to every element that they read."""
    rank = len(kernel)
    y, (k, extents, tap) = axes("y", len(size)), _taps(kernel)
    read = read_by(y[-rank:], k, kernel, stride, padding, (1,) * rank)
    element: Any = grad.padded(0)[(*y[:-rank], *read)] * tap
    if divisor is None:
        first = [a - t + o for a, t, o in zip(y[-rank:], k, origin, strict=True)]
        element = element / f("inside", *first, kernel, plane, margin)
    else:
        element = element / divisor
    return Output.of(y, reduce("sum", k, element), **extents)


@describe("aten.avg_pool2d_backward")
def avg_pool2d_backward(grad: Any, x: Any) -> Any:
    return planes(2, grad, x)


@describe("aten.avg_pool3d_backward")
def avg_pool3d_backward(grad: Any, x: Any) -> Any:
    return planes(3, grad, x)


# Adaptive


def _adaptive(rank: int, x: Operand, made: Sequence[int], *also: Operand) -> Any:
    blocks = [block(n, m) for n, m in zip(x.shape[-rank:], made, strict=True)]
    return resized(x, made, blocks, *also)


def _adaptive_local(rank: int) -> Any:
    return lambda args, local: (args[0], local.outputs[0][-rank:])


@describe("aten._adaptive_avg_pool2d", local=_adaptive_local(2))
def adaptive_avg_pool2d(x: Any, *, out: Any) -> Any:
    return _adaptive(2, x, out[0][-2:])


@describe("aten._adaptive_avg_pool3d", local=_adaptive_local(3))
def adaptive_avg_pool3d(x: Any, *, out: Any) -> Any:
    return _adaptive(3, x, out[0][-3:])


@describe("aten._adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad: Any, x: Any) -> Any:
    return _adaptive(2, grad, x.shape[-2:], x)


@describe("aten._adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(grad: Any, x: Any) -> Any:
    return _adaptive(3, grad, x.shape[-3:], x)


unsplit(
    *(f"aten.{kind}_max_pool{d}d_backward" for kind in ("adaptive", "fractional") for d in (2, 3)),
    why="it is split as apportion.plane_add, which capture puts in its place",
)
