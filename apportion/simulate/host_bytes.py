"""What a step keeps in the memory of hosts.

Part of the room simulate. A TaskGraph comes in; out go the most bytes that each device has on its
host, and by how much a host's memory is exceeded. Slots there are no part of a device's own curve.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints
from apportion.lower import TaskGraph
from apportion.machine import Cluster, hosts_of


def host_peaks(tasks: TaskGraph) -> tuple[int, ...]:
    """For every device the most bytes that lie on its host at a time, in the order of tasks."""
    found = []
    there = np.flatnonzero(tasks.slot_on_host & (tasks.slot_base < 0))
    for device in range(tasks.devices):
        mine = there[tasks.slot_device[there] == device]
        found.append(_most(tasks.slot_first[mine], tasks.slot_last[mine], tasks.slot_nbytes[mine]))
    return tuple(found)


def _most(first: Ints, last: Ints, nbytes: Ints) -> int:
    """The most bytes that are there at a time, of slots that are made by one task and freed after
    another."""
    moment = np.concatenate([2 * first, 2 * last + 1])
    change = np.concatenate([nbytes, -nbytes])
    order = np.argsort(moment, kind="stable")
    return int(np.cumsum(change[order]).max(initial=0))


def host_excess(tasks: TaskGraph, cluster: Cluster) -> dict[str, tuple[int, int]]:
    """The hosts that would have to hold more than they have: by name, what they would hold and what
    they have."""
    peaks = host_peaks(tasks)
    found = {}
    for host in hosts_of(cluster):
        held = sum(peaks[device] for device in host.devices if device < len(peaks))
        if held > host.memory_bytes:
            found[host.name] = (held, host.memory_bytes)
    return found
