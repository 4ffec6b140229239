"""Calls that address the memory of a tensor: as_strided, and what autograd makes of it.

Part of the room capture. A Graph knows elements and no memory, and a part of a step may have a
tensor in another order than the whole had it. So what such a call reads is put into the order of
its memory first: a permutation is recorded before it, after which the tensor is contiguous. The
kernel that runs the call (execute/kernels/view.py) makes sure that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apportion.capture.trace import CaptureError

aten = torch.ops.aten
MEMORY_CALLS = frozenset({aten.as_strided.default, aten.as_strided_scatter.default})


def in_memory_order(func: Any, args: Any, at: Callable[[], str]) -> list[int] | None:
    """The order of dimensions in which what a call addresses is contiguous, None if it is so
    already; raises CaptureError if there is none, or the call reads beyond the tensor. `at` says
    where the call is."""
    tensor = args[0]
    size, stride, *rest = args[1:] if func is aten.as_strided.default else args[2:]
    given = rest[0] if rest else None
    offset = given or 0
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    inside = (offset >= 0 and last < tensor.numel()) or 0 in size
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    dense = tensor.is_contiguous() or tensor.permute(order).is_contiguous()
    elsewhere = given is not None and tensor.storage_offset() != 0  # it counts from another place
    if not inside or not dense or elsewhere:
        raise CaptureError(
            f"as_strided addresses memory that is not the elements of its tensor{at()}; a captured "
            "step knows elements only, so call contiguous() before it, or use unfold, slices or an "
            "index instead"
        )
    return None if tensor.is_contiguous() else order
