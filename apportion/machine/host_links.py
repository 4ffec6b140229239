"""What lies between devices and their hosts: the rate of a copy, and whose memory takes it.

Part of the room machine. A Cluster comes in; out goes for a device the Link to its host, and the
Hosts. A link that several devices share is taken to be used by all of them at once, as they do
where they all run the same step: each has its share. Where a cluster says nothing:

    a process  copies within the machine's memory, which it reads and writes; all processes together
               have the memory that they have together
    others     PCIe 3.0 x16 at the 12 GB/s that copies of some megabytes reach of its 15.75, as one
               reads for cards of that age; the host's memory is not known, and not limited

`host_rates` puts these in lines, as a table of measurements has them: what is measured stands for
what is said. A host that computes is bound by its memory: ASSUMED_WORK bytes a second where nothing
else is known, which its devices share.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.machine.cost_model import CostModel
from apportion.machine.cost_table import (
    BESIDE,
    HOST_BACK_LINE,
    HOST_OUT_LINE,
    HOST_WORK_LINE,
    CostLine,
)
from apportion.machine.topology import Cluster, Host, Link

ASSUMED_BANDWIDTH, ASSUMED_LATENCY = 12e9, 10e-6
ASSUMED_WORK = 60e9


def host_link(cluster: Cluster, device: int) -> Link:
    """What a copy between a device and its host occupies, in either direction."""
    route, own = cluster.host_routes[device], cluster.devices[device]
    if route:
        links = [cluster.links[k] for k in route]
        users = [sum(k in other for other in cluster.host_routes) for k in route]
        return Link(
            f"{own.name} and its host",
            min(link.bandwidth / many for link, many in zip(links, users, strict=True)),
            sum(link.latency for link in links),
            "; ".join(dict.fromkeys(link.provenance for link in links)),
        )
    if own.kind == "cpu":
        source = "assumed: a copy within the memory of the machine, which it reads and writes"
        return Link(own.name, own.memory_bandwidth / 2, own.launch_seconds, source)
    return Link(own.name, ASSUMED_BANDWIDTH, ASSUMED_LATENCY, "assumed: PCIe 3.0 x16")


def hosts_of(cluster: Cluster) -> tuple[Host, ...]:
    """The hosts whose memory is known."""
    if cluster.hosts:
        return cluster.hosts
    processes = tuple(k for k, device in enumerate(cluster.devices) if device.kind == "cpu")
    if not processes:
        return ()
    total = sum(cluster.devices[k].memory_bytes for k in processes)
    return (Host("this machine", total, processes, "all memory of its processes"),)


@dataclass(frozen=True)
class HostRates:
    """What a device and its host take, each alone and beside the others: copies out and back by
    their bytes, and what the host computes by the bytes that it reads and writes."""

    out: CostLine
    back: CostLine
    work: CostLine
    out_beside: CostLine
    back_beside: CostLine
    work_beside: CostLine


def host_rates(cluster: Cluster, cost: CostModel, device: int) -> HostRates:
    """The rates of a device and its host, as measured or else as the cluster says."""
    own, link = cluster.devices[device], host_link(cluster, device)
    table = cost.tables.get(own.kind)
    lines = {} if table is None else table.lines
    share = max(sum(d.kind != "cpu" for d in cluster.devices), 1)
    for host in cluster.hosts:
        if device in host.devices:
            share = len(host.devices)
    work = own.memory_bandwidth if own.kind == "cpu" else ASSUMED_WORK / share
    said = {
        HOST_OUT_LINE: CostLine(link.latency, 0.0, 1 / link.bandwidth, 0.0, 0),
        HOST_BACK_LINE: CostLine(link.latency, 0.0, 1 / link.bandwidth, 0.0, 0),
        HOST_WORK_LINE: CostLine(0.0, 0.0, 1 / work, 0.0, 0),
    }
    names = (HOST_OUT_LINE, HOST_BACK_LINE, HOST_WORK_LINE)
    alone = {name: lines.get(name, said[name]) for name in names}
    beside = [lines.get(name + BESIDE, alone[name]) for name in names]
    return HostRates(*(alone[name] for name in names), *beside)
