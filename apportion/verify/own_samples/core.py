"""Core operators that never occur in the database: overloads that its functions do not reach."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    x, plane = torch.randn(4, 5, 6), torch.randn(2, 3, 4, 6)
    whole = torch.randint(0, 64, (5, 7))
    for op in (aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar):
        yield sample_of(op, whole, 21)
    for mode in (None, "floor", "trunc"):
        yield sample_of(aten.div.Scalar_mode, x, 0.7, rounding_mode=mode)
    yield sample_of(aten.fmod.Scalar, x, 0.7)
    yield sample_of(aten.copy.default, x, torch.randn(5, 1))
    yield sample_of(aten.copy.default, x, whole[:1, :6])
    yield sample_of(aten.var.dim, x, [1], True, keepdim=True)
    yield sample_of(aten.var.dim, x, [0, -1], False)
    yield sample_of(aten.avg_pool1d.default, torch.randn(3, 4, 9), [3], [2], [1])
    yield sample_of(aten.adaptive_avg_pool1d.default, torch.randn(3, 4, 9), [3])
    yield sample_of(aten.upsample_nearest2d.vec, plane, None, [2.0, 3.0])
    yield sample_of(aten.upsample_nearest2d.vec, plane, [9, 7], None)
    yield sample_of(aten.upsample_bilinear2d.vec, plane, [9, 7], True, None)
    yield sample_of(aten.upsample_bilinear2d.vec, plane, None, False, [2.0, 1.5])
