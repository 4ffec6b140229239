"""placeto_simulator: the simulator of Placeto (Addanki et al., NeurIPS 2019).

In: groups of operators and a device for each. Out: the step time and the peak memory. The engine is
that of simulate/schedule.py; step_time.py with `placeto_links` is faster and gives the same.

Groups of operators are placed whole. The rules and constants are those of the published code, where
they were fitted to a p2.8xlarge of Amazon EC2:

    device  one group at a time, first ready first; busy for another 5.7 us after a group of any
            cost, though its output is there at once
    link    one for everything that leaves a device, first ready first. An output that is wanted
            elsewhere is sent once, to however many devices, at 7600 bytes per microsecond; the link
            stays busy for another 25 us. Receivers do not contend.
    step    ends when the last device and the last link are free
    memory  an output is charged to the device that makes it, from the start of its group to 1 us
            before the last group that wants it ends

The published code breaks ties by the order in which its queues were filled, and cuts times to whole
microseconds when it counts memory; here ties go by index, and times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.columns import (
    Floats,
    Ints,
)
from apportion.simulate import Network, queued, schedule_compiled

DEVICE_HOLD_NS = 5_700
LINK_HOLD_NS = 25_000
BYTES_PER_NS = 7.6
LAST_NS = 1_000  # of a reader during which what it reads is not counted


@dataclass(frozen=True, slots=True, eq=False)
class OpGroups:
    """What is placed: `edges` are rows (group, later group that wants its output)."""

    seconds: Floats  # n
    nbytes: Ints  # n: of the output
    edges: Ints  # e x 2

    def __post_init__(self) -> None:
        edges = self.edges.reshape(-1, 2)
        if len(self.nbytes) != len(self.seconds) or (edges[:, 0] >= edges[:, 1]).any():
            raise ValueError("groups need a size each, and edges that lead to later groups")


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedPlacement:
    """A placement, simulated."""

    step_seconds: float
    start_ns: Ints  # n
    end_ns: Ints  # n
    peak_bytes: tuple[int, ...]  # per device


def simulate_placement(
    groups: OpGroups, placement: Sequence[int], devices: int
) -> SimulatedPlacement:
    """What Placeto's simulator says if group i runs on device placement[i]."""
    place = np.array(placement, np.int64)
    if len(place) != len(groups.seconds) or not ((place >= 0) & (place < devices)).all():
        raise ValueError(f"the placement does not give each group one of {devices} devices")
    item, net = queue_network(groups, place, devices)
    start, end = schedule_compiled(net)
    peaks = _peaks(groups, place, start[item], end[item], devices)
    last = int((end + net.hold).max(initial=0))
    return SimulatedPlacement(last / 1e9, start[item], end[item], peaks)


def queue_network(groups: OpGroups, place: Ints, devices: int) -> tuple[Ints, Network]:
    """The item of each group, and all items: groups, each followed by the message it sends if any.

    Queue d is device d, queue devices + d the link that leaves it.
    """
    n, (made, wants) = len(place), groups.edges.reshape(-1, 2).T
    away = place[made] != place[wants]
    sends = np.zeros(n, bool)
    sends[made[away]] = True
    item = np.arange(n) + np.cumsum(sends) - sends
    message = item[sends] + 1
    count = n + len(message)
    queue, occupancy, hold = (np.empty(count, np.int64) for _ in range(3))
    queue[item], queue[message] = place, devices + place[sends]
    occupancy[item] = np.rint(groups.seconds * 1e9)
    occupancy[message] = np.rint(groups.nbytes[sends] / BYTES_PER_NS)
    hold[item] = np.where(occupancy[item] > 0, DEVICE_HOLD_NS, 0)
    hold[message] = LINK_HOLD_NS
    before: list[list[int]] = [[] for _ in range(count)]
    for group, sent in zip(item[sends].tolist(), message.tolist(), strict=True):
        before[sent].append(group)
    for source, target in zip((item[made] + away).tolist(), item[wants].tolist(), strict=True):
        before[target].append(source)
    return item, queued(queue, occupancy, hold, before, 2 * devices)


def _peaks(groups: OpGroups, place: Ints, start: Ints, end: Ints, devices: int) -> tuple[int, ...]:
    made, wants = groups.edges.reshape(-1, 2).T
    gone = start.copy()
    np.maximum.at(gone, made, end[wants] - LAST_NS)
    device, time = np.tile(place, 2), np.concatenate([start, gone])
    change = np.concatenate([groups.nbytes, -groups.nbytes])
    order = np.lexsort((change < 0, time))  # what comes at the time that something goes adds to it
    return tuple(
        int(np.cumsum(change[order][device[order] == d]).max(initial=0)) for d in range(devices)
    )
