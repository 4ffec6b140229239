"""Composite operators in pieces: statistics, and what is pointwise once they are known.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.attention import scores
from apportion.execute.kernels.base import Context, dtype, own


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _columns(x: torch.Tensor, rank: int) -> tuple[int, ...]:
    return tuple(range(x.dim() - rank, x.dim()))


# Softmax


@own("apportion.log_sum_exp")
def _log_sum_exp(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, dim = args
    return (torch.logsumexp(_wide(x), (dim,), keepdim=True),)


@own("apportion.softmax_of")
def _softmax_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, lse, kind = args
    return ((_wide(x) - lse).exp_().to(dtype(kind)),)


@own("apportion.safe_softmax_of")
def _safe_softmax_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, lse, kind = args
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # rows of nothing are zeros
    return ((_wide(x) - lse).exp_().to(dtype(kind)),)


@own("apportion.log_softmax_of")
def _log_softmax_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, lse, kind = args
    return ((_wide(x) - lse).to(dtype(kind)),)


@own("apportion.row_dot")
def _row_dot(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, out, dim = args
    product = _wide(grad) if out is None else _wide(grad) * out
    return (product.sum(dim, keepdim=True),)


@own("apportion.softmax_backward_of")
def _softmax_backward_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, out, total, kind = args
    return ((_wide(grad) - total).mul_(out).to(dtype(kind)),)


@own("apportion.log_softmax_backward_of")
def _log_softmax_backward_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, out, total, kind = args
    return ((_wide(grad) - _wide(out).exp().mul_(total)).to(dtype(kind)),)


# Layer norm


@own("apportion.row_sum")
def _row_sum(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, rank = args
    return (_wide(x).sum(_columns(x, rank), keepdim=True),)


@own("apportion.row_squares")
def _row_squares(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, rank, count = args
    return ((_wide(x) - total / count).pow_(2).sum(_columns(x, rank), keepdim=True),)


@own("apportion.row_statistics")
def _row_statistics(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    total, squares, count, eps = args
    return total / count, (squares / count + eps).rsqrt_()


@own("apportion.layer_norm_of")
def _layer_norm_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, total, squares, weight, bias, _, count, eps = args
    found = (_wide(x) - total / count).mul_((squares / count + eps).rsqrt_())
    found = found if weight is None else found.mul_(weight)
    return ((found if bias is None else found.add_(bias)).to(x.dtype),)


def _normalised(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    return (_wide(x) - mean).mul_(rstd)


@own("apportion.layer_norm_reduce")
def _layer_norm_reduce(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, mean, rstd, weight, rank = args
    scaled = _wide(grad) if weight is None else _wide(grad) * weight
    dims = _columns(x, rank)
    total = scaled.sum(dims, keepdim=True)
    return total, _normalised(x, mean, rstd).mul_(scaled).sum(dims, keepdim=True)


@own("apportion.layer_norm_backward_of")
def _layer_norm_backward_of(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, mean, rstd, weight, total, dot, _, count = args
    scaled = _wide(grad) if weight is None else _wide(grad) * weight
    away = _normalised(x, mean, rstd).mul_(dot / count).add_(total / count)
    return ((scaled - away).mul_(rstd).to(grad.dtype),)


@own("apportion.layer_norm_weight")
def _layer_norm_weight(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, x, mean, rstd, rank = args
    return (_over_rows(_normalised(x, mean, rstd).mul_(grad), rank).to(grad.dtype),)


@own("apportion.layer_norm_bias")
def _layer_norm_bias(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, rank = args
    return (_over_rows(_wide(grad), rank).to(grad.dtype),)


def _over_rows(x: torch.Tensor, rank: int) -> torch.Tensor:
    dims = tuple(range(x.dim() - rank))
    return x.sum(dims) if dims else x


@own("apportion.absent")
def _absent(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (None, None, None)


# Attention


@own("apportion.sdpa_lse")
def _sdpa_lse(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    q, k, mask, causal, scale, *place = args
    return (torch.logsumexp(scores(q, k, mask, causal, scale, place), -1),)


@own("apportion.sdpa_seen")
def _sdpa_seen(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    (lse,) = args  # rows that see no key weigh nothing; attention's kernels say 0 for them
    return (lse.masked_fill(lse == float("-inf"), 0.0),)


@own("apportion.sdpa_values")
def _sdpa_values(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, lse, mask, causal, scale, *place = args
    weights = (scores(q, k, mask, causal, scale, place) - lse.unsqueeze(-1)).exp_()
    groups = q.shape[1] // v.shape[1]
    v = v if groups == 1 else v.repeat_interleave(groups, 1)
    return ((weights.to(v.dtype) @ v).to(q.dtype),)
