"""Every description against its real kernel: each derived split, run in pieces, equals the whole.

A sample is a call with random inputs. Where it names axes, exactly those can be cut, so that a
description that refuses everything fails as surely as one that allows too much.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from graphs import CONTEXT, One, one

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.reference import capture_as
from apportion.describe import descriptions, language
from apportion.describe.formula import evaluate_formula
from apportion.describe.interval import volume
from apportion.describe.ops.elementwise import ELEMENTWISE
from apportion.graph import Ref
from apportion.verify import run_split as check
from apportion.verify.run_split import check_op
from apportion.verify.verify_step import verify_step


@dataclass(frozen=True)
class Random:
    """A random tensor: numbers around 0, in an interval, whole numbers, or truth values."""

    shape: tuple[int, ...]
    kind: str = "normal"
    low: float = 0
    high: float = 1
    strided: bool = False

    def make(self, generator: torch.Generator) -> torch.Tensor:
        if not self.strided:
            return self._dense(self.shape, generator)
        # Every other element of a tensor whose dimensions lie in the opposite order.
        wide = self._dense(tuple(2 * n for n in reversed(self.shape)), generator)
        wide = wide[tuple(slice(None, None, 2) for _ in self.shape)]
        return wide.permute(*reversed(range(wide.dim())))

    def _dense(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if self.kind == "normal":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        if self.kind == "whole":
            return torch.randint(int(self.low), int(self.high), shape, generator=generator)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return uniform < 0.5 if self.kind == "bool" else uniform * (self.high - self.low) + self.low


def R(*shape: int) -> Random:
    return Random(shape)


def NC(*shape: int) -> Random:
    """Not contiguous."""
    return Random(shape, strided=True)


def U(*shape: int, low: float = 0.05, high: float = 0.95) -> Random:
    return Random(shape, "uniform", low, high)


def Z(high: int, *shape: int, low: int = 0) -> Random:
    return Random(shape, "whole", low, high)


def B(*shape: int) -> Random:
    return Random(shape, "bool")


@dataclass(frozen=True)
class Sample:
    kind: str
    args: tuple[Any, ...]
    axes: set[str] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)

    def one(self, seed: int) -> One:
        generator = torch.Generator().manual_seed(seed)

        def made(arg: Any) -> Any:
            if isinstance(arg, Random):
                return arg.make(generator)
            return [made(a) for a in arg] if isinstance(arg, list) else arg

        keywords = {name: made(arg) for name, arg in self.keywords.items()}
        return one(self.kind, *(made(a) for a in self.args), **keywords)


def S(kind: str, *args: Any, axes: str | None = None, **keywords: Any) -> Sample:
    return Sample(kind, args, None if axes is None else set(axes.split()), keywords)


NONE, MEAN, SUM = 0, 1, 2

MATMUL = [
    S("aten.mm.default", R(4, 6), R(6, 8), axes="i j k"),
    S("aten.mm.default", NC(5, 7), NC(7, 3), axes="i j k"),
    S("aten.mm.default", R(1, 7), R(7, 1), axes="k"),
    S("aten.mm.default", R(5, 1), R(1, 5), axes="i j"),
    S("aten.bmm.default", R(3, 4, 5), NC(3, 5, 7), axes="n i j k"),
    S("aten.bmm.default", R(1, 2, 5), R(1, 5, 2), axes="i j k"),
    S("aten.addmm.default", R(7), R(5, 4), R(4, 7), axes="i j k"),
    S("aten.addmm.default", R(5, 7), NC(5, 4), R(4, 7), axes="i j k", beta=0.5, alpha=3),
    S("aten.addmm.default", R(5, 1), R(5, 4), NC(4, 7), axes="i j k", beta=-2),
    S("aten.addmm.default", R(), R(5, 4), R(4, 7), axes="i j k", alpha=0.25),
    S("aten.addmm.default", R(7), R(5, 4), R(4, 7), axes="i j k", beta=0),
    S("aten.baddbmm.default", R(3, 5, 7), R(3, 5, 2), R(3, 2, 7), axes="n i j k", beta=2),
    S("aten.baddbmm.default", R(1, 7), R(3, 5, 2), NC(3, 2, 7), axes="n i j k", alpha=-1),
    S("aten.mv.default", NC(5, 7), R(7), axes="i k"),
    S("aten.dot.default", R(7), R(7), axes="k"),
    S("aten.vdot.default", R(5), NC(5), axes="k"),
]

REDUCTION = [
    S("aten.sum.default", R(4, 5, 6), axes="k0 k1 k2"),
    S("aten.sum.default", R(), axes=""),
    S("aten.sum.dim_IntList", R(4, 5, 6), [1], axes="i0 i1 k0"),
    S("aten.sum.dim_IntList", NC(4, 5, 6), [-1, 0], True, axes="i1 k0 k1"),
    S("aten.sum.dim_IntList", R(4, 5), None, axes="k0 k1"),
    S("aten.sum.dim_IntList", R(4, 5), [], True, axes="k0 k1"),
    S("aten.sum.dim_IntList", R(1, 7), [0], axes="i0"),
    S("aten.sum.dim_IntList", B(5, 7), [1], axes="i0 k0"),
    S("aten.mean.default", R(5, 7), axes="k0 k1"),
    S("aten.mean.dim", R(5, 7), [1], axes="i0 k0"),
    S("aten.mean.dim", NC(3, 5, 7), [0, -1], True, axes="i1 k0 k1"),
    S("aten.mean.dim", R(5, 7), None, axes="k0 k1"),
    S("aten.amax.default", R(5, 7), [1], axes="i0 k0"),
    S("aten.amax.default", R(5, 7), axes="k0 k1"),
    S("aten.amin.default", NC(5, 7), [-2], True, axes="i1 k0"),
    S("aten.prod.default", R(5, 7), axes="k0 k1"),
    S("aten.prod.dim_int", R(5, 7), 0, axes="i0 k0"),
    S("aten.prod.dim_int", R(5, 7), -1, True, axes="i0 k0"),
    S("aten.max.default", R(5, 7), axes="k0 k1"),
    S("aten.min.default", NC(5, 7), axes="k0 k1"),
    S("aten._softmax.default", R(5, 7, 3), 1, False, axes="i0 i2"),
    S("aten._softmax.default", R(7), -1, False, axes=""),
    S("aten._log_softmax.default", NC(5, 7), -1, False, axes="i0"),
    S("aten._log_softmax.default", R(), 0, False, axes=""),
    S("aten._safe_softmax.default", R(5, 7), 0, axes="i1"),
    S("aten.cumsum.default", R(5, 7), 1, axes="i0"),
    S("aten.cumprod.default", NC(5, 7), 0, axes="i1"),
    S("aten.logcumsumexp.default", R(5, 7), -2, axes="i1"),
    S("aten._softmax_backward_data.default", R(5, 7, 3), U(5, 7, 3), 1, torch.float64,
      axes="i0 i2"),
    S("aten._log_softmax_backward_data.default", R(5, 7), NC(5, 7), -1, torch.float64, axes="i0"),
    S("aten._softmax_backward_data.default", R(), R(), 0, torch.float64, axes=""),
]  # fmt: skip

NORM = [
    S("aten.native_layer_norm.default", R(4, 5, 6), [6], R(6), R(6), 1e-5, axes="i0 i1"),
    S("aten.native_layer_norm.default", NC(4, 5, 6), [5, 6], R(5, 6), None, 1e-3, axes="i0"),
    S("aten.native_layer_norm.default", R(5, 7), [7], None, None, 1e-5, axes="i0"),
    S("aten.native_layer_norm.default", R(7), [7], R(7), R(7), 1e-5, axes=""),
    S("aten.native_layer_norm.default", R(5, 1), [1], R(1), None, 1e-5, axes="i0"),
    *(
        S("aten.native_layer_norm_backward.default", NC(4, 5, 6), R(4, 5, 6), [6], R(4, 5, 1),
          U(4, 5, 1), weight, bias, mask, axes="i0 i1")
        for weight, bias, mask in [
            (R(6), R(6), [True, True, True]),
            (None, None, [True, False, False]),
            (R(6), None, [True, True, False]),
            (R(6), R(6), [True, False, True]),
            (R(6), R(6), [False, True, True]),
        ]
    ),
    S("aten.native_layer_norm_backward.default", R(4, 5, 6), R(4, 5, 6), [5, 6], R(4, 1, 1),
      U(4, 1, 1), R(5, 6), R(5, 6), [True] * 3, axes="i0"),
]  # fmt: skip

LOSS = [
    *(
        S(f"aten.{name}.default", R(5, 7), NC(5, 7), reduction, axes=axes)
        for name in ("mse_loss", "soft_margin_loss", "smooth_l1_loss", "huber_loss")
        for reduction, axes in ((NONE, "i0 i1"), (MEAN, "i0 i1"), (SUM, "i0 i1"))
    ),
    S("aten.mse_loss.default", R(), R(), MEAN, axes=""),
    S("aten.mse_loss.default", R(7, 1), R(7, 1), MEAN, axes="i0"),
    S("aten.mse_loss.default", R(5, 7), R(7), MEAN, axes="i0 i1"),
    S("aten.mse_loss.default", R(5, 1), R(5, 7), MEAN, axes="i0 i1"),  # the input is broadcast
    S("aten.mse_loss.default", R(5), R(5, 5), MEAN, axes="i0 i1"),
    S("aten.mse_loss.default", R(5), R(5, 5), NONE, axes="i0 i1"),
    S("aten.smooth_l1_loss.default", R(7), R(7), MEAN, 0.3, axes="i0"),
    S("aten.huber_loss.default", R(7), R(7), SUM, 0.3, axes="i0"),
    *(
        S(f"aten.{name}.default", R(5, 7) if reduction == NONE else R(), R(5, 7), NC(5, 7),
          reduction, *extra, axes="i0 i1")
        for name, extra in (
            ("mse_loss_backward", ()), ("soft_margin_loss_backward", ()),
            ("smooth_l1_loss_backward", (0.5,)), ("huber_loss_backward", (0.5,)),
        )
        for reduction in (NONE, MEAN, SUM)
    ),
    *(
        S("aten.binary_cross_entropy.default", U(5, 7), U(5, 7), weight, reduction, axes="i0 i1")
        for weight in (None, R(7), R(5, 7))
        for reduction in (NONE, MEAN, SUM)
    ),
    *(
        S("aten.binary_cross_entropy_backward.default", R(5, 7) if reduction == NONE else R(),
          U(5, 7), U(5, 7), weight, reduction, axes="i0 i1")
        for weight in (None, R(5, 7))
        for reduction in (NONE, MEAN, SUM)
    ),
    S("aten.nll_loss_forward.default", R(7, 5), Z(5, 7), None, SUM, -100, axes="n c"),
    S("aten.nll_loss_forward.default", R(7, 5), Z(5, 7), R(5), SUM, 2, axes="n c"),
    S("aten.nll_loss_forward.default", NC(7, 5), Z(5, 7), U(5), NONE, 2, axes="n c"),
    S("aten.nll_loss_forward.default", R(7, 5), Z(5, 7), None, NONE, -100, axes="n c"),
    S("aten.nll_loss_forward.default", R(7, 5), Z(5, 7), None, MEAN, -100, axes=""),
    *(
        S("aten.nll_loss_backward.default", R(7) if reduction == NONE else R(), R(7, 5), Z(5, 7),
          weight, reduction, ignore, U(low=3, high=6), axes="n c")
        for weight, ignore in ((None, -100), (U(5), 2))
        for reduction in (NONE, MEAN, SUM)
    ),
]  # fmt: skip

INDEX = [
    S("aten.embedding.default", R(11, 6), Z(11, 4, 3), axes="i0 i1 i2"),
    S("aten.embedding.default", NC(11, 6), Z(11, 5), 3, axes="i0 i1"),
    S("aten.embedding.default", R(11, 6), Z(11), axes="i0"),
    S("aten.embedding_dense_backward.default", R(4, 3, 6), Z(11, 4, 3), 11, -1, False,
      axes="n0 n1 d"),
    S("aten.embedding_dense_backward.default", NC(7, 6), Z(11, 7), 11, 4, False, axes="n0 d"),
    S("aten.embedding_dense_backward.default", R(7, 6), Z(11, 7), 11, -1, True, axes=""),
    S("aten.gather.default", R(5, 7), 1, Z(7, 5, 3), axes="i0 i1"),
    S("aten.gather.default", NC(5, 7), -2, Z(5, 4, 6), axes="i0 i1"),
    S("aten.gather.default", R(7), 0, Z(7, 4), axes="i0"),
]  # fmt: skip

FACTORY = [
    S("aten.full.default", [5, 7], 0.5, torch.float64, axes="i0 i1"),
    S("aten.zeros.default", [5, 7], torch.float64, axes="i0 i1"),
    S("aten.ones.default", [7], torch.int64, axes="i0"),
    S("aten.full.default", [], 2.0, torch.float64, axes=""),
    S("aten.new_full.default", R(3), [5, 7], 2.0, axes="i0 i1"),
    S("aten.new_zeros.default", R(3), [5, 7], axes="i0 i1"),
    S("aten.new_zeros.default", R(5, 3), [5, 7], axes="i0 i1"),
    S("aten.new_zeros.default", R(0, 3), [5, 7], axes="i0 i1"),
    S("aten.new_ones.default", R(3), [7], torch.bool, axes="i0"),
    S("aten.scalar_tensor.default", 3.0, torch.float64, axes=""),
    S("aten.arange.default", 7, torch.int64, axes="i0"),
    S("aten.arange.start", 2, 9, torch.int64, axes="i0"),
    S("aten.arange.start_step", 2, 9, 3, torch.float64, axes="i0"),
    S("apportion.random_uniform", (5, 7, 2), 4, torch.float64, axes="i0 i1 i2"),
    S("apportion.random_uniform", (7,), 4, torch.float32, axes="i0"),
]

VIEW = [
    S("aten.view.default", R(4, 6), [24], axes="g0_0 g0_1"),
    S("aten.view.default", R(24), [4, -1], axes="g0_0 g0_1"),
    S("aten.view.default", R(4, 5, 6), [20, 6], axes="g0_0 g0_1 g1_0"),
    S("aten.view.default", NC(20, 6), [4, 5, 2, 3], axes="g0_0 g0_1 g1_0 g1_1"),
    S("aten.view.default", R(4, 1, 6), [4, 6, 1], axes="g0_0 g1_0"),
    S("aten.view.default", R(6, 4), [2, 12], axes="g0_0 g0_1 g0_2"),
    S("aten.view.default", R(3, 4), [4, 3], axes=""),
    S("aten.view.default", R(1), [], axes=""),
    S("aten.view.default", R(), [1, 1], axes=""),
    S("aten._unsafe_view.default", R(4, 6), [2, 2, 6], axes="g0_0 g0_1 g1_0"),
    S("aten.reshape.default", NC(4, 6), [24], axes="g0_0 g0_1"),
    S("aten.expand.default", R(5, 1, 7), [5, 4, 7], axes="i0 i1 i2"),
    S("aten.expand.default", R(7), [3, -1], axes="i0 i1"),
    S("aten.expand.default", R(), [3, 2], axes="i0 i1"),
    S("aten.t.default", NC(5, 7), axes="i j"),
    S("aten.t.default", R(5), axes="i0"),
    S("aten.transpose.int", R(3, 5, 7), 0, -1, axes="i0 i1 i2"),
    S("aten.transpose.int", R(3, 5, 7), -2, 1, axes="i0 i1 i2"),
    S("aten.transpose.int", R(), 0, -1, axes=""),
    S("aten.permute.default", NC(3, 5, 7), [2, 0, -2], axes="i0 i1 i2"),
    S("aten.unsqueeze.default", R(5, 7), 1, axes="i0 i2"),
    S("aten.unsqueeze.default", R(5, 7), -1, axes="i0 i1"),
    S("aten.unsqueeze.default", R(), 0, axes=""),
    S("aten.squeeze.dim", R(5, 1, 7), 1, axes="i0 i1"),
    S("aten.squeeze.dim", R(5, 2), 1, axes="i0"),  # a part of 1 would be squeezed
    S("aten.squeeze.dim", R(2), 0, axes=""),
    S("aten.squeeze.dim", R(), 0, axes=""),
    S("aten.squeeze.dim", R(5, 7), -2, axes="i0 i1"),
    S("aten.squeeze.dims", R(1, 5, 1, 7), [0, -2], axes="i0 i1"),
    S("aten.squeeze.dims", R(1, 5, 2), [0, 2], axes="i0"),
    S("aten.select.int", R(5, 7), 0, 3, axes="i0"),
    S("aten.select.int", NC(5, 7, 3), -2, -1, axes="i0 i1"),
    S("aten.select.int", R(5), 0, 2, axes=""),
    S("aten.slice.Tensor", R(9, 5), 0, 2, 7, axes="i0 i1"),
    S("aten.slice.Tensor", R(9, 5), 0, 1, 9, 3, axes="i0 i1"),
    S("aten.slice.Tensor", NC(9, 5), -2, -4, None, axes="i0 i1"),
    S("aten.slice.Tensor", R(9, 5), 1, None, 100, 2, axes="i0 i1"),
    S("aten.slice.Tensor", R(9), 0, 3, -1, axes="i0"),
    S("aten.split.Tensor", R(4, 6), 2, 1, axes="i0 i1"),
    S("aten.split.Tensor", NC(6, 5), 3, -2, axes="i0 i1"),
    S("aten.split.Tensor", R(4, 7), 3, 1, axes="i0"),
    S("aten.split.Tensor", R(4, 3), 5, 1, axes="i0 i1"),
    S("aten.split_with_sizes.default", R(4, 6), [3, 3], 1, axes="i0 i1"),
    S("aten.split_with_sizes.default", R(4, 7), [2, 1, 4], -1, axes="i0"),
    S("aten.cat.default", [R(4, 5), R(4, 5), NC(4, 5)], 1, axes="i0 i1"),
    S("aten.cat.default", [R(4, 5), R(4, 5)], -2, axes="i0 i1"),
    S("aten.cat.default", [R(4, 5), R(4, 2)], 1, axes="i0"),
    S("aten.cat.default", [R(3), R(1)], 0, axes=""),
    S("aten.stack.default", [R(4, 5), NC(4, 5)], 1, axes="i0 i2"),
    S("aten.stack.default", [R(4), R(4), R(4)], -1, axes="i0"),
    S("aten.stack.default", [R(), R()], 0, axes=""),
    S("aten.slice_backward.default", R(4, 5), [9, 5], 0, 2, 6, 1, axes="i1"),
    S("aten.slice_backward.default", NC(5, 4), [5, 9], -1, 1, 9, 2, axes="i0"),
    S("aten.select_backward.default", R(5, 7), [5, 3, 7], 1, 2, axes="i0 i2"),
    S("aten.select_backward.default", R(5), [5, 4], -1, -1, axes="i0"),
    S("aten.tril.default", R(3, 5, 7), axes="i0 i1 i2"),
    S("aten.triu.default", NC(5, 7), 1, axes="i0 i1"),
]

ATTENTION = [
    S("apportion.sdpa", R(2, 3, 5, 8), R(2, 3, 7, 8), NC(2, 3, 7, 8), 0.0, False, None, None,
      axes="b h i"),
    S("apportion.sdpa", R(2, 3, 5, 8), R(2, 3, 5, 8), R(2, 3, 5, 8), 0.0, True, None, 0.3,
      axes="b h i"),
    S("apportion.sdpa", R(2, 3, 5, 8), R(2, 3, 7, 8), R(2, 3, 7, 8), 0.0, False, R(5, 7), None,
      axes="b h i"),
    S("apportion.sdpa", R(2, 3, 5, 8), R(2, 3, 7, 8), R(2, 3, 7, 8), 0.0, False, R(2, 3, 5, 7),
      None, axes="b h i"),
    S("apportion.sdpa", R(2, 3, 5, 8), R(2, 3, 7, 8), R(2, 3, 7, 8), 0.0, False, R(2, 1, 5, 7),
      None, axes="b h i"),
    S("apportion.sdpa", R(2, 1, 5, 8), R(2, 1, 7, 8), R(2, 1, 7, 8), 0.0, False, R(1, 1, 5, 7),
      None, axes="b i"),
    *(
        S("apportion.sdpa_backward", NC(2, 3, 5, 8), R(2, 3, 5, 8), R(2, 3, keys, 8),
          R(2, 3, keys, 8), NC(2, 3, 5, 8), U(2, 3, 5, low=1, high=3), 0.0, causal, mask, None,
          axes="b h i j")
        for keys, causal, mask in (
            (7, False, None), (5, True, None), (7, False, R(5, 7)), (7, False, R(1, 3, 5, 7)),
        )
    ),
]  # fmt: skip

CONV = [  # more of them are in test_conv.py
    S("aten.convolution.default", R(3, 4, 7, 8), NC(6, 4, 3, 3), R(6), [1, 1], [1, 1], [1, 1],
      False, [0, 0], 1, axes="n o c i0 i1 k0 k1"),
    S("aten.convolution.default", NC(3, 4, 9), R(6, 2, 3), None, [2], [1], [2], False, [0], 2,
      axes="n g o c i0 k0"),
    S("apportion.conv_backward_input", NC(3, 6, 7, 8), R(6, 4, 3, 3), (3, 4, 7, 8), (1, 1), (1, 1),
      (1, 1), 1, axes="n o c y0 y1 k0 k1"),
    S("apportion.conv_backward_input", R(3, 6, 4), NC(6, 2, 3), (3, 4, 9), (2,), (1,), (2,), 2,
      axes="n g o c y0 k0"),
    S("apportion.conv_backward_weight", NC(3, 6, 7, 8), R(3, 4, 7, 8), (6, 4, 3, 3), (1, 1), (1, 1),
      (1, 1), 1, axes="n o c i0 i1 k0 k1"),
    S("apportion.conv_backward_weight", R(3, 6, 4), NC(3, 4, 9), (6, 2, 3), (2,), (1,), (2,), 2,
      axes="n g o c i0 k0"),
    S("aten.constant_pad_nd.default", R(5, 7), [1, 2], 0.5, axes="i0 i1"),
    S("aten.constant_pad_nd.default", NC(5, 7), [0, 2, 1, 0], axes="i0 i1"),
    S("aten.constant_pad_nd.default", R(5, 7), [-1, 2, 2, -1], axes="i0 i1"),
    S("aten.constant_pad_nd.default", R(5, 7), [0, 9], axes="i0"),  # half of it is only padding
]  # fmt: skip

POOL = [
    S("aten.max_pool2d_with_indices.default", R(3, 4, 7, 8), [3, 3], [2, 2], [1, 1], axes="i0 i1"),
    S("aten.max_pool2d_with_indices.default", NC(4, 7, 8), [2], axes="i0"),
    S("aten.max_pool2d_with_indices_backward.default", R(3, 4, 4, 4), NC(3, 4, 7, 8), [3, 3],
      [2, 2], [1, 1], [1, 1], False, Z(50, 3, 4, 4, 4), axes="i0 i1"),
    S("aten.avg_pool2d.default", NC(3, 4, 7, 8), [2, 3], axes="i0 i1 i2 i3"),
    S("aten.avg_pool2d.default", R(3, 4, 7, 8), [3, 3], [2, 1], [1, 1], axes="i0 i1 i2 i3"),
    S("aten.avg_pool2d.default", R(4, 7, 8), [3], [1], [1], False, False, 5, axes="i0 i1 i2"),
    S("aten.avg_pool2d.default", R(3, 4, 7, 8), [3], [1], [1], False, False, axes="i0 i1"),
    S("aten.avg_pool2d.default", R(3, 4, 7, 8), [3], [2], [1], True, axes="i0 i1"),
    S("aten.avg_pool2d_backward.default", NC(3, 4, 4, 4), R(3, 4, 7, 8), [3, 3], [2, 2], [1, 1],
      False, True, None, axes="i0 i1"),
    S("aten._adaptive_avg_pool2d.default", NC(3, 4, 7, 8), [3, 2], axes="i0 i1 y1"),
    S("aten._adaptive_avg_pool2d_backward.default", R(3, 4, 3, 2), R(3, 4, 7, 8), axes="i0 i1 y1"),
]  # fmt: skip

BATCH_NORM = [  # against torch's own in test_batch_norm.py
    S("apportion.channel_sum", NC(5, 3, 4, 2), axes="c i0 i1 i2"),
    S("apportion.channel_sum", R(5, 3), axes="c i0"),
    S("apportion.channel_squares", R(5, 3, 4), R(3), 20, axes="c i0 i1"),
    S("apportion.batch_norm", NC(5, 3, 4), R(3), U(3), R(3), R(3), 20, 1e-5, axes="c i0 i1"),
    S("apportion.batch_norm", R(5, 3, 4), R(3), U(3), None, None, 20, 1e-5, axes="c i0 i1"),
    S("apportion.batch_norm_reduce", NC(5, 3, 4), R(5, 3, 4), R(3), U(3), 20, 1e-5,
      axes="c i0 i1"),
    S("apportion.batch_norm_backward", R(5, 3, 4), NC(5, 3, 4), R(3), U(3), R(3), R(3), R(3), 20,
      1e-5, axes="c i0 i1"),
    S("apportion.batch_norm_backward", R(5, 3), R(5, 3), R(3), U(3), None, R(3), R(3), 5, 1e-5,
      axes="c i0"),
    S("aten.native_batch_norm.default", R(5, 3, 4), R(3), R(3), R(3), U(3), False, 0.1, 1e-5,
      axes="c i0 i1"),
    S("aten.native_batch_norm.default", R(5, 3, 4), R(3), R(3), R(3), U(3), True, 0.1, 1e-5,
      axes="c"),
    S("aten._native_batch_norm_legit_no_training.default", NC(5, 3), R(3), R(3), R(3), U(3), 0.1,
      1e-5, axes="c i0"),
    *(
        S("aten.native_batch_norm_backward.default", NC(5, 3, 4), R(5, 3, 4), weight, R(3), U(3),
          None, None, False, 1e-5, mask, axes="c i0 i1")
        for weight, mask in ((R(3), [True] * 3), (None, [True, False, False]))
    ),
]  # fmt: skip

TOTAL = [
    S("apportion.mm_total", [R(4, 5), NC(4, 5)], [NC(5, 6), R(5, 6)], axes="i j k"),
    S("apportion.sum_total", [R(4, 5, 6), NC(4, 5, 6), R(4, 5, 6)], (0, 2), axes="i0 k0 k1"),
    S("aten.unbind.int", R(4, 3, 5), 1, axes="i0 i1"),
    S("aten.unbind.int", NC(4, 3), -2, axes="i0"),
]

SAMPLES = [
    *MATMUL, *REDUCTION, *NORM, *LOSS, *INDEX, *FACTORY, *VIEW, *ATTENTION, *CONV, *POOL,
    *BATCH_NORM, *TOTAL,
]  # fmt: skip


def seed_of(text: str) -> int:
    return zlib.crc32(text.encode())


def assert_right(it: One) -> int:
    """Checks all derived splits; returns how many there are."""
    findings = check_op(it.space, 0, it.tensors, CONTEXT)
    wrong = [str(f) for f in findings if not f.right]
    assert not wrong, wrong
    return len(findings)


@pytest.mark.parametrize(
    "number", range(len(SAMPLES)), ids=[f"{n}-{s.kind}" for n, s in enumerate(SAMPLES)]
)
def test_every_derived_split_is_right(number: int) -> None:
    sample = SAMPLES[number]
    it = sample.one(seed_of(f"{number} {sample.kind}"))
    if sample.axes is not None:
        assert it.cuttable() == sample.axes
    assert assert_right(it) >= len(it.cuttable())


@pytest.mark.parametrize(("rows", "read"), [(8, ((0, 2), (0, 1))), (6, ((0, 1), (0, 1)))])
def test_of_a_tensor_that_lends_its_dtype_next_to_nothing_is_read(rows: int, read: Any) -> None:
    it = one("aten.new_zeros.default", torch.zeros(rows, 3), [8, 7])
    assert it.space.split(0, it.parts(i0=4)).parts[0].inputs == (read,)
    assert all(volume(part.inputs[0]) <= 2 for part in it.space.split(0, it.parts(i0=4)).parts)


@pytest.mark.parametrize(
    "sample",
    [
        S("aten.empty.memory_format", [5, 7], torch.float64),
        S("aten.new_empty.default", R(3), [5, 7]),
        S("aten.empty_like.default", R(5, 7)),
    ],
    ids=lambda s: s.kind,
)
def test_parts_of_an_empty_tensor_have_their_own_size(sample: Sample) -> None:
    it = sample.one(0)
    assert it.cuttable() == {"i0", "i1"}
    for part in it.space.split(0, it.parts(i0=2, i1=3)).parts:
        tensors = [torch.zeros([b - a for a, b in box]) for box in part.inputs]
        (made,) = check.run_op(it.space.graph.ops[0], part.args, tensors, CONTEXT)
        assert list(made.shape) == [b - a for a, b in part.outputs[0]]


# Pointwise operators, overload by overload

DOMAIN = {"aten.acosh": U(5, 7, low=1.1, high=3)}
WHOLE_NUMBERS = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"}
TRUTH = {("masked_fill", "mask"), ("native_dropout_backward", "mask"), ("where", "condition")}
SCALAR = {("masked_fill", "value"), ("fill", "value")}
UNDEFINED = {"aten.empty_like": "its elements are whatever was there"}
SAME_SHAPE = {  # these kernels do not broadcast, or not this argument
    "elu_backward", "gelu_backward", "hardsigmoid_backward", "hardswish_backward",
    "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward", "logit_backward",
    "mish_backward", "native_dropout_backward", "sigmoid_backward", "silu_backward",
    "softplus_backward", "tanh_backward", "threshold_backward",
}  # fmt: skip


def overloads(kind: str) -> list[Any]:
    """The functional overloads of a pointwise operator that take and return tensors."""
    packet = getattr(torch.ops.aten, kind.removeprefix("aten."))
    found = [getattr(packet, name) for name in packet.overloads()]
    return [
        o
        for o in found
        if not o._schema.is_mutable
        and [str(r.type) for r in o._schema.returns] == ["Tensor"]
        and any(str(a.type) == "Tensor" for a in o._schema.arguments)
    ]


def pointwise_sample(overload: Any, shapes: list[tuple[int, ...]]) -> Sample:
    """A call with tensors of the given shapes in turn, and numbers for what has no default."""
    schema = overload._schema
    name = schema.name.removeprefix("aten::")
    turn = iter(shapes * 4)
    keywords: dict[str, Any] = {}
    for argument in schema.arguments:
        place = (name, argument.name)
        if str(argument.type) in ("Tensor", "Optional[Tensor]"):
            keywords[argument.name] = _operand(place, () if place in SCALAR else next(turn))
        elif not argument.has_default_value() or place == ("clamp", "min"):
            keywords[argument.name] = _number(name, argument)
    return Sample(str(overload), (), keywords=keywords)


def _operand(place: tuple[str, str], shape: tuple[int, ...]) -> Random:
    name = place[0]
    if place in TRUTH:
        return Random(shape, "bool")
    if name in WHOLE_NUMBERS:
        return Random(shape, "whole", 0, 9)
    return replace(DOMAIN.get(f"aten.{name}", U()), shape=shape)


def _number(name: str, argument: Any) -> Any:
    kind = str(argument.type)
    if kind == "bool":
        return False
    if kind == "Optional[str]":
        return "floor"
    return 3 if name in WHOLE_NUMBERS or kind == "int" else 0.4


POINTWISE = [o for kind in sorted(ELEMENTWISE - UNDEFINED.keys()) for o in overloads(kind)]


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_every_pointwise_operator_exists(kind: str) -> None:
    assert overloads(kind)


@pytest.mark.parametrize("overload", POINTWISE, ids=str)
def test_pointwise_operators_are_cut_along_every_axis(overload: Any) -> None:
    it = pointwise_sample(overload, [(5, 7)]).one(seed_of(str(overload)))
    assert it.cuttable() == {"i0", "i1"}
    assert assert_right(it) == 2 + 2 + 2


BROADCAST = [
    o
    for o in POINTWISE
    if sum(str(a.type).count("Tensor") for a in o._schema.arguments) > 1
    and o._schema.name.removeprefix("aten::") not in SAME_SHAPE
]


@pytest.mark.parametrize("overload", BROADCAST, ids=str)
def test_pointwise_operators_broadcast(overload: Any) -> None:
    it = pointwise_sample(overload, [(4, 5, 3), (5, 1), (3,)]).one(seed_of(str(overload)))
    assert it.cuttable() == {"i0", "i1", "i2"}
    assert assert_right(it) == 6 + 6


@pytest.mark.parametrize(
    ("kind", "shapes", "axes"),
    [
        ("aten.add.Tensor", [(1, 7), (5, 1)], {"i0", "i1"}),
        ("aten.mul.Tensor", [(), (5,)], {"i0"}),
        ("aten.mul.Tensor", [(5,), ()], {"i0"}),
        ("aten.add.Tensor", [(), ()], set()),
        ("aten.where.self", [(5, 1), (1, 3), ()], {"i0", "i1"}),
        ("aten.add.Tensor", [(1, 1), (1,)], set()),
    ],
)
def test_extents_of_one_broadcast(kind: str, shapes: Any, axes: set[str]) -> None:
    overload = getattr(getattr(torch.ops.aten, kind.split(".")[1]), kind.split(".")[2])
    it = pointwise_sample(overload, shapes).one(5)
    assert it.cuttable() == axes
    assert_right(it)


def test_one_tensor_can_be_several_arguments() -> None:
    x = torch.randn(5, 7, dtype=torch.float64)
    square = torch.randn(4, 4, dtype=torch.float64)
    assert assert_right(one("aten.mul.Tensor", x, x)) == 6
    assert assert_right(one("aten.cat.default", [x, x], 0)) > 0
    # Both factors are one tensor, of which the parts would need different regions.
    assert one("aten.mm.default", square, square).cuttable() == set()


# Several axes at once


@pytest.mark.parametrize(
    ("sample", "parts"),
    [
        (S("aten.mm.default", R(5, 7), R(7, 6)), {"i": 2, "j": 3, "k": 2}),
        (S("aten.addmm.default", R(6), R(5, 7), R(7, 6), beta=2, alpha=3),
         {"i": 3, "j": 2, "k": 4}),
        (S("aten.bmm.default", R(3, 5, 7), R(3, 7, 6)), {"n": 2, "i": 2, "j": 3, "k": 5}),
        (S("aten.baddbmm.default", R(3, 1, 6), R(3, 5, 7), R(3, 7, 6)),
         {"n": 3, "i": 2, "j": 2, "k": 2}),
        (S("aten.mean.dim", R(5, 7, 3), [0, 2]), {"i0": 2, "k0": 3, "k1": 2}),
        (S("aten.native_layer_norm_backward.default", R(4, 5, 3, 6), R(4, 5, 3, 6), [6],
           R(4, 5, 3, 1), U(4, 5, 3, 1), R(6), R(6), [True] * 3), {"i0": 3, "i1": 2, "i2": 2}),
        (S("apportion.sdpa", R(4, 3, 5, 8), R(4, 3, 7, 8), R(4, 3, 7, 8), 0.0, False, None, None),
         {"b": 3, "h": 2, "i": 3}),
        (S("aten.view.default", R(4, 5, 6), [20, 2, 3]),
         {"g0_0": 2, "g0_1": 3, "g1_0": 2, "g1_1": 3}),
        (S("aten.embedding_dense_backward.default", R(4, 3, 6), Z(11, 4, 3), 11, -1, False),
         {"n0": 2, "n1": 3, "d": 4}),
        (S("apportion.random_uniform", (4, 5, 6), 9, torch.float64), {"i0": 3, "i1": 2, "i2": 4}),
    ],
    ids=lambda case: case.kind if isinstance(case, Sample) else "",
)  # fmt: skip
def test_cuts_of_several_axes_are_right(
    sample: Sample, parts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = sample.one(seed_of(sample.kind))
    monkeypatch.setattr(check, "cuts", lambda space, index: [it.parts(**parts)])
    assert assert_right(it) == 1


def test_the_check_itself_finds_a_wrong_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax described as pointwise: every cut along it must be reported."""
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))
    del descriptions.DESCRIPTIONS["aten._softmax"]
    descriptions.describe("aten._softmax")(lambda x: lambda i, j: language.f("softmax", x[i, j]))
    it = one("aten._softmax.default", torch.randn(5, 7, dtype=torch.float64), 1, False)
    wrong = [f.parts for f in check_op(it.space, 0, it.tensors, CONTEXT) if not f.right]
    assert wrong == [(1, 2), (1, 3), (2, 2), (2, 3)]


