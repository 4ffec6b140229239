"""Problems for the tests of throughput and latency: drawn at random, or read from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from apportion.columns import offsets
from apportion.place.imports.imported import imported_problem
from apportion.place.imports.read_graph import read_graph
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)

TICK = 1e9


def build(
    name: str,
    nodes: list[dict[str, Any]],
    edges: list[tuple[int, int]],
    accelerators: int,
    hosts: int,
    limit: int | None,
    transfer: bool = True,
) -> PlacementProblem:
    """Nodes (cpu, acc, size, backward, cls, cost, runs on an accelerator) and edges by position,
    in an order in which they can run."""
    k = accelerators + hosts
    classes = {c: i for i, c in enumerate(dict.fromkeys(n["cls"] for n in nodes))}
    unit = np.array([classes[n["cls"]] for n in nodes], np.int64)
    acc = np.array([n["acc"] for n in nodes], float)
    cpu = np.array([n["cpu"] for n in nodes], float)
    duration = np.rint(np.stack([acc] * accelerators + [cpu] * hosts, 1) * TICK).astype(np.int64)
    allowed = np.ones((len(classes), k), np.bool_)
    for node, at in zip(nodes, unit, strict=True):
        if not node.get("runs", True):
            allowed[at, :accelerators] = False
    readers: list[list[int]] = [[] for _ in nodes]
    for source, target in sorted(set(edges)):
        readers[source].append(target)
    n = len(nodes)
    cost = np.array([node["cost"] for node in nodes], float)
    columns = PlacementColumns(
        unit=unit,
        duration=duration,
        backward=np.array([n["backward"] for n in nodes], np.int64),
        resident=np.array([n["size"] for n in nodes], np.int64),
        source=np.arange(n),
        nbytes=np.zeros(n, np.int64),
        send=np.rint(cost * TICK),
        output_start=np.arange(n + 1),
        reader_start=offsets(np.array([len(r) for r in readers], np.int64)),
        reader=np.array([t for r in readers for t in r], np.int64),
        allowed=allowed,
    )
    links = PlacementLinks(
        0, 0, 0, 0, 0, k, np.arange(k * k + 1), np.repeat(np.arange(k), k),
        np.ones(k * k), np.zeros((k, k)), np.zeros((k, k)), 0,
    )  # fmt: skip
    devices = [PlacementDevice(f"acc{i}", "acc", limit) for i in range(accelerators)]
    devices += [PlacementDevice(f"cpu{i}", "cpu") for i in range(hosts)]
    return PlacementProblem(
        name, tuple(str(i) for i in range(n)), ("",) * n, columns, links, tuple(devices), TICK,
        "ms", cost if transfer else None,
    )  # fmt: skip


def read(path: Path) -> PlacementProblem:
    """A published problem."""
    return imported_problem(read_graph(path))


def drawn(seed: int, most: int = 6, limited: bool | None = None) -> PlacementProblem:
    """A small problem: classes, backward nodes, memory limits, hosts and unlike devices."""
    rng = np.random.default_rng(seed)
    forward = int(rng.integers(2, most + 1))
    trains = rng.random() < 0.5
    nodes, edges = [], []
    for i in range(forward):
        nodes.append(_node(rng, 0, i))
        edges += [(j, i) for j in range(i) if rng.random() < 0.4]
    if rng.random() < 0.5:  # two nodes share a class
        a, b = rng.integers(0, forward, 2)
        nodes[a]["cls"] = nodes[b]["cls"]
    if trains:
        mirror = {}
        for i in reversed(range(forward)):
            if rng.random() < 0.8:
                mirror[i] = len(nodes)
                nodes.append(_node(rng, 1, nodes[i]["cls"]))
        edges += [(mirror[b], mirror[a]) for a, b in edges if a in mirror and b in mirror]
        edges += [(i, at) for i, at in mirror.items() if rng.random() < 0.5]
        if rng.random() < 0.3:  # a unit without a forward part
            reads = int(rng.integers(0, len(nodes)))
            nodes.append(_node(rng, 1, "lone"))
            edges.append((reads, len(nodes) - 1))
    total = sum(n["size"] for n in nodes)
    if limited is None:
        limited = rng.random() < 0.5
    limit = int(max(total * rng.uniform(0.4, 0.9), 1)) if limited else None
    hosts = int(rng.integers(0 if limit is None else 1, 2))
    return build(f"drawn {seed}", nodes, edges, int(rng.integers(1, 4)), hosts, limit)


def _node(rng: np.random.Generator, backward: int, cls: object) -> dict[str, Any]:
    acc = float(rng.integers(0, 8))
    return {
        "acc": acc, "cpu": acc * float(rng.integers(2, 6)), "size": int(rng.integers(0, 9)),
        "backward": backward, "cls": cls, "cost": float(rng.integers(0, 4)),
        "runs": True,
    }  # fmt: skip
