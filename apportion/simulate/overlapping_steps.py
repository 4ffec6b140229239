"""overlapping_steps: the Timeline of a step that is not over when the next one begins.

A part of simulate/. The next step does its late updates, or its host is still busy with state that
lies there. Steps overlap, so that one alone says nothing: STEPS of them are simulated, one
after the other (repeat_steps.py), and the period is the time between the ends of the last two, when
what one step leaves to the next is as it will be. The Timeline is that of the last step but one,
with its late tasks; memory is that of all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from apportion.columns import Ints
from apportion.lower import TaskGraph, uses_host
from apportion.machine import Cluster, CostModel
from apportion.simulate.contention import schedule_beside
from apportion.simulate.memory_curve import Curve, curves, granules
from apportion.simulate.network import needed_at, network
from apportion.simulate.priority_network import MessageParts, priority_network
from apportion.simulate.priority_schedule import schedule_by_priority_compiled
from apportion.simulate.repeat_steps import RepeatedSteps, late_start, repeat_steps
from apportion.simulate.schedule import LinkSpans, link_spans
from apportion.simulate.timeline import SIMULATED, Timeline, timeline

STEPS = 4


class _Scheduled(NamedTuple):
    """When the tasks of all steps began and ended, how long each occupied its devices, and when
    links served messages."""

    start: Ints
    end: Ints
    occupied: Ints
    use: LinkSpans


def overlapping_steps(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Timeline:
    """The Timeline of one of many steps."""
    several = repeat_steps(tasks, STEPS)
    at_host = uses_host(tasks) and not cluster.communication_on_device
    found = (_beside_hosts if at_host else _by_priority)(several, tasks, cluster, cost)
    start, end = found.start, found.end
    own = several.at[STEPS - 2]
    own_step = several.at[:, : late_start(tasks)]
    over = [int(end[own_step[k]].max(initial=0)) for k in range(STEPS)]
    begun = int(start[own].min(initial=0))
    line = timeline(
        tasks, start[own] - begun, end[own] - begun, source=SIMULATED, granule=granules(cluster),
        occupied_ns=found.occupied[own], communication_on_device=cluster.communication_on_device,
        period_ns=over[-1] - over[-2],
    )  # fmt: skip

    def levels() -> tuple[Curve, ...]:
        held = curves(several.tasks, start, end, granules(cluster), several.buffers(tasks))
        return tuple(_of_one_step(curve, several, tasks, begun) for curve in held)

    return replace(line, find_curves=levels, link_spans=_spans(found.use, several, begun))


def _by_priority(
    several: RepeatedSteps, tasks: TaskGraph, cluster: Cluster, cost: CostModel
) -> _Scheduled:
    """Late work is done as soon as it can be, and messages overtake each other."""
    net, parts = priority_network(several, tasks, cluster, cost)
    found = schedule_by_priority_compiled(net)
    return _Scheduled(*_of_tasks(several.tasks, parts, found.start, found.end), found.use)


def _beside_hosts(
    several: RepeatedSteps, tasks: TaskGraph, cluster: Cluster, cost: CostModel
) -> _Scheduled:
    """Hosts compute beside their devices. Late work stands where it is due, and messages travel as
    they are posted."""
    needed = needed_at(tasks)[several.source] + several.step * len(tasks)
    net = network(several.tasks, cluster, cost, needed)
    start, end = schedule_beside(several.tasks, cluster, cost, net)
    occupied = np.where(net.lead >= 0, net.duration, end - start) if len(net.lead) else end - start
    use = link_spans(net, (start, end))
    return _Scheduled(start, end, occupied, use)


def _spans(use: LinkSpans, several: RepeatedSteps, begun: int) -> LinkSpans:
    """When links served the messages of the step that is shown."""
    mine = several.step[use.item] == STEPS - 2
    item = several.source[use.item[mine]]
    return LinkSpans(item, use.link[mine], use.start[mine] - begun, use.end[mine] - begun)


def _of_tasks(
    tasks: TaskGraph, parts: MessageParts, start: Ints, end: Ints
) -> tuple[Ints, Ints, Ints]:
    """When tasks began and ended, and how long each occupied its devices: a message begins when it
    is packed."""
    n = len(tasks)
    first, length = start[:n].copy(), end[:n] - start[:n]
    if len(parts.item):
        np.minimum.at(
            first, parts.task, np.where(parts.leads, start[parts.item], first[parts.task])
        )
        ends = np.maximum(np.bincount(tasks.ends.task, minlength=n), 1)
        each = np.bincount(parts.task, end[parts.item] - start[parts.item], n) / ends
        length = np.where(tasks.is_message, np.rint(each).astype(np.int64), length)
    return first, end[:n], length


def _of_one_step(curve: Curve, several: RepeatedSteps, tasks: TaskGraph, begun: int) -> Curve:
    """The curve of several steps, by the clock and the numbers of one."""
    count, one = len(several.tasks.slot_device), several.slots
    of_slot = curve.thing < count
    task = several.source[np.where(of_slot, 0, curve.thing - count)]
    thing: Ints = np.where(of_slot, curve.thing % one, one + task)
    return replace(
        curve, time_ns=np.maximum(curve.time_ns - begun, 0), thing=thing.astype(np.int32)
    )
