"""Transposed convolutions get the size of their result; convolution_backward -> an Op per gradient.

Rules of capture/decompose/; the Ops of several gradients are cut along different axes. The
gradients of a transposed convolution are those of the convolution that it transposes, with the
input and the gradient in each other's place, and that convolution itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion import graph as g
from apportion.capture.decompose.base import NodeBuilder, rule
from apportion.capture.normalise import Node

CONV_TRANSPOSE = "apportion.conv_transpose"
CONV_BACKWARD_INPUT = "apportion.conv_backward_input"
CONV_BACKWARD_WEIGHT = "apportion.conv_backward_weight"
_PAD = "aten.constant_pad_nd.default"


@rule("aten.convolution.default")
def _convolution(node: Node, make: NodeBuilder) -> list[Node]:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if not transposed:
        return [node]
    (slot,) = node.results
    settings = (stride, padding, dilation, groups)
    make.op(CONV_TRANSPOSE, x, weight, bias, make.types[slot][0], *settings, out=slot)
    return make.nodes


@rule("aten.convolution_backward.default")
def _convolution_backward(node: Node, make: NodeBuilder) -> list[Node]:
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    assert isinstance(grad, g.Ref) and isinstance(x, g.Ref) and isinstance(weight, g.Ref)
    for_input, for_weight, for_bias = (*node.outputs, None, None)[:3]
    settings = (stride, padding, dilation, groups)
    shapes = make.types[x.index][0], make.types[weight.index][0]
    if for_bias is not None:
        dims = (0, *range(2, len(shapes[0])))
        make.op("aten.sum.dim_IntList", grad, dims, False, None, out=for_bias)
    if transposed:
        _of_transposed(node, make, for_input, for_weight)
        return make.nodes
    if for_input is not None:
        make.op(CONV_BACKWARD_INPUT, grad, weight, shapes[0], *settings, out=for_input)
    if for_weight is not None:
        make.op(CONV_BACKWARD_WEIGHT, grad, x, shapes[1], *settings, out=for_weight)
    return make.nodes


def _of_transposed(
    node: Node, make: NodeBuilder, for_input: int | None, for_weight: int | None
) -> None:
    """The gradients of a transposed convolution. Where torch lets the output's padding be a stride
    long or longer, a convolution finds more windows than there were elements."""
    grad, x, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    assert isinstance(grad, g.Ref) and isinstance(x, g.Ref) and isinstance(weight, g.Ref)
    (shape, dtype), size = make.types[x.index], make.types[weight.index][0]
    rank = len(shape) - 2
    seen = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(
            make.types[grad.index][0][2:],
            size[2:],
            *(_each(setting, rank) for setting in (stride, padding, dilation)),
            strict=True,
        )
    ]
    more = [found - n for found, n in zip(seen, shape[2:], strict=True)]
    larger = ((*shape[:2], *seen), dtype)
    if for_input is not None:
        rest = (stride, padding, dilation, False, (0,) * rank, groups)
        out = larger if any(more) else for_input
        found = make.op("aten.convolution.default", grad, weight, None, *rest, out=out)
        if any(more):
            make.op(_PAD, found, _widths([-n for n in more]), 0, out=for_input)
    if for_weight is not None:
        if any(more):
            x = make.op(_PAD, x, _widths(more), 0, out=larger)
        settings = (stride, padding, dilation, groups)
        make.op(CONV_BACKWARD_WEIGHT, x, grad, size, *settings, out=for_weight)


def _widths(after: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for width in reversed(after) for n in (0, width))


def _each(setting: g.Arg, rank: int) -> tuple[int, ...]:
    assert isinstance(setting, tuple)
    numbers = tuple(n for n in setting if isinstance(n, int))
    return numbers * rank if len(numbers) == 1 else numbers
