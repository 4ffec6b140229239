"""Batch norm in pieces: statistics, and what is pointwise once they are known.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.capture import computing_dtype
from apportion.execute.kernels.base import Context, own


@own("apportion.channel_sum")
def _channel_sum(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    (x,) = args
    return (_per_channel_total(x),)


@own("apportion.channel_squares")
def _channel_squares(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, count = args
    away = x - _per_channel(total / count, x)
    return (_per_channel_total(away.pow_(2)),)


@own("apportion.batch_norm")
def _batch_norm(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, squares, weight, bias, count, eps = args
    normalise = torch.ops.aten.native_batch_norm.default  # with statistics given: pointwise
    weight, bias = (None if t is None else t.to(total.dtype) for t in (weight, bias))
    # On dense tensors only: other strides take another kernel, and replicas must be bit-equal.
    x = x.contiguous()
    found = normalise(x, weight, bias, total / count, squares / count, False, 0.0, eps)
    return (found[0],)


@own("apportion.batch_norm_reduce")
def _batch_norm_reduce(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, total, squares, count, eps = args
    mean, invstd = total / count, (squares / count + eps).rsqrt()
    away = x - _per_channel(mean, x)
    return _per_channel_total(grad), _per_channel_total(away.mul_(grad)) * invstd


@own("apportion.batch_norm_backward")
def _batch_norm_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, total, squares, weight, sum_grad, sum_normalised, count, eps = args
    invstd = (squares / count + eps).rsqrt()
    scale = invstd if weight is None else invstd * weight
    found = x - _per_channel(total / count, x)
    found = found.mul_(_per_channel(invstd * sum_normalised / -count, x)).add_(grad)
    found = found.sub_(_per_channel(sum_grad / count, x)).mul_(_per_channel(scale, x))
    return (found.to(grad.dtype),)


# Where a device has the whole batch, or whole channels of it: one call for all pieces
# (lower/join_batch_norm.py).

_SMALL_PLANE = 16  # elements of a channel; below, torch's own kernel has the sums sooner on a CPU


@own("apportion.nothing")
def _nothing(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return ()


@own("apportion.batch_norm_whole")
def _batch_norm_whole(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """The result, mean and inverse deviation, and the new running statistics if there are any."""
    x, weight, bias, mean, variance, momentum, eps = args
    x, wide = x.contiguous(), computing_dtype(x.dtype)
    weight, bias = weight.to(wide), bias.to(wide)
    plane = x.numel() // (x.shape[0] * x.shape[1])
    if context.cuda or plane <= _SMALL_PLANE:
        return _by_one_kernel(context, x, weight, bias, mean, variance, momentum, eps)
    # torch's kernel for CPUs takes its sums element by element.
    count = x.numel() // x.shape[1]
    total = _per_channel_total(x)
    found = total / count
    squares = _per_channel_total((x - _per_channel(found, x)).pow_(2))
    spread = squares / count
    normalise = torch.ops.aten.native_batch_norm.default  # with statistics given: pointwise
    out = normalise(x, weight, bias, found, spread, False, 0.0, eps)[0]
    if mean is None:
        return out, found, spread.add_(eps).rsqrt_()
    after = (mean * (1 - momentum)).add_(total, alpha=momentum / count)
    spread_after = (variance * (1 - momentum)).add_(squares, alpha=momentum / (count - 1))
    return out, found, spread.add_(eps).rsqrt_(), after, spread_after


def _by_one_kernel(
    context: Context, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
    mean: torch.Tensor | None, variance: torch.Tensor | None, momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    if mean is None:
        plain = torch.ops.aten._native_batch_norm_legit.no_stats
        return tuple(plain(x, weight, bias, True, momentum, eps))
    if context.cuda:  # picks cuDNN's where torch itself would
        functional = torch.ops.aten._batch_norm_with_update_functional.default
        out, found, inverse, _, *after = functional(x, weight, bias, mean, variance, momentum, eps)
        return out, found, inverse, *after
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    return tuple(functional(x, weight, bias, mean, variance, True, momentum, eps))


@own("apportion.batch_norm_whole_backward")
def _batch_norm_whole_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """The gradient of x, unless there is no weight, and those of bias and weight."""
    grad, x, mean, inverse, weight, eps = args
    wanted = [weight is not None, True, True]
    scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    grad, x = grad.contiguous(), x.contiguous()
    given = (grad, x, scale, None, None, mean, inverse, True, eps, wanted)
    if context.cuda:
        none = torch.empty(0, dtype=torch.uint8, device=x.device)  # reserved for other layouts
        found = torch.ops.aten.batch_norm_backward.default(*given, none)
    else:
        found = torch.ops.aten.native_batch_norm_backward.default(*given)
    for_input, for_weight, for_bias = found
    return (for_bias, for_weight) if weight is None else (for_input, for_bias, for_weight)


def _per_channel_total(x: torch.Tensor) -> torch.Tensor:
    """The sum of all but channels, added in double like torch's own statistics, plane by plane."""
    kind = computing_dtype(x.dtype)
    x = x.contiguous()  # so that the order of additions does not depend on strides
    planes = x.sum(tuple(range(2, x.dim())), dtype=kind) if x.dim() > 2 else x
    return planes.sum(0, dtype=torch.float64).to(kind)


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number per channel, to be broadcast over `x`."""
    return values.reshape(-1, *[1] * (x.dim() - 2))
