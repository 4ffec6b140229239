"""Pools whose windows must know their place in the plane -> operators that have it as an argument.

Rules of capture/decompose/. Gradients of pools no longer read the pool's input, of which torch's
kernels use only the shape.
"""

from __future__ import annotations

import math
from typing import Any

from apportion import graph as g
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import Node

MAX_POOL, MAX_POOL_BACKWARD = "apportion.max_pool", "apportion.max_pool_backward"
PLANE_ADD = "apportion.plane_add"
AVG_POOL, AVG_POOL_BACKWARD = "apportion.avg_pool", "apportion.avg_pool_backward"


def _rank(node: Node) -> int:
    return 2 if "pool2d" in node.kind else 3


def _each(setting: Any, rank: int) -> tuple[int, ...]:
    return tuple(setting) * rank if len(setting) == 1 else tuple(setting)


@rule("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def _max_pool(node: Node, make: NodeBuilder) -> list[Node]:
    x, kernel, stride, padding, dilation, ceil = node.args
    rank = _rank(node)
    assert isinstance(x, g.Ref)
    shape, dtype = make.types[x.index]
    if not dtype.is_floating_point:
        return [node]  # nothing is less than all whole numbers
    settings = (_each(s, rank) for s in (kernel, stride or kernel, padding, dilation))
    args = (x, *settings, ceil, (0,) * rank, shape[-rank:])
    return [Node(MAX_POOL, args, node.outputs, node.site)]


@rule(
    "aten.max_pool2d_with_indices_backward.default",
    "aten.max_pool3d_with_indices_backward.default",
)
def _max_pool_backward(node: Node, make: NodeBuilder) -> list[Node]:
    grad, _, kernel, stride, padding, dilation, _, found = node.args
    rank = _rank(node)
    (slot,) = node.results
    size = make.types[slot][0]
    settings = (_each(s, rank) for s in (kernel, stride or kernel, padding, dilation))
    args = (grad, found, size, *settings, (0,) * rank, size[-rank:])
    return [Node(MAX_POOL_BACKWARD, args, node.outputs, node.site)]


@rule(
    *(f"aten.adaptive_max_pool{rank}d_backward.default" for rank in (2, 3)),
    *(f"aten.fractional_max_pool{rank}d_backward.default" for rank in (2, 3)),
)
def _plane_add(node: Node, make: NodeBuilder) -> list[Node]:
    grad, found = node.args[0], node.args[-1]
    rank = _rank(node)
    (slot,) = node.results
    size = make.types[slot][0]
    args = (grad, found, size, (0,) * rank, size[-rank:])
    return [Node(PLANE_ADD, args, node.outputs, node.site)]


@rule("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def _avg_pool(node: Node, make: NodeBuilder) -> list[Node]:
    x, kernel, stride, padding, ceil, with_padding, divisor = node.args
    rank = _rank(node)
    assert isinstance(x, g.Ref)
    around = _each(padding, rank)
    if divisor is not None or not (ceil or (any(around) and not with_padding)):
        return [node]
    (slot,) = node.results
    settings = (_each(s, rank) for s in (kernel, stride or kernel, padding))
    plane, windows = make.types[x.index][0][-rank:], make.types[slot][0][-rank:]
    margin = around if with_padding else None
    args = (x, *settings, windows, (0,) * rank, plane, margin)
    return [Node(AVG_POOL, args, node.outputs, node.site)]


@rule("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def _avg_pool_backward(node: Node, make: NodeBuilder) -> list[Node]:
    grad, _, kernel, stride, padding, ceil, with_padding, divisor = node.args
    rank = _rank(node)
    (slot,) = node.results
    size = make.types[slot][0]
    settings = [_each(s, rank) for s in (kernel, stride or kernel, padding)]
    around = settings[2]
    if divisor is None and not ceil and (with_padding or not any(around)):
        divisor = math.prod(settings[0])
    margin = around if with_padding else None
    args = (grad, size, *settings, (0,) * rank, size[-rank:], margin, divisor)
    return [Node(AVG_POOL_BACKWARD, args, node.outputs, node.site)]
