"""Convolutions of single places, transposed ones, and gradients of convolutions.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
A part's padding may be uneven, or negative: then its kernel computes more and leaves the rest out.

On one thread torch computes a convolution of 1x1 taps as a product of matrices for each of fewer
than 16 samples, and a product with few columns is slow (2048 channels to 512 on 2x2 places, 8
samples: 10.5 ms, by oneDNN 1.2). Which library is called depends on the dilation too, which says
nothing where there is one tap: so a dilation of 2 asks for oneDNN (`_dilation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import Context, own

_convolution = torch.ops.aten.convolution.default
_FEW_TAPS = 7  # never seen to go wrong, and frequent

# Where oneDNN was faster than torch's products, forward and backward together, on an AMD EPYC by 0
# to 88%: weights of so many elements, images of so many places, so many samples unless places are
# few.
_LARGE_WEIGHT, _SMALL_IMAGE, _FEW_PLACES, _SAMPLES = 1 << 16, 196, 16, 4


@own("aten.conv_tbc.default")
def _conv_tbc(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, *rest = args
    return (torch.ops.aten.conv_tbc.default(x.contiguous(), *rest),)  # it makes views of x


@own("aten.convolution.default")
def _conv(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, weight, bias, stride, padding, dilation, *rest = args
    dilation = _dilation(context, x, weight.shape, stride, dilation)
    return (_convolution(x, weight, bias, stride, padding, dilation, *rest),)


def _dilation(
    context: Context, x: torch.Tensor, weight: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int],
) -> Sequence[int]:  # fmt: skip
    """A dilation that has the same result and, on CPUs, the faster library."""
    one_tap = len(weight) == 4 and weight[2] == weight[3] == 1 and set(stride) == {1}
    if not one_tap or context.cuda or x.dtype != torch.float32:
        return dilation
    samples, places = x.shape[0], x.shape[2] * x.shape[3]
    worth = weight[0] * weight[1] >= _LARGE_WEIGHT and 1 < places <= _SMALL_IMAGE
    worth = worth and samples > 1 and (samples >= _SAMPLES or places < _FEW_PLACES)
    return [2, 2] if worth else dilation


@own("apportion.conv_transpose")
def _conv_transpose(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, weight, bias, size, *settings, groups = args
    stride, padding, dilation = (each(setting, x.dim() - 2) for setting in settings)
    reach = _reach(x, weight, stride, dilation)
    more = [n - (r - 2 * p) for n, r, p in zip(size[2:], reach, padding, strict=True)]
    limits = [max(s, d) for s, d in zip(stride, dilation, strict=True)]
    if min(padding) >= 0 and all(0 <= m < top for m, top in zip(more, limits, strict=True)):
        out = _convolution(x, weight, bias, stride, padding, dilation, True, more, groups)
        return (out,)
    out = _spread(x, weight, size[2:], stride, padding, dilation, groups)
    return (out if bias is None else out + bias.view(-1, *[1] * (x.dim() - 2)),)


@own("apportion.conv_backward_input")
def _conv_backward_input(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, weight, size, *settings, groups = args
    stride, padding, dilation = (each(setting, grad.dim() - 2) for setting in settings)
    if _as_torch_sees_it(grad, weight, size, stride, padding, dilation):
        x = _unread(context, grad, size)
        dilation = list(_dilation(context, x, weight.shape, stride, dilation))
        return _conv_backward(grad, x, weight, stride, padding, dilation, groups, 0)
    return (_spread(grad, weight, size[2:], stride, padding, dilation, groups),)


def _as_torch_sees_it(
    grad: torch.Tensor, weight: torch.Tensor, size: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> bool:  # fmt: skip
    """Whether a convolution of x of that size has just the windows that there are."""
    reach = _reach(grad, weight, stride, dilation)
    # How far the last window that torch would see lies behind the last that is there.
    more = [n + 2 * p - r for n, r, p in zip(size[2:], reach, padding, strict=True)]
    return min(padding) >= 0 and all(0 <= m < s for m, s in zip(more, stride, strict=True))


@own("apportion.conv_backward_both")
def _conv_backward_both(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """Both gradients by one call (lower/join_conv_backward.py)."""
    grad, x, weight, *settings, groups = args
    stride, padding, dilation = (each(setting, grad.dim() - 2) for setting in settings)
    if _as_torch_sees_it(grad, weight, x.shape, stride, padding, dilation):
        none, mask = [0] * (grad.dim() - 2), [True, True, False]
        backward = torch.ops.aten.convolution_backward.default
        wide, left = _padded_input(context, x, weight.shape, padding, dilation)
        dilation = list(_dilation(context, x, weight.shape, stride, dilation))
        local = (None, stride, left, dilation, False, none, groups, mask)
        for_x, for_weight = backward(grad, wide, weight, *local)[:2]
        return _without_padding(for_x, x) if wide is not x else for_x, for_weight
    for_input = _conv_backward_input(context, (grad, weight, tuple(x.shape), *settings, groups))
    shape = tuple(weight.shape)
    return *for_input, *_conv_backward_weight(context, (grad, x, shape, *settings, groups))


@own("apportion.conv_backward_weight")
def _conv_backward_weight(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, size, stride, padding, dilation, groups = args
    weight = _unread(context, grad, size)
    dims = grad.dim() - 2
    x, padding = _padded_input(context, x, size, each(padding, dims), each(dilation, dims))
    dilation = _dilation(context, x, size, stride, dilation)
    return _conv_backward(grad, x, weight, stride, padding, dilation, groups, 1)


def _padded_input(
    context: Context, x: torch.Tensor, weight: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[torch.Tensor, Sequence[int]]:  # fmt: skip
    """The input and its padding; with zeros around it instead where many taps reach further than
    the input is long. There oneDNN's gradient of the weight writes beyond its memory (seen with 31
    taps over 16 places and 63 over 32, of one group), and a division by channels or by places makes
    such convolutions of others."""
    reach = zip(x.shape[2:], weight[2:], dilation, strict=True)
    if context.cuda or all(k <= _FEW_TAPS or d * (k - 1) < n for n, k, d in reach):
        return x, padding
    both = [p for p in reversed(padding) for _ in range(2)]
    return torch.nn.functional.pad(x, both), [0] * len(padding)


def _without_padding(wide: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The middle of it, as large as x."""
    for dim in range(2, x.dim()):
        wide = wide.narrow(dim, (wide.shape[dim] - x.shape[dim]) // 2, x.shape[dim])
    return wide


def _conv_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any,
    dilation: Any, groups: int, wanted: int,
) -> tuple[Any, ...]:  # fmt: skip
    none = [0] * (grad.dim() - 2)
    mask = [k == wanted for k in range(3)]
    backward = torch.ops.aten.convolution_backward.default
    found = backward(grad, x, weight, None, stride, padding, dilation, False, none, groups, mask)
    return (found[wanted],)


