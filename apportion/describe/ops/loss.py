"""Losses and their backwards. A mean's divisor is an extent; the weighted mean of nll_loss is
divided outside. Its class axis can be cut: a part knows its first class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import Operand, Output, axes, axis, f, opaque, reduce

NONE, MEAN, SUM = 0, 1, 2


def _reduced(reduction: int, *operands: Any) -> Any:
    """The loss of each element of the broadcast shape, or their sum, or their mean."""
    used = [x for x in operands if x is not None]
    shape = _broadcast(*(x.shape for x in used))
    if reduction == MEAN and 0 in shape:
        raise Undescribed("the mean of nothing")
    i = axes("i", len(shape))
    element = f("loss", *(x.at(i) for x in used))
    if reduction == NONE:
        return Output.of(i, element)
    total = reduce("sum", i, element)
    extents = {f"i{d}": n for d, n in enumerate(shape)}
    return Output.of((), total / math.prod(shape) if reduction == MEAN else total, **extents)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


@describe("aten.mse_loss", "aten.soft_margin_loss", "aten.smooth_l1_loss", "aten.huber_loss")
def pointwise_loss(x: Any, target: Any, reduction: Any = MEAN) -> Any:
    return _reduced(reduction, x, target)


@describe("aten.binary_cross_entropy")
def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: Any = MEAN) -> Any:
    return _reduced(reduction, x, target, weight)


@describe("aten.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    x: Any, target: Any, weight: Any = None, positive: Any = None, reduction: Any = MEAN
) -> Any:
    return _reduced(reduction, x, target, weight, positive)


def _pointwise_backward(operands: Sequence[Any], reduction: int, out: Any) -> Any:
    count = math.prod(out[0]) if reduction == MEAN else 1
    used = [x for x in operands if x is not None]
    return lambda *i: f("backward", *(x.at(i) for x in used)) / max(count, 1)


@describe(
    "aten.mse_loss_backward",
    "aten.soft_margin_loss_backward",
    "aten.smooth_l1_loss_backward",
    "aten.huber_loss_backward",
)
def pointwise_loss_backward(grad: Any, x: Any, target: Any, reduction: Any, *, out: Any) -> Any:
    if x.shape != out[0]:
        raise Undescribed("an input that is broadcast to the shape of its target")
    return _pointwise_backward((grad, x, target), reduction, out)


@describe("aten.binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: Any, *, out: Any
) -> Any:
    return _pointwise_backward((grad, x, target, weight), reduction, out)


# Losses of rows of classes, which need a whole row


def _row_losses(reduction: int, x: Any, *given: Any) -> Any:
    """One loss for each row of x, [rows, classes] or one row; `given` has the rows' other data."""
    rows = axes("n", x.ndim - 1)
    element = opaque(x[(*rows, slice(None))] if x.ndim else x[()], *_rows_of(rows, given))
    if reduction == NONE or not rows:
        return Output.of(rows, element)
    total = reduce("sum", rows, element)
    return Output.of((), total / max(x.shape[0], 1) if reduction == MEAN else total)


