"""Attention, by the kernel that this device has.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from apportion.execute.kernels.base import Context, own


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
    if context.cuda:
        return _on_cuda(q, k, v, causal, mask, scale, place)
    if causal and place:
        causal, mask = False, _causal(q, k, place)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = attend(_dense(q), _dense(k), _dense(v), dropout, causal, attn_mask=mask, scale=scale)
    return out, lse


@own("apportion.sdpa_backward")
def _sdpa_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, q, k, v, out, lse, dropout, causal, mask, scale, *place = args
    if context.cuda:
        return _backward_on_cuda(grad, q, k, v, out, lse, causal, mask, scale, place)
    if causal and place:
        causal, mask = False, _causal(q, k, place)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    # The kernel wants the gradient dense as [batch, position, head, width].
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    tensors = [grad, *(_dense(x) for x in (q, k, v, out))]
    return tuple(backward(*tensors, lse.contiguous(), dropout, causal, attn_mask=mask, scale=scale))


# On CUDA devices: cuDNN's kernels or FlashAttention in half precision without a mask, the
# memory-efficient kernel for the rest, and plain products in precisions and widths that none takes.

_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32  # the memory-efficient kernel keeps its sums in multiples of so many queries
_CUDNN = 91500  # the version from which torch itself prefers it, on Hopper and Blackwell


def _flash(q: torch.Tensor, v: torch.Tensor, mask: Any, place: Sequence[int]) -> bool:
    widths = q.shape[-1], v.shape[-1]
    return q.dtype in _HALF and mask is None and not place and widths[0] == widths[1] <= 256 and (
        widths[0] % 8 == 0
    )  # fmt: skip


def _cudnn(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Of what FlashAttention takes, whether cuDNN does it, as torch chooses on the device here."""
    usual = q.shape[-1] <= 128 and min(q.shape[2], k.shape[2]) > 1
    return usual and not torch.are_deterministic_algorithms_enabled() and _prefers_cudnn()


@cache
def _prefers_cudnn() -> bool:
    if not (torch.cuda.is_available() and torch.backends.cudnn.is_available()):
        return False
    new = (torch.backends.cudnn.version() or 0) >= _CUDNN
    wanted = torch.backends.cuda.cudnn_sdp_enabled()
    return new and wanted and torch.cuda.get_device_capability() in ((9, 0), (10, 0))


def _efficient(q: torch.Tensor, v: torch.Tensor) -> bool:
    step = 8 if q.dtype in _HALF else 4
    known = q.dtype in (torch.float32, *_HALF)
    return known and q.shape[-1] % step == 0 and v.shape[-1] % step == 0


def _bias(
    q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None, place: Sequence[int]
) -> torch.Tensor | None:
    """What is added to the scores, its rows 16 elements apart or a multiple, as the kernel
    wants."""
    if causal and place:
        mask = _causal(q, k, place)
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        none = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        mask = none.masked_fill_(~mask, float("-inf"))
    more = -mask.shape[-1] % 16
    if more:
        mask = torch.nn.functional.pad(mask, [0, more])[..., : mask.shape[-1]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def _on_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None,
    scale: float | None, place: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    if not (_flash(q, v, mask, place) or _efficient(q, v)):
        found = scores(q, k, mask, causal, scale, place)
        lse = torch.logsumexp(found, -1)
        lse = lse.masked_fill_(lse == float("-inf"), 0.0)  # rows that see no key
        weights = found.sub_(lse.unsqueeze(-1)).exp_()
        return torch.matmul(weights.to(v.dtype), _repeated(v, q.shape[1])), lse
    dense = [_dense(q), *(_dense(_repeated(x, q.shape[1])) for x in (k, v))]
    if _flash(q, v, mask, place) and _cudnn(q, k):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        out, lse, *_ = cudnn(*dense, None, True, 0.0, causal, scale=scale)
        return out, lse.reshape(out.shape[:-1])
    if _flash(q, v, mask, place):
        attend = torch.ops.aten._scaled_dot_product_flash_attention.default
        return tuple(attend(*dense, 0.0, causal, scale=scale)[:2])
    bias = _bias(q, k, causal, mask, place)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = efficient(*dense, bias, True, 0.0, causal and not place, scale=scale)
    return out, lse[..., : q.shape[2]]


def _backward_on_cuda(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None,
    place: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    heads, own = q.shape[1], k.shape[1]
    if not (_flash(q, v, mask, place) or _efficient(q, v)):
        return _plain_backward(grad, q, k, v, out, lse, causal, mask, scale, place)
    wide = [_dense(q), *(_dense(_repeated(x, heads)) for x in (k, v))]
    grad, out, lse = _dense(grad), _dense(out), lse.contiguous()
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # nothing is dropped
    if _flash(q, v, mask, place) and _cudnn(q, k):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        sums = (lse.unsqueeze(-1), no_seed, no_seed, None, None, None, q.shape[2], k.shape[2])
        found = cudnn(grad, *wide, out, *sums, 0.0, causal, scale=scale)
    elif _flash(q, v, mask, place):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        lengths = (None, None, q.shape[2], k.shape[2])
        seeds = (torch.zeros(2, dtype=torch.uint64, device=q.device), no_seed)
        found = flash(grad, *wide, out, lse, *lengths, 0.0, causal, *seeds, scale=scale)
    else:
        bias = _bias(q, k, causal, mask, place)
        more = -lse.shape[-1] % _ROWS
        lse = torch.nn.functional.pad(lse, [0, more], value=float("inf")) if more else lse
        wanted = [True, True, True, False]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        found = efficient(
            grad, *wide, bias, out, lse, no_seed, no_seed, 0.0, wanted, causal and not place,
            scale=scale,
        )[:3]  # fmt: skip
    for_query, for_key, for_value = found
    return for_query, _summed(for_key, own), _summed(for_value, own)


def _plain_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None,
    place: Sequence[int],
) -> tuple[Any, ...]:  # fmt: skip
    heads, own = q.shape[1], k.shape[1]
    found = scores(q, k, mask, causal, scale, place)
    weights = found.sub_(lse.unsqueeze(-1)).exp_()
    for_value = torch.matmul(weights.to(grad.dtype).transpose(-1, -2), grad)
    change = torch.matmul(grad, _repeated(v, heads).transpose(-1, -2))
    change = change.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
    change = change.mul_(1 / math.sqrt(q.shape[-1]) if scale is None else scale).to(q.dtype)
    for_query = torch.matmul(change, _repeated(k, heads))
    for_key = torch.matmul(change.transpose(-1, -2), q)
    return for_query, _summed(for_key, own), _summed(for_value, own)