def _reach(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """How many places all taps of all elements of x cover, in each dimension."""
    each_dim = zip(x.shape[2:], weight.shape[2:], stride, dilation, strict=True)
    return [s * (n - 1) + d * (k - 1) + 1 for n, k, s, d in each_dim]


def _spread(
    x: torch.Tensor, weight: torch.Tensor, size: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """A transposed convolution whose result begins `padding` after the first tap and is `size`
    long."""
    reach = _reach(x, weight, stride, dilation)
    before = list(padding)
    after = [r - n - p for r, n, p in zip(reach, size, before, strict=True)]
    even = [max(0, min(a, b)) for a, b in zip(before, after, strict=True)]
    out = _convolution(x, weight, None, stride, even, dilation, True, [0] * len(even), groups)
    return cropped(out, *([a - e for a, e in zip(s, even, strict=True)] for s in (before, after)))


def each(setting: Sequence[int], rank: int) -> list[int]:
    """One number per spatial dimension; torch takes one for all."""
    return list(setting) * rank if len(setting) == 1 else list(setting)


def cropped(x: torch.Tensor, before: Sequence[int], after: Sequence[int]) -> torch.Tensor:
    """x without so many elements before and after in its last dimensions, zeros where these numbers
    are negative."""
    widths = [-n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    return torch.ops.aten.constant_pad_nd.default(x, widths) if any(widths) else x


def _unread(context: Context, like: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """An operand that a convolution's gradient is not computed from. On CPUs the kernels make
    every operand dense first, which copies one of other strides."""
    return shaped(like, size) if context.cuda else like.new_empty(tuple(size))


def shaped(like: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A tensor that is asked for its shape only; one element of memory."""
    return like.new_empty(1).expand(tuple(size))