# Every operator of whole steps, with the atoms that the graph gives it


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "mlp:tiny",
        "rnn:tiny",
        pytest.param("gpt2:tiny", marks=pytest.mark.slow),
        pytest.param("wresnet:tiny", marks=pytest.mark.slow),
    ],
)
def test_every_split_of_every_operator_of_a_step_is_right(spec: str) -> None:
    it = zoo.load(spec, seed=1)
    program = capture_as(
        capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm), torch.float64
    )
    verdicts = verify_step(program, spec)
    assert [str(cut) for verdict in verdicts for cut in verdict.bad] == []
    assert {kind for verdict in verdicts for kind in verdict.undescribed} <= {"apportion.absent"}
    assert sum(verdict.splits for verdict in verdicts) > 10


def test_a_total_of_many_terms_is_described() -> None:
    """The gradient of a weight that an unrolled network uses a thousand times."""
    many = tuple(Ref(k) for k in range(1000))
    for kind, args, shape, out in (
        ("apportion.sum_total", (many, (0,)), (3, 4), (4,)),
        ("apportion.mm_total", (many[:500], many[500:]), (4, 4), (4, 4)),
    ):
        description = descriptions.find_description(kind)
        assert description is not None
        found = evaluate_formula(description, args, [shape] * 1000, [out])
        assert len(found.accesses) == 1000 and sorted(found.extents.values()) >= [3, 4]
