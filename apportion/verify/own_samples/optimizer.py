"""Optimizers on lists of parameters, and the operators on lists that they use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from apportion.verify.sample import Sample, aten, sample_of

_UNARY = """
abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg
reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero
"""
_SHAPES = ((4, 6), (7,))


def samples() -> Iterator[Sample]:
    """Extents that differ, so that no two dimensions can be mistaken for each other."""
    for name in _UNARY.split():
        yield sample_of(getattr(aten, f"_foreach_{name}").default, _list())
    yield from _binary()
    yield from _reductions()
    yield from _fused()


def _list(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [0.1 + 0.8 * torch.rand(shape) for shape in shapes or _SHAPES]


def _binary() -> Iterator[Sample]:
    numbers = [0.5, 2.0]
    for name in ("add", "sub", "mul", "div", "clamp_max", "clamp_min", "maximum", "minimum", "pow"):
        packet = getattr(aten, f"_foreach_{name}")
        yield sample_of(packet.Scalar, _list(), 0.75)
        yield sample_of(packet.ScalarList, _list(), numbers)
        yield sample_of(packet.List, _list(), _list())
    for name in ("add", "mul", "div"):
        yield sample_of(getattr(aten, f"_foreach_{name}").Tensor, _list(), torch.tensor(0.75))
    yield sample_of(aten._foreach_add.List, _list(), _list(), alpha=0.5)
    yield sample_of(aten._foreach_pow.ScalarAndTensor, 2.5, _list())
    for name in ("addcmul", "addcdiv"):
        packet = getattr(aten, f"_foreach_{name}")
        yield sample_of(packet.Scalar, _list(), _list(), _list(), 0.5)
        yield sample_of(packet.ScalarList, _list(), _list(), _list(), numbers)
        yield sample_of(packet.Tensor, _list(), _list(), _list(), torch.tensor(numbers))
    yield sample_of(aten._foreach_lerp.List, _list(), _list(), _list())
    yield sample_of(aten._foreach_lerp.Scalar, _list(), _list(), 0.3)
    yield sample_of(aten._foreach_lerp.ScalarList, _list(), _list(), numbers)
    yield sample_of(aten._foreach_copy.default, _list(), _list())


def _reductions() -> Iterator[Sample]:
    for power in (1, 2, float("inf")):
        yield sample_of(aten._foreach_norm.Scalar, _list(), power)
    yield sample_of(aten._foreach_powsum.Scalar, _list(), 2)
    yield sample_of(aten._foreach_max.default, _list())
    yield sample_of(aten._foreach_mm.default, _list((4, 6), (3, 5)), _list((6, 8), (5, 7)))
    gradient = torch.rand(3, 5, 7)
    for overflown in (gradient, gradient.clone()):
        overflown[2, 3, 4] = torch.inf if overflown is gradient else 0.5
        yield sample_of(
            aten._amp_foreach_non_finite_check_and_unscale.default,
            [overflown], torch.zeros(1), torch.full((1,), 0.5),
        )  # fmt: skip


def _fused() -> Iterator[Sample]:
    adam: dict[str, Any] = {
        "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-6,
    }  # fmt: skip
    for packet in (aten._fused_adam, aten._fused_adamw):
        for amsgrad in (False, True):
            moments = [_list() for _ in range(3)]
            largest = _list() if amsgrad else []
            steps = [torch.tensor(3.0) for _ in _SHAPES]
            yield sample_of(
                packet.default, _list(), *moments, largest, steps, **adam, amsgrad=amsgrad,
                maximize=False,
            )  # fmt: skip
    sgd: dict[str, Any] = {"weight_decay": 0.01, "lr": 0.1, "dampening": 0.0, "maximize": False}
    for momentum, nesterov, first in ((0.9, True, False), (0.9, False, True), (0.0, False, False)):
        buffers = _list() if momentum else []
        yield sample_of(
            aten._fused_sgd.default, _list(), _list(), buffers, **sgd, momentum=momentum,
            nesterov=nesterov, is_first_step=first,
        )  # fmt: skip
    yield sample_of(
        aten._fused_adagrad.default, _list(), _list(), _list(),
        [torch.tensor(3.0) for _ in _SHAPES], lr=0.1, lr_decay=0.01, weight_decay=0.01, eps=1e-8,
        maximize=False,
    )  # fmt: skip
