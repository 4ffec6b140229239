"""varied problem: variants of a placement problem, so that a policy learns from many machines.

In: a PlacementProblem. Out: the same with some of its devices, with other speeds of devices, links
and kinds of operators, with less memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from apportion.columns import offsets
from apportion.place import NEVER, PlacementColumns, PlacementLinks, PlacementProblem, policy_graph

DEVICE_COUNTS = (2, 3, 4, 4, 4, 5, 6, 8, 8)


def some_devices(problem: PlacementProblem, which: Sequence[int]) -> PlacementProblem:
    """The problem on some of its devices only."""
    keep, k = np.array(which, np.int64), len(problem.devices)
    c, links = problem.columns, problem.links
    routes = [
        slice(links.hop_start[a * k + b], links.hop_start[a * k + b + 1])
        for a in keep
        for b in keep
    ]
    hops = np.array([j for r in routes for j in range(r.start, r.stop)], np.int64)
    columns = c._replace(
        duration=np.ascontiguousarray(c.duration[:, keep]),
        allowed=np.ascontiguousarray(c.allowed[:, keep]),
        issue=np.ascontiguousarray(c.issue[:, keep]) if len(c.issue) else c.issue,
    )
    pairs = np.ix_(keep, keep)
    fewer = links._replace(
        hop_start=offsets(np.array([r.stop - r.start for r in routes], np.int64)),
        hop_link=links.hop_link[hops],
        hop_pace=links.hop_pace[hops],
        lag=np.ascontiguousarray(links.lag[pairs]),
        drag=np.ascontiguousarray(links.drag[pairs]),
        receive=links.receive[keep] if len(links.receive) else links.receive,
    )
    devices = tuple(problem.devices[d] for d in which)
    return replace(problem, columns=columns, links=fewer, devices=devices, expert=None)


def varied_problem(problem: PlacementProblem, seed: int) -> PlacementProblem:
    """A random variant: 2 to 8 of the devices, speeds and bytes changed, sometimes unequal devices
    or little memory."""
    random = np.random.default_rng(seed)
    k = min(int(random.choice(DEVICE_COUNTS)), len(problem.devices))
    which = sorted(random.choice(len(problem.devices), k, replace=False).tolist())
    found = some_devices(problem, which)
    slower = np.ones(k)
    if random.random() < 0.25:
        slower = np.exp(random.uniform(0, np.log(3), k))
    columns = _with_speeds(found, slower, 0.3 * random.random(), random)
    links = found.links
    if random.random() < 0.7:
        links = _with_pace(links, float(np.exp(random.uniform(np.log(0.25), np.log(4)))))
    found = replace(found, columns=columns, links=links)
    return _with_memory(found, random)


def _with_speeds(
    problem: PlacementProblem, slower: np.ndarray, spread: float, random: np.random.Generator
) -> PlacementColumns:
    """Durations by device and by kind of operator."""
    c = problem.columns
    kinds, which = np.unique(np.array(problem.node_kinds), return_inverse=True)
    factor = np.exp(spread * random.standard_normal(len(kinds)))[which.ravel()]
    changed = np.rint(c.duration * factor[:, None] * slower[None, :]).astype(np.int64)
    return c._replace(duration=np.where(c.duration < NEVER, changed, c.duration))


def _with_pace(links: PlacementLinks, factor: float) -> PlacementLinks:
    """Slower or faster links."""
    return links._replace(
        hop_pace=links.hop_pace * factor, lag=links.lag * factor, drag=links.drag * factor
    )


def _with_memory(problem: PlacementProblem, random: np.random.Generator) -> PlacementProblem:
    """In one of four cases memory that a single device would not have; else none is a limit."""
    limit: int | None = None
    if random.random() < 0.25:
        graph = policy_graph(problem)
        k = len(problem.devices)
        share = float(graph.memory.sum()) * random.uniform(1.3, 2.5) / k
        limit = int(max(share, 1.5 * float(graph.memory.max(initial=0.0))))
    devices = tuple(replace(device, memory_bytes=limit) for device in problem.devices)
    return replace(problem, devices=devices)
