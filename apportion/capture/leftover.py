"""leftover: no Node may read the gradients that the step before has left.

Part of capture/, before build_graph.py. A step that is recorded begins with gradients that nothing
has computed. Where they are only overwritten with zeros (zero_grad(set_to_none=False)), the zeros
are made like the parameter instead; any other read of them is refused with the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from apportion import graph as g
from apportion.capture.normalise import Node, NormalisedTrace
from apportion.capture.trace import CaptureError
from apportion.capture.user_line import at_line

_SHAPE_ONLY = frozenset(f"aten.{n}_like.default" for n in ("zeros", "ones", "full", "empty"))


def without_leftovers(trace: NormalisedTrace, parameters: Mapping[int, int]) -> NormalisedTrace:
    """The trace with each leftover gradient's slot replaced by that of its parameter; raises
    CaptureError where its value is used."""
    return replace(trace, nodes=tuple(_without(node, parameters) for node in trace.nodes))


def _without(node: Node, parameters: Mapping[int, int]) -> Node:
    if not any(slot in parameters for slot in g.refs(node.args)):
        return node
    first = node.args[0]
    if node.kind not in _SHAPE_ONLY or not isinstance(first, g.Ref):
        raise CaptureError(
            f"the step uses gradients of the step before{at_line(node.site.line)}; call "
            "optimizer.zero_grad() before, and use gradients after backward()"
        )
    return replace(node, args=(g.Ref(parameters[first.index]), *node.args[1:]))
