"""Losses and their backwards. A mean's divisor is an extent; the weighted mean of nll_loss is
divided outside."""

from __future__ import annotations

import math
from typing import Any

from apportion.formula import Undescribed
from apportion.tdl import Output, axis, describe, f, reduce
from apportion.tdl import axes as make_axes

NONE, MEAN, SUM = 0, 1, 2


def _reduced(reduction: int, x: Any, *others: Any) -> Any:
    shape: tuple[int, ...] = x.shape
    if any(not _fits(other.shape, shape) for other in others):
        raise Undescribed("an input that is broadcast to the shape of its target")
    i = make_axes("i", len(shape))
    element = f("loss", *(operand.at(i) for operand in (x, *others)))
    if reduction == NONE:
        return Output.of(i, element)
    total = reduce("sum", i, element)
    extents = {f"i{d}": n for d, n in enumerate(shape)}
    return Output.of((), total / math.prod(shape) if reduction == MEAN else total, **extents)


def _fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether a tensor is broadcast to the shape `into`, and not beyond."""
    pairs = zip(reversed(shape), reversed(into), strict=False)
    return len(shape) <= len(into) and all(a in (1, b) for a, b in pairs)


@describe("aten.mse_loss", "aten.soft_margin_loss")
def pointwise_loss(x: Any, target: Any, reduction: Any = MEAN) -> Any:
    return _reduced(reduction, x, target)


@describe("aten.smooth_l1_loss", "aten.huber_loss")
def smooth_loss(x: Any, target: Any, reduction: Any = MEAN) -> Any:
    return _reduced(reduction, x, target)


@describe("aten.binary_cross_entropy")
def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: Any = MEAN) -> Any:
    return _reduced(reduction, x, target, *(() if weight is None else (weight,)))


def _pointwise_backward(operands: tuple[Any, ...], shape: tuple[int, ...], reduction: int) -> Any:
    count = math.prod(shape) if reduction == MEAN else 1
    return lambda *i: f("backward", *(x.at(i) for x in operands)) / count


@describe("aten.mse_loss_backward", "aten.soft_margin_loss_backward")
def pointwise_loss_backward(grad: Any, x: Any, target: Any, reduction: Any) -> Any:
    return _pointwise_backward((grad, x, target), x.shape, reduction)


@describe("aten.smooth_l1_loss_backward", "aten.huber_loss_backward")
def smooth_loss_backward(grad: Any, x: Any, target: Any, reduction: Any) -> Any:
    return _pointwise_backward((grad, x, target), x.shape, reduction)


@describe("aten.binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: Any
) -> Any:
    scale = () if weight is None else (weight,)
    return _pointwise_backward((grad, x, target, *scale), x.shape, reduction)


@describe("aten.nll_loss_forward")
def nll_loss_forward(x: Any, target: Any, weight: Any, reduction: Any) -> Any:
    if reduction == MEAN or x.ndim != 2:
        raise Undescribed("a weighted mean over labels does not split; sums of it do")
    n = axis("n")
    scale = () if weight is None else (weight[target[n]],)
    chosen = f("pick", x[n, target[n]], *scale)
    # Kernels leave the total weight at zero, not summed, when they do not reduce.
    total = f("weigh", target[n], *scale) if reduction == SUM else f("zero")
    if reduction == SUM:
        return Output.of((), reduce("sum", (n,), chosen)), Output.of((), reduce("sum", (n,), total))
    return Output.of((n,), chosen), Output.of((), total)


@describe("aten.nll_loss_backward")
def nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: Any, ignore: Any, total: Any
) -> Any:
    if x.ndim != 2:
        raise Undescribed("only rows of classes are described")

    def output(n: Any, c: Any) -> Any:
        scale = () if weight is None else (weight[target[n]],)
        upstream = grad[n] if reduction == NONE else grad[()]
        # The class number c is a value: it is compared with the label.
        return f("backward", upstream, target[n], c, total[()], f("shape", x[n, c]), *scale)

    return output
