"""CostModel: how long a task takes alone, from the rates of the Cluster.

    COMPUTE   max(flops / (rate * efficiency), nbytes / (memory bandwidth * efficiency)) + launch
    ASSEMBLE  nbytes / (memory bandwidth * efficiency) + launch
    TRANSFER  sum of the latencies of its links + nbytes / the smallest of their bandwidths

A view has no flops and no bytes: it costs the launch. Waiting for lanes and links is `simulate`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.cluster import Cluster, Device
from apportion.tasks import TRANSFER, Floats, Ints, TaskGraph

LARGEST_ITEM = 16  # bytes of a complex128


@dataclass(frozen=True, slots=True)
class CostModel:
    """`efficiency` is the share of a device's rates that a kernel is taken to reach."""

    name: str
    provenance: str
    efficiency: float

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"the efficiency {self.efficiency} is not above 0 and at most 1")


PUBLISHED = CostModel(
    "published", "published peak rates; every kernel is assumed to reach half of them", 0.5
)
ASSUMED = CostModel("assumed", "assumed rates of a CPU core, taken as what a kernel reaches", 1.0)


def default_cost(cluster: Cluster) -> CostModel:
    """The CostModel for a Cluster nobody has measured."""
    return ASSUMED if all(device.kind == "cpu" for device in cluster.devices) else PUBLISHED


def nanoseconds(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Ints:
    """Duration of each task; at least 1, so that simulated time always moves on."""
    if tasks.devices > len(cluster.devices):
        raise ValueError(
            f"the tasks are for {tasks.devices} devices, cluster {cluster.name!r} has "
            f"{len(cluster.devices)}"
        )
    seconds = _work_seconds(tasks, cluster, cost)
    moving = tasks.kind == TRANSFER
    seconds[moving] = _message_seconds(
        tasks.device[moving], tasks.peer[moving], tasks.nbytes[moving], cluster
    )
    return np.maximum(np.rint(seconds * 1e9), 1).astype(np.int64)


def _work_seconds(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Floats:
    devices = cluster.devices
    rates = np.array([_rates(device) for device in devices])
    bandwidth = np.array([device.memory_bandwidth for device in devices])
    launch = np.array([device.launch_seconds for device in devices])
    at = tasks.device
    arithmetic = tasks.flops / rates[at, np.clip(tasks.itemsize, 0, LARGEST_ITEM)]
    memory = tasks.nbytes / bandwidth[at]
    seconds: Floats = np.maximum(arithmetic, memory) / cost.efficiency + launch[at]
    return seconds


def _rates(device: Device) -> list[float]:
    """Operations per second by bytes per element: the largest listed size that fits."""
    sizes = [
        max((known for known, _ in device.flops if known <= size), default=device.flops[0][0])
        for size in range(LARGEST_ITEM + 1)
    ]
    return [dict(device.flops)[size] for size in sizes]


def _message_seconds(sender: Ints, receiver: Ints, nbytes: Ints, cluster: Cluster) -> Floats:
    count = len(cluster.devices)
    pairs, which = np.unique(sender * count + receiver, return_inverse=True)
    routes = [cluster.routes[pair // count][pair % count] for pair in pairs.tolist()]
    links = cluster.links
    latency = np.array([sum(links[k].latency for k in route) for route in routes])
    bandwidth = np.array([min(links[k].bandwidth for k in route) for route in routes])
    seconds: Floats = latency[which] + nbytes / bandwidth[which]
    return seconds
