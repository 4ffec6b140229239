"""Own inputs: views, pieces of tensors, and tensors put together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _shapes()
    yield from _orders()
    yield from _pieces()
    yield from _places()
    yield from _joined()


def _shapes() -> Iterator[Sample]:
    x = torch.randn(4, 6, 5)
    for view in (aten.view.default, aten.view_copy.default, aten._unsafe_view.default):
        yield sample_of(view, x, [24, 5])
        yield sample_of(view, x, [2, 2, 3, 10])
        yield sample_of(view, x, [4, 3, -1])
        yield sample_of(view, torch.randn(4, 9), [-1, 6])
    yield sample_of(aten.view.dtype, torch.randn(4, 6), torch.int32)
    yield sample_of(aten.view.dtype, torch.randint(0, 9, (4, 6)), torch.int32)
    yield sample_of(
        aten.view_copy.dtype, torch.randint(0, 9, (5, 6), dtype=torch.int32), torch.int64
    )
    for expand in (aten.expand.default, aten.expand_copy.default):
        yield sample_of(expand, torch.randn(5, 1, 7), [3, -1, 4, 7])
        yield sample_of(expand, torch.randn(1), [6])
    for squeeze in (aten.squeeze, aten.squeeze_copy):
        yield sample_of(squeeze.default, torch.randn(1, 4, 1, 2))
        yield sample_of(squeeze.dim, torch.randn(4, 1, 3), -2)
        yield sample_of(squeeze.dim, torch.randn(4, 2), 1)
        yield sample_of(squeeze.dims, torch.randn(1, 4, 2, 1), [0, 2, -1])
    for unsqueeze in (aten.unsqueeze.default, aten.unsqueeze_copy.default):
        yield sample_of(unsqueeze, torch.randn(4, 5), -2)
    for same in (aten.alias_copy, aten.detach_copy, aten.lift_fresh_copy):
        yield sample_of(same.default, torch.randn(4, 5))
    for real in (aten.view_as_real.default, aten.view_as_real_copy.default):
        yield sample_of(real, torch.randn(4, 5, dtype=torch.complex64))
    for number in (aten.view_as_complex.default, aten.view_as_complex_copy.default):
        yield sample_of(number, torch.randn(4, 5, 2))
    yield sample_of(aten.resize.default, torch.randn(4, 5), [4, 5])
    yield sample_of(aten.resize_as.default, torch.randn(4, 5), torch.randn(4, 5))


def _orders() -> Iterator[Sample]:
    x = torch.randn(4, 5, 7)
    yield sample_of(aten.t.default, torch.randn(4, 5))
    yield sample_of(aten.t_copy.default, torch.randn(4, 5))
    for transpose in (aten.transpose.int, aten.transpose_copy.int):
        yield sample_of(transpose, x, 0, -1)
    for permute in (aten.permute.default, aten.permute_copy.default):
        yield sample_of(permute, x, [-1, 0, 1])
    yield sample_of(aten.flip.default, x, [0, -1])
    for turns in range(4):
        yield sample_of(aten.rot90.default, x, turns, [0, 2])
    yield sample_of(aten.rot90.default, x, -1, [-1, 1])
    yield sample_of(aten.roll.default, x, [2], [1])
    yield sample_of(aten.roll.default, x, [-1, 4, 3], [0, 0, -1])
    yield sample_of(aten.roll.default, x, [3])
    yield sample_of(aten.roll.default, x, [140])
    yield sample_of(aten.channel_shuffle.default, torch.randn(3, 12, 5), 4)
    yield sample_of(aten.native_channel_shuffle.default, torch.randn(3, 12, 5, 2), 3)
    yield sample_of(aten.pixel_shuffle.default, torch.randn(3, 18, 4, 5), 3)
    yield sample_of(aten.pixel_unshuffle.default, torch.randn(3, 5, 8, 12), 4)
    yield sample_of(aten.pixel_shuffle.default, torch.randn(8, 3, 5), 2)


def _pieces() -> Iterator[Sample]:
    x = torch.randn(9, 5, 8)
    for select in (aten.select.int, aten.select_copy.int):
        yield sample_of(select, x, -1, -2)
    for cut in (aten.slice.Tensor, aten.slice_copy.Tensor):
        yield sample_of(cut, x, 0, 2, 7)
        yield sample_of(cut, x, -1, -7, None, 3)
    yield sample_of(aten.narrow_copy.default, x, 0, 2, 6)
    yield sample_of(aten.narrow_copy.default, x, -1, -5, 4)
    for split in (aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor):
        yield sample_of(split, x, 3, 0)
        yield sample_of(split, x, 3, -1)
        yield sample_of(split, x, 99, 1)
    for sizes in (
        *(aten.split_with_sizes.default, aten.split_with_sizes_copy.default),
        aten.unsafe_split_with_sizes.default,
    ):
        yield sample_of(sizes, x, [4, 4], -1)
        yield sample_of(sizes, x, [2, 4, 3], 0)
        yield sample_of(sizes, x, [0, 9], 0)
    for unbind in (aten.unbind.int, aten.unbind_copy.int):
        yield sample_of(unbind, torch.randn(4, 3, 5), -2)
    for diagonal in (aten.diagonal.default, aten.diagonal_copy.default):
        yield sample_of(diagonal, torch.randn(4, 9, 6), 0, 1, 2)
        yield sample_of(diagonal, torch.randn(9, 4, 6), 2, 0, -1)
        yield sample_of(diagonal, torch.randn(9, 4, 6), -3, 0, -1)
    yield sample_of(aten.trace.default, torch.randn(5, 8))
    yield sample_of(aten.trace.default, torch.randn(7, 4))
    for unfold in (aten.unfold.default, aten.unfold_copy.default):
        yield sample_of(unfold, torch.randn(4, 11, 3), 1, 4, 2)
        yield sample_of(unfold, torch.randn(4, 11), -1, 2, 3)


def _places() -> Iterator[Sample]:
    yield sample_of(aten.slice_backward.default, torch.randn(4, 8), [4, 9], 1, 1, 9, 1)
    yield sample_of(aten.slice_backward.default, torch.randn(3, 4), [9, 4], 0, 2, 5, 1)
    yield sample_of(aten.slice_backward.default, torch.randn(4, 3), [4, 9], -1, -8, 9, 3)
    yield sample_of(aten.select_backward.default, torch.randn(4, 5), [4, 6, 5], -2, -3)
    x = torch.randn(4, 9, 5)
    yield sample_of(aten.slice_scatter.default, x, torch.randn(4, 3, 5), 1, 1, 8, 3)
    yield sample_of(aten.slice_scatter.default, x, torch.randn(4, 9, 2), -1, None, 2)
    yield sample_of(aten.select_scatter.default, x, torch.randn(4, 5), 1, -2)
    yield sample_of(aten.diagonal_scatter.default, x, torch.randn(9, 3), 2, 0, 2)
    yield sample_of(aten.diagonal_scatter.default, x, torch.randn(4, 5), -3, -2, -1)
    yield sample_of(aten.diagonal_backward.default, torch.randn(4, 6), [9, 4, 6], -3, 0, -1)
    yield sample_of(aten.diagonal_backward.default, torch.randn(3, 4), [3, 4, 9], 5, 1, 2)
    yield sample_of(aten.diag_embed.default, torch.randn(4, 5), 2)
    yield sample_of(aten.diag_embed.default, torch.randn(4, 5), -1, 0, 2)
    yield sample_of(aten.unfold_backward.default, torch.randn(4, 4, 3, 4), [4, 11, 3], 1, 4, 2)


def _joined() -> Iterator[Sample]:
    a, b = torch.randn(4, 5, 3), torch.randn(4, 2, 3)
    yield sample_of(aten.cat.default, [a, b, a], 1)
    yield sample_of(aten.cat.default, [a, torch.randn(4, 5, 3)], -1)
    yield sample_of(aten.cat.default, [a, torch.randn(0), b], 1)
    yield sample_of(aten.cat.default, [a, torch.randn(4, 0, 3)], 1)
    yield sample_of(aten.stack.default, [a, torch.randn(4, 5, 3)], -2)
    yield sample_of(aten._chunk_cat.default, [a, torch.randn(4, 7, 2)], 1, 3)
    yield sample_of(aten.block_diag.default, [torch.randn(4, 5)])
    yield sample_of(aten.block_diag.default, [torch.randn(4, 5), torch.randn(3)])
    yield sample_of(aten.repeat.default, torch.randn(4, 1, 5), [3, 2, 4, 1])
    yield sample_of(aten.repeat.default, torch.randn(3), [4])
    yield sample_of(aten.constant_pad_nd.default, torch.randn(4, 9, 5), [1, 2, 0, 3], 0.5)
    yield sample_of(aten.constant_pad_nd.default, torch.randn(4, 9), [-2, 1], -1)
