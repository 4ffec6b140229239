"""Convolutions and their gradients, in any number of spatial dimensions.

    out[n, (g,o), i] = bias[(g,o)] + Sum_(c,k) x[n, (g,c), s*i + d*k - p] * w[(g,o), c, k]

with zeros outside of x: stride s, dilation d, padding p, groups g. The two gradients are the same
sum read the other way round. Cutting i or k cuts the padding, which the part then gets as elements
and asks its kernel for none. The input's gradient reads grad[y + p - d*k] where s = 1; with a
stride the y that meet one i are s apart, so that it is opaque along those dimensions.

Groups come back from the local shapes: a part has as many as its input channels hold those of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.formula import Undescribed
from apportion.interval import Affine
from apportion.tdl import Local, Operand, Output, axes, axis, describe, opaque, reduce

Ints = tuple[int, ...]


def _each(setting: Sequence[int], rank: int) -> Ints:
    """One number per spatial dimension; torch takes one for all."""
    return tuple(setting) * rank if len(setting) == 1 else tuple(setting)


def _window(
    positions: Sequence[Affine], taps: Sequence[Affine], kernel: Ints, *settings: Sequence[int]
) -> list[Affine]:
    """s*i + d*k - p for each dimension. A kernel of one tap has k = 0, so that i may be the
    index."""
    stride, padding, dilation = (_each(setting, len(kernel)) for setting in settings)
    return [
        i * s - p if size == 1 else i * s + k * d - p
        for i, k, size, s, p, d in zip(
            positions, taps, kernel, stride, padding, dilation, strict=True
        )
    ]


def _unpadded(padding: Sequence[int], tensor: Any, local: Local, rank: int) -> Ints:
    """The padding that a part asks for: none where it gets its own."""
    return tuple(
        0 if (tensor.index, dim + 2) in local.padded else p
        for dim, p in enumerate(_each(padding, rank))
    )


def _forward_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    x, weight, bias, stride, padding, *rest = args
    sizes = local.inputs[x.index], local.inputs[weight.index]
    groups = sizes[0][1] // sizes[1][1]
    own = _unpadded(padding, x, local, len(sizes[0]) - 2)
    return (x, weight, bias, stride, own, *rest[:-1], groups)


@describe("aten.convolution", local=_forward_local)
def convolution(
    x: Operand, weight: Operand, bias: Operand | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    if transposed:
        raise Undescribed("transposed convolutions are not described")
    rank = x.ndim - 2
    n, g, o, c = (axis(name) for name in "ngoc")
    i, k = axes("i", rank), axes("k", rank)
    place = _window(i, k, weight.shape[2:], stride, padding, dilation)
    product = x.padded(0)[(n, (g, c), *place)] * weight[((g, o), c, *k)]
    total: Any = reduce("sum", (c, *k), product)
    total = total if bias is None else total + bias[((g, o),)]
    return Output.of((n, (g, o), *i), total, g=groups)


def _weight_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    grad, x, _, stride, padding, dilation, _ = args
    size = local.outputs[0]
    groups = local.inputs[x.index][1] // size[1]
    own = _unpadded(padding, x, local, len(size) - 2)
    return (grad, x, size, stride, own, dilation, groups)


@describe("apportion.conv_backward_weight", local=_weight_local)
def conv_backward_weight(
    grad: Operand, x: Operand, size: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    rank = x.ndim - 2
    n, g, o, c = (axis(name) for name in "ngoc")
    i, k = axes("i", rank), axes("k", rank)
    place = _window(i, k, size[2:], stride, padding, dilation)
    product = grad[(n, (g, o), *i)] * x.padded(0)[(n, (g, c), *place)]
    return Output.of(((g, o), c, *k), reduce("sum", (n, *i), product), g=groups)


def _input_flops(inputs: Sequence[Ints], outputs: Sequence[Ints]) -> float:
    return 2.0 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _input_local(args: tuple[Any, ...], local: Local) -> tuple[Any, ...]:
    grad, weight, _, stride, padding, dilation, _ = args
    size, kernel = local.outputs[0], local.inputs[weight.index]
    rank = len(size) - 2
    # The first element that a part gets meets its first position at the last tap.
    own = tuple(
        d * (taps - 1) if (grad.index, dim + 2) in local.padded else p
        for dim, (p, d, taps) in enumerate(
            zip(_each(padding, rank), _each(dilation, rank), kernel[2:], strict=True)
        )
    )
    return (grad, weight, size, stride, own, dilation, size[1] // kernel[1])


@describe("apportion.conv_backward_input", local=_input_local, flops=_input_flops)
def conv_backward_input(
    grad: Operand, weight: Operand, size: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    rank = grad.ndim - 2
    n, g, o, c = (axis(name) for name in "ngoc")
    y, k = axes("y", rank), axes("k", rank)
    strides, kernel = _each(stride, rank), weight.shape[2:]
    plain = [d for d in range(rank) if strides[d] == 1]
    reach = _window([-a for a in y], k, kernel, strides, padding, dilation)
    whole = slice(None)
    read = [-reach[d] if d in plain else whole for d in range(rank)]
    taps = [k[d] if d in plain else whole for d in range(rank)]
    element: Any = grad.padded(0)[(n, (g, o), *read)] * weight[((g, o), c, *taps)]
    if len(plain) < rank:
        element = opaque(element)[tuple(y[d] for d in range(rank) if d not in plain)]
    total = reduce("sum", (o, *(k[d] for d in plain)), element)
    return Output.of((n, (g, c), *y), total, g=groups, o=weight.shape[0] // groups)
