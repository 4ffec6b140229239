"""InsertedOps: Ops that are put between those of a Graph, and what others read instead.

Part of the room memory. host_state.py and offload.py insert copies to the host and back with it.
Ops are named by their numbers in the Graph before throughout.
"""

from __future__ import annotations

from dataclasses import replace

from apportion.graph import Body, Graph, Op, Ref
from apportion.memory.rewritten_graph import NewValues, RewrittenGraph


def host_op(kind: str, name: str, inputs: tuple[int, ...], output: int, phase: str, like: Op) -> Op:
    """An Op that copies to the host or back or waits for that, on behalf of another one."""
    refs = tuple([Ref(k) for k in range(len(inputs))])
    named = f"{name}.{kind.rpartition('.')[2]}"
    return Op(named, kind, inputs, (output,), refs, phase, like.line, like.module)


class InsertedOps:
    """What is inserted so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.before: dict[int, list[tuple[tuple[int, int], int, Op]]] = {}  # (turn, origin, Op)
        self.instead: dict[tuple[int, int], int] = {}  # by reader and Value, what it reads
        self.replaced: dict[int, Op | None] = {}  # Ops that are others now, or gone

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        return bool(self.before or self.replaced)

    def add(self, place: int, turn: tuple[int, int], origin: int, op: Op) -> None:
        """Puts an Op before the one at `place`, among those there after all of smaller `turn`;
        its `forward` is a number of the Graph before."""
        self.before.setdefault(place, []).append((turn, origin, op))

    def replace(self, index: int, op: Op | None) -> None:
        """Puts an Op in the place of another; None: nothing."""
        self.replaced[index] = op

    def read_instead(self, reader: int, value: int, copy: int) -> None:
        """Lets an Op of the Graph before read another Value."""
        self.instead[reader, value] = copy

    def built(
        self,
        values: NewValues,
        state: tuple[tuple[int, int], ...] | None = None,
        bodies: tuple[Body, ...] | None = None,
    ) -> RewrittenGraph:
        """The Graph with these Ops and Values; `state` and `bodies` where they are others."""
        graph = self.graph
        ops: list[Op] = []
        origins: list[int] = []
        moved: list[int | None] = []
        for index in range(len(graph.ops) + 1):
            for _, origin, op in sorted(self.before.get(index, ()), key=lambda row: row[0]):
                ops.append(op)
                origins.append(origin)
            here = self._now(index) if index < len(graph.ops) else None
            moved.append(None if here is None else len(ops))
            if here is not None:
                ops.append(here)
                origins.append(index)
        ops = [op if op.forward is None else replace(op, forward=moved[op.forward]) for op in ops]
        made = replace(
            graph, values=tuple(values.values), ops=tuple(ops),
            state=graph.state if state is None else state,
            bodies=graph.bodies if bodies is None else bodies,
        )  # fmt: skip
        return RewrittenGraph(made, tuple(origins), tuple(values.equal))

    def _now(self, index: int) -> Op | None:
        op = self.replaced.get(index, self.graph.ops[index])
        if op is None or not self.instead:
            return op
        inputs = tuple([self.instead.get((index, value), value) for value in op.inputs])
        return op if inputs == op.inputs else replace(op, inputs=inputs)
