"""Normalisations. Those over trailing dimensions are opaque there, so that they stay one kernel.

Batch norm comes in two forms. In training it is a chain of Ops with the statistics between them, so
that it is cut along everything (docs/design/005-batch-norm.md); `count`, the number of elements of
a channel in the whole batch, is an argument that no part changes. With given statistics it is one
Op, pointwise in each channel.
"""

from __future__ import annotations

from typing import Any

from apportion.formula import Undescribed
from apportion.tdl import Output, axes, axis, describe, f, opaque, reduce


@describe("aten.native_layer_norm")
def layer_norm(x: Any, shape: Any, weight: Any, bias: Any) -> Any:
    whole = (slice(None),) * len(shape)
    lead = x.ndim - len(shape)
    parameters = [p[whole] for p in (weight, bias) if p is not None]
    i = axes("i", x.ndim)
    rows, columns = i[:lead], i[lead:]
    source = x[(*rows, *whole)]
    statistic = Output.of((*rows, *axes("one", len(shape))), opaque(source))
    return Output.of(i, opaque(source, *parameters)[columns]), statistic, statistic


@describe("aten.native_layer_norm_backward")
def layer_norm_backward(
    grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    lead = x.ndim - len(shape)
    if x.shape[lead:] != shape:
        raise Undescribed("the kernel is told the whole normalised shape")
    i = axes("i", x.ndim)
    rows, columns = i[:lead], i[lead:]
    whole = (slice(None),) * len(shape)
    ones = (0,) * len(shape)
    statistics = (mean[(*rows, *ones)], rstd[(*rows, *ones)])
    scale = () if weight is None else (weight[whole],)
    slices = (grad[(*rows, *whole)], x[(*rows, *whole)], *statistics, *scale)
    here = grad[(*rows, *columns)]
    normalised = f("normalise", x[(*rows, *columns)], *statistics)
    found = (
        Output.of(i, opaque(*slices)[columns]),
        Output.of(columns, reduce("sum", rows, here * normalised)),
        Output.of(columns, reduce("sum", rows, here)),
    )
    return tuple(output if keep else None for output, keep in zip(found, mask, strict=True))


def _channels(x: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """The axis of channels, the other axes, and the place of an element."""
    c, others = axis("c"), axes("i", x.ndim - 1)
    return c, others, (others[0], c, *others[1:])


def _each(c: Any, *tensors: Any) -> list[Any]:
    """What is given per channel."""
    return [x[c] for x in tensors if x is not None]


@describe("apportion.channel_sum")
def channel_sum(x: Any) -> Any:
    c, others, place = _channels(x)
    return Output.of((c,), reduce("sum", others, x[place]))


@describe("apportion.channel_squares")
def channel_squares(x: Any, total: Any, count: Any) -> Any:
    """Sum of the squared distances from the mean, total / count."""
    c, others, place = _channels(x)
    return Output.of((c,), reduce("sum", others, f("squared distance", x[place], total[c], count)))


@describe("apportion.batch_norm")
def batch_norm(
    x: Any, total: Any, squares: Any, weight: Any, bias: Any, count: Any, eps: Any
) -> Any:
    c, _, place = _channels(x)
    given = _each(c, total, squares, weight, bias)
    return Output.of(place, f("normalise", x[place], *given, count))


@describe("apportion.batch_norm_reduce")
def batch_norm_reduce(grad: Any, x: Any, total: Any, squares: Any, count: Any, eps: Any) -> Any:
    """Sums of grad, and of grad times the normalised x: the gradients of bias and weight."""
    c, others, place = _channels(x)
    normalised = f("normalise", x[place], total[c], squares[c], count)
    return (
        Output.of((c,), reduce("sum", others, grad[place])),
        Output.of((c,), reduce("sum", others, grad[place] * normalised)),
    )


@describe("apportion.batch_norm_backward")
def batch_norm_backward(
    grad: Any, x: Any, total: Any, squares: Any, weight: Any, sum_grad: Any, sum_normalised: Any,
    count: Any, eps: Any,
) -> Any:  # fmt: skip
    c, _, place = _channels(x)
    given = _each(c, total, squares, weight, sum_grad, sum_normalised)
    return Output.of(place, f("backward", grad[place], x[place], *given, count))


@describe("aten.native_batch_norm", "aten._native_batch_norm_legit_no_training")
def given_batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any) -> Any:
    if len(rest) == 3 and rest[0]:
        raise Undescribed("the statistics of a batch depend on all of it")
    c, _, place = _channels(x)
    given = _each(c, weight, bias, mean, variance)
    return Output.of(place, f("normalise", x[place], *given)), None, None


@describe("aten.native_batch_norm_backward")
def given_batch_norm_backward(
    grad: Any, x: Any, weight: Any, mean: Any, variance: Any, saved_mean: Any, saved_invstd: Any,
    training: Any, eps: Any, mask: Any,
) -> Any:  # fmt: skip
    if training:
        raise Undescribed("the statistics of a batch depend on all of it")
    c, others, place = _channels(x)
    given = _each(c, mean, variance)
    normalised = f("normalise", x[place], *given)
    found = (
        # The kernel takes the shape of x, whose values it does not need here.
        Output.of(
            place, f("backward", grad[place], f("shape", x[place]), *given, *_each(c, weight))
        ),
        Output.of((c,), reduce("sum", others, grad[place] * normalised)),
        Output.of((c,), reduce("sum", others, grad[place])),
    )
    return tuple(output if keep else None for output, keep in zip(found, mask, strict=True))
