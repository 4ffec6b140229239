"""Cluster: devices, links, and the links that a message between two devices occupies.

    cluster("p2.8xlarge")   a preset (`known()` lists them; the files are in presets/)
    cluster("8xh100")       one node of eight;  cluster("2x8xa100"): two nodes of eight
    cluster("local:4")      this machine, its cores shared by four processes
    cluster("p2.8xlarge:4") the first four devices of a preset
    cluster("mine.toml")    a file of one's own

cluster_file.py tells what a file says.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from apportion.machine.cluster_file import (
    MAX_DEVICES,
    DeviceTable,
    File,
    Flops,
    Switch,
    Wire,
    checked,
    kinds,
    preset,
    preset_names,
    read,
    sentence,
)

SCHEMA_VERSION = 2
# A core of an unknown CPU and gloo on it, until `calibrate` has measured them. Transport:
# one-way messages between 2 ranks, and between more ranks than cores, on a 2-core EPYC.
CORE_FLOPS = ((2, 30e9), (4, 30e9), (8, 15e9))
CORE_BANDWIDTH = 8e9
CORE_LAUNCH = 5e-6
GLOO_LATENCY, GLOO_BANDWIDTH = 62e-6, 3.9e9
GLOO_CROWDED_LATENCY, GLOO_CROWDED_BANDWIDTH = 0.8e-3, 0.8e9

Route = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """`flops` holds (bytes per element, operations per second) pairs, rising.

    An asynchronous device runs behind a host that issues its kernels ahead; `launch_seconds` is
    then the host's time to issue one, else what one kernel costs on the device.
    """

    name: str
    kind: str
    memory_bytes: int
    flops: tuple[tuple[int, float], ...]
    memory_bandwidth: float
    launch_seconds: float
    provenance: str
    asynchronous: bool = False
    rates: tuple[tuple[str, float], ...] = ()
    """Operations per second by type of number, as far as they are known; `flops` are those that
    costs are taken from, and leave out that types of one size may differ."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one message at a time can occupy: a port, a bus, a network card."""

    name: str
    bandwidth: float
    latency: float
    provenance: str


@dataclass(frozen=True, slots=True)
class Host:
    """The memory that some devices share and that is not theirs."""

    name: str
    memory_bytes: int
    devices: tuple[int, ...]
    provenance: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """`routes[a][b]` are the links that a message from device a to b occupies; () for a == b.

    `host_routes[a]` are those between a and its host's memory; () where nothing is known.
    """

    name: str
    description: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    routes: tuple[tuple[Route, ...], ...]
    host_routes: tuple[Route, ...]
    communication_on_device: bool
    hosts: tuple[Host, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {len(self.devices)} devices, {len(self.links)} links"


def cluster(spec: str) -> Cluster:
    """The Cluster that `spec` names (see the head of this file); ValueError if there is none."""
    if spec.endswith(".toml"):
        return _build(read(Path(spec)), f"cluster file {spec}")
    if spec.startswith("local:"):
        return _local(_whole(spec.removeprefix("local:"), "processes", spec))
    counted = re.fullmatch(r"(?:([^x]*)x)?([^x]*)x(.+)", spec)
    if counted and counted[3] in kinds():
        nodes = 1 if counted[1] is None else _whole(counted[1], "nodes", spec)
        return _counted(spec, counted[3], nodes, _whole(counted[2], "devices", spec))
    name, colon, count = spec.partition(":")
    if name in preset_names():
        whole = _build(preset(name), f"preset {name}")
        return first(whole, _whole(count, "devices", spec), spec) if colon else whole
    raise ValueError(
        f"unknown cluster {spec!r}; known: {', '.join(preset_names())}, local:N, counts such as "
        "8xh100 or 2x8xa100, and paths that end in .toml"
    )


def known() -> list[tuple[str, str]]:
    """(name, one line about it) of everything `cluster` understands but files."""
    presets = [(name, str(preset(name)["description"])) for name in preset_names()]
    return [
        *presets,
        ("PRESET:N", "the first N devices of a preset"),
        ("NxKIND, MxNxKIND", f"M nodes of N devices; kinds: {', '.join(kinds())}"),
        ("local:N", "this machine, its cores shared by N processes"),
    ]


def first(whole: Cluster, count: int, name: str) -> Cluster:
    """The first `count` devices of a Cluster and the links that they use, under another name."""
    if count > len(whole.devices):
        raise ValueError(f"cluster {name!r}: {whole.name!r} has {len(whole.devices)} devices")
    routes = [row[:count] for row in (*whole.routes[:count], whole.host_routes)]
    used = sorted({link for row in routes for route in row for link in route})
    number = {link: k for k, link in enumerate(used)}
    kept = tuple(tuple(tuple(number[k] for k in route) for route in row) for row in routes)
    hosts = (
        replace(host, devices=tuple(device for device in host.devices if device < count))
        for host in whole.hosts
    )
    return replace(
        whole,
        name=name,
        description=f"{count} of: {whole.description}",
        devices=whole.devices[:count],
        links=tuple(whole.links[link] for link in used),
        routes=kept[:-1],
        host_routes=kept[-1],
        hosts=tuple(host for host in hosts if host.devices),
    )


def verify(cluster: Cluster) -> None:
    """Raises ValueError, naming the device or link, unless the Cluster is well formed."""
    count = len(cluster.devices)
    if not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"cluster {cluster.name!r} has {count} devices, not 1 to {MAX_DEVICES}")
    for device in cluster.devices:
        _verify_device(device)
    for link in cluster.links:
        if not (_positive(link.bandwidth) and _positive(link.latency, or_zero=True)):
            raise ValueError(f"link {link.name!r} has a bandwidth or latency out of range")
    for part in (cluster.devices, cluster.links):
        names = [item.name for item in part]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"cluster {cluster.name!r} has two parts named {twice!r}")
    _verify_routes(cluster)
    for host in cluster.hosts:
        if host.memory_bytes < 1 or not all(0 <= device < count for device in host.devices):
            raise ValueError(f"host {host.name!r} has no memory, or a device that is not there")


