"""Reductions over dimensions, and operators that are opaque along one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apportion.interval import Affine
from apportion.tdl import Access, Operand, axes, describe, f, opaque, reduce


def normal_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions as non-negative numbers, in order; None and () mean all."""
    if dims is None or dims == ():
        return tuple(range(ndim))
    listed = dims if isinstance(dims, tuple) else (dims,)
    return tuple(sorted({d % ndim for d in listed})) if ndim else ()


def over(
    x: Operand,
    dims: tuple[int, ...],
    keepdim: bool,
    body: Callable[[Access, tuple[Affine, ...]], Any],
) -> Any:
    """A lambda over the dimensions that stay; `body` gets the element and the others' axes."""
    inner = axes("k", len(dims))

    def output(*i: Affine) -> Any:
        kept = [axis for d, axis in enumerate(i) if d not in dims] if keepdim else list(i)
        names = iter(kept)
        reduced = dict(zip(dims, inner, strict=True))
        index = tuple(reduced[d] if d in reduced else next(names) for d in range(x.ndim))
        return body(x[index] if index else x[()], inner)

    return output


def _reduction(reducer: str) -> Callable[..., Any]:
    def formula(x: Operand, dims: Any = None, keepdim: Any = False) -> Any:
        where = normal_dims(dims if not isinstance(dims, bool) else None, x.ndim)
        return over(x, where, bool(keepdim), lambda e, k: reduce(reducer, k, e))

    return formula


describe("aten.sum.dim_IntList")(_reduction("sum"))
describe("aten.amax")(_reduction("max"))
describe("aten.amin")(_reduction("min"))
describe("aten.prod.dim_int")(_reduction("prod"))


@describe("aten.sum.default")
def sum_all(x: Any) -> Any:
    return over(x, tuple(range(x.ndim)), False, lambda e, k: reduce("sum", k, e))


@describe("aten.prod.default")
def prod_all(x: Any) -> Any:
    return over(x, tuple(range(x.ndim)), False, lambda e, k: reduce("prod", k, e))


@describe("aten.max.default")
def max_all(x: Any) -> Any:
    return over(x, tuple(range(x.ndim)), False, lambda e, k: reduce("max", k, e))


@describe("aten.min.default")
def min_all(x: Any) -> Any:
    return over(x, tuple(range(x.ndim)), False, lambda e, k: reduce("min", k, e))


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    count = 1
    for d in dims:
        count *= shape[d]
    return count


@describe("aten.mean.default")
def mean_all(x: Any) -> Any:
    count = _count(x.shape, range(x.ndim))
    return over(x, tuple(range(x.ndim)), False, lambda e, k: reduce("sum", k, e) / count)


@describe("aten.mean.dim")
def mean(x: Any, dims: Any, keepdim: Any = False) -> Any:
    where = normal_dims(dims, x.ndim)
    count = _count(x.shape, where)
    return over(x, where, bool(keepdim), lambda e, k: reduce("sum", k, e) / count)


def along(x: Operand, dim: int, i: Sequence[Affine]) -> Access:
    """The whole slice of `x` along `dim` at the place `i`."""
    return x[tuple(slice(None) if d == dim else axis for d, axis in enumerate(i))]


@describe(
    "aten._softmax",
    "aten._log_softmax",
    "aten._safe_softmax",
    "aten.cumsum",
    "aten.cumprod",
    "aten.logcumsumexp",
)
def opaque_along(x: Any, dim: Any) -> Any:
    d = dim % x.ndim if x.ndim else 0
    return lambda *i: opaque(along(x, d, i))[i[d]] if x.ndim else f("elementwise", x[()])


@describe("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(grad: Any, out: Any, dim: Any) -> Any:
    if not grad.ndim:
        return lambda: f("elementwise", grad[()], out[()])
    d = dim % grad.ndim
    return lambda *i: opaque(along(grad, d, i), along(out, d, i))[i[d]]
