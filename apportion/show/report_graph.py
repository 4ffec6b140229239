"""The picture of a plan's graph: modules in order, how each is cut, what flows between them.

Part of the room show. A Plan comes in, plain data for the report goes out. Forward Ops stand for
all; those of one module are one node, and modules that differ only in their numbers (equal layers)
and are divided alike are drawn once.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.graph import FORWARD, PARAMETER, Graph
from apportion.plan import Plan, WorkDivision, WorkDivisions

MOST_NODES = 150  # of a picture; modules are taken together until there are no more
OUTSIDE = "outside of modules"


@dataclass
class GraphNode:
    """Modules that are drawn as one: how their heaviest Op is divided, on which devices."""

    name: str
    division: WorkDivision
    devices: tuple[int, ...]
    place: int = sys.maxsize  # in the order of the Graph
    modules: list[str] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)


def picture(plan: Plan, fetched: Sequence[int], length_ns: Sequence[int]) -> dict[str, Any]:
    """Columns of nodes and edges. `fetched` and `length_ns` are of every Op: bytes that arrive for
    it, and what it takes on its busiest device."""
    graph = plan.space.graph
    divisions = WorkDivisions(plan)
    for depth in (8, 4, 3, 2, 1):
        nodes = _nodes(plan, divisions, depth)
        if len(nodes) <= MOST_NODES:
            break
    nodes = nodes[:MOST_NODES]
    backward = _backward_of(graph)
    rows = [node.ops + [b for op in node.ops for b in backward.get(op, ())] for node in nodes]
    return {
        "name": [node.name for node in nodes],
        "times": [len(node.modules) for node in nodes],
        "how": [str(node.division) for node in nodes],
        "samples": [node.division.samples for node in nodes],
        "weights": [node.division.weights for node in nodes],
        "other": [node.division.other for node in nodes],
        "replicas": [node.division.replicas for node in nodes],
        "devices": [list(node.devices) for node in nodes],
        "ops": [len(node.ops) for node in nodes],
        "parameters": [_parameter_bytes(graph, node.ops) for node in nodes],
        "fetched": [sum(int(fetched[op]) for op in mine) for mine in rows],
        "length": [sum(int(length_ns[op]) for op in mine) for mine in rows],
        "edges": _edges(graph, nodes),
    }


def _nodes(plan: Plan, divisions: WorkDivisions, depth: int) -> list[GraphNode]:
    """Modules to this depth, in the order of their heaviest Ops."""
    graph = plan.space.graph
    modules: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.phase == FORWARD:
            path = ".".join(op.module.split(".")[:depth]) if op.module else OUTSIDE
            modules.setdefault(path, []).append(index)
    found: dict[object, GraphNode] = {}
    for path, ops in modules.items():
        heaviest = max(ops, key=lambda op: _weight(plan, op))
        division = divisions.of(heaviest)
        devices = tuple(sorted(set(plan.strategy.choices[heaviest].devices)))
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        node = found.setdefault((name, division, devices), GraphNode(name, division, devices))
        node.place = min(node.place, heaviest)
        node.modules.append(path)
        node.ops += ops
    for node in found.values():
        if len(node.modules) == 1:
            node.name = node.modules[0]
    return sorted(found.values(), key=lambda node: node.place)


def _weight(plan: Plan, op: int) -> tuple[float, int]:
    graph = plan.space.graph
    flops = plan.space.split(op, (1,) * len(plan.space.axes(op))).parts[0].flops
    return flops, sum(graph.values[v].nbytes for v in graph.ops[op].outputs)


def _backward_of(graph: Graph) -> dict[int, list[int]]:
    """For forward Ops those that differentiate them."""
    found: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.forward is not None:
            found.setdefault(op.forward, []).append(index)
    return found


def _parameter_bytes(graph: Graph, ops: Sequence[int]) -> int:
    read = {v for op in ops for v in graph.ops[op].inputs}
    return sum(graph.values[v].nbytes for v in read if graph.values[v].role == PARAMETER)


def _edges(graph: Graph, nodes: Sequence[GraphNode]) -> list[list[int]]:
    """(from, to, bytes) for what one node makes and another reads; bytes are those of one layer."""
    node_of = {op: number for number, node in enumerate(nodes) for op in node.ops}
    total: Counter[tuple[int, int]] = Counter()
    count: Counter[tuple[int, int]] = Counter()
    for value, made in zip(graph.values, graph.producer, strict=True):
        if made is None or made[0] not in node_of:
            continue
        source = node_of[made[0]]
        readers = {node_of[r] for r in graph.consumers[_index(graph, made)] if r in node_of}
        for reader in readers - {source}:
            total[source, reader] += value.nbytes
            count[source, reader] += 1
    times = [max(len(node.modules), 1) for node in nodes]
    return [
        [a, b, nbytes // max(min(times[a], times[b], count[a, b]), 1)]
        for (a, b), nbytes in total.items()
    ]


def _index(graph: Graph, made: tuple[int, int]) -> int:
    op, position = made
    return graph.ops[op].outputs[position]
