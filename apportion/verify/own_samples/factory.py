"""Tensors made from sizes, and random ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    yield from _constant()
    yield from _placed()
    yield from _random()


def _constant() -> Iterator[Sample]:
    size, strides, x = [4, 6, 5], [30, 5, 1], torch.randn(3, 7)
    yield sample_of(aten.full.default, size, 0.5)
    for name in ("zeros", "ones", "_efficientzerotensor"):
        yield sample_of(getattr(aten, name).default, size)
    yield sample_of(aten.empty.memory_format, size)
    yield sample_of(aten.empty_strided.default, size, [1, 4, 24])
    yield sample_of(aten.empty_permuted.default, size, [2, 0, 1])
    yield sample_of(aten.new_full.default, x, size, 0.5)
    for name in ("new_zeros", "new_ones", "new_empty"):
        yield sample_of(getattr(aten, name).default, x, size)
    yield sample_of(aten.new_empty_strided.default, x, size, strides)
    yield sample_of(aten.full_like.default, x, 0.5)
    for name in ("zeros_like", "ones_like", "empty_like"):
        yield sample_of(getattr(aten, name).default, x)
    yield sample_of(aten.scalar_tensor.default, 0.5)


def _placed() -> Iterator[Sample]:
    yield sample_of(aten.arange.default, 11)
    yield sample_of(aten.arange.start, 2, 13)
    yield sample_of(aten.arange.start_step, -3.5, 4.0, 0.7)
    yield sample_of(aten.arange.start_step, 9, -4, -2)
    a, b = torch.tensor(0.3), torch.tensor(2.9)
    for name in ("linspace", "logspace"):
        packet = getattr(aten, name)
        yield sample_of(packet.default, 0.3, 2.9, 11)
        yield sample_of(packet.Tensor_Tensor, a, b, 11)
        yield sample_of(packet.Tensor_Scalar, a, 2.9, 11)
        yield sample_of(packet.Scalar_Tensor, 0.3, b, 11)
    yield sample_of(aten.eye.default, 7)
    for shape in ((5, 8), (8, 3)):
        yield sample_of(aten.eye.m, *shape)
    for name in ("tril_indices", "triu_indices"):
        for offset in (-1, 0, 2):
            yield sample_of(getattr(aten, name).default, 5, 7, offset)
    for name in ("tril", "triu"):
        for offset in (-2, 0, 1):
            yield sample_of(getattr(aten, name).default, torch.randn(3, 5, 8), offset)


def _random() -> Iterator[Sample]:
    size, x = [4, 6, 5], torch.rand(4, 6)
    yield sample_of(aten.rand.default, size)
    yield sample_of(aten.randn.default, size)
    yield sample_of(aten.rand_like.default, x)
    yield sample_of(aten.randn_like.default, x)
    yield sample_of(aten.randint.default, 9, size)
    yield sample_of(aten.randint.low, -3, 90000, size)
    yield sample_of(aten.randint_like.default, x, 9)
    yield sample_of(aten.randint_like.low_dtype, x, 3, 9)
    for name in ("uniform", "exponential", "cauchy", "log_normal", "random", "normal_functional"):
        yield sample_of(getattr(aten, name).default, x)
    yield sample_of(aten.geometric.default, x, 0.3)
    yield sample_of(getattr(aten.random, "from"), x, 3, 9)
    yield sample_of(aten.random.to, x, 9)
    yield sample_of(aten.normal.Tensor_Tensor, x, torch.rand(6))
    yield sample_of(aten.normal.Tensor_float, x, 2.0)
    yield sample_of(aten.normal.float_Tensor, 2.0, x)
    yield sample_of(aten.normal.float_float, 2.0, 3.0, size)
    yield sample_of(aten.bernoulli.default, x)
    yield sample_of(aten.bernoulli.p, x, 0.3)
    yield sample_of(aten.bernoulli.Tensor, x, torch.rand(6))
    yield sample_of(aten.native_dropout.default, x, 0.3, True)
    yield sample_of(aten.rrelu_with_noise_functional.default, x - 0.5, x, 0.1, 0.3, True)
    yield sample_of(aten.poisson.default, 5 * x)
    yield sample_of(aten.randperm.default, 11)
    yield sample_of(aten.multinomial.default, x, 3)
    yield sample_of(aten.multinomial.default, x, 9, True)
