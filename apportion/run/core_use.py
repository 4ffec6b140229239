"""Who uses this machine's cores: these processes, and others beside them.

Part of the room run. Two readings of the system's own counters come in, one before and one after a
measurement; which share of the cores that it wanted went to other programs goes out. A load average
is of no use here: it follows minutes later, and spread over rounds does not show a program that
runs all the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
WORKING = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq
STOLEN = 7  # what the machine under a virtual one took


@dataclass(frozen=True)
class CoreUse:
    """One reading, in seconds that only grow: `busy` of all programs on the usable cores, stolen
    time included; `own` of the processes that belong to the measurement."""

    wall: float
    busy: float
    own: float
    cores: int


def core_use(processes: Sequence[int] = ()) -> CoreUse | None:
    """A reading, `own` being this process and those with the given numbers; None where the system
    does not say."""
    try:
        rows = [line.split() for line in STAT.read_text().splitlines()]
        tick = os.sysconf("SC_CLK_TCK")
        usable = os.sched_getaffinity(0)
        mine = [
            [int(x) for x in row[1:]]
            for row in rows
            if row and row[0][:3] == "cpu" and row[0][3:].isdigit() and int(row[0][3:]) in usable
        ]
        busy = sum(sum(row[k] for k in (*WORKING, STOLEN)) for row in mine) / tick
        own = sum(_used(number) for number in {os.getpid(), *processes}) / tick
    except (OSError, AttributeError, IndexError, ValueError):
        return None
    return CoreUse(time.perf_counter(), busy, own, len(mine)) if mine else None


def _used(process: int) -> int:
    """Ticks that a process has used, all its threads together."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def taken(before: CoreUse | None, after: CoreUse | None, wanted: int) -> float | None:
    """The share of the `wanted` cores that other programs had between two readings: 0 while there
    are cores left for everybody; None if that is not known."""
    if before is None or after is None or after.wall <= before.wall:
        return None
    others = (after.busy - before.busy - (after.own - before.own)) / (after.wall - before.wall)
    wanted = max(1, min(wanted, after.cores))
    return min(max(others + wanted - after.cores, 0.0) / wanted, 1.0)
