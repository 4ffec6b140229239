"""Own inputs: convolutions, pools, resampling, padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from apportion.verify.sample import Sample, aten, sample_of

PLANES = {1: (9,), 2: (7, 10), 3: (5, 6, 7)}


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _convolutions()
    yield from _max_pools()
    yield from _avg_pools()
    yield from _adaptive_pools()
    yield from _unpools()
    yield from _upsamples()
    yield from _pads()
    yield from _grids()
    yield from _columns()


def _convolutions() -> Iterator[Sample]:
    # rank, kernel, stride, padding, dilation, groups
    cases = [
        (1, 3, 1, 1, 1, 1), (1, 4, 3, 2, 1, 2), (1, 1, 1, 0, 1, 1), (1, 2, 2, 0, 3, 3),
        (2, 3, 1, 1, 1, 1), (2, 3, 2, 1, 1, 2), (2, 1, 2, 0, 1, 1), (2, 2, 1, 0, 2, 4),
        (3, 3, 1, 1, 1, 1), (3, 2, 2, 1, 2, 2),
    ]  # fmt: skip
    for number, (rank, *each, groups) in enumerate(cases):
        kernel, *settings = ([n] * rank for n in each)
        x = torch.randn(3, 4 * groups, *PLANES[rank])
        bias = torch.randn(5 * groups) if number % 2 else None
        for transposed in (False, True):
            within = x.shape[1]
            size = (within, 5, *kernel) if transposed else (5 * groups, 4, *kernel)
            weight = torch.randn(size)
            stride, _, dilation = settings
            more = [min(number % 2, max(stride[0], dilation[0]) - 1) * transposed] * rank
            args = (*settings, transposed, more, groups)
            yield sample_of(aten.convolution.default, x, weight, bias, *args)
            grad = torch.randn_like(aten.convolution.default(x, weight, bias, *args))
            sizes = None if bias is None else list(bias.shape)
            mask = [True, True, bias is not None]
            rest = (sizes, *args, mask)
            yield sample_of(aten.convolution_backward.default, grad, x, weight, *rest)
    yield sample_of(
        aten.conv_tbc.default, torch.randn(9, 3, 4), torch.randn(2, 4, 5), torch.randn(5), 1
    )


_MAX = {
    2: (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
    3: (aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default),
}
_AVERAGE = {
    2: (aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
    3: (aten.avg_pool3d.default, aten.avg_pool3d_backward.default),
}


def _max_pools() -> Iterator[Sample]:
    # rank, kernel, stride, padding, dilation, rounded up, batched
    cases = [
        (2, 3, 2, 1, 1, False, True), (2, 2, 2, 0, 1, True, True), (2, 3, 1, 1, 2, False, False),
        (2, 2, 3, 1, 1, True, False), (3, 3, 2, 1, 1, False, True), (3, 2, 1, 0, 2, True, False),
    ]  # fmt: skip
    for rank, kernel, stride, padding, dilation, ceil, batched in cases:
        forward, backward = _MAX[rank]
        x = torch.randn(*([3] if batched else []), 4, *PLANES[rank])
        settings = ([kernel] * rank, [stride] * rank, [padding] * rank, [dilation] * rank, ceil)
        yield sample_of(forward, x, *settings)
        most, found = forward(x, *settings)
        yield sample_of(backward, torch.randn_like(most), x, *settings, found)
    # Nothing is less than every whole number, with which a part could be padded.
    yield sample_of(_MAX[2][0], torch.randperm(3 * 4 * 70).view(3, 4, 7, 10), [2, 3], [], [0, 1])


def _avg_pools() -> Iterator[Sample]:
    # rank, kernel, stride, padding, rounded up, padding counts, divisor, batched
    cases = [
        (2, 3, 2, 1, False, True, None, True), (2, 3, 1, 1, False, False, None, True),
        (2, 3, 2, 1, True, True, None, False), (2, 2, 3, 1, True, False, None, True),
        (2, 3, 2, 0, False, True, 5, True), (2, 2, 2, 1, True, False, 3, False),
        (3, 2, 1, 0, False, True, None, True), (3, 3, 2, 1, True, False, None, False),
        (3, 2, 2, 1, False, False, 7, True),
    ]  # fmt: skip
    for rank, kernel, stride, padding, *rest, batched in cases:
        forward, backward = _AVERAGE[rank]
        x = torch.randn(*([3] if batched else []), 4, *PLANES[rank])
        settings = ([kernel] * rank, [stride] * rank, [padding] * rank, *rest)
        yield sample_of(forward, x, *settings)
        yield sample_of(backward, torch.randn_like(forward(x, *settings)), x, *settings)


def _adaptive_pools() -> Iterator[Sample]:
    two, three = (3, 4, 8, 9), (3, 2, 6, 8, 9)
    for shape, sizes in (
        (two, [(4, 3), (5, 7), (8, 6), (16, 1)]),
        (two[1:], [(4, 9)]),
        (three, [(3, 4, 5), (6, 8, 3)]),
        (three[1:], [(2, 12, 3)]),
    ):
        x = torch.randn(shape)
        for size in sizes:
            flat = len(size) == 2
            average = aten._adaptive_avg_pool2d if flat else aten._adaptive_avg_pool3d
            back = (
                aten._adaptive_avg_pool2d_backward if flat else aten._adaptive_avg_pool3d_backward
            )
            most = aten.adaptive_max_pool2d if flat else aten.adaptive_max_pool3d
            undo = aten.adaptive_max_pool2d_backward if flat else aten.adaptive_max_pool3d_backward
            yield sample_of(average.default, x, size)
            yield sample_of(most.default, x, size)
            made, found = most.default(x, size)
            yield sample_of(back.default, torch.randn_like(made), x)
            yield sample_of(undo.default, torch.randn_like(made), x, found)


def _unpools() -> Iterator[Sample]:
    for batch, rank in itertools.product(((3,), ()), (2, 3)):
        x = torch.randn(*batch, 4, *PLANES[rank])
        drawn = torch.rand(batch[0] if batch else 1, 4, rank)
        pool, back = (
            (aten.fractional_max_pool2d, aten.fractional_max_pool2d_backward)
            if rank == 2
            else (aten.fractional_max_pool3d, aten.fractional_max_pool3d_backward)
        )
        kernel, size = [2, 2, 3][:rank], [3, 4, 2][:rank]
        yield sample_of(pool.default, x, kernel, size, drawn)
        most, found = pool.default(x, kernel, size, drawn)
        yield sample_of(back.default, torch.randn_like(most), x, kernel, size, found)
        most, found = _MAX[rank][0](x, [2] * rank, [2] * rank)
        if rank == 2:
            yield sample_of(aten.max_unpool2d.default, most, found, list(x.shape[-2:]))
        else:
            places = (list(x.shape[-3:]), [2] * 3, [0] * 3)
            yield sample_of(aten.max_unpool3d.default, most, found, *places)


def _upsamples() -> Iterator[Sample]:
    nearest = [
        (aten.upsample_nearest1d, aten.upsample_nearest1d_backward, (4,)),
        (aten.upsample_nearest2d, aten.upsample_nearest2d_backward, (4, 6)),
        (aten.upsample_nearest3d, aten.upsample_nearest3d_backward, (4, 6, 5)),
        (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact1d_backward, (4,)),
        (aten._upsample_nearest_exact2d, aten._upsample_nearest_exact2d_backward, (4, 6)),
        (aten._upsample_nearest_exact3d, aten._upsample_nearest_exact3d_backward, (4, 6, 5)),
    ]
    smooth = [
        (aten.upsample_linear1d, aten.upsample_linear1d_backward, (4,)),
        (aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward, (4, 6)),
        (aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward, (4, 6)),
        (aten.upsample_trilinear3d, aten.upsample_trilinear3d_backward, (4, 6, 5)),
        (aten._upsample_bilinear2d_aa, aten._upsample_bilinear2d_aa_backward, (4, 6)),
        (aten._upsample_bicubic2d_aa, aten._upsample_bicubic2d_aa_backward, (4, 6)),
    ]
    for forward, backward, plane in nearest:
        for size in ([8, 18, 5], [7, 4, 10], [2, 9, 15]):
            yield from _upsampled(forward, backward, plane, size[: len(plane)], ())
    for forward, backward, plane in smooth:
        for size, corners in (([8, 6, 5], False), ([7, 4, 10], True)):
            yield from _upsampled(forward, backward, plane, size[: len(plane)], (corners,))
    x = torch.randn(3, 2, 4, 6)
    yield sample_of(aten.upsample_nearest2d.default, x, [8, 15], 2.0, 2.5)
    yield sample_of(aten.upsample_bilinear2d.default, x, [8, 15], False, 2.0, 2.5)


def _upsampled(
    forward: Any, backward: Any, plane: tuple[int, ...], size: list[int], extra: tuple[bool, ...]
) -> Iterator[Sample]:
    x = torch.randn(3, 2, *plane)
    yield sample_of(forward.default, x, size, *extra)
    grad = torch.randn(3, 2, *size)
    yield sample_of(backward.default, grad, size, [3, 2, *plane], *extra)


def _pads() -> Iterator[Sample]:
    names = [(kind, rank) for kind in ("reflection", "replication") for rank in (1, 2, 3)]
    for kind, rank in names:
        forward = getattr(aten, f"{kind}_pad{rank}d").default
        backward = getattr(aten, f"{kind}_pad{rank}d_backward").default
        for before, widths in (((3, 2), [1, 2, 0, 0, 2, 1]), ((2,), [0, 0, 2, 1, 0, 3])):
            x = torch.randn(*before, *PLANES[rank])
            padding = widths[: 2 * rank]
            yield sample_of(forward, x, padding)
            yield sample_of(backward, torch.randn_like(forward(x, padding)), x, padding)


def _grids() -> Iterator[Sample]:
    two = torch.randn(3, 2, 4, 6), torch.rand(3, 7, 5, 2) * 2.4 - 1.2
    three = torch.randn(3, 2, 4, 6, 5), torch.rand(3, 7, 5, 8, 3) * 2.4 - 1.2
    for mode, padding, corners in ((0, 0, False), (1, 1, True), (2, 2, False)):
        yield sample_of(aten.grid_sampler_2d.default, *two, mode, padding, corners)
        grad = torch.randn(3, 2, 7, 5)
        for mask in ([True, True], [False, True]):
            args = (grad, *two, mode, padding, corners, mask)
            yield sample_of(aten.grid_sampler_2d_backward.default, *args)
        if mode < 2:
            yield sample_of(aten.grid_sampler_3d.default, *three, mode, padding, corners)
            args = (torch.randn(3, 2, 7, 5, 8), *three, mode, padding, corners, [True, True])
            yield sample_of(aten.grid_sampler_3d_backward.default, *args)
    yield sample_of(aten.affine_grid_generator.default, torch.randn(5, 2, 3), [5, 3, 4, 6], False)
    yield sample_of(aten.affine_grid_generator.default, torch.randn(4, 3, 4), [4, 2, 3, 5, 6], True)


def _columns() -> Iterator[Sample]:
    for batch in ((3,), ()):
        x = torch.randn(*batch, 4, 7, 10)
        for settings in (([2, 3], [1, 1], [0, 0], [1, 1]), ([3, 2], [2, 1], [1, 0], [2, 3])):
            yield sample_of(aten.im2col.default, x, *settings)
            columns = torch.randn_like(aten.im2col.default(x, *settings))
            yield sample_of(aten.col2im.default, columns, [7, 10], *settings)
