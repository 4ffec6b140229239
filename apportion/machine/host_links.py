"""What lies between devices and their hosts: the rate of a copy, and whose memory takes it.

Part of the room machine. A Cluster comes in; out goes for a device the Link to its host, and the
Hosts. A link that several devices share is taken to be used by all of them at once, as they do
where they all run the same step: each has its share. Where a cluster says nothing:

    a process  copies within the machine's memory, which it reads and writes; all processes together
               have the memory that they have together
    others     PCIe 3.0 x16 at the 12 GB/s that copies of some megabytes reach of its 15.75, as one
               reads for cards of that age; the host's memory is not known, and not limited
"""

from __future__ import annotations

from apportion.machine.topology import Cluster, Host, Link

ASSUMED_BANDWIDTH, ASSUMED_LATENCY = 12e9, 10e-6


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
