"""Attention, by the kernel that this device has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from apportion.kernels.base import Context, own


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _causal(q: torch.Tensor, k: torch.Tensor, place: Sequence[int]) -> torch.Tensor:
    """The additive mask of a causal kernel whose queries and keys begin at `place`."""
    i0, j0 = place
    rows = torch.arange(i0, i0 + q.shape[2], device=q.device)
    columns = torch.arange(j0, j0 + k.shape[2], device=q.device)
    hidden = rows.unsqueeze(1) < columns
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(
        hidden, float("-inf")
    )


def scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float | None, place: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """q . k * scale + mask, in the precision of the log of sums."""
    groups = q.shape[1] // k.shape[1]
    k = k if groups == 1 else k.repeat_interleave(groups, 1)
    found = torch.matmul(q, k.transpose(-1, -2))
    found = found.float() if found.dtype in (torch.float16, torch.bfloat16) else found
    found = found * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        mask = _causal(q, k, place or (0, 0))
    if mask is None:
        return found
    return found.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else found + mask


@own("apportion.sdpa")
def _sdpa(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, dropout, causal, mask, scale, *place = args
    if causal and place:
        causal, mask = False, _causal(q, k, place)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = attend(_dense(q), _dense(k), _dense(v), dropout, causal, attn_mask=mask, scale=scale)
    return out, lse


@own("apportion.sdpa_backward")
def _sdpa_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, q, k, v, out, lse, dropout, causal, mask, scale, *place = args
    if causal and place:
        causal, mask = False, _causal(q, k, place)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # The kernel wants the gradient dense as [batch, position, head, width].
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = [grad, *(_dense(x) for x in (q, k, v, out))]
    return tuple(backward(*tensors, lse.contiguous(), dropout, causal, attn_mask=mask, scale=scale))
