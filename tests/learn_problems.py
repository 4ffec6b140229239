"""Small placement problems for tests of learned placement."""

from __future__ import annotations

import itertools

import numpy as np

from apportion.columns import offsets
from apportion.place import (
    Objective,
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)


def made_problem(
    units: int,
    devices: int = 2,
    *,
    seed: int = 0,
    memory: int | None = None,
    kinds: tuple[str, ...] = ("mm", "add", "relu"),
    backward: bool = False,
    pace: float = 50.0,
) -> PlacementProblem:
    """A random graph, one node a unit (or two: forward and, in reverse, backward). A node reads
    from up to two nodes not far before it. Every device has a link of its own for what it sends."""
    rng = np.random.default_rng(seed)
    edges = set()
    for node in range(1, units):
        for _ in range(int(rng.integers(1, 3))):
            edges.add((int(rng.integers(max(0, node - 6), node)), node))
    unit = list(range(units))
    if backward:
        unit += unit[::-1]
        edges |= {(2 * units - 1 - b, 2 * units - 1 - a) for a, b in edges}
        edges.add((units - 1, units))
    n = len(unit)
    work = rng.integers(50_000, 1_000_000, n)
    return problem_of(
        unit, work, sorted(edges), devices, memory=memory, pace=pace,
        nbytes=rng.integers(100, 5_000, n),
        kinds=tuple(kinds[int(i)] for i in rng.integers(0, len(kinds), n)),
        backward=[int(i >= units) for i in range(n)],
    )  # fmt: skip


def problem_of(unit, work, edges, devices, *, nbytes, kinds, backward, memory, pace):
    """A problem of these nodes, each with one output."""
    n, k = len(unit), devices
    readers = [sorted({b for a, b in edges if a == node}) for node in range(n)]
    columns = PlacementColumns(
        unit=np.array(unit, np.int64),
        duration=np.repeat(np.array(work, np.int64)[:, None], k, axis=1),
        backward=np.array(backward, np.int64),
        resident=np.array(nbytes, np.int64),
        source=np.arange(n, dtype=np.int64),
        nbytes=np.array(nbytes, np.int64),
        send=np.array(nbytes, np.float64),
        output_start=np.arange(n + 1, dtype=np.int64),
        reader_start=offsets(np.array([len(row) for row in readers], np.int64)),
        reader=np.array(list(itertools.chain(*readers)), np.int64),
        allowed=np.ones((max(unit) + 1, k), bool),
    )
    routes = [(a, b) for a in range(k) for b in range(k)]
    links = PlacementLinks(
        in_order=0,
        once=0,
        live=0,
        device_hold=0,
        link_hold=0,
        links=k,
        hop_start=offsets(np.array([int(a != b) for a, b in routes], np.int64)),
        hop_link=np.array([a for a, b in routes if a != b], np.int64),
        hop_pace=np.full(k * (k - 1), pace),
        lag=np.zeros((k, k)),
        drag=np.zeros((k, k)),
        grace=0,
    )
    names = tuple(f"n{i}" for i in range(n))
    gpus = tuple(PlacementDevice(f"gpu{i}", "gpu", memory) for i in range(k))
    return PlacementProblem("made", names, tuple(kinds), columns, links, gpus)


def exhaustive(objective: Objective) -> float:
    """The best score of all placements."""
    problem = objective.problem
    choices = itertools.product(range(len(problem.devices)), repeat=problem.units)
    return min(objective.score(np.array(place, np.int64)) for place in choices)
