"""Products of groups of rows, each with a matrix of its own, by parts that know their rows.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
Groups are read from two tensors, so these kernels look at data; torch's own takes neither float64
nor a part of the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import Context, own

Tensor = torch.Tensor


def _groups(starts: Tensor, ends: Tensor, first: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """The groups that have rows here: number, first row and end."""
    if starts.is_meta:
        return
    for number, (low, high) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        here = max(low - first, 0), min(high - first, rows)
        if here[0] < here[1]:
            yield number, *here


@own("apportion.grouped_mm")
def _grouped_mm(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    a, b, starts, ends, first = args
    out = a.new_zeros(a.shape[0], b.shape[2])
    for number, low, high in _groups(starts, ends, first, a.shape[0]):
        torch.mm(a[low:high], b[number], out=out[low:high])
    return (out,)


@own("apportion.grouped_outer")
def _grouped_outer(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    a, b, starts, ends, first = args
    out = a.new_zeros(starts.shape[0], a.shape[0], b.shape[1])
    for number, low, high in _groups(starts, ends, first, a.shape[1]):
        torch.mm(a[:, low:high], b[low:high], out=out[number])
    return (out,)
