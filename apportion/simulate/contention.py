"""contention: copies to the host, copies back and what the host computes slow each other down.

A part of simulate/. In: a TaskGraph, a Cluster, a CostModel and the Network of the tasks. Out: when
each item runs. How long a copy takes depends on what runs beside it, and that on how long copies
take: the step is scheduled with what each takes alone, then again with what each takes beside the
others for the share of its time that it was beside them, ROUNDS times in all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints
from apportion.lower import TaskGraph
from apportion.machine import Cluster, CostLine, CostModel, host_rates, to_nanoseconds
from apportion.simulate.schedule import Network, Times, schedule_compiled

ROUNDS = 3
OUT, BACK, WORK = range(3)


class _HostTasks(NamedTuple):
    """The tasks between one device and its host, of one of three kinds; what each takes alone and
    beside others, in nanoseconds."""

    kind: int
    tasks: Ints
    alone: Floats
    beside: Floats


def schedule_beside(tasks: TaskGraph, cluster: Cluster, cost: CostModel, net: Network) -> Times:
    """When each item of the Network runs."""
    devices = _host_tasks(tasks, cluster, cost)
    times = schedule_compiled(net)
    for _ in range(ROUNDS - 1) if devices else ():
        duration = net.duration.copy()
        for device in devices:
            for mine in device:
                share = np.zeros(len(mine.tasks))
                for other in device:
                    if other.kind != mine.kind:
                        share += _share(times, mine.tasks, other.tasks)
                share = np.minimum(share, 1.0)
                took = mine.alone + (mine.beside - mine.alone) * share
                duration[mine.tasks] = to_nanoseconds(took / 1e9)
        net = _with_durations(net, duration)
        times = schedule_compiled(net)
    return times


def _host_tasks(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> list[list[_HostTasks]]:
    """By device; none where being beside others changes nothing."""
    if cluster.communication_on_device:
        return []
    kinds, found = tasks.task_kinds, []
    which = (
        kinds.is_host_copy & kinds.to_host, kinds.is_host_copy & ~kinds.to_host, kinds.is_host_work,
    )  # fmt: skip
    for device in range(tasks.devices):
        rates = host_rates(cluster, cost, device)
        lines = (
            (rates.out, rates.out_beside), (rates.back, rates.back_beside),
            (rates.work, rates.work_beside),
        )  # fmt: skip
        if all(alone == beside for alone, beside in lines):
            continue
        rows = []
        for kind, (alone, beside) in enumerate(lines):
            mine = np.flatnonzero(which[kind][tasks.kind] & (tasks.device == device))
            nbytes = tasks.nbytes[mine] // (1 if kind == WORK else 2)
            rows.append(_HostTasks(kind, mine, _by_line(alone, nbytes), _by_line(beside, nbytes)))
        if any(len(row.tasks) for row in rows):
            found.append(rows)
    return found


def _by_line(line: CostLine, nbytes: Ints) -> Floats:
    """Nanoseconds of so many bytes."""
    return np.asarray((line.each + nbytes * line.per_byte) * 1e9, np.float64)


def _share(times: Times, mine: Ints, others: Ints) -> Floats:
    """Which share of the time of each task some of the others run; these run one at a time."""
    start, end = times
    order = np.argsort(start[others], kind="stable")
    begin, over = start[others][order], end[others][order]
    busy = np.append(0, np.cumsum(over - begin))

    def until(moment: Ints) -> Ints:
        """For how long others have run at some moments."""
        count = np.searchsorted(begin, moment, side="right")
        last = np.maximum(count - 1, 0)
        rest = np.maximum(over[last] - moment, 0) if len(over) else np.zeros_like(moment)
        found: Ints = np.where(count > 0, busy[count] - rest, 0)
        return found

    length = np.maximum(end[mine] - start[mine], 1)
    found: Floats = (until(end[mine]) - until(start[mine])) / length
    return found


def _with_durations(net: Network, duration: Ints) -> Network:
    """The Network with other durations, and other occupancies of what hosts do by need."""
    if not len(net.urgency):
        return net._replace(duration=duration)
    item = np.repeat(np.arange(len(duration)), np.diff(net.hop_start))
    urgent = net.urgency[item] >= 0
    occupancy = np.where(urgent, duration[item], net.hop_occupancy)
    return net._replace(duration=duration, hop_occupancy=occupancy)
