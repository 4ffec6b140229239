"""reorder: the Ops of a Graph in another order.

Part of the room memory. A Graph and an order come in, a RewrittenGraph goes out. What a device
holds follows from the order alone, and any order in which every Op comes after those that make
what it reads gives the same results.

`updates_early` is the order in which every parameter is updated as soon as its gradient is final,
so that gradients need not wait for each other; those of one layer together, since one call does
many of them. capture/ puts all updates last, as optimizers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apportion.graph import UPDATE, Graph
from apportion.memory.rewritten_graph import RewrittenGraph, unchanged
from apportion.split import layers_of


def reorder(graph: Graph, order: Sequence[int]) -> RewrittenGraph:
    """The Graph with its Ops in this order, () for as they are; raises ValueError if that is no
    order of them, or an Op would come before one that makes what it reads."""
    if not len(order) or list(order) == list(range(len(graph.ops))):
        return unchanged(graph)
    if sorted(order) != list(range(len(graph.ops))):
        raise ValueError(f"the order does not have each of the {len(graph.ops)} operators once")
    place = [0] * len(order)
    for number, index in enumerate(order):
        place[index] = number
    for reader, op in enumerate(graph.ops):
        for value in op.inputs:
            made = graph.producer[value]
            if made is not None and place[made[0]] >= place[reader]:
                raise ValueError(f"the order has operator {op.name!r} before one that it reads")
    ops = [graph.ops[index] for index in order]
    moved = [op if op.forward is None else replace(op, forward=place[op.forward]) for op in ops]
    made_of = replace(graph, ops=tuple(moved))
    return RewrittenGraph(made_of, tuple(order), tuple(range(len(graph.values))))


def updates_early(graph: Graph) -> tuple[int, ...]:
    """The order in which each update comes after the last Op that makes what it reads, and after
    the others of that Op's layer that follow it; () if that is the order they are in."""
    due: dict[int, list[int]] = {}
    ends = _ends_of_layers(graph)
    for index, op in enumerate(graph.ops):
        if op.phase == UPDATE and not any(_follows(graph, value) for value in op.outputs):
            makers = [graph.producer[value] for value in op.inputs]
            last = max((m[0] for m in makers if m is not None), default=-1)
            due.setdefault(ends[last] if last >= 0 else -1, []).append(index)
    early = {op for ops in due.values() for op in ops}
    order = list(due.get(-1, ()))
    for index in range(len(graph.ops)):
        if index not in early:
            order.append(index)
            order += due.get(index, ())
    return tuple(order) if order != list(range(len(graph.ops))) else ()


def _ends_of_layers(graph: Graph) -> list[int]:
    """For each Op the last one of its layer that follows it without another layer between; itself
    if it is of none."""
    layers, found = layers_of(graph), list(range(len(graph.ops)))
    for op in range(len(graph.ops) - 2, -1, -1):
        same = layers[op] >= 0 and layers[op] == layers[op + 1]
        if same and graph.ops[op].phase == graph.ops[op + 1].phase:
            found[op] = found[op + 1]
    return found


def _follows(graph: Graph, value: int) -> bool:
    """Whether an Op of the step reads a Value that an update makes."""
    return bool(graph.consumers[value])
