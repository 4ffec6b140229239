"""Contractions, and totals of several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.language import Output, Sum, f, reduce
from apportion.describe.language import axes as make_axes


@describe("aten.mm", "aten._int_mm")
def mm(a: Any, b: Any) -> Any:
    return lambda i, j: Sum(lambda k: a[i, k] * b[k, j])


@describe("aten.bmm")
def bmm(a: Any, b: Any) -> Any:
    return lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j])


@describe("aten.addmm")
def addmm(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda i, j: beta * bias.at((i, j)) + alpha * Sum(lambda k: a[i, k] * b[k, j])


@describe("aten.baddbmm")
def baddbmm(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda n, i, j: (
        beta * bias.at((n, i, j)) + alpha * Sum(lambda k: a[n, i, k] * b[n, k, j])
    )


@describe("aten.mv")
def mv(a: Any, x: Any) -> Any:
    return lambda i: Sum(lambda k: a[i, k] * x[k])


@describe("aten.dot", "aten.vdot")
def dot(a: Any, b: Any) -> Any:
    return lambda: Sum(lambda k: a[k] * b[k])


@describe("aten.addmv")
def addmv(bias: Any, a: Any, x: Any, beta: Any, alpha: Any) -> Any:
    return lambda i: beta * bias.at((i,)) + alpha * Sum(lambda k: a[i, k] * x[k])


@describe("aten.addr")
def addr(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda i, j: beta * bias.at((i, j)) + alpha * (a[i] * b[j])


@describe("aten.addbmm")
def addbmm(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda i, j: beta * bias.at((i, j)) + alpha * Sum(lambda n, k: a[n, i, k] * b[n, k, j])


@describe("aten._addmm_activation")
def addmm_activation(bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    return lambda i, j: f("activation", addmm(bias, a, b, beta, alpha)(i, j))


@describe("aten._trilinear")
def trilinear(a: Any, b: Any, c: Any, no_a: Any, no_b: Any, no_c: Any, summed: Any) -> Any:
    """The product of three tensors, each without some dimensions, summed over others."""
    rank = a.ndim + len(no_a)
    every = make_axes("d", rank)
    extents: dict[str, int] = {}

    def element(x: Any, absent: Any) -> Any:
        missing = {d % rank for d in absent}
        dims = [d for d in range(rank) if d not in missing]
        for d, n in zip(dims, x.shape, strict=True):
            extents[f"d{d}"] = max(n, extents.get(f"d{d}", 0))
        return x[tuple(0 if n == 1 else every[d] for d, n in zip(dims, x.shape, strict=True))]

    product = element(a, no_a) * element(b, no_b) * element(c, no_c)
    over = [d % rank for d in summed]
    kept = [every[d] for d in range(rank) if d not in over]
    return Output.of(kept, reduce("sum", [every[d] for d in over], product), **extents)


Shapes = Sequence[tuple[int, ...]]


def _total_flops(inputs: Shapes, outputs: Shapes) -> float:
    return float(len(inputs) * math.prod(outputs[0]) * inputs[0][1])


def _added(terms: Sequence[Any]) -> Any:
    """The sum of terms, halves first: a weight that is used a thousand times has as many, and an
    expression as deep would be too deep to walk over."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return _added(terms[:half]) + _added(terms[half:])


@describe("apportion.mm_total", flops=_total_flops)
def mm_total(lefts: Any, rights: Any) -> Any:
    """lefts[0] @ rights[0] + lefts[1] @ rights[1] + ...: one partial value for all products."""
    pairs = list(zip(lefts, rights, strict=True))
    return lambda i, j: Sum(lambda k: _added([a[i, k] * b[k, j] for a, b in pairs]))


@describe("apportion.sum_total", flops=lambda inputs, outputs: float(sum(map(math.prod, inputs))))
def sum_total(tensors: Any, dims: Any) -> Any:
    """tensors[0].sum(dims) + tensors[1].sum(dims) + ..."""
    k = make_axes("k", len(dims))

    def output(*i: Any) -> Any:
        kept, reduced = iter(i), dict(zip(dims, k, strict=True))
        place = tuple(reduced[d] if d in reduced else next(kept) for d in range(tensors[0].ndim))
        return reduce("sum", k, _added([x[place] for x in tensors]))

    return output
