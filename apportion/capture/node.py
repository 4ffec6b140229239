"""Node: an operator of a Trace on its way to becoming an Op.

Part of capture/: what normalise.py makes of a Trace, decompose/ rewrites and build_graph.py turns
into Ops.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion import graph as g
from apportion.capture.trace import CallSite, TensorType


@dataclass(frozen=True, slots=True)
class Node:
    """An Op before it has a name and Values: its tensors are `Ref(slot)`."""

    kind: str
    args: tuple[g.Arg, ...]
    outputs: tuple[int | None, ...]
    site: CallSite

    @property
    def results(self) -> tuple[int, ...]:
        """The outputs that are tensors."""
        return tuple(slot for slot in self.outputs if slot is not None)


@dataclass(frozen=True)
class NormalisedTrace:
    """Nodes in running order, the slots' types, and the slots of the trace's results."""

    nodes: tuple[Node, ...]
    types: tuple[TensorType, ...]
    outputs: tuple[int | None, ...]
