"""Operators that read or write at places given by data."""

from __future__ import annotations

from typing import Any

from apportion.formula import Undescribed
from apportion.tdl import Output, axes, axis, describe, f, reduce


@describe("aten.embedding")
def embedding(weight: Any, indices: Any) -> Any:
    return lambda *i: weight[indices[i[:-1]], i[-1]]


@describe("aten.embedding_dense_backward")
def embedding_dense_backward(
    grad: Any, indices: Any, rows: Any, padding: Any, by_frequency: Any
) -> Any:
    if by_frequency:
        raise Undescribed(
            "gradients scaled by how often a row occurs depend on all indices at once"
        )
    n = axes("n", indices.ndim)
    v, d = axis("v"), axis("d")
    # The row number v is a value here: a kernel that holds only some rows needs shifted indices.
    return Output.of((v, d), reduce("sum", n, f("scatter", v, indices[n], grad[(*n, d)])))


@describe("aten.gather")
def gather(x: Any, dim: Any, index: Any) -> Any:
    d = dim % x.ndim if x.ndim else 0

    def output(*i: Any) -> Any:
        return x[tuple(index[i] if k == d else axis for k, axis in enumerate(i))]

    return output
