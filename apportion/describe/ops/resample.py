"""Planes of another size: upsampling, sampling at the places of a grid, and grids.

Nearest neighbours repeat in each of the blocks that both extents have in common, so that blocks can
be cut: all of them where the factor is a whole number. The other kinds of interpolation look beyond
a block's edge; they are cut only along what lies before the plane, and along dimensions that keep
their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.language import Operand, Output, axes, axis, opaque, reduce
from apportion.describe.ops.window import block, resized

Blocks = Callable[[int, int, float | None], int]
"""Into how many equal blocks a dimension is divided, from its extents before and after."""


@cache
def _nearest(extent: int, made: int, scale: float | None, shift: float) -> int:
    """As many as both extents have in common, if the kernel rounds alike in all of them."""
    common = block(extent, made)
    if common == 1:
        return 1
    step = 1 / scale if scale else extent / made
    inner, outer = extent // common, made // common
    places = np.arange(made)
    doubled = (2 * (places % outer) + int(2 * shift)) * inner // (2 * outer)
    exact = places // outer * inner + doubled
    for kind in ("float32", "float64"):
        product = (places + np.array(shift, kind)).astype(kind) * np.array(step, kind)
        found = np.minimum(np.floor(product).astype(np.int64), extent - 1)
        if not np.array_equal(found, exact):
            return 1
    return common


def _plain(extent: int, made: int, scale: float | None) -> int:
    return _nearest(extent, made, scale, 0.0)


def _exact(extent: int, made: int, scale: float | None) -> int:
    return _nearest(extent, made, scale, 0.5)


def _smooth(extent: int, made: int, scale: float | None) -> int:
    return extent if extent == made and scale in (None, 1.0) else 1


def _describe_upsample(name: str, rank: int, blocks: Blocks) -> None:
    """The description of an upsampling and of its gradient; the last arguments are the scales."""

    def forward(x: Operand, *args: Any, out: Any) -> Any:
        after = out[0][-rank:]
        each = zip(x.shape[-rank:], after, args[-rank:], strict=True)
        return resized(x, after, [blocks(*one) for one in each])

    def backward(grad: Operand, *args: Any, out: Any) -> Any:
        after = out[0][-rank:]
        each = zip(after, grad.shape[-rank:], args[-rank:], strict=True)
        return resized(grad, after, [blocks(*one) for one in each])

    def forward_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
        return (args[0], local.outputs[0][-rank:], *args[2:])

    def backward_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
        return (args[0], local.inputs[0][-rank:], local.outputs[0], *args[3:])

    describe(name, local=forward_local)(forward)
    describe(f"{name}_backward", local=backward_local)(backward)


for _rank in (1, 2, 3):
    _describe_upsample(f"aten.upsample_nearest{_rank}d", _rank, _plain)
    _describe_upsample(f"aten._upsample_nearest_exact{_rank}d", _rank, _exact)
for _name, _rank in (
    ("aten.upsample_linear1d", 1),
    ("aten.upsample_bilinear2d", 2),
    ("aten.upsample_bicubic2d", 2),
    ("aten.upsample_trilinear3d", 3),
    ("aten._upsample_bilinear2d_aa", 2),
    ("aten._upsample_bicubic2d_aa", 2),
    ("aten._upsample_lanczos2d_aa", 2),
):
    _describe_upsample(_name, _rank, _smooth)


# Grids


@describe("aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten._grid_sampler_2d_cpu_fallback")
def grid_sampler(x: Operand, grid: Operand) -> Any:
    """Every result reads the plane at the place that the grid says."""
    rank = x.ndim - 2
    n, c, i = axis("n"), axis("c"), axes("i", rank)
    whole = (slice(None),) * rank
    return Output.of((n, c, *i), opaque(x[(n, c, *whole)], grid[(n, *i, slice(None))]))


def _sampler_backward(grad: Operand, x: Operand, grid: Operand, mask: Sequence[bool]) -> Any:
    rank = x.ndim - 2
    n, c, i, y, t = axis("n"), axis("c"), axes("i", rank), axes("y", rank), axis("t")
    whole = (slice(None),) * rank
    read = grad[(n, c, *i)], x[(n, c, *whole)], grid[(n, *i, slice(None))]
    for_x = reduce("sum", i, opaque(*read)[y])
    for_grid = reduce("sum", (c,), opaque(*read)[t])
    return (
        Output.of((n, c, *y), for_x) if mask[0] else None,
        Output.of((n, *i, t), for_grid) if mask[1] else None,
    )


@describe("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def grid_sampler_backward(
    grad: Any, x: Any, grid: Any, mode: Any, padding: Any, corners: Any, mask: Any
) -> Any:
    return _sampler_backward(grad, x, grid, mask)


@describe("aten._grid_sampler_2d_cpu_fallback_backward")
def grid_sampler_fallback_backward(grad: Any, x: Any, grid: Any) -> Any:
    return _sampler_backward(grad, x, grid, (True, True))


def _grid_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    theta, size, *rest = args
    return (theta, (local.outputs[0][0], *size[1:]), *rest)


@describe("aten.affine_grid_generator", local=_grid_local)
def affine_grid_generator(theta: Operand, size: Any) -> Any:
    n, i = axis("n"), axes("i", len(size) - 1)
    return Output.of((n, *i), opaque(theta[n, :, :])[i])