def to_json(cluster: Cluster) -> dict[str, Any]:
    """The Cluster as plain JSON data."""
    return {"version": SCHEMA_VERSION, **asdict(cluster)}


def from_json(data: dict[str, Any]) -> Cluster:
    """The Cluster written by `to_json`; ValueError on anything else."""
    if not isinstance(data, dict) or data.get("version") != SCHEMA_VERSION:
        raise ValueError(f"the cluster is not of version {SCHEMA_VERSION}")
    fields = {key: item for key, item in data.items() if key != "version"}
    try:
        # By way of text, because only there does pydantic take a list for a tuple and still
        # refuse a text for a number.
        loaded = _CLUSTER.validate_json(json.dumps(fields), strict=True, extra="forbid")
    except ValidationError as error:
        raise ValueError(sentence("the cluster", error)) from None
    except TypeError as error:
        raise ValueError(f"the cluster is not plain JSON data: {error}") from None
    verify(loaded)
    return loaded


_CLUSTER = TypeAdapter(Cluster)


def _verify_device(device: Device) -> None:
    sizes = [size for size, _ in device.flops]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"device {device.name!r} needs rates for rising element sizes")
    rates = [rate for _, rate in (*device.flops, *device.rates)]
    numbers = [device.memory_bytes, device.memory_bandwidth, *rates]
    if not (all(map(_positive, numbers)) and _positive(device.launch_seconds, or_zero=True)):
        raise ValueError(f"device {device.name!r} has a number that is not positive and finite")


def _verify_routes(cluster: Cluster) -> None:
    count, links = len(cluster.devices), range(len(cluster.links))
    rows = (*cluster.routes, cluster.host_routes)
    if len(rows) != count + 1 or any(len(row) != count for row in rows):
        raise ValueError(f"cluster {cluster.name!r} does not have a route for every pair")
    for a, row in enumerate(cluster.routes):
        for b, route in enumerate(row):
            if bool(route) == (a == b):
                raise ValueError(f"cluster {cluster.name!r} has a wrong route from {a} to {b}")
    if not all(link in links for row in rows for route in row for link in route):
        raise ValueError(f"cluster {cluster.name!r} has a route over a link that is not there")
    if any(len(set(route)) < len(route) for row in rows for route in row):
        raise ValueError(f"cluster {cluster.name!r} has a route that uses a link twice")


def _positive(number: float, or_zero: bool = False) -> bool:
    return math.isfinite(number) and (number > 0 or (or_zero and number == 0))


