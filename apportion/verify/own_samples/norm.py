"""Normalisations, forward and backward, in training and with given statistics."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of

ALL = [True, True, True]


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _rows()
    yield from _groups()
    yield from _batches()
    yield from _weights()


def _rows() -> Iterator[Sample]:
    x, grad, weight, bias = (
        torch.randn(3, 4, 5),
        torch.randn(3, 4, 5),
        torch.randn(5),
        torch.randn(5),
    )
    for scale, shift in ((weight, bias), (None, None)):
        yield sample_of(aten.native_layer_norm.default, x, [5], scale, shift, 1e-5)
    wide = torch.randn(4, 5)
    yield sample_of(aten.native_layer_norm.default, x, [4, 5], wide, None, 1e-5)
    _, mean, rstd = aten.native_layer_norm.default(x, [5], weight, bias, 1e-5)
    for mask in (ALL, [True, False, False], [False, True, True]):
        yield sample_of(
            aten.native_layer_norm_backward.default, grad, x, [5], mean, rstd, weight, bias, mask
        )


def _groups() -> Iterator[Sample]:
    x, grad, weight, bias = (
        torch.randn(3, 12, 5, 4),
        torch.randn(3, 12, 5, 4),
        torch.randn(12),
        None,
    )
    sizes = (3, 12, 20)
    for groups in (1, 4, 12):
        yield sample_of(aten.native_group_norm.default, x, weight, bias, *sizes, groups, 1e-5)
        _, mean, rstd = aten.native_group_norm.default(x, weight, bias, *sizes, groups, 1e-5)
        for mask in (ALL, [True, False, False], [False, True, True]):
            yield sample_of(
                aten.native_group_norm_backward.default, grad, x, mean, rstd, weight, *sizes,
                groups, mask,
            )  # fmt: skip
    flat = torch.randn(4, 6)
    yield sample_of(aten.native_group_norm.default, flat, None, torch.randn(6), 4, 6, 1, 3, 1e-5)


def _batches() -> Iterator[Sample]:
    x, grad = torch.randn(4, 3, 5, 6), torch.randn(4, 3, 5, 6)
    weight, bias, mean, variance = torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 1
    given = (x, weight, bias, mean, variance)
    yield sample_of(aten._native_batch_norm_legit_no_training.default, *given, 0.1, 1e-5)
    for op in (aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default):
        for training in (False, True):
            yield sample_of(op, *given, training, 0.1, 1e-5)
    yield sample_of(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
    yield sample_of(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5)
    yield sample_of(aten._batch_norm_no_update.default, *given, 0.1, 1e-5)
    yield sample_of(aten._batch_norm_with_update_functional.default, *given, 0.1, 1e-5)
    saved_mean, saved = x.mean((0, 2, 3)), 1 / x.std((0, 2, 3))
    for training in (False, True):
        for mask in (ALL, [True, False, False]):
            args = (grad, x, weight, mean, variance, saved_mean, saved, training, 1e-5, mask)
            yield sample_of(aten.native_batch_norm_backward.default, *args)
        yield sample_of(aten.batch_norm_backward.default, *args, torch.empty(0))


def _weights() -> Iterator[Sample]:
    for dim, shape in ((0, (4, 1, 1)), (2, (1, 1, 6))):
        v, g, grad = torch.randn(4, 5, 6), torch.rand(shape) + 1, torch.randn(4, 5, 6)
        yield sample_of(aten._weight_norm_interface.default, v, g, dim)
        _, norms = aten._weight_norm_interface.default(v, g, dim)
        yield sample_of(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim)
