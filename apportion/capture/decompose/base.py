"""Rules of decomposition, as capture/decompose/ writes them: one Node -> the Nodes in its place.

A rule is a function of the Node and of a NodeBuilder that makes new ones; `rule` registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apportion import graph as g
from apportion.capture.normalise import Node
from apportion.capture.trace import CallSite, TensorType, dtype_name


class NodeBuilder:
    """Makes the Nodes that take the place of one, and slots for their results.

    `notes` is where rules leave what they know about slots for other rules.
    """

    def __init__(self, types: list[TensorType], site: CallSite, notes: dict[int, Any]) -> None:
        self.types, self.site = types, site
        self.notes = notes
        self.nodes: list[Node] = []

    def slot(self, like: TensorType) -> int:
        """A new slot."""
        self.types.append(like)
        return len(self.types) - 1

    def op(self, kind: str, *args: Any, out: TensorType | int) -> g.Ref:
        """A Node with one result: a new slot of a type, or a given one."""
        slot = out if isinstance(out, int) else self.slot(out)
        self.nodes.append(Node(kind, args, (slot,), self.site))
        return g.Ref(slot)

    def cast(self, source: g.Ref, slot: int) -> None:
        """Makes `slot`, which may have another dtype, from a Ref."""
        dtype = g.Dtype(dtype_name(self.types[slot][1]))
        self.op("aten._to_copy.default", source, dtype, False, out=slot)


Rule = Callable[[Node, NodeBuilder], list[Node]]
DECOMPOSITIONS: dict[str, Rule] = {}
"""The rule of each kind: a registry that the files of this folder fill while they are loaded."""


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Registers the decorated function as what becomes of Nodes of these kinds; it may return the
    Node itself."""

    def register(function: Rule) -> Rule:
        DECOMPOSITIONS.update(dict.fromkeys(kinds, function))
        return function

    return register
