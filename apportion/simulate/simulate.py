"""simulate: TaskGraph + Cluster + CostModel -> predicted Timeline. Integer nanoseconds throughout.

What waits for what is in network.py, when each runs in schedule.py. Steps that overlap are
simulated as several (overlapping_steps.py).
"""

from __future__ import annotations

import numpy as np

from apportion.lower import TaskGraph
from apportion.machine import Cluster, CostModel
from apportion.simulate.contention import schedule_beside
from apportion.simulate.memory_curve import granules
from apportion.simulate.network import network
from apportion.simulate.overlapping_steps import overlapping_steps
from apportion.simulate.timeline import SIMULATED, Timeline, timeline


def simulate(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Timeline:
    """The Timeline that the Cluster would show; ValueError if it has too few devices."""
    beside = not cluster.communication_on_device
    if tasks.late_start >= 0 or (beside and tasks.keeps_state_on_host):
        return overlapping_steps(tasks, cluster, cost)
    net = network(tasks, cluster, cost)
    start, end = schedule_beside(tasks, cluster, cost, net)
    occupied = np.where(net.lead >= 0, net.duration, end - start) if len(net.lead) else None
    return timeline(
        tasks, start, end, source=SIMULATED, granule=granules(cluster), occupied_ns=occupied,
        communication_on_device=cluster.communication_on_device,
    )  # fmt: skip
