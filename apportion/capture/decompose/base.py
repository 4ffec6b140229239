"""Rules of decomposition: one Node -> the Nodes in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apportion import graph as g
from apportion.capture.normalise import Node
from apportion.capture.record import Site, Type, dtype_name


class Maker:
    """Nodes in the place of one, and slots for what they make."""

    def __init__(self, types: list[Type], site: Site, notes: dict[int, Any]) -> None:
        self.types, self.site = types, site
        self.notes = notes  # what rules tell each other about slots
        self.nodes: list[Node] = []

    def slot(self, like: Type) -> int:
        """A new slot."""
        self.types.append(like)
        return len(self.types) - 1

    def op(self, kind: str, *args: Any, out: Type | int) -> g.Ref:
        """A Node with one result: a new slot of a type, or a given one."""
        slot = out if isinstance(out, int) else self.slot(out)
        self.nodes.append(Node(kind, args, (slot,), self.site))
        return g.Ref(slot)

    def cast(self, source: g.Ref, slot: int) -> None:
        """Makes `slot`, which may have another dtype, from a Ref."""
        dtype = g.Dtype(dtype_name(self.types[slot][1]))
        self.op("aten._to_copy.default", source, dtype, False, out=slot)


Rule = Callable[[Node, Maker], list[Node]]
RULES: dict[str, Rule] = {}


def rule(*kinds: str) -> Callable[[Rule], Rule]:
    """Registers the decorated function as what becomes of Nodes of these kinds; it may return the
    Node itself."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register
