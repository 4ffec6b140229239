"""imported: a graph from elsewhere as a PlacementProblem.

In: an ImportedGraph, and maybe a number of accelerators or a Cluster. Out: a PlacementProblem whose
units are the graph's colocation classes.

Without a Cluster the devices are acc0, acc1, ..., cpu0, cpu1, ... as the file has them. For the
objective `step` an output that is wanted elsewhere leaves its device once, over the one outgoing
link of the device, and occupies it for the file's transfer time: Placeto's rule. Graphs of DOPPLER
have its rule: links serve any number of outputs at once.

On a Cluster the devices are the cluster's: CPUs take the file's times for a CPU, all others those
for an accelerator, and outputs travel the cluster's routes by their bytes, for all objectives.

Memory is what the file says that nodes occupy, all of it for the whole step; accelerators have a
limit, CPUs of a file have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from apportion.columns import Bools, Floats, Ints, offsets
from apportion.graph import FORWARD, Graph
from apportion.machine import Cluster
from apportion.place.imports.imported_graph import ACCELERATOR, CPU, MOST_DEVICES, ImportedGraph
from apportion.place.placement_problem import (
    NEVER,
    PlacementColumns,
    PlacementDevice,
    PlacementLinks,
    PlacementProblem,
    check_problem,
)

FINEST_TICK = 1e10  # in one unit of time: DOPPLER's whole numbers stay whole
MOST_DURATIONS = 1 << 28  # nodes x devices
MILLISECONDS = {"ms": 1e3}  # units of a second in which routes of a Cluster can be timed


def imported_problem(
    imported: ImportedGraph,
    accelerators: int | None = None,
    cluster: Cluster | None = None,
    memory_limit: float | None = None,
) -> PlacementProblem:
    """The problem of placing a graph. `accelerators` and `memory_limit` (bytes of each accelerator,
    or of each device of a Cluster; infinity for none) replace what the file says."""
    graph = imported.graph
    devices = _devices(imported, accelerators, cluster, memory_limit)
    if len(graph.ops) * len(devices) > MOST_DURATIONS:
        raise ValueError(f"{len(graph.ops)} nodes on {len(devices)} devices are too many")
    times = _times(graph, devices)
    transfer = np.array([op.imported.transfer if op.imported else 0.0 for op in graph.ops])
    tick = _tick(times, transfer)
    columns = _columns(graph, times, transfer, tick, by_bytes=cluster is not None)
    if cluster is not None:
        links = _routes(imported, cluster, tick, columns.nbytes)
    elif imported.free_links:
        links = free_links(len(devices))
    else:
        links = own_links(len(devices))
    names, kinds = tuple(op.name for op in graph.ops), tuple(op.kind for op in graph.ops)
    own = transfer if cluster is None else None
    problem = PlacementProblem(
        imported.name, names, kinds, columns, links, devices, tick, imported.time_unit, own
    )
    check_problem(problem)
    if imported.split and cluster is None:
        used = {int(name.removeprefix(ACCELERATOR)) for name in imported.split.values()}
        if max(used) < sum(device.kind == ACCELERATOR for device in devices):
            return with_expert(problem, imported.split)
    return problem


def with_expert(problem: PlacementProblem, split: Mapping[str, str]) -> PlacementProblem:
    """The problem with a split of its nodes as its expert placement. Nodes that the split leaves
    out, such as backward nodes, go with those of their class that it has."""
    number = {device.name: k for k, device in enumerate(problem.devices)}
    node = {name: k for k, name in enumerate(problem.node_names)}
    place = np.full(problem.units, -1, np.int64)
    for name, device in split.items():
        if name not in node:
            raise ValueError(f"the split has node {name}, which the graph has not")
        if device not in number:
            raise ValueError(f"the split has node {name} on {device}; there is no such device")
        unit = problem.columns.unit[node[name]]
        if place[unit] not in (-1, number[device]):
            raise ValueError(f"the split has node {name} apart from others of its class")
        place[unit] = number[device]
    if (left := np.flatnonzero(place < 0)).size:
        first = int(np.flatnonzero(problem.columns.unit == left[0])[0])
        raise ValueError(f"the split has no device for node {problem.node_names[first]}")
    return replace(problem, expert=place)


# Devices and times


def _devices(
    imported: ImportedGraph,
    accelerators: int | None,
    cluster: Cluster | None,
    memory_limit: float | None,
) -> tuple[PlacementDevice, ...]:
    if cluster is not None:
        return tuple(
            PlacementDevice(
                d.name, d.kind, _room(d.memory_bytes if memory_limit is None else memory_limit)
            )
            for d in cluster.devices
        )
    count = imported.accelerators if accelerators is None else accelerators
    if not 0 <= count <= MOST_DEVICES:
        raise ValueError(f"{count} is not a number of accelerators: 0 to {MOST_DEVICES}")
    if count + imported.cpus == 0:
        raise ValueError("there is no device to place the graph on")
    room = _room(imported.memory_bytes if memory_limit is None else memory_limit)
    return (
        *(PlacementDevice(f"{ACCELERATOR}{k}", ACCELERATOR, room) for k in range(count)),
        *(PlacementDevice(f"{CPU}{k}", CPU) for k in range(imported.cpus)),
    )


def _room(limit: float | None) -> int | None:
    return None if limit is None or limit == inf else int(limit)


def _times(graph: Graph, devices: Sequence[PlacementDevice]) -> Floats:
    """n x k: times in the unit of the file, infinity where a device cannot run a node."""
    of_cpu = np.array([device.kind == CPU for device in devices])
    times = np.empty((len(graph.ops), len(devices)))
    for node, op in enumerate(graph.ops):
        if op.imported is None:
            raise ValueError(f"node {op.name} has no costs of its own")
        own = dict(op.imported.times)
        times[node] = np.where(of_cpu, own.get(CPU, inf), own.get(ACCELERATOR, inf))
    return times


def _tick(times: Floats, transfer: Floats) -> float:
    """Ticks in a unit of time: many, yet no step takes as long as `NEVER`."""
    slowest = np.where(np.isfinite(times), times, 0.0).max(axis=1, initial=0.0)
    total, tick = float(slowest.sum() + transfer.sum()), FINEST_TICK
    while total * tick > NEVER / 2:
        tick /= 10
    return tick


# Columns


def _columns(
    graph: Graph, times: Floats, transfer: Floats, tick: float, by_bytes: bool
) -> PlacementColumns:
    unit = _units(graph)
    can = np.isfinite(times)
    allowed: Bools = np.ones((int(unit.max(initial=-1)) + 1, times.shape[1]), bool)
    np.logical_and.at(allowed, unit, can)
    values = [v for op in graph.ops for v in op.outputs]
    source = np.repeat(np.arange(len(graph.ops)), [len(op.outputs) for op in graph.ops])
    nbytes = np.array([graph.values[v].nbytes for v in values], np.int64)
    readers = [graph.consumers[v] for v in values]
    return PlacementColumns(
        unit=unit,
        duration=np.where(can, np.rint(np.where(can, times, 0.0) * tick), NEVER).astype(np.int64),
        backward=np.array([int(op.phase != FORWARD) for op in graph.ops], np.int64),
        resident=np.array([op.imported.memory_bytes for op in graph.ops if op.imported], np.int64),
        source=source.astype(np.int64),
        nbytes=nbytes,
        send=nbytes.astype(np.float64) if by_bytes else _shares(source, nbytes, transfer * tick),
        output_start=offsets(np.bincount(source, minlength=len(graph.ops))),
        reader_start=offsets(np.array([len(each) for each in readers], np.int64)),
        reader=np.array([r for each in readers for r in each], np.int64),
        allowed=allowed,
    )


def _units(graph: Graph) -> Ints:
    """Colocation classes, numbered as they begin; a node without one is a class of its own."""
    number: dict[object, int] = {}
    keys = [
        op.imported.colocation if op.imported and op.imported.colocation is not None else index
        for index, op in enumerate(graph.ops)
    ]
    return np.array([number.setdefault(key, len(number)) for key in keys], np.int64)


def _shares(source: Ints, nbytes: Ints, ticks: Floats) -> Floats:
    """What each output takes of its node's transfer time: by bytes, or equal parts of no bytes."""
    whole = np.bincount(source, nbytes, len(ticks))[source]
    count = np.bincount(source, minlength=len(ticks))[source]
    part = np.where(whole > 0, nbytes / np.where(whole > 0, whole, 1.0), 1.0 / np.maximum(count, 1))
    found: Floats = part * ticks[source]
    return found


