"""A Cluster for people: its devices, its tree, what lies between some pairs, its sources.

Part of the room show. A Cluster comes in, tables for a terminal and plain data go out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from rich.table import Table

from apportion.machine import (
    PATTERNS,
    Cluster,
    Device,
    Host,
    Link,
    all_reduce,
    cluster_to_json,
    collective,
)
from apportion.quantity import format_quantity
from apportion.show.plain_table import plain_table

SIZE = 100_000_000
"""Bytes of the whole array on every member, in the table of collectives."""


def listed(known: Iterable[tuple[str, str]]) -> Table:
    """Clusters that have a name."""
    table = plain_table("cluster", "what it is")
    for name, about in known:
        table.add_row(name, about)
    return table


def described(cluster: Cluster) -> list[Table | str]:
    """All there is to say about one Cluster."""
    parts: list[Table | str] = [f"{cluster}; {cluster.description}", "", devices(cluster)]
    if cluster.hosts:
        parts += ["", hosts(cluster)]
    parts += ["", *tree(cluster)]
    if len(cluster.devices) > 1:
        parts += ["", pairs(cluster), "", collectives(cluster)]
    if cluster.communication_on_device:
        parts += ["", "Sending and receiving take time of the devices themselves."]
    return [*parts, "", "Sources:", *(f"- {source}" for source in sources(cluster))]


def facts(cluster: Cluster) -> dict[str, Any]:
    """The same as plain JSON data; without the route of every pair."""
    whole = cluster_to_json(cluster)
    kept = {key: item for key, item in whole.items() if key not in ("routes", "host_routes")}
    between = [
        {"from": cluster.devices[a].name, "to": cluster.devices[b].name, "bandwidth": bandwidth,
         "latency": latency, "links": [cluster.links[k].name for k in cluster.routes[a][b]]}
        for a, b, bandwidth, latency in some_pairs(cluster)
    ]  # fmt: skip
    return {"cluster": cluster.name, **kept, "pairs": between}


def devices(cluster: Cluster) -> Table:
    """Equal devices in one row."""
    table = plain_table("devices", "kind", "memory", "memory rate", "launch", "operations")
    for device, count in Counter(replace(d, name="") for d in cluster.devices).items():
        rates = device.rates or tuple((f"{8 * size} bit", rate) for size, rate in device.flops)
        ahead = "issued ahead" if device.asynchronous else "each waited for"
        table.add_row(
            str(count),
            device.kind,
            format_quantity(device.memory_bytes, "B"),
            format_quantity(device.memory_bandwidth, "B/s"),
            f"{format_quantity(device.launch_seconds, 's')}, {ahead}",
            "\n".join(f"{name} {format_quantity(rate, _operations(name))}" for name, rate in rates),
        )
    return table


def hosts(cluster: Cluster) -> Table:
    """Equal hosts in one row."""
    table = plain_table("hosts", "memory", "devices on each", "to a device")
    rows = Counter(
        (host.memory_bytes, len(host.devices), _way(cluster, cluster.host_routes[host.devices[0]]))
        for host in cluster.hosts
    )
    for (memory, on_each, way), count in rows.items():
        table.add_row(str(count), format_quantity(memory, "B"), str(on_each), way)
    return table


def pairs(cluster: Cluster) -> Table:
    """One pair for each distance from a device."""
    table = plain_table("from", "to", "bandwidth", "latency", "over")
    for a, b, bandwidth, latency in some_pairs(cluster):
        over = ", ".join(cluster.links[k].name for k in cluster.routes[a][b])
        names = (cluster.devices[a].name, cluster.devices[b].name)
        table.add_row(
            *names, format_quantity(bandwidth, "B/s"), format_quantity(latency, "s"), over
        )
    return table


def some_pairs(cluster: Cluster) -> list[tuple[int, int, float, float]]:
    """(device, device, bandwidth, latency): the first device of each kind and the first others at
    each distance from it."""
    firsts = {device.kind: k for k, device in reversed(list(enumerate(cluster.devices)))}
    found: dict[tuple[Any, ...], tuple[int, int, float, float]] = {}
    for a in sorted(firsts.values()):
        for b, route in enumerate(cluster.routes[a]):
            if route:
                links = [cluster.links[k] for k in route]
                bandwidth, latency = min(k.bandwidth for k in links), sum(k.latency for k in links)
                kinds = (cluster.devices[a].kind, cluster.devices[b].kind)
                found.setdefault(
                    (kinds, bandwidth, latency, len(route)), (a, b, bandwidth, latency)
                )
    return list(found.values())


def collectives(cluster: Cluster) -> Table:
    """What collectives among all devices cost, and the algorithm that is cheapest."""
    table = plain_table(f"of {format_quantity(SIZE, 'B')} among all", "time", "algorithm")
    group = tuple(range(len(cluster.devices)))
    for pattern, name in enumerate(PATTERNS):
        cost = collective(pattern, group, (len(group) - 1) * SIZE, cluster)
        table.add_row(name, format_quantity(cost.seconds, "s"), cost.algorithm)
    cost = all_reduce(group, SIZE, cluster)
    table.add_row("all-reduce", format_quantity(cost.seconds, "s"), cost.algorithm)
    return table


def sources(cluster: Cluster) -> list[str]:
    """Where the numbers come from, each once."""
    parts: list[Device | Link | Host] = [*cluster.devices, *cluster.links, *cluster.hosts]
    return list(dict.fromkeys(part.provenance for part in parts))


# The tree, from the names of devices and links


@dataclass(slots=True)
class _Branch:
    name: str
    links: list[Link] = field(default_factory=list)
    below: dict[str, _Branch] = field(default_factory=dict)


def tree(cluster: Cluster) -> Iterator[str]:
    """Lines: equal neighbours are one line with their number."""
    root = _Branch(cluster.name)
    places = {"": root}
    for device in cluster.devices:
        here, path = root, ""
        for step in device.name.split("/"):
            path = f"{path}/{step}" if path else step
            here = places.setdefault(path, here.below.setdefault(step, _Branch(step)))
    for link in cluster.links:
        path = link.name.split(".")[0]
        places.get(path, root).links.append(link)
    yield from _lines(root, 1, "")


def _lines(branch: _Branch, count: int, indent: str) -> Iterator[str]:
    times = f" x {count}" if count > 1 else ""
    name = re.sub(r"\d+$", "", branch.name) if count > 1 else branch.name
    links = ", ".join(dict.fromkeys(_link_text(link) for link in branch.links))
    yield f"{indent}{name}{times}{': ' if links else ''}{links}"
    for _, equal in groupby(branch.below.values(), key=_shape):
        same = list(equal)
        yield from _lines(same[0], len(same), indent + "  ")


def _shape(branch: _Branch) -> tuple[Any, ...]:
    """What makes two branches equal: all but the numbers in their names."""
    name = re.sub(r"\d+$", "", branch.name)
    return name, [_link_text(link) for link in branch.links], [*map(_shape, branch.below.values())]


def _link_text(link: Link) -> str:
    what = link.name.partition(".")[2].removesuffix("out").removesuffix("in").removesuffix(".")
    bandwidth, latency = format_quantity(link.bandwidth, "B/s"), format_quantity(link.latency, "s")
    return f"{what or 'link'} {bandwidth}, {latency}"


def _operations(kind: str) -> str:
    return "OP/s" if kind.startswith("int") else "FLOP/s"


def _way(cluster: Cluster, route: tuple[int, ...]) -> str:
    links = [cluster.links[k] for k in route]
    bandwidth = min(link.bandwidth for link in links)
    latency = sum(link.latency for link in links)
    return f"{format_quantity(bandwidth, 'B/s')}, {format_quantity(latency, 's')}"
