"""Small placement problems for the tests of list schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import offsets
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)


def links(
    devices: int, *, pace: float = 1.0, once: int = 0, live: int = 0, hold: int = 0, lag: float = 0
) -> PlacementLinks:
    """Every device has one outgoing link, over which it sends to all others."""
    start = [0]
    link: list[int] = []
    for a in range(devices):
        for b in range(devices):
            if a != b:
                link.append(a)
            start.append(len(link))
    off = np.full((devices, devices), float(lag))
    np.fill_diagonal(off, 0.0)
    return PlacementLinks(
        0, once, live, hold, hold, devices, np.array(start), np.array(link, np.int64),
        np.full(len(link), pace), off, np.zeros((devices, devices)), 0,
    )  # fmt: skip


def problem(
    times: Sequence[float] | np.ndarray,
    edges: Sequence[tuple[int, int]],
    sends: Sequence[float],
    *,
    devices: int = 2,
    units: Sequence[int] | None = None,
    backward: Sequence[int] | None = None,
    resident: Sequence[int] | None = None,
    limits: Sequence[int | None] | None = None,
    tick: float = 1.0,
    **rules: float,
) -> PlacementProblem:
    """Nodes of so many ticks (per device, if they have rows) with one output each, of such sends;
    edges are pairs of nodes. Bytes are as many as sends."""
    duration = np.array(times, np.int64)
    if duration.ndim == 1:
        duration = np.repeat(duration[:, None], devices, axis=1)
    n = len(duration)
    readers = [sorted(b for a, b in edges if a == node) for node in range(n)]
    has = [node for node in range(n) if readers[node] or sends[node]]
    unit = np.arange(n) if units is None else np.array(units)
    kept = [limits[d] if limits else None for d in range(devices)]
    columns = PlacementColumns(
        unit.astype(np.int64), duration,
        np.zeros(n, np.int64) if backward is None else np.array(backward),
        np.zeros(n, np.int64) if resident is None else np.array(resident),
        np.array(has, np.int64), np.array([int(sends[i]) for i in has], np.int64),
        np.array([float(sends[i]) for i in has]),
        offsets(np.bincount(np.array(has, np.int64), minlength=n)),
        offsets(np.array([len(readers[i]) for i in has], np.int64)),
        np.array([b for i in has for b in readers[i]], np.int64),
        np.ones((int(unit.max()) + 1, devices), np.bool_),
    )  # fmt: skip
    return PlacementProblem(
        "case", tuple(f"n{i}" for i in range(n)), ("",) * n, columns,
        links(devices, **rules),  # type: ignore[arg-type]
        tuple(PlacementDevice(f"d{i}", "gpu", kept[i]) for i in range(devices)), tick, "s",
    )  # fmt: skip


def layered(
    nodes: int, devices: int, seed: int = 0, *, width: int = 50, train: bool = True,
    tight: float | None = 1.3, unequal: bool = False, **rules: float,
) -> PlacementProblem:  # fmt: skip
    """A random layered graph; with `train` half of the nodes are backward nodes that mirror the
    forward ones and share their units. `tight`: limits of so much more than the mean of memory."""
    rng = np.random.default_rng(seed)
    forward = nodes // 2 if train else nodes
    source, target = [], []
    for node in range(1, forward):
        low = max(0, node - 2 * width)
        for parent in {int(p) for p in rng.integers(low, node, int(rng.integers(1, 4)))}:
            source.append(parent)
            target.append(node)
    one, two = np.array(source, np.int64), np.array(target, np.int64)
    n = forward * (2 if train else 1)
    if train:
        last = n - 1
        mirror_one, mirror_two = last - two, last - one
        own = np.arange(forward)
        one, two = (
            np.concatenate([one, mirror_one, own]),
            np.concatenate([two, mirror_two, last - own]),
        )
    pairs = np.unique(np.stack([one, two], axis=1), axis=0)
    unit = np.concatenate([np.arange(forward), np.arange(forward)[::-1]])[:n]
    took = rng.integers(10, 1000, n)
    speed = 1 + np.arange(devices) % 2 if unequal else np.ones(devices)
    duration = np.rint(took[:, None] * speed[None, :]).astype(np.int64)
    nbytes = rng.integers(1, 400, n)
    resident = np.where(np.arange(n) < forward, rng.integers(1, 1000, n), 0)
    columns = PlacementColumns(
        unit.astype(np.int64), duration, (np.arange(n) >= forward).astype(np.int64), resident,
        np.arange(n), nbytes, nbytes.astype(np.float64), np.arange(n + 1),
        offsets(np.bincount(pairs[:, 0], minlength=n)), pairs[:, 1].copy(),
        np.ones((forward, devices), np.bool_),
    )  # fmt: skip
    total = resident.sum() + (nbytes[:forward].sum() if rules.get("live") else 0)
    limit = None if tight is None else int(total / devices * tight)
    return PlacementProblem(
        "layered", tuple(f"n{i}" for i in range(n)), ("",) * n, columns,
        links(devices, **rules),  # type: ignore[arg-type]
        tuple(PlacementDevice(f"d{i}", "gpu", limit) for i in range(devices)), 1.0, "s",
    )  # fmt: skip
