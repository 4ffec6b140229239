"""overlapping_steps: the Timeline of a step whose updates the next one does.

A part of simulate/. Steps overlap, so that one alone says nothing: STEPS of them are simulated, one
after the other (repeat_steps.py), and the period is the time between the ends of the last two, when
what one step leaves to the next is as it will be. The Timeline is that of the last step but one,
with its late tasks; memory is that of all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion.columns import Ints
from apportion.lower import TaskGraph
from apportion.machine import Cluster, CostModel
from apportion.simulate.memory_curve import Curve, curves, granules
from apportion.simulate.network import network
from apportion.simulate.repeat_steps import RepeatedSteps, repeat_steps
from apportion.simulate.schedule import schedule_compiled
from apportion.simulate.timeline import SIMULATED, Timeline, timeline

STEPS = 4


def overlapping_steps(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Timeline:
    """The Timeline of one of many steps."""
    several = repeat_steps(tasks, STEPS)
    net = network(several.tasks, cluster, cost)
    start, end = schedule_compiled(net)
    occupied = np.where(net.lead >= 0, net.duration, end - start) if len(net.lead) else end - start
    own = several.at[STEPS - 2]
    over = [int(end[several.at[k][: tasks.late_start]].max(initial=0)) for k in range(STEPS)]
    begun = int(start[own].min(initial=0))
    line = timeline(
        tasks, start[own] - begun, end[own] - begun, source=SIMULATED, granule=granules(cluster),
        occupied_ns=occupied[own], communication_on_device=cluster.communication_on_device,
        period_ns=over[-1] - over[-2],
    )  # fmt: skip
    held = curves(several.tasks, start, end, granules(cluster), several.buffers(tasks))
    found = tuple(_of_one_step(curve, several, tasks, begun) for curve in held)
    return replace(line, curves=found)


def _of_one_step(curve: Curve, several: RepeatedSteps, tasks: TaskGraph, begun: int) -> Curve:
    """The curve of several steps, by the clock and the numbers of one."""
    count, one = len(several.tasks.slot_device), several.slots
    of_slot = curve.thing < count
    task = several.source[np.where(of_slot, 0, curve.thing - count)]
    thing: Ints = np.where(of_slot, curve.thing % one, one + task)
    return replace(
        curve, time_ns=np.maximum(curve.time_ns - begun, 0), thing=thing.astype(np.int32)
    )