# Specifications


def _whole(text: str, what: str, spec: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= MAX_DEVICES:
        raise ValueError(f"cluster {spec!r}: the number of {what} must be 1 to {MAX_DEVICES}")
    return int(text)


def _counted(spec: str, kind: str, nodes: int, count: int) -> Cluster:
    """The preset `kind` with so many nodes and so many devices on each."""
    tables = preset(kind)
    tables["name"] = spec
    tables["device"][0]["count"] = count
    for switch in tables["switch"]:
        if switch["name"] == "node":
            switch["count"] = nodes
    return _build(tables, f"cluster {spec!r}")


def _local(count: int) -> Cluster:
    shared = cores()
    share = shared / count
    crowded = count > shared
    latency = GLOO_CROWDED_LATENCY if crowded else GLOO_LATENCY
    wire = {
        "bandwidth": GLOO_CROWDED_BANDWIDTH if crowded else GLOO_BANDWIDTH,
        "latency": latency / 2,  # a message crosses two ports
    }
    rates = {f"float{8 * size}": rate * share for size, rate in CORE_FLOPS}
    device = {
        "name": "process",
        "kind": "cpu",
        "on": "machine",
        "count": count,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // count,
        "memory_bandwidth": CORE_BANDWIDTH * share,
        "launch_seconds": CORE_LAUNCH,
        "flops": rates,
        "port": wire,
        "provenance": f"assumed, not measured: {count} processes share {shared} cores and the "
        f"memory, {share:.3g} cores each of {CORE_FLOPS[1][1]:.3g} float32 operations and "
        f"{CORE_BANDWIDTH:.3g} bytes a second; gloo as measured on another machine",
    }
    tables = {
        "name": f"local:{count}",
        "description": f"this machine, its {shared} cores shared by {count} processes",
        "communication_on_device": True,
        "switch": [{"name": "machine"}],
        "device": [device],
    }
    return _build(tables, f"cluster 'local:{count}'")


def cores() -> int:
    """Cores of this machine that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _build(tables: dict[str, Any], where: str) -> Cluster:
    """The Cluster that the tables of a file describe; `where` heads every complaint."""
    file = checked(tables, where)
    try:
        return _grow(file)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


# Growing the tree: every switch and device `count` times, then a route for every pair


@dataclass(frozen=True, slots=True)
class _Hub:
    """One copy of a switch. Routes of links, each of at most one: () where it has none."""

    name: str
    up: Route
    down: Route
    bus: Route
    host: Route
    memory_bytes: int
    provenance: str


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One copy of a device, the hubs from the root to it, and its links: (out, in)."""

    device: Device
    path: tuple[_Hub, ...]
    port: tuple[Route, Route]
    nic: tuple[Route, Route]
    host: Route


def _grow(file: File) -> Cluster:
    links: list[Link] = []
    root = next(switch for switch in file.switch if switch.parent is None)
    leaves = list(_leaves(file, root, (), links))
    if not leaves:
        raise ValueError("there are no devices")
    middles: dict[tuple[int, int], tuple[Route, bool, bool]] = {}
    grown = Cluster(
        name=file.name,
        description=file.description,
        devices=tuple(leaf.device for leaf in leaves),
        links=tuple(links),
        routes=tuple(tuple(_route(a, b, middles) for b in leaves) for a in leaves),
        host_routes=tuple(_host_route(leaf) for leaf in leaves),
        communication_on_device=file.communication_on_device,
        hosts=tuple(_hosts(leaves)),
    )
    verify(grown)
    return grown


def _leaves(
    file: File, switch: Switch, above: tuple[_Hub, ...], links: list[Link]
) -> Iterator[_Leaf]:
    """All devices below `switch`, in the order of the file; their links are added to `links`."""
    for hub in _hubs(switch, above, links):
        path = (*above, hub)
        for table in file.device:
            if table.on == switch.name:
                yield from _copies_of(table, path, links)
        for child in file.switch:
            if child.parent == switch.name:
                yield from _leaves(file, child, path, links)


def _hubs(switch: Switch, above: tuple[_Hub, ...], links: list[Link]) -> Iterator[_Hub]:
    for name in _numbered(switch.name, switch.count, above):
        source = switch.provenance
        yield _Hub(
            name,
            up=_link(f"{name}.out", switch.uplink, source, links),
            down=_link(f"{name}.in", switch.uplink, source, links),
            bus=_link(f"{name}.bus", switch.bus, source, links),
            host=_link(f"{name}.host", switch.host, source, links),
            memory_bytes=switch.host.memory_bytes if switch.host else 0,
            provenance=source,
        )


def _copies_of(table: DeviceTable, path: tuple[_Hub, ...], links: list[Link]) -> Iterator[_Leaf]:
    rates = _rates(table.flops)
    source = table.provenance
    nic: tuple[Route, Route] = ((), ())
    for position, name in enumerate(_numbered(table.name, table.count, path)):
        device = Device(
            name=name,
            kind=table.kind,
            memory_bytes=table.memory_bytes,
            flops=tuple((size, rates[kind]) for size, kind in _BY_SIZE if kind in rates),
            memory_bandwidth=table.memory_bandwidth,
            launch_seconds=table.launch_seconds,
            provenance=source,
            asynchronous=table.kind != "cpu" if table.asynchronous is None else table.asynchronous,
            rates=tuple(rates.items()),
        )
        out, into = (_link(f"{name}.{way}", table.port, source, links) for way in ("out", "in"))
        if table.nic is None:
            nic = (out, into)
        elif position % table.nic.devices == 0:  # the first of those that share one
            ways = (f"{name}.nic.{way}" for way in ("out", "in"))
            sending, receiving = (_link(way, table.nic, source, links) for way in ways)
            nic = (sending, receiving)
        hosted = any(hub.host for hub in path)
        host = _link(f"{name}.host", table.host if hosted else None, source, links)
        yield _Leaf(device, path, (out, into), nic, host)


_BY_SIZE = ((1, "int8"), (2, "float16"), (4, "float32"), (8, "float64"))


def _rates(flops: Flops) -> dict[str, float]:
    return {kind: rate for kind, rate in flops.model_dump().items() if rate is not None}


def _numbered(name: str, count: int, above: tuple[_Hub, ...]) -> list[str]:
    """Names of the copies; the root's own name is left out of what hangs on it."""
    prefix = f"{above[-1].name}/" if len(above) > 1 else ""
    return [f"{prefix}{name}{k if count > 1 else ''}" for k in range(count)]


def _link(name: str, wire: Wire | None, source: str, links: list[Link]) -> Route:
    if wire is None:
        return ()
    links.append(Link(name, wire.bandwidth, wire.latency, source))
    return (len(links) - 1,)


def _route(a: _Leaf, b: _Leaf, middles: dict[tuple[int, int], tuple[Route, bool, bool]]) -> Route:
    if a is b:
        return ()
    pair = (id(a.path[-1]), id(b.path[-1]))  # what lies between depends on the hubs alone
    if pair not in middles:
        middles[pair] = _middle(a.path, b.path)
    between, leaves_a, enters_b = middles[pair]
    out = (a.nic if leaves_a else a.port)[0]
    into = (b.nic if enters_b else b.port)[1]
    return out + between + into


def _middle(a: tuple[_Hub, ...], b: tuple[_Hub, ...]) -> tuple[Route, bool, bool]:
    """Links between the devices' own, and whether the message leaves a's hub and enters b's."""
    common = sum(x is y for x, y in zip(a, b, strict=False))
    rising, falling = a[common:][::-1], b[common:]
    route: Route = ()
    for hub in rising:
        route += hub.bus + hub.up
    route += a[common - 1].bus
    for hub in falling:
        route += hub.down + hub.bus
    return route, bool(rising), bool(falling)


def _host_hub(leaf: _Leaf) -> _Hub | None:
    return next((hub for hub in reversed(leaf.path) if hub.host), None)


def _host_route(leaf: _Leaf) -> Route:
    hub = _host_hub(leaf)
    return leaf.host + hub.host if hub else ()


def _hosts(leaves: list[_Leaf]) -> Iterator[Host]:
    found: dict[str, tuple[_Hub, list[int]]] = {}
    for index, leaf in enumerate(leaves):
        hub = _host_hub(leaf)
        if hub is not None:
            found.setdefault(hub.name, (hub, []))[1].append(index)
    for hub, devices in found.values():
        yield Host(hub.name, hub.memory_bytes, tuple(devices), hub.provenance)
