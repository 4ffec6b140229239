"""Attention, by the kernel that this device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.kernels.base import Context, own


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


@own("apportion.sdpa")
def _sdpa(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, dropout, causal, mask, scale = args
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = attend(_dense(q), _dense(k), _dense(v), dropout, causal, attn_mask=mask, scale=scale)
    return out, lse


@own("apportion.sdpa_backward")
def _sdpa_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, q, k, v, out, lse, dropout, causal, mask, scale = args
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # The kernel wants the gradient dense as [batch, position, head, width].
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = [grad, *(_dense(x) for x in (q, k, v, out))]
    return tuple(backward(*tensors, lse.contiguous(), dropout, causal, attn_mask=mask, scale=scale))