def _rows_of(rows: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Accesses of data that every row has: a number, a row or nothing."""
    found = []
    for item in given:
        if item is not None and item.ndim < len(rows):
            raise Undescribed("one target for all rows")
        if item is not None:
            found.append(item[(*rows, *[slice(None)] * (item.ndim - len(rows)))])
    return found


def _row_gradients(reduction: int, grad: Any, x: Any, *given: Any) -> Any:
    rows, row = axes("n", max(x.ndim - 1, 0)), axes("c", min(x.ndim, 1))
    upstream = grad[rows] if grad.ndim else grad[()]
    data = [x[(*rows, *[slice(None)] * len(row))], *_rows_of(rows, given)]
    gradient = opaque(upstream, *data)[row]
    return Output.of((*rows, *row), gradient / (x.shape[0] if reduction == MEAN and rows else 1))


@describe("aten.multi_margin_loss")
def multi_margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: Any = MEAN
) -> Any:
    _one_target_per_row(x, target)
    return _row_losses(reduction, x, target if x.ndim > 1 else None)


@describe("aten.multi_margin_loss_backward")
def multi_margin_loss_backward(
    grad: Any, x: Any, target: Any, p: Any, margin: Any, weight: Any = None, reduction: Any = MEAN
) -> Any:
    _one_target_per_row(x, target)
    return _row_gradients(reduction, grad, x, target if x.ndim > 1 else None)


def _one_target_per_row(x: Any, target: Any) -> None:
    if x.ndim > 2 or (x.ndim == 2 and target.shape != x.shape[:1]):
        raise Undescribed("targets that are not one for each row")


@describe("aten.multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(x: Any, target: Any, reduction: Any) -> Any:
    rows, row = axes("n", max(x.ndim - 1, 0)), axes("c", min(target.ndim, 1))
    marks = opaque(*_rows_of(rows, (target,)))[row]
    return _row_losses(reduction, x, target), Output.of((*rows, *row), marks)


@describe("aten.multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    grad: Any, x: Any, target: Any, reduction: Any, marks: Any
) -> Any:
    return _row_gradients(reduction, grad, x, target, marks)


# Negative log likelihood


def _from_class(number: int) -> Any:
    """Tells a part of the classes which is its first and how many there are in all, in arguments
    that torch's operator does not have."""

    def local(args: tuple[Any, ...], part: PartLocation) -> tuple[Any, ...]:
        low, high = part.ranges.get("c", (0, 0))
        if high - low == part.extents["c"]:
            return args
        first, classes = args[number:] or (0, part.extents["c"])
        return (*args[:number], first + low, classes)

    return local


def _labels(x: Any, target: Any) -> tuple[Any, ...]:
    """The axes of labels: rows, and places of an image; none for a single row."""
    if x.ndim not in (1, 2, 4) or target.shape != (*x.shape[: x.ndim > 1], *x.shape[2:]):
        raise Undescribed("targets that are not one for each row")
    return (axis("n"), *axes("p", target.ndim - 1)) if target.ndim else ()


@describe(
    "aten.nll_loss_forward",
    "aten.nll_loss2d_forward",
    local=_from_class(5),
    flops=lambda inputs, outputs: 2.0 * math.prod(inputs[1]),
)
def nll_loss_forward(
    x: Any, target: Any, weight: Any, reduction: Any, ignore: Any, first: int = 0
) -> Any:
    if reduction == MEAN:
        raise Undescribed("a weighted mean over labels does not split; sums of it do")
    n, c = _labels(x, target), axis("c")
    scale = () if weight is None else (weight[c],)
    # The class number is a value: it is compared with the label.
    label = (c + first, target[n])
    chosen = f("pick", *label, x[(*n[:1], c, *n[1:])], *scale)
    if reduction == SUM or not n:  # of a single row the weight is told in any case
        total = reduce("sum", (*n, c), f("weigh", *label, *scale))
        return Output.of((), reduce("sum", (*n, c), chosen)), Output.of((), total)
    # Kernels leave the total weight at zero, not summed, when they do not reduce.
    return Output.of(n, reduce("sum", (c,), chosen)), Output.of((), f("zero"))


@describe("aten.nll_loss_backward", "aten.nll_loss2d_backward", local=_from_class(7))
def nll_loss_backward(
    grad: Any, x: Any, target: Any, weight: Any, reduction: Any, ignore: Any, total: Any,
    first: int = 0,
) -> Any:  # fmt: skip
    n, c = _labels(x, target), axis("c")
    place = (*n[:1], c, *n[1:])
    scale = () if weight is None else (weight[c],)
    upstream = grad[n] if reduction == NONE and n else grad[(0,) * grad.ndim]
    label = (c + first, target[n])
    whole = total[(0,) * total.ndim] if isinstance(total, Operand) else total
    return Output.of(place, f("backward", upstream, *label, whole, f("shape", x[place]), *scale))
