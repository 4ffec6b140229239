"""From a cluster file to a Cluster: the tree of switches and devices, and the routes through it.

A step of cluster.py in machine/: a checked ClusterFile goes in, a Cluster comes out. Every switch
and device of the file is there `count` times; then every pair of devices gets a route, which goes
up to the nearest common switch and down again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from apportion.machine.cluster_file import (
    ClusterFile,
    DeviceTable,
    FlopsTable,
    LinkTable,
    SwitchTable,
)
from apportion.machine.topology import Cluster, Device, Host, Link, Route, verify


@dataclass(frozen=True, slots=True)
class _SwitchCopy:
    """One copy of a switch. Each of its routes is one link, or () where it has no such link."""

    name: str
    up: Route
    down: Route
    bus: Route
    host: Route
    memory_bytes: int
    provenance: str


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    """One copy of a device, the switches from the root to it, and its links: (out, in)."""

    device: Device
    path: tuple[_SwitchCopy, ...]
    port: tuple[Route, Route]
    nic: tuple[Route, Route]
    host: Route


def grow(file: ClusterFile) -> Cluster:
    """The Cluster that a file describes; raises ValueError if it has no devices."""
    links: list[Link] = []
    root = next(switch for switch in file.switch if switch.parent is None)
    copies = list(_devices_below(file, root, (), links))
    if not copies:
        raise ValueError("there are no devices")
    middles: dict[tuple[int, int], tuple[Route, bool, bool]] = {}
    grown = Cluster(
        name=file.name,
        description=file.description,
        devices=tuple(copy.device for copy in copies),
        links=tuple(links),
        routes=tuple(tuple(_route(a, b, middles) for b in copies) for a in copies),
        host_routes=tuple(_host_route(copy) for copy in copies),
        communication_on_device=file.communication_on_device,
        hosts=tuple(_hosts(copies)),
    )
    verify(grown)
    return grown


def _devices_below(
    file: ClusterFile, switch: SwitchTable, above: tuple[_SwitchCopy, ...], links: list[Link]
) -> Iterator[_DeviceCopy]:
    """All devices below `switch`, in the order of the file; their links are added to `links`."""
    for copy in _switch_copies(switch, above, links):
        path = (*above, copy)
        for table in file.device:
            if table.on == switch.name:
                yield from _device_copies(table, path, links)
        for child in file.switch:
            if child.parent == switch.name:
                yield from _devices_below(file, child, path, links)


def _switch_copies(
    switch: SwitchTable, above: tuple[_SwitchCopy, ...], links: list[Link]
) -> Iterator[_SwitchCopy]:
    for name in _numbered(switch.name, switch.count, above):
        source = switch.provenance
        yield _SwitchCopy(
            name,
            up=_link(f"{name}.out", switch.uplink, source, links),
            down=_link(f"{name}.in", switch.uplink, source, links),
            bus=_link(f"{name}.bus", switch.bus, source, links),
            host=_link(f"{name}.host", switch.host, source, links),
            memory_bytes=switch.host.memory_bytes if switch.host else 0,
            provenance=source,
        )


def _device_copies(
    table: DeviceTable, path: tuple[_SwitchCopy, ...], links: list[Link]
) -> Iterator[_DeviceCopy]:
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
        hosted = any(switch.host for switch in path)
        host = _link(f"{name}.host", table.host if hosted else None, source, links)
        yield _DeviceCopy(device, path, (out, into), nic, host)


_BY_SIZE = ((1, "int8"), (2, "float16"), (4, "float32"), (8, "float64"))


def _rates(flops: FlopsTable) -> dict[str, float]:
    return {kind: rate for kind, rate in flops.model_dump().items() if rate is not None}


def _numbered(name: str, count: int, above: tuple[_SwitchCopy, ...]) -> list[str]:
    """Names of the copies; the root's own name is left out of what hangs on it."""
    prefix = f"{above[-1].name}/" if len(above) > 1 else ""
    return [f"{prefix}{name}{k if count > 1 else ''}" for k in range(count)]


def _link(name: str, wire: LinkTable | None, source: str, links: list[Link]) -> Route:
    if wire is None:
        return ()
    links.append(Link(name, wire.bandwidth, wire.latency, source))
    return (len(links) - 1,)


def _route(
    a: _DeviceCopy, b: _DeviceCopy, middles: dict[tuple[int, int], tuple[Route, bool, bool]]
) -> Route:
    if a is b:
        return ()
    pair = (id(a.path[-1]), id(b.path[-1]))  # what lies between depends on the switches alone
    if pair not in middles:
        middles[pair] = _middle(a.path, b.path)
    between, leaves_a, enters_b = middles[pair]
    out = (a.nic if leaves_a else a.port)[0]
    into = (b.nic if enters_b else b.port)[1]
    return out + between + into


def _middle(a: tuple[_SwitchCopy, ...], b: tuple[_SwitchCopy, ...]) -> tuple[Route, bool, bool]:
    """Links between the devices' own, and whether the message leaves a's switch and enters b's."""
    common = sum(x is y for x, y in zip(a, b, strict=False))
    rising, falling = a[common:][::-1], b[common:]
    route: Route = ()
    for switch in rising:
        route += switch.bus + switch.up
    route += a[common - 1].bus
    for switch in falling:
        route += switch.down + switch.bus
    return route, bool(rising), bool(falling)


def _host_switch(copy: _DeviceCopy) -> _SwitchCopy | None:
    return next((switch for switch in reversed(copy.path) if switch.host), None)


def _host_route(copy: _DeviceCopy) -> Route:
    switch = _host_switch(copy)
    return copy.host + switch.host if switch else ()


def _hosts(copies: list[_DeviceCopy]) -> Iterator[Host]:
    found: dict[str, tuple[_SwitchCopy, list[int]]] = {}
    for index, copy in enumerate(copies):
        switch = _host_switch(copy)
        if switch is not None:
            found.setdefault(switch.name, (switch, []))[1].append(index)
    for switch, devices in found.values():
        yield Host(switch.name, switch.memory_bytes, tuple(devices), switch.provenance)
