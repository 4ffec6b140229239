"""Normalisations. Those over trailing dimensions are opaque there, so that they stay one kernel.

Batch norm comes in two forms. In training it is a chain of Ops with the statistics between them, so
that it is cut along everything (docs/design/005-batch-norm.md); `count`, the number of elements of
a channel in the whole batch, is an argument that no part changes. With given statistics it is one
Op, pointwise in each channel.
"""

from __future__ import annotations

import math
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import ALL, Output, axes, axis, f, opaque, reduce


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


_LEGIT = ("aten._native_batch_norm_legit.default", "aten._native_batch_norm_legit_functional")


@describe("aten.native_batch_norm", "aten._native_batch_norm_legit_no_training", *_LEGIT)
def given_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *rest: Any, out: Any
) -> Any:
    if len(rest) == 3 and rest[0]:
        return _batch_statistics(out, x, weight, bias, mean, variance)
    c, _, place = _channels(x)
    given = _each(c, weight, bias, mean, variance)
    running = [Output.of((c,), f("copy", t[c])) for t in (mean, variance)][: len(out) - 3]
    return Output.of(place, f("normalise", x[place], *given)), None, None, *running


@describe("aten._native_batch_norm_legit.no_stats")
def batch_norm_without_running(x: Any, weight: Any, bias: Any, *, out: Any) -> Any:
    return _batch_statistics(out, x, weight, bias)


@describe("aten._batch_norm_with_update", "aten._batch_norm_with_update_functional")
def updated_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *, out: Any
) -> Any:
    return _batch_statistics(out, x, weight, bias, mean, variance)


@describe("aten._batch_norm_no_update")
def given_batch_norm_with_reserve(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *, out: Any
) -> Any:
    return *given_batch_norm(x, weight, bias, mean, variance, out=out[:3]), None


def _batch_statistics(out: Any, x: Any, *per_channel: Any) -> Any:
    """All of a channel at once: the element at each place, then some per channel (or empty)."""
    c, others, place = _channels(x)
    slices = opaque(_channel(x, c), *_each(c, *per_channel))
    found = (None if shape == (0,) else Output.of((c,), slices) for shape in out[1:])
    return Output.of(place, slices[others]), *found


def _channel(x: Any, c: Any) -> Any:
    return x[(slice(None), c, *(slice(None),) * (x.ndim - 2))]


@describe("aten.native_batch_norm_backward", "aten.batch_norm_backward")
def given_batch_norm_backward(
    grad: Any, x: Any, weight: Any, mean: Any, variance: Any, saved_mean: Any, saved_invstd: Any,
    training: Any, eps: Any, mask: Any,
) -> Any:  # fmt: skip
    c, others, place = _channels(x)
    found: tuple[Output, ...]
    if training:
        saved = _each(c, weight, mean, variance, saved_mean, saved_invstd)
        slices = opaque(_channel(grad, c), _channel(x, c), *saved)
        found = Output.of(place, slices[others]), Output.of((c,), slices), Output.of((c,), slices)
    else:
        # Every result reads all, since the kernel compares the shapes of what it does not need.
        read = (grad[place], x[place], *_each(c, mean, variance, weight))
        found = (
            Output.of(place, f("backward", *read)),
            Output.of((c,), reduce("sum", others, f("for weight", *read))),
            Output.of((c,), reduce("sum", others, f("for bias", *read))),
        )
    return tuple(output if keep else None for output, keep in zip(found, mask, strict=True))


# Groups of channels


def _group_sizes(x: Any, groups: int, local: PartLocation) -> tuple[int, ...]:
    """Samples, channels, elements of a channel and groups of a part."""
    samples, channels, *rest = local.inputs[x.index]
    return samples, channels, math.prod(rest), groups


def _group_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (*args[:3], *_group_sizes(args[0], local.outputs[1][1], local), *args[7:])


def _group_backward_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    groups = local.inputs[args[2].index][1]
    return (*args[:5], *_group_sizes(args[1], groups, local), *args[9:])


def _group(x: Any, groups: int) -> tuple[Any, ...]:
    """Axes of samples, groups, channels in a group, and places; and how many channels those are."""
    return axis("n"), axis("g"), axis("c"), axes("s", x.ndim - 2), x.shape[1] // groups


@describe("aten.native_group_norm", local=_group_local)
def group_norm(
    x: Any, weight: Any, bias: Any, samples: Any, channels: Any, size: Any, groups: Any
) -> Any:
    n, g, c, s, width = _group(x, groups)
    inner = (g, ALL(width))
    source = x[(n, inner, *(slice(None),) * len(s))]
    parameters = [p[(inner,)] for p in (weight, bias) if p is not None]
    statistic = Output.of((n, g), opaque(source))
    normal = Output.of((n, (g, c), *s), opaque(source, *parameters)[(c, *s)], g=groups, c=width)
    return normal, statistic, statistic


@describe("aten.native_group_norm_backward", local=_group_backward_local)
def group_norm_backward(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, samples: Any, channels: Any, size: Any,
    groups: Any, mask: Any,
) -> Any:  # fmt: skip
    n, g, c, s, width = _group(x, groups)
    inner, rest = (g, ALL(width)), (slice(None),) * len(s)
    statistics = (mean[n, g], rstd[n, g])
    scale = () if weight is None else (weight[(inner,)],)
    slices = (grad[(n, inner, *rest)], x[(n, inner, *rest)], *statistics, *scale)
    place = (n, (g, c), *s)
    # The sums read the weight too, since the kernel compares its shape.
    read = (grad[place], x[place], *statistics, *(() if weight is None else (weight[((g, c),)],)))
    extents = {"g": groups, "c": width}
    found = (
        Output.of(place, opaque(*slices)[(c, *s)], **extents),
        Output.of(((g, c),), reduce("sum", (n, *s), f("for weight", *read)), **extents),
        Output.of(((g, c),), reduce("sum", (n, *s), f("for bias", *read)), **extents),
    )
    return tuple(output if keep else None for output, keep in zip(found, mask, strict=True))


# Norms of weights


@describe("aten._weight_norm_interface")
def weight_norm(v: Any, g: Any, dim: Any = 0) -> Any:
    i, place, source = _weight_slices(v, dim)
    norms = Output.of(_norm_axes(v, dim), opaque(source))
    return Output.of(
        i, opaque(source, g[place])[tuple(a for k, a in enumerate(i) if k != dim)]
    ), norms


@describe("aten._weight_norm_interface_backward")
def weight_norm_backward(grad: Any, v: Any, g: Any, norms: Any, dim: Any) -> Any:
    i, place, source = _weight_slices(v, dim)
    slices = opaque(_weight_slices(grad, dim)[2], source, g[place], norms[place])
    inner = tuple(a for k, a in enumerate(i) if k != dim)
    return Output.of(i, slices[inner]), Output.of(_norm_axes(v, dim), slices)


def _weight_slices(v: Any, dim: int) -> tuple[Any, Any, Any]:
    i = axes("i", v.ndim)
    source = v[tuple(a if k == dim else slice(None) for k, a in enumerate(i))]
    return i, tuple(a if k == dim else 0 for k, a in enumerate(i)), source


def _norm_axes(v: Any, dim: int) -> tuple[Any, ...]:
    i, one = axes("i", v.ndim), axes("one", v.ndim)
    return tuple(i[k] if k == dim else one[k] for k in range(v.ndim))
