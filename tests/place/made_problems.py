"""Placement problems for tests: random graphs under random rules, small ones with a known best."""

from __future__ import annotations

from itertools import product

import numpy as np

from apportion.columns import Ints, offsets
from apportion.place.objective import PlacementObjective
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
)


def made_problem(
    rng: np.random.Generator,
    nodes: int = 12,
    devices: int = 3,
    units: int | None = None,
    links: PlacementLinks | None = None,
    limit: int | None = None,
    restricted: bool = False,
) -> PlacementProblem:
    """A random problem. Times are small whole numbers, so that many are equal."""
    count = rng.integers(0, 3, nodes)
    source = np.repeat(np.arange(nodes), count)
    readers = [
        np.flatnonzero(rng.random(nodes - made - 1) < min(1.0, 2.0 / nodes)) + made + 1
        for made in source
    ]
    units = nodes if units is None else units
    unit = np.concatenate([np.arange(units), rng.integers(0, units, nodes - units)])
    allowed = np.ones((units, devices), bool)
    if restricted:
        allowed = rng.random((units, devices)) < 0.7
        allowed[np.arange(units), rng.integers(0, devices, units)] = True
    links = made_links(rng, devices) if links is None else links
    duration = rng.choice([0, 0, 1, 2, 5, 13, 40], (nodes, 1)) * rng.integers(1, 3, (1, devices))
    issue = rng.integers(0, 4, (nodes, devices)) if links.in_order and len(links.receive) else None
    columns = PlacementColumns(
        unit=unit.astype(np.int64),
        duration=duration.astype(np.int64),
        backward=np.zeros(nodes, np.int64),
        resident=rng.integers(0, 10, nodes),
        source=source.astype(np.int64),
        nbytes=rng.integers(0, 20, len(source)),
        send=rng.integers(0, 20, len(source)).astype(float),
        output_start=offsets(count),
        reader_start=offsets(np.array([len(each) for each in readers], np.int64)),
        reader=np.concatenate([*readers, np.zeros(0)]).astype(np.int64),
        allowed=allowed,
    )
    if issue is not None:
        columns = columns._replace(issue=issue.astype(np.int64))
    names = tuple(f"node{k}" for k in range(nodes))
    of = tuple(PlacementDevice(f"d{k}", "kind", limit) for k in range(devices))
    return PlacementProblem("made", names, ("",) * nodes, columns, links, of, tick=1.0)


def made_links(rng: np.random.Generator, devices: int) -> PlacementLinks:
    """Random rules: routes of no, one or two hops over few links."""
    links = int(rng.integers(1, 4))
    hops = [
        rng.integers(0, links, 0 if a == b else rng.integers(0, 3))
        for a in range(devices)
        for b in range(devices)
    ]
    flat = np.concatenate([*hops, np.zeros(0)]).astype(np.int64)
    in_order = int(rng.integers(0, 2))
    made = PlacementLinks(
        in_order=in_order,
        once=int(rng.integers(0, 2)),
        live=int(rng.integers(0, 2)),
        device_hold=int(rng.integers(0, 3)),
        link_hold=int(rng.integers(0, 3)),
        links=links,
        hop_start=offsets(np.array([len(each) for each in hops], np.int64)),
        hop_link=flat,
        hop_pace=rng.choice([0.0, 0.25, 1.0], len(flat)),
        lag=rng.choice([0.0, 0.0, 3.0], (devices, devices)),
        drag=rng.choice([0.0, 0.3], (devices, devices)),
        grace=int(rng.integers(0, 3)),
    )
    if in_order and rng.random() < 0.5:
        return made._replace(receive=rng.choice([0.0, 0.5, 2.0], (devices, 3)))
    return made


def all_placements(problem: PlacementProblem) -> list[Ints]:
    """Every placement that keeps to `allowed`."""
    able = [np.flatnonzero(row).tolist() for row in problem.columns.allowed]
    return [np.array(each, np.int64) for each in product(*able)]


def best_score(objective: PlacementObjective) -> float:
    """The least score of all placements, by trying every one."""
    return min(objective.score(place) for place in all_placements(objective.problem))
