"""TileSchedule: which process runs which tile at which step, and who hands over what.

Part of the room loops. A Scheme and numbers of parts come in. A tile is one part of the space and
one of the time dim. The schedule is a table: a row a step, a column a process, a cell the part of
time that the process runs with its own part of space, or -1. Processes do not wait for each other
between steps, except for what they are handed.

    1d         one step, one part of time 2d         at clock c process e runs parts (c + e) mod N
    of each of `depth` sets of N parts; it hands
               each on to process e - 1, which runs it at the next clock, and computes the next set
               meanwhile
    wavefront  process e runs part t at step e + t, and hands it on to process e + 1

Step by step, and within a step process by process, is the order of tiles that a run is equal to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from apportion.loops.schemes import ONE_D, TWO_D, Scheme


@dataclass(frozen=True)
class Handover:
    """Part `time` goes from a process to another: after step `after` of the first, before step
    `before` of the second. At the end of a pass it goes back to where it began: `before` is then
    the number of steps."""

    time: int
    sender: int
    receiver: int
    after: int
    before: int


@dataclass(frozen=True)
class TileSchedule:
    """`table[step][process]` is a part of time or -1; see the head of this file."""

    processes: int
    time_parts: int
    table: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> int:
        return len(self.table)

    def tiles(self) -> Iterator[tuple[int, int, int]]:
        """(step, process, part of time) of every tile, in the order that a run is equal to."""
        for step, row in enumerate(self.table):
            for process, time in enumerate(row):
                if time >= 0:
                    yield step, process, time

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The process where each part of time begins and ends a pass."""
        first: dict[int, int] = {}
        for _, process, time in self.tiles():
            first.setdefault(time, process)
        return tuple(first[time] for time in range(self.time_parts))

    @cached_property
    def handovers(self) -> tuple[Handover, ...]:
        """Every hand-over of a part of time, in the order of the steps after which they go."""
        found = []
        last: dict[int, tuple[int, int]] = {}  # step and process that had the part
        for step, process, time in self.tiles():
            if time in last and last[time][1] != process:
                after, sender = last[time]
                found.append(Handover(time, sender, process, after, step))
            last[time] = (step, process)
        for time, (after, sender) in sorted(last.items()):
            if sender != self.homes[time]:
                found.append(Handover(time, sender, self.homes[time], after, self.steps))
        return tuple(sorted(found, key=lambda each: (each.after, each.time)))


def tile_schedule(scheme: Scheme, processes: int, depth: int) -> TileSchedule:
    """The schedule of a scheme on so many processes; `depth` parts of time for each of them."""
    if scheme.kind == ONE_D or processes == 1:
        return TileSchedule(processes, 1, ((0,) * processes,))
    parts = processes * depth
    if scheme.kind == TWO_D:
        table = [
            tuple(turn * processes + (clock + process) % processes for process in range(processes))
            for clock in range(processes)
            for turn in range(depth)
        ]
        return TileSchedule(processes, parts, tuple(table))
    table = [
        tuple(step - process if 0 <= step - process < parts else -1 for process in range(processes))
        for step in range(parts + processes - 1)
    ]
    return TileSchedule(processes, parts, tuple(table))
