"""Batch norm in training -> its statistics and what is pointwise once they are known.

Rules of capture/decompose/. Its backward becomes two sums and a pointwise rest.
docs/design/005-batch-norm.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import Node
from apportion.capture.trace import TensorType

CHANNEL_SUM, CHANNEL_SQUARES = "apportion.channel_sum", "apportion.channel_squares"
BATCH_NORM, BATCH_NORM_BACKWARD = "apportion.batch_norm", "apportion.batch_norm_backward"
BATCH_NORM_REDUCE = "apportion.batch_norm_reduce"
_BATCH_NORMS = frozenset(
    f"aten.{name}"
    for name in (
        "native_batch_norm.default",
        "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional.default",
    )
)


@dataclass(frozen=True, slots=True)
class _ChannelStatistics:
    """What the forward pass of a batch norm found: sum and squares, over `count` elements."""

    total: g.Ref
    squares: g.Ref
    count: int
    type: TensorType


@rule(*_BATCH_NORMS)
def _batch_norm(node: Node, make: NodeBuilder) -> list[Node]:
    x, weight, bias, *rest = node.args
    running = rest[:2] if len(rest) == 5 else [None, None]
    training, momentum, eps = rest[-3:]
    if not training:
        return [node]
    assert isinstance(x, g.Ref)
    shape, dtype = make.types[x.index]
    kind = ((shape[1],), torch.promote_types(dtype, torch.float32))  # halves are added as singles
    count = math.prod(shape) // shape[1]
    total = make.op(CHANNEL_SUM, x, out=kind)
    squares = make.op(CHANNEL_SQUARES, x, total, count, out=kind)
    result, mean, invstd, *after = node.outputs
    if result is not None:
        make.op(BATCH_NORM, x, total, squares, weight, bias, count, eps, out=result)
    if mean is not None:
        make.notes[mean] = _ChannelStatistics(total, squares, count, kind)
        make.cast(make.op("aten.div.Scalar", total, count, out=kind), mean)
    if invstd is not None:  # as the mean, for whoever reads it; our backward does not
        variance = make.op("aten.div.Scalar", squares, count, out=kind)
        shifted = make.op("aten.add.Scalar", variance, eps, 1, out=kind)
        make.cast(make.op("aten.rsqrt.default", shifted, out=kind), invstd)
    divisors = count, max(count - 1, 1)
    for old, new, value, divisor in zip(running, after, (total, squares), divisors, strict=False):
        if old is not None and new is not None:
            _running(make, old, new, value, momentum, divisor)
    return make.nodes


def _running(
    make: NodeBuilder, old: Any, new: int, total: g.Ref, momentum: Any, divisor: int
) -> None:
    """The running statistic after the step: (1 - momentum) * before + momentum * total /
    divisor."""
    kind = make.types[new] = make.types[old.index]  # torch's fake kernel widens halves here
    kept = make.op("aten.mul.Scalar", old, 1 - momentum, out=kind)
    wide = (kind[0], make.types[total.index][1])
    if kind == wide:
        make.op("aten.add.Tensor", kept, total, momentum / divisor, out=new)
    else:
        make.cast(make.op("aten.add.Tensor", kept, total, momentum / divisor, out=wide), new)


@rule("aten.native_batch_norm_backward.default")
def _batch_norm_backward(node: Node, make: NodeBuilder) -> list[Node]:
    grad, x, weight, _, _, mean, _, training, eps, _ = node.args
    known = make.notes.get(mean.index) if training and isinstance(mean, g.Ref) else None
    if known is None:
        return [node]
    for_input, for_weight, for_bias = (*node.outputs, None, None)[:3]
    statistics = (known.total, known.squares)
    sums = []
    for slot in (for_bias, for_weight):
        plain = slot is not None and make.types[slot] == known.type
        sums.append(slot if plain and slot is not None else make.slot(known.type))
    args = (grad, x, *statistics, known.count, eps)
    make.nodes.append(Node(BATCH_NORM_REDUCE, args, tuple(sums), make.site))
    for made, slot in zip(sums, (for_bias, for_weight), strict=True):
        if slot is not None and slot != made:
            make.cast(g.Ref(made), slot)
    if for_input is not None:
        given = (*statistics, weight, *map(g.Ref, sums), known.count, eps)
        make.op(BATCH_NORM_BACKWARD, grad, x, *given, out=for_input)
    return make.nodes
