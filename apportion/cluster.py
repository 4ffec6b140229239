"""Cluster: devices, links, and the links that a message between two devices occupies.

    cluster("p2.8xlarge")   a preset (`known()` lists them; the files are in presets/)
    cluster("8xh100")       one node of eight;  cluster("2x8xa100"): two nodes of eight
    cluster("local:4")      this machine, its cores shared by four processes
    cluster("mine.toml")    a file of one's own

A file describes a tree: devices hang on switches, switches on other switches.

    name = "two small boxes"
    description = "one line for people"            # optional
    communication_on_device = false                # optional; true where sending burns the device

    [[switch]]
    name = "network"                               # exactly one switch has no parent

    [[switch]]
    name = "box"
    parent = "network"
    count = 2                                      # optional: so many, with all that hangs on each
    uplink = {bandwidth = 7e9, latency = 2e-6}     # optional: to the parent, one link each way
    bus = {bandwidth = 16e9, latency = 0.0}        # optional: occupied by all messages through it
    host = {bandwidth = 10e9, latency = 1e-5}      # optional: devices to host memory, shared
    provenance = "where these numbers come from"

    [[device]]
    name = "gpu"
    kind = "mygpu"
    on = "box"
    count = 4                                      # optional: so many on each `box`
    memory_bytes = 12_000_000_000
    memory_bandwidth = 240e9
    launch_seconds = 1e-5                          # overhead of one kernel
    flops = {float64 = 1.4e12, float32 = 4.3e12, float16 = 4.3e12}
    port = {bandwidth = 16e9, latency = 2e-6}      # one link out and one in
    nic = {bandwidth = 25e9, latency = 5e-6}       # optional: instead of the port for
    provenance = "where these numbers come from"   # messages that leave `box`

Bytes, seconds, bytes per second and floating-point operations per second; nothing else. A message
takes the sum of the latencies of its links and the smallest of their bandwidths.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

SCHEMA_VERSION = 1
MAX_DEVICES = 1024  # routes are kept for every pair

PRESETS = Path(__file__).parent / "presets"

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
    """`flops` holds (bytes per element, operations per second) pairs, rising."""

    name: str
    kind: str
    memory_bytes: int
    flops: tuple[tuple[int, float], ...]
    memory_bandwidth: float
    launch_seconds: float
    provenance: str


@dataclass(frozen=True, slots=True)
class Link:
    """What one message at a time can occupy: a port, a bus, a network card."""

    name: str
    bandwidth: float
    latency: float
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

    def __str__(self) -> str:
        return f"{self.name}: {len(self.devices)} devices, {len(self.links)} links"


def cluster(spec: str) -> Cluster:
    """The Cluster that `spec` names (see the head of this file); ValueError if there is none."""
    if spec.endswith(".toml"):
        return _build(_read(Path(spec)), f"cluster file {spec}")
    if spec.startswith("local:"):
        return _local(_whole(spec.removeprefix("local:"), "processes", spec))
    counted = re.fullmatch(r"(?:([^x]*)x)?([^x]*)x(.+)", spec)
    if counted and counted[3] in _kinds():
        nodes = 1 if counted[1] is None else _whole(counted[1], "nodes", spec)
        return _counted(spec, counted[3], nodes, _whole(counted[2], "devices", spec))
    if spec in _preset_names():
        return _build(_read(PRESETS / f"{spec}.toml"), f"preset {spec}")
    raise ValueError(
        f"unknown cluster {spec!r}; known: {', '.join(_preset_names())}, local:N, counts such as "
        "8xh100 or 2x8xa100, and paths that end in .toml"
    )


def known() -> list[tuple[str, str]]:
    """(name, one line about it) of everything `cluster` understands but files."""
    presets = [(n, str(_read(PRESETS / f"{n}.toml")["description"])) for n in _preset_names()]
    return [
        *presets,
        ("NxKIND, MxNxKIND", f"M nodes of N devices; kinds: {', '.join(_kinds())}"),
        ("local:N", "this machine, its cores shared by N processes"),
    ]


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
        raise ValueError(_sentence("the cluster", error)) from None
    except TypeError as error:
        raise ValueError(f"the cluster is not plain JSON data: {error}") from None
    verify(loaded)
    return loaded


_CLUSTER = TypeAdapter(Cluster)


def _verify_device(device: Device) -> None:
    sizes = [size for size, _ in device.flops]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"device {device.name!r} needs rates for rising element sizes")
    numbers = [device.memory_bytes, device.memory_bandwidth, *(rate for _, rate in device.flops)]
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


def _preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _kinds() -> list[str]:
    """Presets that can be counted: those named after the kind of their one device."""
    return [n for n in _preset_names() if _read(PRESETS / f"{n}.toml")["device"][0]["kind"] == n]


def _whole(text: str, what: str, spec: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= MAX_DEVICES:
        raise ValueError(f"cluster {spec!r}: the number of {what} must be 1 to {MAX_DEVICES}")
    return int(text)


def _counted(spec: str, kind: str, nodes: int, count: int) -> Cluster:
    """The preset `kind` with so many nodes and so many devices on each."""
    tables = _read(PRESETS / f"{kind}.toml")
    tables["name"] = spec
    tables["device"][0]["count"] = count
    for switch in tables["switch"]:
        if switch["name"] == "node":
            switch["count"] = nodes
    return _build(tables, f"cluster {spec!r}")


def _local(count: int) -> Cluster:
    cores = _cores()
    share = cores / count
    crowded = count > cores
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
        "provenance": f"assumed, not measured: {count} processes share {cores} cores and the "
        f"memory, {share:.3g} cores each of {CORE_FLOPS[1][1]:.3g} float32 operations and "
        f"{CORE_BANDWIDTH:.3g} bytes a second; gloo as measured on another machine",
    }
    tables = {
        "name": f"local:{count}",
        "description": f"this machine, its {cores} cores shared by {count} processes",
        "communication_on_device": True,
        "switch": [{"name": "machine"}],
        "device": [device],
    }
    return _build(tables, f"cluster 'local:{count}'")


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Files


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_Name = Annotated[str, Field(min_length=1)]
_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class _Wire(_Table):
    bandwidth: _Positive
    latency: _NotNegative


class _Flops(_Table):
    float16: _Positive
    float32: _Positive
    float64: _Positive


class _Switch(_Table):
    name: _Name
    parent: _Name | None = None
    count: _Count = 1
    uplink: _Wire | None = None
    bus: _Wire | None = None
    host: _Wire | None = None
    provenance: str = ""


class _DeviceTable(_Table):
    name: _Name
    kind: _Name
    on: _Name
    count: _Count = 1
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_bandwidth: _Positive
    launch_seconds: _NotNegative
    flops: _Flops
    port: _Wire
    nic: _Wire | None = None
    provenance: _Name


class _File(_Table):
    name: _Name
    description: str = ""
    communication_on_device: bool = False
    switch: Annotated[list[_Switch], Field(min_length=1)]
    device: Annotated[list[_DeviceTable], Field(min_length=1)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cluster file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"cluster file {path} is not TOML: {error}") from None


def _build(tables: dict[str, Any], where: str) -> Cluster:
    """The Cluster that the tables of a file describe; `where` heads every complaint."""
    try:
        file = _File.model_validate(tables)
    except ValidationError as error:
        raise ValueError(_sentence(where, error)) from None
    try:
        _check_tree(file)
        return _grow(file)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _sentence(where: str, error: ValidationError) -> str:
    """The first complaint of pydantic, as one sentence that names the field."""
    first = error.errors()[0]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    field = "".join(steps).lstrip(".")
    if first["type"] == "missing":
        return f"{where}: field {field} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: field {field} is not known"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}: field {field}: {message}" if field else f"{where}: {message}"


def _check_tree(file: _File) -> None:
    """Raises ValueError unless the switches form one tree on which all devices hang."""
    switches = {switch.name: switch for switch in file.switch}
    names = [switch.name for switch in file.switch] + [device.name for device in file.device]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two switches or devices are named {twice!r}")
    roots = [switch for switch in file.switch if switch.parent is None]
    if len(roots) != 1 or roots[0].count != 1 or roots[0].uplink is not None:
        raise ValueError("exactly one switch must have no parent; it has no count and no uplink")
    for device in file.device:
        if device.on not in switches:
            raise ValueError(f"device {device.name!r} is on {device.on!r}, which is no switch")
    for switch in file.switch:
        if (switch.uplink or switch.bus or switch.host) and not switch.provenance:
            raise ValueError(f"field switch.provenance of {switch.name!r} is missing")
        _check_ancestry(switch, switches)
    total = sum(d.count * _copies(switches[d.on], switches) for d in file.device)
    if total > MAX_DEVICES:
        raise ValueError(f"{total} devices are more than {MAX_DEVICES}")


def _check_ancestry(switch: _Switch, switches: dict[str, _Switch]) -> None:
    seen = {switch.name}
    while switch.parent is not None:
        if switch.parent not in switches:
            raise ValueError(f"switch {switch.name!r} has the unknown parent {switch.parent!r}")
        if switch.parent in seen:
            raise ValueError(f"switch {switch.name!r} is its own ancestor")
        seen.add(switch.parent)
        switch = switches[switch.parent]


def _copies(switch: _Switch, switches: dict[str, _Switch]) -> int:
    above = 1 if switch.parent is None else _copies(switches[switch.parent], switches)
    return switch.count * above


# Growing the tree: every switch and device `count` times, then a route for every pair


@dataclass(frozen=True, slots=True)
class _Hub:
    """One copy of a switch. Routes of links, each of at most one: () where it has none."""

    name: str
    up: Route
    down: Route
    bus: Route
    host: Route


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One copy of a device, the hubs from the root to it, and its links: (out, in)."""

    device: Device
    path: tuple[_Hub, ...]
    port: tuple[Route, Route]
    nic: tuple[Route, Route]


