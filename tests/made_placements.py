"""Small placement problems for tests of place/ and learn/."""

from __future__ import annotations

import numpy as np

from apportion.columns import offsets
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)


def placeto_rule(devices: int) -> PlacementLinks:
    """One outgoing link a device, an output sent once, with Placeto's constants."""
    k = devices
    elsewhere = [(a, b) for a in range(k) for b in range(k)]
    hops = np.array([a != b for a, b in elsewhere], np.int64)
    link = np.array([a for a, b in elsewhere if a != b], np.int64)
    return PlacementLinks(
        in_order=0, once=1, live=1, device_hold=5_700, link_hold=25_000, links=k,
        hop_start=offsets(hops), hop_link=link, hop_pace=np.full(len(link), 1 / 7.6),
        lag=np.zeros((k, k)), drag=np.zeros((k, k)), grace=1_000,
    )  # fmt: skip


def made_problem(
    nodes: int = 12,
    devices: int = 2,
    seed: int = 0,
    units: int | None = None,
    memory: int | None = None,
    edges: float = 2.0,
    scale: float = 2e6,
) -> PlacementProblem:
    """A random graph: node i reads from about `edges` earlier ones. With `units` less than `nodes`
    some nodes move together."""
    rng = np.random.default_rng(seed)
    reads: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(1, nodes):
        for before in rng.choice(node, min(node, 1 + rng.poisson(edges - 1)), replace=False):
            reads[before].append(node)
    sources = [node for node in range(nodes) if reads[node]]
    count = np.array([bool(r) for r in reads], np.int64)
    unit = np.arange(nodes) if units is None else rng.permutation(np.arange(nodes) % units)
    duration = rng.integers(100_000, int(scale), nodes)
    nbytes = rng.integers(1_000, int(3 * scale), len(sources))
    columns = PlacementColumns(
        unit=unit.astype(np.int64),
        duration=np.repeat(duration[:, None], devices, axis=1),
        backward=np.zeros(nodes, np.int64),
        resident=rng.integers(0, 1_000, nodes),
        source=np.array(sources, np.int64),
        nbytes=nbytes,
        send=nbytes.astype(np.float64),
        output_start=offsets(count),
        reader_start=offsets(np.array([len(reads[s]) for s in sources], np.int64)),
        reader=np.array([r for s in sources for r in sorted(reads[s])], np.int64),
        allowed=np.ones((nodes if units is None else units, devices), bool),
    )
    return PlacementProblem(
        name=f"made {nodes}x{devices} {seed}",
        node_names=tuple(f"n{i}" for i in range(nodes)),
        node_kinds=("",) * nodes,
        columns=columns,
        links=placeto_rule(devices),
        devices=tuple(PlacementDevice(f"d{i}", "k80", memory) for i in range(devices)),
    )
