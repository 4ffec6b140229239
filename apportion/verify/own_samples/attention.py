"""Attention: heads in groups, causal, masked in every broadcast form, other widths of values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def samples() -> Iterator[Sample]:
    """Forward and backward of each form."""
    for heads, groups, queries, keys, width in ((3, 1, 5, 7, 4), (2, 3, 6, 6, 8)):
        shape = (2, heads, keys, width)
        q = torch.randn(2, heads * groups, queries, width)
        k, v = torch.randn(shape), torch.randn(shape)
        for causal in (False, True):
            yield from _both(q, k, v, causal, None)
        for mask in _masks(2, heads * groups, queries, keys):
            yield from _both(q, k, v, False, mask)


def _masks(batch: int, heads: int, queries: int, keys: int) -> Iterator[torch.Tensor]:
    yield torch.randn(queries, keys)
    yield torch.randn(batch, 1, queries, keys)
    yield torch.randn(batch, heads, 1, keys)
    hidden = torch.zeros(queries, keys)
    hidden[1, 2:] = float("-inf")
    hidden[3] = float("-inf")  # a row that sees nothing
    yield hidden


def _both(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
) -> Iterator[Sample]:
    yield sample_of(_FORWARD, q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
    out, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=mask)
    grad = torch.randn_like(out)
    yield sample_of(_BACKWARD, grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask)
