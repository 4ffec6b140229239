"""recompute: forward Ops done again in the backward, so that their results need not be kept.

Part of the room memory. A Graph and some of its forward Ops come in, a RewrittenGraph goes out, in
which every backward Op reads a second computation of what these Ops make:

    y = gelu(x)   z = y @ w   ...   dw = y.T @ dz      with gelu recomputed      y' = gelu(x)
                                                                                 dw = y'.T @ dz

A copy is an Op like any other: of the same kind, with the same arguments (the key of a random draw
is one, so that dropout repeats its mask), of phase backward, naming the Op that it repeats as its
forward Op. It stands just before the first Op that reads it, and reads copies itself where its
inputs are recomputed too, else what the forward has kept. Copies that nobody would read are not
made, so that what the step ends with (running statistics, the loss) is made once.

Values keep their numbers, new ones come after them: whatever is bound to the Graph is bound to this
one. Since a Graph is functional, any set of Ops gives the same results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from apportion.graph import BACKWARD, FORWARD, Graph, Op
from apportion.memory.rewritten_graph import NewValues, RewrittenGraph, unchanged

AGAIN = "again"  # how the names of copies end


def is_repeat(graph: Graph, index: int) -> bool:
    """Whether an Op of the backward repeats one of the forward."""
    op = graph.ops[index]
    if op.phase != BACKWARD or op.forward is None:
        return False
    return op.name == f"{graph.ops[op.forward].name}.{AGAIN}"


def recompute(graph: Graph, ops: Iterable[int]) -> RewrittenGraph:
    """The Graph in which the backward recomputes these forward Ops; raises ValueError for an Op
    that cannot be."""
    chosen = frozenset(ops)
    for op in sorted(chosen):
        _check(graph, op)
    builder = _CopyingBuilder(graph, chosen)
    for op in range(len(graph.ops)):
        builder.add(op)
    return builder.built()


def _check(graph: Graph, op: int) -> None:
    if not 0 <= op < len(graph.ops):
        raise ValueError(f"there is no operator {op} to recompute; there are {len(graph.ops)}")
    if graph.ops[op].phase != FORWARD:
        raise ValueError(
            f"operator {graph.ops[op].name!r} is of the {graph.ops[op].phase}; only those of the "
            "forward can be recomputed"
        )


class _CopyingBuilder:
    """The Ops and Values so far. `copied` has the Value that stands for one in the backward."""

    def __init__(self, graph: Graph, chosen: frozenset[int]) -> None:
        self.graph, self.chosen = graph, chosen
        self.ops: list[Op] = []
        self.origins: list[int] = []
        self.values = NewValues(graph.values)
        self.copied: dict[int, int] = {}
        self.done: set[int] = set()
        self.moved: dict[int, int] = {}

    def add(self, index: int) -> None:
        """The next Op of the Graph, after the copies that it needs."""
        op = self.graph.ops[index]
        if op.phase == BACKWARD:
            for needed in self._needed(op):
                self._copy(needed)
            op = self._reading_copies(op)
        self.moved[index] = len(self.ops)
        self.ops.append(op)
        self.origins.append(index)

    def _needed(self, reader: Op) -> list[int]:
        """The Ops to repeat before this one, in order."""
        found: set[int] = set()
        waiting = [reader]
        while waiting:
            for value in waiting.pop().inputs:
                made = self.graph.producer[value]
                if made is None or made[0] not in self.chosen:
                    continue
                if made[0] not in self.done and made[0] not in found:
                    found.add(made[0])
                    waiting.append(self.graph.ops[made[0]])
        return sorted(found)

    def _copy(self, index: int) -> None:
        op = self._reading_copies(self.graph.ops[index])
        outputs = tuple([self.values.add(value, AGAIN) for value in op.outputs])
        self.copied.update(zip(op.outputs, outputs, strict=True))
        self.done.add(index)
        self.ops.append(
            replace(op, name=f"{op.name}.{AGAIN}", outputs=outputs, phase=BACKWARD, forward=index)
        )
        self.origins.append(index)

    def _reading_copies(self, op: Op) -> Op:
        inputs = tuple([self.copied.get(value, value) for value in op.inputs])
        return op if inputs == op.inputs else replace(op, inputs=inputs)

    def built(self) -> RewrittenGraph:
        if not self.done:
            return unchanged(self.graph)
        ops = [
            op if op.forward is None else replace(op, forward=self.moved[op.forward])
            for op in self.ops
        ]
        graph = replace(self.graph, values=tuple(self.values.values), ops=tuple(ops))
        return RewrittenGraph(graph, tuple(self.origins), tuple(self.values.equal))
