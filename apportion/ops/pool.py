"""Pooling over the trailing two dimensions."""

from __future__ import annotations

import math
from typing import Any

from apportion.tdl import Local, Operand, Output, axes, describe, opaque, reduce

PLANE = (slice(None), slice(None))


def _planes(*tensors: Operand, outputs: int = 1) -> Any:
    """Results that depend on whole planes: cut along what lies before them."""
    rank = tensors[0].ndim
    i = axes("i", rank)
    place = i[:-2]
    made = Output.of(i, opaque(*(x[(*place, *PLANE)] for x in tensors))[i[-2:]])
    return (made,) * outputs


@describe("aten.max_pool2d_with_indices")
def max_pool2d(x: Any) -> Any:
    # The indices are places in the whole plane, which a part of it would not know.
    return _planes(x, outputs=2)


@describe("aten.max_pool2d_with_indices_backward")
def max_pool2d_backward(
    grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, found: Any
) -> Any:
    return _planes(grad, x, found)


def _pair(setting: Any) -> tuple[int, int]:
    return (setting[0], setting[-1])


def _average_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    x, kernel, stride, padding, *rest = args
    rank = len(local.inputs[x.index])
    own = tuple(
        0 if (x.index, rank - 2 + d) in local.padded else p for d, p in enumerate(_pair(padding))
    )
    return (x, kernel, stride, own, *rest)


@describe("aten.avg_pool2d", local=_average_local)
def avg_pool2d(
    x: Any, kernel: Any, stride: Any, padding: Any, ceil: Any, with_padding: Any, divisor: Any
) -> Any:
    size, step, around = _pair(kernel), _pair(stride or kernel), _pair(padding)
    if ceil or (any(around) and not with_padding and divisor is None):
        return _planes(x)  # windows at the edges are divided by how much of them lies inside
    i, k = axes("i", x.ndim), axes("k", 2)
    windows = [a * s + t - p for a, t, s, p in zip(i[-2:], k, step, around, strict=True)]
    # The taps are the kernel's own: an opaque weight, so that nobody cuts them.
    element = x.padded(0)[(*i[:-2], *windows)] * opaque()[k]
    total = reduce("sum", k, element) / (divisor or math.prod(size))
    return Output.of(i, total, k0=size[0], k1=size[1])


@describe("aten.avg_pool2d_backward")
def avg_pool2d_backward(grad: Any, x: Any) -> Any:
    return _planes(grad, x)


@describe("aten._adaptive_avg_pool2d")
def adaptive_avg_pool2d(x: Any) -> Any:
    return _planes(x)


@describe("aten._adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad: Any, x: Any) -> Any:
    return _planes(grad, x)
