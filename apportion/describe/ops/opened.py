"""Composite operators in pieces (split/open_composites.py): statistics that combine, and pointwise
rests."""

from __future__ import annotations

from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.language import Output, axes, f, reduce


def _row(x: Any, dim: int) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Axes of all elements, axes of a result that is 1 long along `dim`, and the axis there."""
    i = axes("i", x.ndim)
    one = axes("one", 1)[0]
    return i, (*i[:dim], one, *i[dim + 1 :]), i[dim]


@describe("apportion.log_sum_exp")
def log_sum_exp(x: Any, dim: Any) -> Any:
    i, kept, k = _row(x, dim)
    return Output.of(kept, reduce("logaddexp", (k,), x[i]), one0=1)


@describe("apportion.row_dot")
def row_dot(grad: Any, out: Any, dim: Any) -> Any:
    i, kept, k = _row(grad, dim)
    element = grad[i] if out is None else grad[i] * out[i]
    return Output.of(kept, reduce("sum", (k,), element), one0=1)


@describe("apportion.softmax_of", "apportion.safe_softmax_of", "apportion.log_softmax_of")
def softmax_of(x: Any, lse: Any) -> Any:
    return lambda *i: f("softmax", x[i], lse.at(i))


@describe("apportion.softmax_backward_of", "apportion.log_softmax_backward_of")
def softmax_backward_of(grad: Any, out: Any, total: Any) -> Any:
    return lambda *i: f("softmax backward", grad[i], out[i], total.at(i))


@describe("apportion.sdpa_seen")
def sdpa_seen(lse: Any) -> Any:
    return lambda *i: f("seen", lse[i])


def _rows(x: Any, rank: int) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], Any]:
    """Axes of all elements, of a result per row, of the columns, and the extents of the ones."""
    i = axes("i", x.ndim)
    lead = x.ndim - rank
    return i, (*i[:lead], *axes("one", rank)), i[lead:], {f"one{k}": 1 for k in range(rank)}


@describe("apportion.row_sum")
def row_sum(x: Any, rank: Any) -> Any:
    i, kept, columns, ones = _rows(x, rank)
    return Output.of(kept, reduce("sum", columns, x[i]), **ones)


@describe("apportion.row_squares")
def row_squares(x: Any, total: Any, rank: Any, count: Any) -> Any:
    i, kept, columns, ones = _rows(x, rank)
    element = f("square", x[i], total.at(i), str(count))
    return Output.of(kept, reduce("sum", columns, element), **ones)


@describe("apportion.row_statistics")
def row_statistics(total: Any, squares: Any) -> Any:
    return (
        lambda *i: f("mean", total[i]),
        lambda *i: f("rstd", squares[i]),
    )


@describe("apportion.layer_norm_of")
def layer_norm_of(x: Any, total: Any, squares: Any, weight: Any, bias: Any) -> Any:
    given = [t for t in (total, squares, weight, bias) if t is not None]
    return lambda *i: f("normalise", x[i], *(t.at(i) for t in given))


@describe("apportion.layer_norm_reduce")
def layer_norm_reduce(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, rank: Any) -> Any:
    i, kept, columns, ones = _rows(x, rank)
    scale = () if weight is None else (weight.at(i),)
    total = f("scaled", grad[i], *scale)
    dot = f("dot", grad[i], x[i], mean.at(i), rstd.at(i), *scale)
    return (
        Output.of(kept, reduce("sum", columns, total), **ones),
        Output.of(kept, reduce("sum", columns, dot), **ones),
    )


@describe("apportion.layer_norm_backward_of")
def layer_norm_backward_of(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, total: Any, dot: Any
) -> Any:
    given = [t for t in (mean, rstd, weight, total, dot) if t is not None]
    return lambda *i: f("backward", grad[i], x[i], *(t.at(i) for t in given))


@describe("apportion.layer_norm_weight")
def layer_norm_weight(grad: Any, x: Any, mean: Any, rstd: Any, rank: Any) -> Any:
    i = axes("i", x.ndim)
    lead = x.ndim - rank
    element = f("dot", grad[i], x[i], mean.at(i), rstd.at(i))
    return Output.of(i[lead:], reduce("sum", i[:lead], element) if lead else element)


@describe("apportion.layer_norm_bias")
def layer_norm_bias(grad: Any, rank: Any) -> Any:
    i = axes("i", grad.ndim)
    lead = grad.ndim - rank
    return Output.of(i[lead:], reduce("sum", i[:lead], grad[i]) if lead else grad[i])
