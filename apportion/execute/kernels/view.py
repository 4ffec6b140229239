"""Views that need dense inputs, and pieces put in their places, which may lie outside of a part.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import Context, own


@own("aten.view_as_complex.default")
def _view_as_complex(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (torch.view_as_complex(args[0].contiguous()),)


@own("aten.as_strided.default")
def _as_strided(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    # Offsets count from the first element; a part may lie anywhere in memory, and in any order.
    x, size, stride, *offset = args
    x = x.contiguous()
    first = x.storage_offset() + (offset[0] or 0 if offset else 0)
    return (x.as_strided(size, stride, first),)


@own("aten.as_strided_scatter.default")
def _as_strided_scatter(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, source, size, stride, *offset = args
    result = x.clone(memory_format=torch.contiguous_format)
    result.as_strided(size, stride, offset[0] or 0 if offset else 0).copy_(source)
    return (result,)


@own("aten.view.dtype")
def _view_dtype(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (args[0].contiguous().view(args[1]),)


@own("apportion.slice_place")
def _slice_place(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    source, sizes, *place = args
    return (_put(source.new_zeros(sizes), source, *place),)


@own("apportion.slice_scatter")
def _slice_scatter(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, source, *place = args
    return (_put(_copy(x), source, *place),)


@own("apportion.select_place")
def _select_place(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    source, sizes, dim, index = args
    return (_put(source.new_zeros(sizes), source.unsqueeze(dim), dim, index, 1),)


@own("apportion.select_scatter")
def _select_scatter(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, source, dim, index = args
    return (_put(_copy(x), source.unsqueeze(dim), dim, index, 1),)


@own("apportion.diagonal_place")
def _diagonal_place(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    source, sizes, *place = args
    return (_put_diagonal(source.new_zeros(sizes), source, *place),)


@own("apportion.diagonal_scatter")
def _diagonal_scatter(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, source, *place = args
    return (_put_diagonal(_copy(x), source, *place),)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _put(
    target: torch.Tensor, source: torch.Tensor, dim: int, start: int, step: int
) -> torch.Tensor:
    """Writes source's k-th slice at start + k*step along `dim`, where that is inside."""
    first = max(0, -(start // step))
    end = min(source.shape[dim], -((start - target.shape[dim]) // step))
    if first < end:
        low = start + first * step
        places = [slice(None)] * target.dim()
        places[dim] = slice(low, low + (end - first - 1) * step + 1, step)
        target[tuple(places)] = source.narrow(dim, first, end - first)
    return target


def _put_diagonal(
    target: torch.Tensor, source: torch.Tensor, dim1: int, dim2: int, row: int, column: int
) -> torch.Tensor:
    """Writes source's k-th element at (row + k, column + k) of the dims, where that is inside."""
    first = max(0, -row, -column)
    end = min(source.shape[-1], target.shape[dim1] - row, target.shape[dim2] - column)
    if first < end:
        block = target.narrow(dim1, row + first, end - first)
        block = block.narrow(dim2, column + first, end - first)
        block.diagonal(0, dim1, dim2).copy_(source.narrow(-1, first, end - first))
    return target
