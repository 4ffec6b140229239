"""Products of groups of rows -> the same, with where every group starts and ends.

Rules of capture/decompose/. torch's operator is told where groups end; a part that holds some of
the groups must know where its first one starts, and a part that holds some of the rows where these
begin: apportion.grouped_mm and apportion.grouped_outer, which makes a matrix for every group.
"""

from __future__ import annotations

from typing import Any

from apportion import graph as g
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import Node


@rule("aten._grouped_mm.default")
def _grouped_mm(node: Node, make: NodeBuilder) -> list[Node]:
    a, b, ends, bias = node.args[:4]
    (slot,) = node.outputs
    assert slot is not None and isinstance(a, g.Ref) and isinstance(b, g.Ref)
    ranks = len(make.types[a.index][0]), len(make.types[b.index][0])
    same = make.types[slot][1] == make.types[a.index][1] == make.types[b.index][1]
    if bias is not None or not same:
        return [node]
    if ends is None and ranks == (3, 3):
        make.op("aten.bmm.default", a, b, out=slot)
    elif isinstance(ends, g.Ref) and ranks == (2, 3):
        make.op("apportion.grouped_mm", a, b, _starts(make, ends), ends, 0, out=slot)
    elif isinstance(ends, g.Ref) and ranks == (2, 2):
        make.op("apportion.grouped_outer", a, b, _starts(make, ends), ends, 0, out=slot)
    else:
        return [node]
    return make.nodes


def _starts(make: NodeBuilder, ends: g.Ref) -> Any:
    """A group starts where the one before it ends."""
    (count,), dtype = make.types[ends.index]
    earlier = ends
    if count > 1:
        shorter = ((count - 1,), dtype)
        earlier = make.op("aten.slice.Tensor", ends, 0, 0, count - 1, 1, out=shorter)
        return make.op("aten.constant_pad_nd.default", earlier, (1, 0), 0, out=((count,), dtype))
    return make.op("aten.mul.Scalar", ends, 0, out=((count,), dtype))