def _grow(file: _File) -> Cluster:
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
        host_routes=tuple(_host_route(leaf.path) for leaf in leaves),
        communication_on_device=file.communication_on_device,
    )
    verify(grown)
    return grown


def _leaves(
    file: _File, switch: _Switch, above: tuple[_Hub, ...], links: list[Link]
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


def _hubs(switch: _Switch, above: tuple[_Hub, ...], links: list[Link]) -> Iterator[_Hub]:
    for name in _numbered(switch.name, switch.count, above):
        source = switch.provenance
        yield _Hub(
            name,
            up=_link(f"{name}.out", switch.uplink, source, links),
            down=_link(f"{name}.in", switch.uplink, source, links),
            bus=_link(f"{name}.bus", switch.bus, source, links),
            host=_link(f"{name}.host", switch.host, source, links),
        )


def _copies_of(table: _DeviceTable, path: tuple[_Hub, ...], links: list[Link]) -> Iterator[_Leaf]:
    rates = table.flops
    flops = ((2, rates.float16), (4, rates.float32), (8, rates.float64))
    source = table.provenance
    for name in _numbered(table.name, table.count, path):
        device = Device(
            name, table.kind, table.memory_bytes, flops, table.memory_bandwidth,
            table.launch_seconds, source,
        )  # fmt: skip
        out, into = (_link(f"{name}.{way}", table.port, source, links) for way in ("out", "in"))
        nic = tuple(_link(f"{name}.nic.{w}", table.nic, source, links) for w in ("out", "in"))
        yield _Leaf(device, path, (out, into), (nic[0] or out, nic[1] or into))


def _numbered(name: str, count: int, above: tuple[_Hub, ...]) -> list[str]:
    """Names of the copies; the root's own name is left out of what hangs on it."""
    prefix = f"{above[-1].name}/" if len(above) > 1 else ""
    return [f"{prefix}{name}{k if count > 1 else ''}" for k in range(count)]


def _link(name: str, wire: _Wire | None, source: str, links: list[Link]) -> Route:
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


def _host_route(path: tuple[_Hub, ...]) -> Route:
    return next((hub.host for hub in reversed(path) if hub.host), ())
