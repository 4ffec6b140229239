"""Convolutions and their gradients, in any number of spatial dimensions.

    out[n, (g,o), i] = bias[(g,o)] + Sum_(c,k) x[n, (g,c), s*i + d*k - p] * w[(g,o), c, k]

with zeros outside of x: stride s, dilation d, padding p, groups g. The two gradients are the same
sum read the other way round; the input's reads grad[(y + p - d*k)/s], which is also what a
transposed convolution does. Cutting i, y or k cuts the padding (window.py).

Groups come back from the local shapes: a part has as many as its input channels hold those of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe, unsplit
from apportion.describe.errors import Undescribed
from apportion.describe.language import ALL, Operand, Output, axes, axis, opaque, reduce
from apportion.describe.ops.window import Ints, each, names, padding_of, read_by, reads, unpadded


def _forward_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, weight, bias, stride, padding, *rest = args
    sizes = local.inputs[x.index], local.inputs[weight.index]
    groups = sizes[0][1] // max(sizes[1][1], 1)
    own = unpadded(padding, x, local, len(sizes[0]) - 2)
    return (x, weight, bias, stride, own, *rest[:-1], groups)


@describe("aten.convolution", local=_forward_local)
def convolution(
    x: Operand, weight: Operand, bias: Operand | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    if transposed:
        raise Undescribed("a transposed convolution is split as apportion.conv_transpose")
    rank = x.ndim - 2
    n, g, o, c = (axis(name) for name in "ngoc")
    i, k = axes("i", rank), axes("k", rank)
    place = reads(i, k, weight.shape[2:], stride, padding, dilation)
    product = x.padded(0)[(n, (g, c), *place)] * weight[((g, o), c, *k)]
    total: Any = reduce("sum", (c, *k), product)
    total = total if bias is None else total + bias[((g, o),)]
    return Output.of((n, (g, o), *i), total, g=groups)


def _weight_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    grad, x, _, stride, padding, dilation, _ = args
    size = local.outputs[0]
    groups = local.inputs[x.index][1] // max(size[1], 1)
    own = unpadded(padding, x, local, len(size) - 2)
    return (grad, x, size, stride, own, dilation, groups)


@describe("apportion.conv_backward_weight", local=_weight_local)
def conv_backward_weight(
    grad: Operand, x: Operand, size: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    rank = x.ndim - 2
    n, g, o, c = (axis(name) for name in "ngoc")
    i, k = axes("i", rank), axes("k", rank)
    place = reads(i, k, size[2:], stride, padding, dilation)
    product = grad[(n, (g, o), *i)] * x.padded(0)[(n, (g, c), *place)]
    return Output.of(((g, o), c, *k), reduce("sum", (n, *i), product), g=groups)


# Read backwards


def _backward_flops(inputs: Sequence[Ints], outputs: Sequence[Ints]) -> float:
    return 2.0 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _settings_local(
    x: Any, weight: Any, settings: Sequence[Any], local: PartLocation
) -> tuple[Any, ...]:
    """Size, stride, padding, dilation and groups of a part."""
    _, stride, padding, dilation, _ = settings
    size = local.outputs[0]
    rank = len(size) - 2
    own = padding_of(x, local, names("y", 0, rank), rank, stride, padding, dilation)
    groups = size[1] // max(local.inputs[weight.index][1], 1)
    return (size, stride, own, dilation, groups)


def _spread(
    x: Operand, weight: Operand, bias: Operand | None, settings: Sequence[Any], within: str,
    without: str,
) -> Any:  # fmt: skip
    """Every element of x times every tap, added where the taps lie; `within` and `without` are the
    axes of the channels that come in and go out."""
    _, stride, padding, dilation, groups = settings
    rank = x.ndim - 2
    n, g, a, b = (axis(name) for name in ("n", "g", within, without))
    y, k = axes("y", rank), axes("k", rank)
    place = read_by(y, k, weight.shape[2:], stride, padding, dilation)
    element = x.padded(0)[(n, (g, a), *place)] * weight[((g, a), b, *k)]
    total: Any = reduce("sum", (a, *k), element)
    total = total if bias is None else total + bias[((g, b),)]
    extents = {"g": groups, within: weight.shape[0] // max(groups, 1)}
    return Output.of((n, (g, b), *y), total, **extents)


def _input_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    grad, weight, *settings = args
    return (grad, weight, *_settings_local(grad, weight, settings, local))


@describe("apportion.conv_backward_input", local=_input_local, flops=_backward_flops)
def conv_backward_input(grad: Operand, weight: Operand, *settings: Any) -> Any:
    return _spread(grad, weight, None, settings, "o", "c")


def _transpose_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, weight, bias, *settings = args
    return (x, weight, bias, *_settings_local(x, weight, settings, local))


@describe("apportion.conv_transpose", local=_transpose_local, flops=_backward_flops)
def conv_transpose(x: Operand, weight: Operand, bias: Operand | None, *settings: Any) -> Any:
    return _spread(x, weight, bias, settings, "c", "o")


# Other forms


def _tbc_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, weight, bias, pad = args
    return (x, weight, bias, 0 if (x.index, 0) in local.padded else pad)


@describe("aten.conv_tbc", local=_tbc_local)
def conv_tbc(x: Operand, weight: Operand, bias: Operand, pad: int) -> Any:
    """Convolution of [time, batch, channel]."""
    t, n, o, c, k = (axis(name) for name in "tnock")
    (place,) = reads([t], [k], weight.shape[:1], [1], [pad], [1])
    total = reduce("sum", (c, k), x.padded(0)[place, n, c] * weight[k, c, o])
    return Output.of((t, n, o), total + bias[(o,)])


def _im2col_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    x, kernel, dilation, padding, stride = args
    spans = [local.ranges.get(f"k{d}", (0, n)) for d, n in enumerate(each(kernel, 2))]
    own = unpadded(padding, x, local, 2)
    return (x, tuple(end - first for first, end in spans), dilation, own, stride)


@describe("aten.im2col", local=_im2col_local)
def im2col(x: Operand, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """Column (c, k) of window i is a copy of one element."""
    n, c = axes("n", x.ndim - 3), axis("c")
    i, k = axes("i", 2), axes("k", 2)
    size = each(kernel, 2)
    place = reads(i, k, size, stride, padding, dilation)
    windows = [
        (extent + 2 * p - d * (taps - 1) - 1) // s + 1
        for extent, taps, s, p, d in zip(
            x.shape[-2:], size, each(stride, 2), each(padding, 2), each(dilation, 2), strict=True
        )
    ]
    extents = {"k0": size[0], "k1": size[1], "i0": windows[0], "i1": windows[1]}
    return Output.of((*n, (c, *k), i), x.padded(0)[(*n, c, *place)], **extents)


@describe("aten.col2im")
def col2im(x: Operand, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    n, c, y = axes("n", x.ndim - 2), axis("c"), axes("y", 2)
    taps = ALL(math.prod(each(kernel, 2)))
    return Output.of((*n, c, *y), opaque(x[(*n, (c, taps), slice(None))])[y])


unsplit(
    "aten.convolution_backward",
    why="it is split as one operator per gradient, into which capture divides it",
)
unsplit(
    "aten._conv_depthwise2d",
    "aten.conv_depthwise3d",
    "aten._slow_conv2d_forward",
    "aten._slow_conv2d_backward",
    "aten.slow_conv3d_forward",
    "aten.slow_conv_dilated2d",
    "aten.slow_conv_dilated3d",
    "aten.slow_conv_transpose2d",
    "aten.slow_conv_transpose3d",
    why="a backend's kernel below aten.convolution, which is what capture sees",
)
