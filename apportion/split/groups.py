"""groups: the Ops that belong to one forward Op.

In: a Graph. Out: for an Op its Group: the forward Op, what prepares the parameters that it reads,
the backward Ops that differentiate these, the updates of the parameters, and whatever stands
between (what scales gradients, for example). Members of a Group are placed and explained together.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion.graph import BACKWARD, FORWARD, PARAMETER, UPDATE, Graph


class Groups:
    """The Groups of a Graph. `from_parameters` has its parameters, and the Values that are made of
    these and nothing else."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.from_parameters = _from_parameters(graph)

    def of(self, op: int) -> tuple[int, ...]:
        """The Group of an Op, its forward Op first; only the Op itself if it has none."""
        graph = self.graph
        first = self._forward_op(op)
        if first is None:
            return (op,)
        preparing = self._preparing(first)
        forward = {first, *preparing}
        parameters = {v for k in forward for v in graph.ops[k].inputs} & self.from_parameters
        updates = [
            k for k, meant in enumerate(graph.ops)
            if meant.phase == UPDATE and meant.parameter in parameters
        ]  # fmt: skip
        backward = [k for k, meant in enumerate(graph.ops) if meant.forward in forward]
        between = self._between(updates, {*forward, *backward})
        members = (*sorted(preparing), *sorted(backward), *sorted(between), *updates)
        found = tuple(dict.fromkeys((first, *members)))
        return found if op in found else (op,)

    def _forward_op(self, op: int) -> int | None:
        """The forward Op whose Group an Op is in."""
        graph, meant = self.graph, self.graph.ops[op]
        if meant.phase == BACKWARD:
            return meant.forward
        if meant.phase == UPDATE:
            return None if meant.parameter is None else self._first_reader(meant.parameter)
        if meant.outputs and self.from_parameters.issuperset(meant.outputs):
            readers = [r for v in meant.outputs for r in graph.consumers[v]]
            return next((r for r in readers if graph.ops[r].phase == FORWARD), op)
        return op

    def _first_reader(self, parameter: int) -> int | None:
        """The first forward Op that reads a parameter, or what is made of it, along with others."""
        waiting = [parameter]
        while waiting:
            value = waiting.pop()
            for reader in self.graph.consumers[value]:
                op = self.graph.ops[reader]
                if op.phase != FORWARD:
                    continue
                if self.from_parameters.isdisjoint(op.outputs):
                    return reader
                waiting += op.outputs
        return None

    def _preparing(self, op: int) -> set[int]:
        """Ops that make what an Op reads from parameters alone."""
        found: set[int] = set()
        waiting = [op]
        while waiting:
            for value in self.graph.ops[waiting.pop()].inputs:
                made = self.graph.producer[value]
                if made is not None and value in self.from_parameters and made[0] not in found:
                    found.add(made[0])
                    waiting.append(made[0])
        return found

    def _between(self, updates: Sequence[int], known: set[int]) -> set[int]:
        """Ops of no forward Op between those known and the updates: what scales gradients."""
        graph = self.graph
        found: set[int] = set()
        waiting = list(updates)
        while waiting:
            for value in graph.ops[waiting.pop()].inputs:
                made = graph.producer[value]
                if made is None or made[0] in known | found:
                    continue
                op, shape = graph.ops[made[0]], graph.values[value].shape
                alike = [v for v in op.inputs if graph.values[v].shape == shape]
                if op.forward is None and op.phase != FORWARD and shape and alike:
                    found.add(made[0])
                    waiting.append(made[0])
        return found


def _from_parameters(graph: Graph) -> frozenset[int]:
    """Parameters, and Values that are made from one of these and nothing else."""
    found = {v for v, meant in enumerate(graph.values) if meant.role == PARAMETER}
    found -= {v for v, made in enumerate(graph.producer) if made is not None}
    for op in graph.ops:
        if op.phase == FORWARD and op.inputs and set(op.inputs) <= found:
            found.update(op.outputs)
    return frozenset(found)
