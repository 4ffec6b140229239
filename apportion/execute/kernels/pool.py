"""Pools that are told where in the whole plane they are.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import Context, own
from apportion.execute.kernels.conv import cropped, shaped

aten = torch.ops.aten
_MAX = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
_MAX_BACKWARD = {
    2: aten.max_pool2d_with_indices_backward.default,
    3: aten.max_pool3d_with_indices_backward.default,
}
_AVERAGE = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
_AVERAGE_BACKWARD = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}


@own("apportion.max_pool")
def _max_pool(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, kernel, stride, padding, dilation, ceil, origin, plane = args
    rank = len(kernel)
    most, found = _MAX[rank](x, kernel, stride, padding, dilation, ceil)
    if tuple(x.shape[-rank:]) == tuple(plane) and not any(origin):
        return most, found
    places = _places(found, x.shape[-rank:])
    flat = torch.zeros_like(found)
    for place, first, extent in zip(places, origin, plane, strict=True):
        # A window of nothing but -inf may find its maximum in the padding.
        flat = flat * extent + (place + first).clamp(0, extent - 1)
    return most, flat


@own("apportion.max_pool_backward")
def _max_pool_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, found, size, kernel, stride, padding, dilation, origin, plane = args
    rank = len(kernel)
    windows, near = grad.shape[-rank:], size[-rank:]
    if tuple(near) == tuple(plane) and not any(origin):
        reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        ceil = _rounding(near, windows, reach, stride, padding)
        if ceil is not None:
            settings = (kernel, stride, padding, dilation, ceil)
            return (_MAX_BACKWARD[rank](grad, shaped(grad, size), *settings, found),)
    return (_added(grad, found, size, origin, plane),)


@own("apportion.plane_add")
def _plane_add(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    return (_added(*args),)


def _added(
    grad: torch.Tensor, found: torch.Tensor, size: Sequence[int], origin: Sequence[int],
    plane: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Zeros of `size` with each element added at its place in the plane, if that is inside."""
    rank = len(plane)
    near = size[-rank:]
    inside = torch.ones_like(found, dtype=torch.bool)
    flat = torch.zeros_like(found)
    for place, first, extent in zip(_places(found, plane), origin, near, strict=True):
        inside &= (place >= first) & (place < first + extent)
        flat = flat * extent + (place - first).clamp(0, extent - 1)
    total = grad.new_zeros([*size[:-rank], _product(near)])
    total.scatter_add_(-1, flat.flatten(-rank), (grad * inside).flatten(-rank))
    return total.view(tuple(size))


def _places(flat: torch.Tensor, extents: Sequence[int]) -> list[torch.Tensor]:
    """The index in each dimension of flat indices."""
    found = []
    for extent in reversed(extents):
        found.append(flat % extent)
        flat = flat // extent
    return found[::-1]


def _product(numbers: Sequence[int]) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


def _rounding(
    sizes: Sequence[int], windows: Sequence[int], reach: Sequence[int], stride: Sequence[int],
    padding: Sequence[int],
) -> bool | None:  # fmt: skip
    """Whether torch must round up to see so many windows; None if it never sees so many, or would
    not look."""
    if min(padding) < 0 or any(
        2 * p > r or n < r for n, p, r in zip(sizes, padding, reach, strict=True)
    ):
        return None
    for ceil in (False, True):
        seen = []
        for n, r, s, p in zip(sizes, reach, stride, padding, strict=True):
            count = (n + 2 * p - r + (s - 1 if ceil else 0)) // s + 1
            seen.append(count - 1 if ceil and (count - 1) * s >= n + p else count)
        if seen == list(windows):
            return ceil
    return None


# Average


@own("apportion.avg_pool")
def _avg_pool(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, kernel, stride, padding, windows, origin, plane, margin = args
    rank = len(kernel)
    ceil = _rounding(x.shape[-rank:], windows, kernel, stride, padding)
    if ceil is None:
        reach = [s * (n - 1) + k for s, n, k in zip(stride, windows, kernel, strict=True)]
        after = [n + p - r for n, p, r in zip(x.shape[-rank:], padding, reach, strict=True)]
        x, padding, ceil = cropped(x, [-p for p in padding], after), [0] * rank, False
        first = [o - p for o, p in zip(origin, args[3], strict=True)]
    else:
        first = [o - p for o, p in zip(origin, padding, strict=True)]
    total = _AVERAGE[rank](x, kernel, stride, padding, ceil, True, 1)
    return (total / _inside(total, first, kernel, stride, plane, margin),)


@own("apportion.avg_pool_backward")
def _avg_pool_backward(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    grad, size, kernel, stride, padding, origin, plane, margin, divisor = args
    rank = len(kernel)
    if divisor is None:
        first = [o - p for o, p in zip(origin, padding, strict=True)]
        grad = grad / _inside(grad, first, kernel, stride, plane, margin)
        divisor = 1
    windows, backward = grad.shape[-rank:], _AVERAGE_BACKWARD[rank]
    ceil = _rounding(size[-rank:], windows, kernel, stride, padding)
    if ceil is not None:
        x = shaped(grad, size)
        return (backward(grad, x, kernel, stride, padding, ceil, True, divisor),)
    reach = [s * (n - 1) + k for s, n, k in zip(stride, windows, kernel, strict=True)]
    x = shaped(grad, [*size[:-rank], *reach])
    full = backward(grad, x, kernel, stride, [0] * rank, False, True, divisor)
    after = [r - n - p for r, n, p in zip(reach, size[-rank:], padding, strict=True)]
    return (cropped(full, list(padding), after),)


def _inside(
    like: torch.Tensor, first: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    plane: Sequence[int], margin: Sequence[int] | None,
) -> torch.Tensor:  # fmt: skip
    """By how many elements each window is divided: those in the plane or, with a margin, those not
    beyond the margin after it. `first` is where the first window begins in the plane."""
    total = like.new_ones(())
    rank = len(kernel)
    for dim, (begin, k, s, extent) in enumerate(zip(first, kernel, stride, plane, strict=True)):
        count = like.shape[like.dim() - rank + dim]
        start = begin + s * torch.arange(count, device=like.device)
        last = extent + (margin[dim] if margin is not None else 0)
        length = (start + k).clamp(max=last) - (start if margin is not None else start.clamp(min=0))
        # Windows of nothing but what a part's neighbours need are of no length: their sums are 0.
        length = length.clamp(min=1).to(like.dtype)
        total = total * length.view(-1, *[1] * (rank - 1 - dim))
    return total
