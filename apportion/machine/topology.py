"""Cluster, Device, Link, Host: the machine as data, with its check and its JSON.

The nouns of machine/. cluster.py makes a Cluster from a specification; every later room reads it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from apportion.checked import (
    brief,
    read_number,
    read_seconds,
    read_text,
    read_whole,
)
from apportion.machine.cluster_file import MAX_DEVICES, error_sentence

SCHEMA_VERSION = 2
LEAST_RATE = 1e-3  # bytes or operations a second

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


def first_devices(whole: Cluster, count: int, name: str) -> Cluster:
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
        read_number(link.bandwidth, f"the bandwidth of link {brief(link.name)}", LEAST_RATE)
        read_seconds(link.latency, f"the latency of link {brief(link.name)}")
    for part in (cluster.devices, cluster.links):
        names = [item.name for item in part]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"cluster {cluster.name!r} has two parts named {twice!r}")
    _verify_routes(cluster)
    for host in cluster.hosts:
        read_whole(host.memory_bytes, f"the memory of host {brief(host.name)}")
        if host.memory_bytes < 1 or not all(0 <= device < count for device in host.devices):
            raise ValueError(f"host {host.name!r} has no memory, or a device that is not there")
        if not host.devices or not all(cluster.host_routes[device] for device in host.devices):
            raise ValueError(f"host {host.name!r} has no devices, or one without a way to it")
    served = [device for host in cluster.hosts for device in host.devices]
    if len(set(served)) < len(served):
        raise ValueError(f"cluster {cluster.name!r} has a device with two hosts")


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """The Cluster as plain JSON data."""
    return {"version": SCHEMA_VERSION, **asdict(cluster)}


def cluster_from_json(data: dict[str, Any]) -> Cluster:
    """The Cluster written by `cluster_to_json`; ValueError on anything else."""
    if not isinstance(data, dict) or data.get("version") != SCHEMA_VERSION:
        raise ValueError(f"the cluster is not of version {SCHEMA_VERSION}")
    fields = {key: item for key, item in data.items() if key != "version"}
    try:
        # By way of text, because only there does pydantic take a list for a tuple and still
        # refuse a text for a number.
        loaded = _CLUSTER.validate_json(json.dumps(fields), strict=True, extra="forbid")
    except ValidationError as error:
        raise ValueError(error_sentence("the cluster", error)) from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the cluster is not plain JSON data: {brief(str(error))}") from None
    _verify_texts(loaded)
    verify(loaded)
    return loaded


def _verify_texts(cluster: Cluster) -> None:
    """Raises ValueError unless all texts can be shown."""
    for what in (cluster.name, cluster.description):
        read_text(what, "a text of the cluster")
    parts: tuple[Device | Link | Host, ...] = (*cluster.devices, *cluster.links, *cluster.hosts)
    for part in parts:
        read_text(part.name, "a name in the cluster")
        read_text(part.provenance, f"where {brief(part.name)} comes from")
    for device in cluster.devices:
        read_text(device.kind, f"the kind of {brief(device.name)}")


_CLUSTER = TypeAdapter(Cluster)


def _verify_device(device: Device) -> None:
    sizes = [size for size, _ in device.flops]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"device {device.name!r} needs rates for rising element sizes")
    rates = [rate for _, rate in (*device.flops, *device.rates)]
    numbers = [device.memory_bytes, device.memory_bandwidth, *rates]
    if not (all(map(_positive, numbers)) and _positive(device.launch_seconds, or_zero=True)):
        raise ValueError(f"device {device.name!r} has a number that is not positive and finite")
    what = f"the numbers of device {brief(device.name)}"
    read_whole(device.memory_bytes, what)
    read_seconds(device.launch_seconds, what)
    for rate in (device.memory_bandwidth, *rates):
        read_number(rate, what, LEAST_RATE)


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
