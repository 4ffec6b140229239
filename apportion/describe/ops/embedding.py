"""Embeddings: rows of a table, picked by data.

Torch's own operators are cut along the indices and along the width. Captured steps contain
`apportion.embedding` and `apportion.embedding_backward`, which know where their rows begin, so that
the table is cut by rows too: a part leaves zeros for the rows that it does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.errors import Undescribed
from apportion.describe.language import Output, axes, axis, f, opaque, reduce

Shapes = Sequence[tuple[int, ...]]


def moves_output(inputs: Shapes, outputs: Shapes) -> float:
    """One operation per element that is left, however much there is to pick from."""
    return float(sum(math.prod(shape) for shape in outputs))


def moves_inputs(inputs: Shapes, outputs: Shapes) -> float:
    """One operation per element that is read."""
    return float(sum(math.prod(shape) for shape in inputs))


def from_row(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    """The last two arguments are where axis `v` begins and how long it is in all."""
    return (*args[:-2], args[-2] + local.first("v"), args[-1])


def _rows_from(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    grad, indices, _, *rest = from_row(args, local)
    return (grad, indices, local.outputs[0][0], *rest)


@describe("aten.embedding")
def embedding(weight: Any, indices: Any) -> Any:
    return lambda *i: weight[indices[i[:-1]], i[-1]]


@describe("apportion.embedding", local=from_row, flops=moves_output)
def rows_of(weight: Any, indices: Any, offset: Any, size: Any) -> Any:
    i, v, d = axes("i", indices.ndim), axis("v"), axis("d")
    picked = f("at", v + offset, size, indices[i], weight[v, d])
    return Output.of((*i, d), reduce("sum", [v], picked))


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


@describe("apportion.embedding_backward", local=_rows_from, flops=moves_inputs)
def rows_of_backward(
    grad: Any, indices: Any, rows: Any, padding: Any, by_frequency: Any, offset: Any, size: Any
) -> Any:
    n, v, d = axes("n", indices.ndim), axis("v"), axis("d")
    place = (v + offset, size, padding)
    if by_frequency:  # all indices are counted
        whole = (slice(None),) * indices.ndim
        total: Any = f("scaled", *place, opaque(indices[whole], grad[(*whole, d)]))
    else:
        total = reduce("sum", n, f("scatter", *place, indices[n], grad[(*n, d)]))
    return Output.of((v, d), total)


@describe("apportion.embedding_renorm", local=from_row, flops=moves_output)
def embedding_renorm(
    weight: Any, indices: Any, most: Any, norm: Any, offset: Any, size: Any
) -> Any:
    row = (most, norm, whole_of(indices))
    return lambda v, d: f("renorm", v + offset, size, opaque(weight[v, :], *row)[d])


_MAX = 2  # the mode of embedding bags that keeps, as output 3, which row was the largest


@describe("aten._embedding_bag", "aten._embedding_bag_forward_only", flops=moves_output)
def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    by_frequency: Any,
    mode: Any,
    sparse: Any,
    factors: Any,
    *,
    out: Any,
) -> Any:
    b, d = axis("b"), axis("d")
    places = [whole_of(t) for t in (indices, offsets, factors) if t is not None]
    bags = opaque(weight[:, d], *places)[b]
    left = [Output.of((b, d), bags)]
    for k, shape in enumerate(out[1:], start=1):
        if k == 3 and mode == _MAX and len(shape) == 2:
            left.append(Output.of((b, d), bags))
        else:
            own = axes(f"s{k}_", len(shape))
            left.append(Output.of(own, opaque(*places)[own]))
    return tuple(left)


@describe("aten._embedding_bag_dense_backward", flops=moves_inputs)
def embedding_bag_dense_backward(
    grad: Any,
    indices: Any,
    bag_of: Any,
    sizes: Any,
    largest: Any,
    rows: Any,
    by_frequency: Any,
    mode: Any,
    factors: Any,
) -> Any:
    v, d = axis("v"), axis("d")
    if bag_of.shape == indices.shape and mode != _MAX and not by_frequency:
        n = axis("n")  # each index by itself; the row number is a value
        place = [indices[n], bag_of[n], *([factors[n]] if factors is not None else [])]
        term = f("scatter", v, *place, opaque(grad[:, d], whole_of(sizes)))
        return Output.of((v, d), reduce("sum", [n], term))
    places = [whole_of(t) for t in (indices, bag_of, sizes, factors) if t is not None]
    if mode == _MAX:
        places.append(largest[:, d])
    return Output.of((v, d), opaque(grad[:, d], *places)[v])


@describe("aten._embedding_bag_backward", flops=moves_inputs)
def embedding_bag_backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    bag_of: Any,
    sizes: Any,
    largest: Any,
    rows: Any,
    by_frequency: Any,
    mode: Any,
    sparse: Any,
    factors: Any,
) -> Any:
    if sparse:
        raise Undescribed("a sparse gradient has no dimensions to cut")
    bags = (grad, indices, bag_of, sizes, largest)
    return embedding_bag_dense_backward(*bags, rows, by_frequency, mode, factors)


@describe("aten._embedding_bag_per_sample_weights_backward")
def embedding_bag_factors(grad: Any, weight: Any, indices: Any, offsets: Any, bag_of: Any) -> Any:
    n, d = axis("n"), axis("d")
    rows = (grad[:, d], weight[:, d])
    if bag_of.shape == indices.shape:
        term = f("in_bag", indices[n], bag_of[n], opaque(*rows))
    else:
        term = opaque(*rows, *map(whole_of, (indices, offsets, bag_of)))[n]
    return Output.of((n,), reduce("sum", [d], term))


def whole_of(tensor: Any) -> Any:
    """All of a tensor."""
    return tensor[(slice(None),) * tensor.ndim]
