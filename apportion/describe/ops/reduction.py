"""Reductions over dimensions: sums, extrema, norms, counts, moments.

A reduction that is no sum, product or extremum (a variance, the log of a sum of exponentials) is
opaque along what it reduces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import Undescribed
from apportion.describe.interval import Affine
from apportion.describe.language import Access, Operand, Output, axes, axis, f, opaque, reduce

WHOLE = slice(None)


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


def opaque_over(x: Operand, dims: tuple[int, ...], keepdim: bool) -> Any:
    """A lambda over the dimensions that stay, opaque along the others."""

    def output(*i: Affine) -> Any:
        names = iter([axis for d, axis in enumerate(i) if d not in dims] if keepdim else i)
        return opaque(x[tuple(WHOLE if d in dims else next(names) for d in range(x.ndim))])

    return output


def _reduction(reducer: str, element: str = "") -> Callable[..., Any]:
    """Over given dimensions; `element` names a function of the elements."""

    def formula(x: Operand, dims: Any = None, keepdim: Any = False) -> Any:
        where = normal_dims(dims, x.ndim)
        return over(
            x,
            where,
            bool(keepdim),
            lambda e, k: reduce(reducer, k, f(element, e) if element else e),
        )

    return formula


def _total(reducer: str, element: str = "") -> Callable[..., Any]:
    """Over all dimensions."""
    some = _reduction(reducer, element)

    def formula(x: Operand) -> Any:
        return some(x)

    return formula


describe("aten.sum.dim_IntList")(_reduction("sum"))
describe("aten.sum.default")(_total("sum"))
describe("aten.nansum.default")(_reduction("sum", "unless nan"))
describe("aten.amax")(_reduction("max"))
describe("aten.amin")(_reduction("min"))
describe("aten.max.default")(_total("max"))
describe("aten.min.default")(_total("min"))
describe("aten.prod.dim_int")(_reduction("prod"))
describe("aten.prod.default")(_total("prod"))
describe("aten.count_nonzero")(_reduction("sum", "nonzero"))
describe("aten.any.default")(_total("max", "nonzero"))
describe("aten.all.default")(_total("min", "nonzero"))


def _truths(reducer: str) -> Callable[..., Any]:
    """As above, but no dimensions at all means none here."""
    some = _reduction(reducer, "nonzero")

    def formula(x: Operand, dims: Any = None, keepdim: Any = False) -> Any:
        return (lambda *i: f("nonzero", x[i])) if dims == () else some(x, dims, keepdim)

    return formula


describe("aten.any.dim", "aten.any.dims")(_truths("max"))
describe("aten.all.dim", "aten.all.dims")(_truths("min"))


@describe("aten.aminmax", "aten._aminmax")
def aminmax(x: Any, dim: Any = None, keepdim: Any = False) -> Any:
    return _reduction("min")(x, dim, keepdim), _reduction("max")(x, dim, keepdim)


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


@describe("aten.mean.default")
def mean_all(x: Any) -> Any:
    return mean(x, None)


@describe("aten.mean.dim")
def mean(x: Any, dims: Any, keepdim: Any = False) -> Any:
    where = normal_dims(dims, x.ndim)
    count = _count(x.shape, where)
    return over(x, where, bool(keepdim), lambda e, k: reduce("sum", k, e) / count)


@describe("aten.var.correction", "aten.std.correction")
def moment(x: Any, dims: Any = None, correction: Any = None, keepdim: Any = False) -> Any:
    return opaque_over(x, normal_dims(dims, x.ndim), bool(keepdim))


@describe("aten.var_mean.correction", "aten.std_mean.correction")
def moments(x: Any, dims: Any = None, correction: Any = None, keepdim: Any = False) -> Any:
    return (moment(x, dims, correction, keepdim),) * 2


@describe("apportion.square_sum")
def square_sum(x: Any, dims: Any, keepdim: Any) -> Any:
    return _reduction("sum", "square")(x, dims, keepdim)


describe("aten.logsumexp")(_reduction("logaddexp"))


@describe("aten.hash_tensor")
def hash_tensor(x: Any, dims: Any = (), keepdim: Any = False) -> Any:
    return opaque_over(x, normal_dims(dims, x.ndim), bool(keepdim))


# Norms

_ADDITIVE = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}


def norm_reducer(p: Any) -> str | None:
    """How p-norms of the parts of a vector make the norm of the whole; None: by no reducer."""
    return _ADDITIVE.get(2.0 if p is None else float(p))


def _norm(x: Any, p: Any, dims: Any, keepdim: Any) -> Any:
    where, reducer = normal_dims(dims, x.ndim), norm_reducer(p)
    if reducer is None:
        return opaque_over(x, where, bool(keepdim))
    return over(x, where, bool(keepdim), lambda e, k: reduce(reducer, k, f("size", e)))


@describe("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype")
def vector_norm(x: Any, p: Any, dims: Any = None, keepdim: Any = False) -> Any:
    return _norm(x, p, dims, keepdim)


@describe("aten.norm.Scalar", "aten.norm.ScalarOpt_dtype")
def total_norm(x: Any, p: Any) -> Any:
    return _norm(x, p, None, False)


@describe("aten.dist")
def dist(x: Any, y: Any, p: Any) -> Any:
    rank, reducer = max(x.ndim, y.ndim), norm_reducer(p)
    if reducer is None:
        return lambda: opaque(x[(WHOLE,) * x.ndim], y[(WHOLE,) * y.ndim])
    k = axes("k", rank)
    shapes = [(1,) * (rank - t.ndim) + t.shape for t in (x, y)]
    extents = {
        f"k{d}": max(n, m) if n * m else 0 for d, (n, m) in enumerate(zip(*shapes, strict=True))
    }
    return Output.of((), reduce(reducer, k, f("distance", x.at(k), y.at(k))), **extents)


@describe("aten.renorm")
def renorm(x: Any, p: Any, dim: Any, limit: Any) -> Any:
    """Every slice at a place of `dim` is scaled by itself."""
    d = dim % x.ndim

    def output(*i: Affine) -> Any:
        source = x[tuple(a if k == d else WHOLE for k, a in enumerate(i))]
        return opaque(source)[tuple(a for k, a in enumerate(i) if k != d)]

    return output


@describe("aten.trace")
def trace(x: Any) -> Any:
    """A part gets a square block on the diagonal."""
    k = axis("k")
    return Output.of((), reduce("sum", (k,), x[k, k]), k=min(x.shape))


# Counts


@describe("aten.histc")
def histc(x: Any, bins: Any, low: Any, high: Any) -> Any:
    if low == high:  # the range of the data
        return lambda b: opaque(x[(WHOLE,) * x.ndim])[b]
    k = axes("k", x.ndim)
    return lambda b: reduce("sum", k, f("in bin", b, x[k]))


def _bins(
    x: Any, weight: Any, edges: Sequence[Any], known: bool, density: bool, rank: int = 0
) -> Any:
    """Counts of elements, or with a `rank` of points of so many coordinates, in each bin: a sum if
    the edges are `known`, whatever the data."""
    b, given = axes("b", rank or 1), [e[:] for e in edges]
    if not known or density:
        slices = [t[(WHOLE,) * t.ndim] for t in (x, weight) if t is not None]
        return Output.of(b, opaque(*slices, *given)[b])
    k = axes("k", x.ndim - 1 if rank else x.ndim)
    weights = [] if weight is None else [weight[k]]
    element = x[(*k, WHOLE)] if rank else x[k]
    return Output.of(b, reduce("sum", k, f("in bin", *b, element, *weights, *given)))


@describe("aten.histogram.bins_tensor")
def histogram(x: Any, bins: Any, weight: Any = None, density: Any = False) -> Any:
    return _bins(x, weight, (bins,), True, density), lambda e: opaque(bins[:])[e]


@describe("aten.histogram.bin_ct")
def histogram_count(
    x: Any, bins: Any, limits: Any = None, weight: Any = None, density: Any = False
) -> Any:
    source = () if limits is not None else (x[(WHOLE,) * x.ndim],)
    return _bins(x, weight, (), limits is not None, density), lambda e: opaque(*source)[e]


@describe("aten._histogramdd_from_bin_tensors")
def histogramdd(x: Any, bins: Any, weight: Any = None, density: Any = False) -> Any:
    return _bins(x, weight, bins, True, density, len(bins))


@describe("aten._histogramdd_from_bin_cts")
def histogramdd_count(
    x: Any, bins: Any, limits: Any = None, weight: Any = None, density: Any = False
) -> Any:
    return _bins(x, weight, (), limits is not None, density, len(bins))


@describe("aten._histogramdd_bin_edges")
def histogramdd_edges(x: Any, *rest: Any, out: Any) -> Any:
    source = x[(WHOLE,) * x.ndim]
    return tuple(Output.of((f"e{n}",), opaque(source)[axis(f"e{n}")]) for n in range(len(out)))


def _bincount_local(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    return (*args[:2], local.outputs[0][0])


@describe("aten.bincount", local=_bincount_local)
def bincount(x: Any, weights: Any, least: Any) -> Any:
    """A part counts as many numbers as the whole, though it may not have the largest."""
    given = () if weights is None else (weights,)
    return lambda b: reduce("sum", axes("k", 1), f("is", b, *(t[axis("k0")] for t in (x, *given))))


# Segments


def _segment_place(x: Operand, dim: int, i: Sequence[Affine]) -> Access:
    """All segments of `x` at a place; lengths have no dimensions after `dim`."""
    return x[tuple(WHOLE if d == dim else i[d] for d in range(x.ndim))]


@describe("aten.segment_reduce")
def segment_reduce(
    data: Any, how: Any, lengths: Any, indices: Any, offsets: Any, dim: Any = 0
) -> Any:
    if indices is not None:
        raise Undescribed("segments given by indices")
    tensors = [t for t in (data, lengths, offsets) if t is not None]
    return lambda *i: opaque(*(_segment_place(t, dim, i) for t in tensors))[i[dim]]


@describe("aten._segment_reduce_backward")
def segment_reduce_backward(
    grad: Any, result: Any, data: Any, how: Any, lengths: Any, offsets: Any, dim: Any = 0
) -> Any:
    tensors = [t for t in (grad, result, data, lengths, offsets) if t is not None]
    return lambda *i: opaque(*(_segment_place(t, dim, i) for t in tensors))[i[dim]]
