"""Small placement problems for the tests of list schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from placement_scale import links

from apportion.columns import offsets
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementProblem,
)


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
