"""RewrittenGraph: a Graph made of another one by a decision about memory.

Part of the room memory. recompute.py, reorder.py, host_state.py and offload.py each make one. It
says of every Op and Value what it was before, so that whatever is known of the Graph before (a
Strategy, seconds, bytes) is known of this one. Values keep their numbers and new ones come after
them, so that whatever is bound to the Graph before is bound to this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from apportion.describe import HOST_KINDS
from apportion.graph import Graph, Value, nbytes_of


@dataclass(frozen=True)
class RewrittenGraph:
    """A Graph, and what its parts were before.

    origins  for each Op the one of the Graph before that it is or repeats; of a copy to the host or
             back the one that made the Value, -1 if the step begins with it
    values   for each Value the one of the Graph before that it equals
    """

    graph: Graph
    origins: tuple[int, ...]
    values: tuple[int, ...]

    def is_repeat(self, op: int) -> bool:
        """Whether an Op computes what another one has computed."""
        forward = self.graph.ops[op].forward
        if forward is None or self.is_host_copy(op):
            return False
        return self.origins[forward] == self.origins[op]

    def is_host_copy(self, op: int) -> bool:
        """Whether an Op copies to the host or back, or waits for that."""
        return self.graph.ops[op].kind in HOST_KINDS

    @property
    def repeats(self) -> tuple[int, ...]:
        """The Ops that repeat others."""
        return tuple(op for op in range(len(self.graph.ops)) if self.is_repeat(op))

    def then(self, after: RewrittenGraph) -> RewrittenGraph:
        """What this one and a further one, made of its Graph, make together."""
        origins = tuple([op if op < 0 else self.origins[op] for op in after.origins])
        values = tuple([self.values[value] for value in after.values])
        return RewrittenGraph(after.graph, origins, values)


def unchanged(graph: Graph) -> RewrittenGraph:
    """The Graph itself."""
    return RewrittenGraph(graph, tuple(range(len(graph.ops))), tuple(range(len(graph.values))))


class NewValues:
    """The Values of a Graph, and those that are added to them."""

    def __init__(self, values: Iterable[Value]) -> None:
        self.values = list(values)
        self.equal = list(range(len(self.values)))
        self.names = {value.name for value in self.values}

    def add(self, like: int, ending: str, role: str | None = None, dtype: str | None = None) -> int:
        """A Value that equals another one, of a name that ends so; in another role or dtype where
        these are given."""
        before = self.values[like]
        name = f"{before.name}.{ending}"
        while name in self.names:
            name = f"{name}.{ending}"
        self.names.add(name)
        found = replace(before, name=name, role=role or before.role)
        if dtype is not None and dtype != before.dtype:
            found = in_dtype(found, dtype)
        self.values.append(found)
        self.equal.append(self.equal[like])
        return len(self.values) - 1


def in_dtype(value: Value, dtype: str) -> Value:
    """The Value in another dtype."""
    assert value.shape is not None, "only what was captured is rewritten"
    return replace(value, dtype=dtype, nbytes=nbytes_of(value.shape, dtype))
