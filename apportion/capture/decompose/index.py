"""Operators that read or write at places given by data -> the same, with the place of a part.

Rules of capture/decompose/. A kernel that holds a range of a dimension that is picked from must
know where the range begins and how long the dimension is in all. torch's kernels have no argument
for that. Our own kinds have two more arguments for it, an offset and a size (of every indexed
dimension, where there are several), 0 and the whole here; the local rules of their descriptions
shift them.
"""

from __future__ import annotations

from typing import Any

import torch

from apportion import graph as g
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import Node

_MASKS = (torch.bool, torch.uint8)
_REDUCERS = {"add": "sum", "multiply": "prod"}


def _shape(make: NodeBuilder, ref: Any) -> tuple[int, ...]:
    return tuple(make.types[ref.index][0])


def _length(make: NodeBuilder, ref: Any, dim: int) -> int:
    shape = _shape(make, ref)
    return shape[dim] if shape else 1


def _one(node: Node, make: NodeBuilder, kind: str, *args: Any) -> list[Node]:
    (slot,) = node.outputs
    assert slot is not None
    make.op(f"apportion.{kind}", *args, out=slot)
    return make.nodes


@rule("aten.embedding.default")
def _embedding(node: Node, make: NodeBuilder) -> list[Node]:
    weight, indices = node.args[:2]
    return _one(node, make, "embedding", weight, indices, 0, _length(make, weight, 0))


@rule("aten.embedding_dense_backward.default")
def _embedding_backward(node: Node, make: NodeBuilder) -> list[Node]:
    return _one(node, make, "embedding_backward", *node.args, 0, node.args[2])


@rule("aten.embedding_renorm.default")
def _embedding_renorm(node: Node, make: NodeBuilder) -> list[Node]:
    return _one(node, make, "embedding_renorm", *node.args, 0, _length(make, node.args[0], 0))


@rule("aten.gather.default")
def _gather(node: Node, make: NodeBuilder) -> list[Node]:
    x, dim, index = node.args[:3]
    assert isinstance(dim, int)
    return _one(node, make, "gather", x, dim, index, 0, _length(make, x, dim))


@rule(
    "aten.index_select.default",
    "aten.index_add.default",
    "aten.index_copy.default",
    "aten.index_fill.int_Scalar",
    "aten.index_fill.int_Tensor",
    "aten.index_reduce.default",
)
def _along(node: Node, make: NodeBuilder) -> list[Node]:
    x, dim = node.args[:2]
    assert isinstance(dim, int)
    return _one(node, make, node.kind.split(".")[1], *node.args, 0, _length(make, x, dim))


@rule(
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def _scatter(node: Node, make: NodeBuilder) -> list[Node]:
    x, dim, index, source, *rest = node.args
    assert isinstance(dim, int)
    how, own = "sum" if node.kind == "aten.scatter_add.default" else "", True
    if rest:
        how = _REDUCERS.get(str(rest[0]), str(rest[0]))
        own = bool(rest[1]) if len(rest) > 1 else True
    size = _length(make, x, dim)
    return _one(node, make, "scatter", x, dim, index, source, how, own, 0, size)


def _masks(make: NodeBuilder, indices: Any) -> tuple[bool, ...]:
    return tuple(i is not None and make.types[i.index][1] in _MASKS for i in indices)


def _place(make: NodeBuilder, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = _shape(make, x)
    return (0,) * len(shape), shape


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(node: Node, make: NodeBuilder) -> list[Node]:
    x, indices = node.args
    masks = _masks(make, indices)
    if any(masks):
        return _one(node, make, "mask_index", x, indices, masks)
    return _one(node, make, "index", x, indices, *_place(make, x))


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(node: Node, make: NodeBuilder) -> list[Node]:
    x, indices, values, accumulate = node.args
    masks = _masks(make, indices)
    if any(masks):
        return _one(node, make, "mask_put", x, indices, values, accumulate, masks)
    return _one(node, make, "index_put", x, indices, values, accumulate, *_place(make, x))


@rule("aten.take.default")
def _take(node: Node, make: NodeBuilder) -> list[Node]:
    return _one(node, make, "take", *node.args, *_place(make, node.args[0]))


@rule("aten.put.default")
def _put(node: Node, make: NodeBuilder) -> list[Node]:
    return _one(node, make, "put", *node.args, *_place(make, node.args[0]))


# Masked forms clamp what the mask hides, so that every index is inside.


@rule("aten._unsafe_masked_index.default")
def _masked_index(node: Node, make: NodeBuilder) -> list[Node]:
    x, mask, indices, fill = node.args
    if 0 in _shape(make, x):
        return [node]
    (slot,) = node.outputs
    assert slot is not None
    inside = _clamped(make, x, indices)
    found = make.op("apportion.index", x, inside, *_place(make, x), out=make.types[slot])
    make.op("aten.masked_fill.Scalar", found, _not(make, mask), fill, out=slot)
    return make.nodes


@rule("aten._unsafe_masked_index_put_accumulate.default")
def _masked_index_put(node: Node, make: NodeBuilder) -> list[Node]:
    x, mask, indices, values = node.args
    if 0 in _shape(make, x):
        return [node]
    assert isinstance(values, g.Ref)
    like = make.types[values.index]
    kept = make.op("aten.masked_fill.Scalar", values, _not(make, mask), 0, out=like)
    inside = _clamped(make, x, indices)
    return _one(node, make, "index_put", x, inside, kept, True, *_place(make, x))


def _not(make: NodeBuilder, mask: Any) -> g.Ref:
    like = (make.types[mask.index][0], torch.bool)
    return make.op("aten.logical_not.default", mask, out=like)


def _clamped(make: NodeBuilder, x: Any, indices: Any) -> tuple[Any, ...]:
    sizes = _shape(make, x)
    return tuple(
        None
        if index is None
        else make.op("aten.clamp.default", index, -size, size - 1, out=make.types[index.index])
        for index, size in zip(indices, sizes, strict=False)
    )
