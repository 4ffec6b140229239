"""Reductions, orders, scans, counts and transforms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _reductions()
    yield from _norms()
    yield from _orders()
    yield from _counts()
    yield from _segments()
    yield from _labels()


def _reductions() -> Iterator[Sample]:
    x, y = torch.randn(4, 5, 6), torch.randn(3, 7)
    sparse = torch.randn(5, 7) * (torch.rand(5, 7) < 0.3)
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
        yield sample_of(op, x, [0, -1], True)
        yield sample_of(op, y, [1])
    for op in (aten.var.correction, aten.std_mean.correction, aten.var_mean.correction):
        yield sample_of(op, x, [1, -1], correction=0, keepdim=True)
        yield sample_of(op, y, None, correction=1)
    yield sample_of(aten.std.correction, x, [-2], correction=2.5)
    for truth in (aten.any, aten.all):
        yield sample_of(truth.default, sparse)
        yield sample_of(truth.dim, sparse, -1, True)
        yield sample_of(truth.dims, torch.rand(3, 4, 5) < 0.2, [0, -1])
        yield sample_of(truth.dims, sparse, [])
    yield sample_of(aten.aminmax.default, x, dim=-2, keepdim=True)
    yield sample_of(aten.aminmax.default, y)
    yield sample_of(aten.prod.dim_int, y, 0, True)
    yield sample_of(aten.prod.default, y)
    yield sample_of(aten.count_nonzero.dim_IntList, sparse, [1])
    yield sample_of(aten.nansum.default, sparse.where(sparse != 0, torch.nan), [-1], True)
    yield sample_of(aten.logsumexp.default, x, [0, 2])
    yield sample_of(aten.logsumexp.default, y, [1], True)
    yield sample_of(aten.trace.default, torch.randn(6, 4))
    yield sample_of(aten.trace.default, torch.randn(5, 5))


def _norms() -> Iterator[Sample]:
    x, y = torch.randn(4, 5, 6), torch.randn(5, 1)
    for p in (0, 1, 2, 3.5, math.inf, -math.inf):
        yield sample_of(aten.linalg_vector_norm.default, x, p, [0, -1], True)
        yield sample_of(aten.dist.default, x, y, p)
    yield sample_of(aten.linalg_vector_norm.default, x)
    yield sample_of(aten.linalg_vector_norm.default, torch.randn(4, 5, dtype=torch.complex64))
    yield sample_of(aten.linalg_vector_norm.default, x, 2, [1], dtype=torch.float64)
    yield sample_of(aten.norm.Scalar, x, 2)
    yield sample_of(aten.norm.Scalar, x, 1)
    yield sample_of(aten.norm.ScalarOpt_dim, x, None, [-2])
    yield sample_of(aten.norm.ScalarOpt_dim, x, 0.5, [], True)
    yield sample_of(aten.renorm.default, x, 2, -2, 1.5)


def _orders() -> Iterator[Sample]:
    x = torch.randn(4, 5, 6)
    for op in (aten.argmax.default, aten.argmin.default):
        yield sample_of(op, x, 1, True)
        yield sample_of(op, x)
    for op in (aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim):
        yield sample_of(op, x, 1)
        yield sample_of(op, x, -1, True)
    yield sample_of(aten.median.default, x)
    yield sample_of(aten.mode.default, torch.randint(3, (4, 5, 6)), 1)
    yield sample_of(aten.kthvalue.default, x, 3, 1, True)
    yield sample_of(aten.topk.default, x, 3, 1, False)
    yield sample_of(aten.sort.default, x, 0, True)
    yield sample_of(aten.sort.stable, torch.randint(3, (4, 5, 6)), stable=True, dim=1)
    for scan in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin):
        yield sample_of(scan.default, x, -2)
    yield sample_of(aten._masked_softmax.default, x, torch.rand(4, 5, 6) < 0.3, 2, 2)
    scores = torch.randn(3, 2, 7, 7)
    yield sample_of(aten._masked_softmax.default, scores, torch.rand(7, 7) < 0.3, 3, 0)
    yield sample_of(aten._masked_softmax.default, scores, torch.rand(3, 7) < 0.3, 3, 1)
    out = x.softmax(1)
    yield sample_of(aten._masked_softmax_backward.default, x, out, torch.rand(4, 5, 6) < 0.3, 1)
    yield sample_of(aten._softmax.default, x, 1, False)
    yield sample_of(aten._log_softmax.default, x, -1, False)
    yield sample_of(aten._softmax_backward_data.default, x, out, 1, torch.float32)
    yield sample_of(aten._log_softmax_backward_data.default, x, out.log(), 1, torch.float32)
    signal = torch.randn(3, 4, 5, 6)
    yield sample_of(aten._fft_r2c.default, signal, [1, 3], 0, True)
    yield sample_of(aten._fft_r2c.default, signal, [2], 1, False)
    wave = torch.randn(3, 4, 5, 6, dtype=torch.complex64)
    yield sample_of(aten._fft_c2c.default, wave, [2], 2, False)
    yield sample_of(aten._fft_c2r.default, wave, [0, 3], 0, 10)


def _counts() -> Iterator[Sample]:
    x, weight, points = torch.randn(5, 7), torch.rand(5, 7), torch.randn(11, 2)
    edges = torch.linspace(-2, 2, 7)
    yield sample_of(aten.histc.default, x, 4, -1, 2)
    yield sample_of(aten.histc.default, x, 4)
    yield sample_of(aten.histogram.bins_tensor, x, edges)
    yield sample_of(aten.histogram.bins_tensor, x, edges, weight=weight)
    yield sample_of(aten.histogram.bins_tensor, x, edges, density=True)
    yield sample_of(aten.histogram.bin_ct, x, 6, range=[-2.0, 1.0], weight=weight)
    yield sample_of(aten.histogram.bin_ct, x, 6, range=[-2.0, 1.0], density=True)
    yield sample_of(aten.histogram.bin_ct, x, 6)
    limits = [-1.0, 2.0, -2.0, 1.0]
    yield sample_of(aten._histogramdd_from_bin_cts.default, points, [4, 3], range=limits)
    yield sample_of(aten._histogramdd_from_bin_cts.default, points, [4, 3])
    yield sample_of(aten._histogramdd_bin_edges.default, points, [4, 3])
    yield sample_of(
        aten._histogramdd_from_bin_tensors.default, points, [edges, edges[:5]],
        weight=torch.rand(11),
    )  # fmt: skip
    numbers = torch.randint(6, (13,))
    yield sample_of(aten.bincount.default, numbers, None, 4)
    yield sample_of(aten.bincount.default, numbers, torch.rand(13), 9)


def _segments() -> Iterator[Sample]:
    data, lengths = torch.randn(9, 4, 5), torch.tensor([2, 4, 3])
    yield sample_of(aten.segment_reduce.default, data, "sum", lengths=lengths)
    grad, made = torch.randn(3, 4, 5), torch.segment_reduce(data, "mean", lengths=lengths)
    yield sample_of(
        aten._segment_reduce_backward.default, grad, made, data, "mean", lengths=lengths
    )
    several, counts = (
        torch.randn(4, 9, 5),
        torch.tensor([[2, 4, 3], [3, 3, 3], [1, 4, 4], [9, 0, 0]]),
    )
    yield sample_of(aten.segment_reduce.default, several, "max", lengths=counts, axis=1)


def _labels() -> Iterator[Sample]:
    scores, targets = torch.randn(9, 4, 6).log_softmax(2), torch.randint(1, 6, (4, 5))
    frames, letters = [9, 7, 8, 9], [2, 3, 4, 1]
    loss, alpha = aten._ctc_loss.default(scores, targets, frames, letters)
    yield sample_of(aten._ctc_loss.default, scores, targets, frames, letters)
    yield sample_of(
        aten._ctc_loss_backward.default, torch.rand(4), scores, targets, frames, letters, loss,
        alpha, 0,
    )  # fmt: skip
    row = torch.randint(1, 6, (10,))
    yield sample_of(aten._ctc_loss.default, scores, row, frames, letters)
