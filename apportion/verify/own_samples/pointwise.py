"""Pointwise operators with broadcasting, several outputs, or halves of a dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.sample import Sample, aten, sample_of

_BACKWARDS = "hardsigmoid hardswish mish sigmoid silu tanh"
_WITH_NUMBERS = (
    ("gelu",),
    ("leaky_relu", 0.2, False),
    ("hardtanh", -0.5, 0.7),
    ("hardshrink", 0.4),
    ("softshrink", 0.4),
    ("softplus", 1.5, 10.0),
    ("threshold", 0.3),
    ("logit", 0.1),
)


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    x, y, row, column = (torch.randn(shape) for shape in ((4, 6, 5), (4, 6, 5), (5,), (6, 1)))
    for name in ("add", "sub", "mul", "div"):
        for other in (y, row, column, torch.randn(())):
            yield sample_of(getattr(aten, name).Tensor, x, other)
    yield sample_of(aten.where.self, column > 0, x, row)
    yield sample_of(aten.clamp.Tensor, x, column, row)
    yield sample_of(aten.lerp.Tensor, column, x, row)
    yield sample_of(aten.addcmul.default, x, column, row, value=0.5)
    yield sample_of(aten.masked_fill.Scalar, x, column > 0, 0.5)
    yield sample_of(aten.native_dropout_backward.default, x, y > 0, 1.5)
    for name in _BACKWARDS.split():
        yield sample_of(getattr(aten, f"{name}_backward").default, x, y)
    for name, *numbers in _WITH_NUMBERS:
        yield sample_of(getattr(aten, f"{name}_backward").default, x, y, *numbers)
    yield sample_of(aten.elu_backward.default, x, 1.1, 1.0, 0.9, False, y)
    yield sample_of(aten.rrelu_with_noise_backward.default, x, y, y.abs(), 0.1, 0.3, True, False)
    yield from _several_outputs(x)
    yield from _halves()
    yield from _membership()


def _several_outputs(x: torch.Tensor) -> Iterator[Sample]:
    yield sample_of(aten.frexp.Tensor, x)
    yield sample_of(aten.log_sigmoid_forward.default, x)
    buffer = aten.log_sigmoid_forward.default(x)[1]
    yield sample_of(aten.log_sigmoid_backward.default, torch.randn_like(x), x, buffer)
    weight = torch.randn(6, 1)
    yield sample_of(aten._prelu_kernel.default, x, weight)
    yield sample_of(aten._prelu_kernel_backward.default, torch.randn_like(x), x, weight)


def _halves() -> Iterator[Sample]:
    for dim, shape in ((0, (6, 5, 4)), (1, (3, 10, 4)), (-1, (3, 5, 8))):
        x = torch.randn(shape)
        yield sample_of(aten.glu.default, x, dim)
        yield sample_of(aten.glu_backward.default, torch.randn_like(x.chunk(2, dim)[0]), x, dim)


def _membership() -> Iterator[Sample]:
    for invert in (False, True):
        given, candidates = torch.randint(30, (6, 7)), torch.randint(30, (4, 3))
        yield sample_of(aten.isin.Tensor_Tensor, given, candidates, invert=invert)
        yield sample_of(aten.isin.Tensor_Scalar, given, 7, invert=invert)
        yield sample_of(aten.isin.Scalar_Tensor, 7, torch.arange(11), invert=invert)
