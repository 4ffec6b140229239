"""Reductions whose parts combine only before their last step, or only if a size is given.

Rules of capture/decompose/. A euclidean norm becomes the root of a sum of squares. The
connectionist temporal classification of a batch becomes one with the width of its alignments as an
argument: as wide as the longest target of the whole batch needs, which may be in another part.
"""

from __future__ import annotations

import torch

from apportion import graph as g
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import Node

SQUARE_SUM = "apportion.square_sum"
CTC_LOSS = "apportion.ctc_loss"


@rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim")
def _norm(node: Node, make: NodeBuilder) -> list[Node]:
    x, power, dims, keepdim, *_ = (*node.args, None)
    return _root(node, make, x, power, dims, bool(keepdim), node.args[4:])


@rule("aten.norm.Scalar")
def _total_norm(node: Node, make: NodeBuilder) -> list[Node]:
    return _root(node, make, node.args[0], node.args[1], None, False, ())


def _root(
    node: Node, make: NodeBuilder, x: g.Arg, power: g.Arg, dims: g.Arg, keepdim: bool, dtype: g.Arg
) -> list[Node]:
    (result,) = node.outputs
    assert isinstance(x, g.Ref) and result is not None
    shape, kind = make.types[result]
    rank = len(make.types[x.index][0])
    if power not in (None, 2) or rank == 0 or dtype not in ((), (None,)):
        return [node]
    listed = dims if isinstance(dims, tuple) and dims else tuple(range(rank))
    places = tuple(sorted({d % rank for d in listed if isinstance(d, int)}))
    wide = (shape, torch.promote_types(kind, torch.float32))  # squares of halves overflow
    total = make.op(SQUARE_SUM, x, places, keepdim, out=wide)
    if wide[1] == kind:
        make.op("aten.sqrt.default", total, out=result)
    else:
        make.cast(make.op("aten.sqrt.default", total, out=wide), result)
    return make.nodes


@rule("aten._ctc_loss.default")
def _ctc_loss(node: Node, make: NodeBuilder) -> list[Node]:
    targets, letters = node.args[1], node.args[3]
    assert isinstance(targets, g.Ref) and isinstance(letters, tuple)
    if len(make.types[targets.index][0]) != 2:
        return [node]
    longest = max((n for n in letters if isinstance(n, int)), default=0)
    args = (*node.args, 2 * longest + 1)
    return [Node(CTC_LOSS, args, node.outputs, node.site)]
