"""Batch norm in pieces: statistics, and what is pointwise once they are known.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import Context, own


@own("apportion.channel_sum")
def _channel_sum(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    (x,) = args
    return (_per_channel_total(x),)


@own("apportion.channel_squares")
def _channel_squares(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, count = args
    away = x - _per_channel(total / count, x)
    return (_per_channel_total(away.square_()),)


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


def _per_channel_total(x: torch.Tensor) -> torch.Tensor:
    """The sum of all but channels, added in double like torch's own statistics, plane by plane."""
    kind = torch.promote_types(x.dtype, torch.float32)
    x = x.contiguous()  # so that the order of additions does not depend on strides
    planes = x.sum(tuple(range(2, x.dim())), dtype=kind) if x.dim() > 2 else x
    return planes.sum(0, dtype=torch.float64).to(kind)


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number per channel, to be broadcast over `x`."""
    return values.reshape(-1, *[1] * (x.dim() - 2))
