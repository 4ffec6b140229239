"""Sums of squares, alignments of labels with frames, and systems of equations.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.capture import computing_dtype
from apportion.execute.kernels.base import Context, own, resolve


@own("apportion.square_sum")
def _square_sum(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, dims, keepdim = args
    wide = computing_dtype(x.dtype)
    return (torch.linalg.vector_norm(x, 2, dims, keepdim, dtype=wide).square(),)


@own("apportion.ctc_loss")
def _ctc_loss(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """torch's kernel, its alignments `width` wide and impossible (log 0) where it left them
    unset."""
    scores, targets, frames, letters, blank, zero_infinity, width = args
    call = resolve("aten._ctc_loss.default")
    loss, found = call(scores, targets, frames, letters, blank, zero_infinity)
    alpha = found.new_full((*found.shape[:2], width), -torch.inf)
    for n, (steps, count) in enumerate(zip(frames, letters, strict=True)):
        alpha[n, :steps, : 2 * count + 1] = found[n, :steps, : 2 * count + 1]
    return loss, alpha


@own("aten._linalg_solve_ex.default")
def _solve(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """The factors that it keeps are those of the transpose, if the matrices are contiguous."""
    a, b, left, check_errors = args
    solve = resolve("aten._linalg_solve_ex.default")
    return tuple(solve(a.contiguous(), b, left=left, check_errors=check_errors))