# Rules


def own_links(devices: int) -> PlacementLinks:
    """One outgoing link for each device; an output is sent once, to however many devices."""
    routes = [[] if a == b else [a] for a in range(devices) for b in range(devices)]
    hops = [link for route in routes for link in route]
    nothing = np.zeros((devices, devices))
    return PlacementLinks(
        in_order=0, once=1, live=0, device_hold=0, link_hold=0, links=devices,
        hop_start=offsets(np.array([len(route) for route in routes], np.int64)),
        hop_link=np.array(hops, np.int64), hop_pace=np.ones(len(hops)), lag=nothing, drag=nothing,
        grace=0,
    )  # fmt: skip


def free_links(devices: int) -> PlacementLinks:
    """DOPPLER's rule: every output takes its own time, whatever else is sent."""
    return PlacementLinks(
        in_order=0, once=0, live=0, device_hold=0, link_hold=0, links=0,
        hop_start=np.zeros(devices * devices + 1, np.int64), hop_link=np.zeros(0, np.int64),
        hop_pace=np.zeros(0), lag=np.zeros((devices, devices)),
        drag=1.0 - np.eye(devices), grace=0,
    )  # fmt: skip


def _routes(imported: ImportedGraph, cluster: Cluster, tick: float, nbytes: Ints) -> PlacementLinks:
    """The routes of a Cluster, by bytes; an output is sent to each device that wants it."""
    if imported.time_unit not in MILLISECONDS:
        raise ValueError(
            f"the times of {imported.format} files are in no known unit, so that they cannot be "
            "set beside those of a cluster; use --devices"
        )
    if len(nbytes) and not nbytes.any():
        raise ValueError("the file does not say how many bytes are sent; use --devices")
    second = tick * MILLISECONDS[imported.time_unit]
    routes = [route for row in cluster.routes for route in row]
    hops = [link for route in routes for link in route]
    lag = [[sum(cluster.links[k].latency for k in r) for r in row] for row in cluster.routes]
    devices = len(cluster.devices)
    return PlacementLinks(
        in_order=0, once=0, live=0, device_hold=0, link_hold=0, links=len(cluster.links),
        hop_start=offsets(np.array([len(route) for route in routes], np.int64)),
        hop_link=np.array(hops, np.int64),
        hop_pace=np.array([second / cluster.links[k].bandwidth for k in hops], np.float64),
        lag=np.array(lag, np.float64) * second, drag=np.zeros((devices, devices)), grace=0,
    )  # fmt: skip
