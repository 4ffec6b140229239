"""convolution_backward -> one Op per gradient; they are cut along different axes."""

from __future__ import annotations

from apportion import graph as g
from apportion.decompose.base import Maker, rule
from apportion.rewrite import Node

CONV_BACKWARD_INPUT = "apportion.conv_backward_input"
CONV_BACKWARD_WEIGHT = "apportion.conv_backward_weight"


@rule("aten.convolution_backward.default")
def _convolution_backward(node: Node, make: Maker) -> list[Node]:
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = node.args
    if transposed:
        return [node]
    assert isinstance(x, g.Ref) and isinstance(weight, g.Ref)
    for_input, for_weight, for_bias = (*node.outputs, None, None)[:3]
    settings = (stride, padding, dilation, groups)
    shapes = make.types[x.index][0], make.types[weight.index][0]
    if for_input is not None:
        make.op(CONV_BACKWARD_INPUT, grad, weight, shapes[0], *settings, out=for_input)
    if for_weight is not None:
        make.op(CONV_BACKWARD_WEIGHT, grad, x, shapes[1], *settings, out=for_weight)
    if for_bias is not None:
        dims = (0, *range(2, len(shapes[0])))
        make.op("aten.sum.dim_IntList", grad, dims, False, None, out=for_bias)
    return make.nodes
