"""level_costs: what a level costs on a cluster.

In: a Cluster. Out: the orders of factors worth trying, and per level the seconds of a byte and of a
transfer.

Devices are numbered host by host, and level 0 decides the highest digit of the device: the first
levels cross the slowest links.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.machine import Cluster


def primes(number: int) -> list[int]:
    """The prime factors of a number, the largest first."""
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return sorted([*found, number] if number > 1 else found, reverse=True)


def orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Orders of factors worth trying, the one that follows the hosts first.

    Then the largest first, the smallest first, and all devices at once.
    """
    devices = len(cluster.devices)
    sizes = {len(host.devices) for host in cluster.hosts}
    size = sizes.pop() if len(sizes) == 1 else devices
    if size == 0 or devices % size:
        size = devices
    every = primes(devices)
    tried = [
        (*primes(devices // size), *primes(size)),
        tuple(every),
        tuple(reversed(every)),
        (devices,),
    ]
    return [order for order in dict.fromkeys(tried) if order]


def seconds_per_byte(cluster: Cluster, factors: Sequence[int]) -> tuple[float, ...]:
    """Per level how long a byte takes, of those that all devices exchange at once.

    Every device sends to the one that has its place in the next group; the most loaded link, or the
    port of a device, says how long that takes.
    """
    found = []
    for block, k in _blocks(len(cluster.devices), factors):
        load = np.zeros(len(cluster.links))
        for a in range(len(cluster.devices)):
            for link in cluster.routes[a][_counterpart(a, block, k)]:
                load[link] += 1
        slowest = max(
            (n / link.bandwidth for n, link in zip(load, cluster.links, strict=True)), default=0.0
        )
        found.append(slowest / len(cluster.devices))
    return tuple(found)


def seconds_per_transfer(cluster: Cluster, factors: Sequence[int]) -> tuple[float, ...]:
    """Per level how long a message takes that holds next to nothing, to each of the other
    groups."""
    found = []
    for block, k in _blocks(len(cluster.devices), factors):
        latency = max(
            sum(
                cluster.links[link].latency for link in cluster.routes[a][_counterpart(a, block, k)]
            )
            for a in range(len(cluster.devices))
        )
        found.append((k - 1) * latency)
    return tuple(found)


def _blocks(devices: int, factors: Sequence[int]) -> list[tuple[int, int]]:
    """Per level the devices of one of its groups, and how many groups there are."""
    found, block = [], devices
    for k in factors:
        block //= k
        found.append((block, k))
    return found


def _counterpart(device: int, block: int, k: int) -> int:
    place = device // block % k
    return device + ((place + 1) % k - place) * block
