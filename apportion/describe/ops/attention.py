"""Attention kernels, one Op each: cut along batch, heads (keys and values may have fewer), queries
and, in the backward, keys.

The forward kernel is opaque along keys; opened (split/open_composites.py) it is the log of the sum
over keys, and the sum of values once that is known. Causal kernels must know where their queries
and keys begin, which they are told by two more arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.language import Operand, Output, axis, f, opaque, reduce

Shapes = Sequence[tuple[int, ...]]

WHOLE = slice(None)


def _flops(inputs: Shapes, outputs: Shapes) -> float:
    batch, heads, queries, width = inputs[0]
    return 4.0 * batch * heads * queries * inputs[1][2] * width


def _backward_flops(inputs: Shapes, outputs: Shapes) -> float:
    return 2.5 * _flops(inputs[1:], outputs)


def _half_flops(inputs: Shapes, outputs: Shapes) -> float:
    return 0.5 * _flops(inputs, outputs)


class _AttentionAxes:
    """The axes of an attention: batch, heads of keys, queries per key head, queries, keys."""

    def __init__(self, q: Operand, k: Operand) -> None:
        self.b, self.h, self.g, self.i, self.j, self.d = (axis(name) for name in "bhgijd")
        self.heads: Any = (self.h, self.g)
        self.extents = {"h": k.shape[1], "g": q.shape[1] // max(k.shape[1], 1)}

    def query(self, *tensors: Operand) -> list[Any]:
        """What belongs to a query, its width whole."""
        return [x[(self.b, self.heads, self.i, *[WHOLE] * (x.ndim - 3))] for x in tensors]

    def key(self, j: Any, *tensors: Operand) -> list[Any]:
        return [x[self.b, self.h, j, WHOLE] for x in tensors]

    def mask(self, mask: Operand | None, j: Any) -> list[Any]:
        if mask is None:
            return []
        places = (self.b, self.heads, self.i, j)[4 - mask.ndim :]
        return [mask[tuple(0 if n == 1 else a for n, a in zip(mask.shape, places, strict=True))]]

    def output(self, dims: Sequence[Any], body: Any) -> Output:
        return Output.of(tuple(dims), body, **self.extents)


def _with_place(fixed: int, causal: int) -> Any:
    """The local rule of a kernel with `fixed` arguments before its place."""

    def local(args: tuple[Any, ...], here: PartLocation) -> tuple[Any, ...]:
        i0, j0 = args[fixed:] or (0, 0)
        place = i0 + here.first("i"), j0 + here.first("j")
        return (*args[:fixed], *place) if args[causal] and any(place) else args[:fixed]

    return local


def _place(causal: Any, i: Any, j: Any, i0: int, j0: int) -> list[Any]:
    """What a causal mask depends on: query - key."""
    if not causal:
        return []
    return [f("causal", i + i0, j0 if j is None else j + j0)]


@describe("apportion.sdpa", local=_with_place(7, 4), flops=_flops)
def sdpa(
    q: Any, k: Any, v: Any, dropout: Any, causal: Any, mask: Any, scale: Any,
    i0: int = 0, j0: int = 0, *, out: Any,
) -> Any:  # fmt: skip
    a = _AttentionAxes(q, k)
    slices = (
        *a.query(q),
        *a.key(WHOLE, k, v),
        *a.mask(mask, WHOLE),
        *_place(causal, a.i, None, i0, j0),
    )
    result = a.output((a.b, a.heads, a.i, a.d), opaque(*slices)[a.d])
    return (result, a.output((a.b, a.heads, a.i), opaque(*slices)))[: len(out)]


@describe("apportion.sdpa_backward", local=_with_place(10, 7), flops=_backward_flops)
def sdpa_backward(
    grad: Any, q: Any, k: Any, v: Any, result: Any, lse: Any, dropout: Any, causal: Any, mask: Any,
    scale: Any, i0: int = 0, j0: int = 0, *, out: Any,
) -> Any:  # fmt: skip
    a = _AttentionAxes(q, k)
    slices = (
        *a.query(grad, q, result, lse),
        *a.key(a.j, k, v),
        *a.mask(mask, a.j),
        *_place(causal, a.i, a.j, i0, j0),
    )
    e = axis("e")
    for_query = reduce("sum", (a.j,), opaque(*slices)[a.d])
    for_key = reduce("sum", (a.g, a.i), opaque(*slices)[a.d])
    for_value = reduce("sum", (a.g, a.i), opaque(*slices)[e])
    return (
        a.output((a.b, a.heads, a.i, a.d), for_query),
        a.output((a.b, a.h, a.j, a.d), for_key),
        a.output((a.b, a.h, a.j, e), for_value),
    )[: len(out)]


@describe("apportion.sdpa_lse", local=_with_place(5, 3), flops=_half_flops)
def sdpa_lse(q: Any, k: Any, mask: Any, causal: Any, scale: Any, i0: int = 0, j0: int = 0) -> Any:
    a = _AttentionAxes(q, k)
    slices = (
        *a.query(q), *a.key(a.j, k), *a.mask(mask, a.j), *_place(causal, a.i, a.j, i0, j0)
    )  # fmt: skip
    return a.output((a.b, a.heads, a.i), reduce("logaddexp", (a.j,), opaque(*slices)))


@describe("apportion.sdpa_values", local=_with_place(7, 5), flops=_flops)
def sdpa_values(
    q: Any, k: Any, v: Any, lse: Any, mask: Any, causal: Any, scale: Any, i0: int = 0, j0: int = 0
) -> Any:
    a = _AttentionAxes(q, k)
    slices = (
        *a.query(q, lse), *a.key(a.j, k), *a.mask(mask, a.j),
        *_place(causal, a.i, a.j, i0, j0),
    )  # fmt: skip
    weighted = f("weigh", opaque(*slices), v[a.b, a.h, a.j, a.d])
    return a.output((a.b, a.heads, a.i, a.d), reduce("sum", (a.j,), weighted))
