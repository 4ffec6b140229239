"""ImportedGraph: a graph from elsewhere, with its own costs. What the importers make.

In: nodes with their costs and the nodes that read from them, as an importer found them in a file.
Out: an ImportedGraph, its Graph in an order in which it can run; or a ValueError that names a node.

An Op stands for a node of the file and has its id as its name. An output that nobody reads is not a
Value.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from apportion.graph import ACTIVATION, BACKWARD, FORWARD, GRADIENT, Graph, ImportedCosts, Op, Value

ACCELERATOR, CPU = "acc", "cpu"
MOST_DEVICES = 1024
MOST_BYTES = 1 << 60
MOST_TIME = 1e15  # in the unit of the file


@dataclass(frozen=True, slots=True)
class ImportedNode:
    """A node of a file. `outputs` has the bytes of each output and the nodes that read it, by their
    positions among all nodes."""

    name: str
    kind: str
    costs: ImportedCosts
    outputs: Sequence[tuple[int, Sequence[int]]] = ()
    backward: bool = False
    module: str = ""
    forward: int | None = None  # the position of the forward node that this one differentiates


@dataclass(frozen=True)
class ImportedGraph:
    """A graph from a file, and what else the file says.

    accelerators, cpus  how many devices the file is for
    memory_bytes        of each accelerator; None: no limit
    split               a device's name for some nodes, where the file has a placement of its own
    free_links          outputs travel without waiting for each other
    """

    name: str
    format: str
    graph: Graph
    time_unit: str
    accelerators: int
    cpus: int = 0
    memory_bytes: int | None = None
    split: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    free_links: bool = False
    notes: tuple[str, ...] = ()


def build_graph(nodes: Sequence[ImportedNode]) -> Graph:
    """The nodes as a Graph; ValueError if two have one name or they depend on each other in a
    circle."""
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise ValueError(f"two nodes have the id {node.name}")
        seen.add(node.name)
    order = _runnable_order(nodes)
    place = {position: rank for rank, position in enumerate(order)}
    values: list[Value] = []
    inputs: list[list[int]] = [[] for _ in nodes]
    made: list[list[int]] = [[] for _ in nodes]
    for position in order:
        node = nodes[position]
        for port, (nbytes, readers) in enumerate(node.outputs):
            if not readers:
                continue
            for reader in dict.fromkeys(readers):
                inputs[reader].append(len(values))
            made[position].append(len(values))
            name = f"{node.name}:{port}" if len(node.outputs) > 1 else node.name
            role = GRADIENT if node.backward else ACTIVATION
            values.append(Value(name, role, None, None, nbytes))
    ops = []
    for position in order:
        node = nodes[position]
        ops.append(
            Op(
                node.name, node.kind, tuple(inputs[position]), tuple(made[position]), (),
                BACKWARD if node.backward else FORWARD, "", node.module,
                None if node.forward is None else place[node.forward], imported=node.costs,
            )
        )  # fmt: skip
    return Graph(tuple(values), tuple(ops))


def _runnable_order(nodes: Sequence[ImportedNode]) -> list[int]:
    """Positions in an order in which the nodes can run, as near to that of the file as can be."""
    later = [sorted({r for _, readers in node.outputs for r in readers}) for node in nodes]
    waits = [0] * len(nodes)
    for readers in later:
        for reader in readers:
            waits[reader] += 1
    ready = [position for position, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for reader in later[position]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise ValueError(
            f"the graph has a cycle through node {nodes[_on_cycle(later, waits)].name}"
        )
    return order


def _on_cycle(later: Sequence[Sequence[int]], waits: Sequence[int]) -> int:
    """A node on a cycle, among those that wait for ever: backwards from one of them, every node has
    one that it waits for, until one comes up again."""
    before = {
        reader: position
        for position, readers in enumerate(later)
        if waits[position]
        for reader in readers
    }
    seen: set[int] = set()
    here = next(position for position, count in enumerate(waits) if count)
    while here not in seen:
        seen.add(here)
        here = before[here]
    return here


# Numbers of files


def checked_time(number: object, what: str) -> float:
    """A time of a file, or a ValueError that says what it is of."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{what} is {number!r}, not a number")
    if not number >= 0:  # nor NaN
        raise ValueError(f"{what} is {number}; times are 0 or more")
    if number > MOST_TIME:
        raise ValueError(f"{what} is {_short(number)}; that cannot be a time")
    return float(number)


def checked_bytes(number: object, what: str) -> int:
    """Bytes of a file, rounded up, or a ValueError that says what they are of."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"{what} is {number!r}, not a number of bytes")
    if not number >= 0:  # nor NaN
        raise ValueError(f"{what} is {number}; sizes are 0 or more")
    if number > MOST_BYTES:
        raise ValueError(f"{what} is {_short(number)} bytes; no device holds that")
    return math.ceil(number)


def checked_count(number: object, what: str) -> int:
    """A number of devices, or a ValueError."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{what} is {number!r}, not a number of devices")
    if number > MOST_DEVICES:
        raise ValueError(
            f"{what} is {_short(number)}; at most {MOST_DEVICES} devices can be placed on"
        )
    return number


def _short(number: float) -> str:
    """A number of any size, even one that no float can hold."""
    try:
        return f"{number:g}"
    except OverflowError:
        return "a number of hundreds of digits"


def stage_names(stages: Iterable[tuple[str, int]]) -> Mapping[str, str]:
    """A split by stages: stage i runs on accelerator i."""
    return MappingProxyType({node: f"{ACCELERATOR}{stage}" for node, stage in stages})
