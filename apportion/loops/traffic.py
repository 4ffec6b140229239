"""The messages of a pass: who sends how many bytes to whom, after and before which steps.

Part of the room loops. What ranks send follows from the schedule, the bounds and the placement of
arrays; here it is counted without running anything: for choosing a scheme, for `explain`, and for
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from apportion.loops.array_layout import Box, box_size, intersection
from apportion.loops.elements import DealFacts
from apportion.loops.loop_plan import (
    BOXED,
    KEYED,
    READ,
    ROTATING,
    TABLED,
    UPDATED,
    WRITTEN,
    ArrayUse,
)
from apportion.loops.tile_schedule import TileSchedule

HAND_OVER, FETCH, PUT_BACK = "hand over", "fetch", "put back"


class LoopMessage(NamedTuple):
    """A message: it leaves after the sender's step `after` (-1: at the beginning) and is needed
    before the receiver's step `before`."""

    kind: str
    array: str
    sender: int
    receiver: int
    after: int
    before: int
    nbytes: int


def pass_messages(
    uses: Sequence[ArrayUse], schedule: TileSchedule, facts: DealFacts, chunks: int = 1
) -> Iterator[LoopMessage]:
    """All messages of a pass."""
    for use in uses:
        if use.placement == ROTATING:
            yield from _handed_over(use, schedule)
        elif use.placement == BOXED:
            yield from _fetched(use, schedule, facts, chunks)
        elif use.placement in (KEYED, TABLED):
            yield from _rows(use, schedule, facts, chunks)


def itemsize(use: ArrayUse) -> int:
    """Bytes of an element."""
    return int(np.dtype(use.kernel.dtype).itemsize)


def _handed_over(use: ArrayUse, schedule: TileSchedule) -> Iterator[LoopMessage]:
    sizes = [
        box_size(use.layout.box(part, use.kernel.shape)) * itemsize(use)
        for part in range(schedule.time_parts)
    ]
    for each in schedule.handovers:
        if sizes[each.time]:
            yield LoopMessage(
                HAND_OVER, use.kernel.name, each.sender, each.receiver, each.after, each.before,
                sizes[each.time],
            )  # fmt: skip


def _fetched(
    use: ArrayUse, schedule: TileSchedule, facts: DealFacts, chunks: int
) -> Iterator[LoopMessage]:
    assert use.boxes is not None
    last: dict[int, Box | None] = {}
    held = list(use.layout.parts(use.kernel.shape))
    back_size = itemsize(use) + (1 if use.change == WRITTEN else 0)
    for step, row in enumerate(schedule.table):
        for rank, time in enumerate(row):
            box = use.boxes.box(facts, rank, time) if time >= 0 else None
            if box is None or (use.change == READ and last.get(rank) == box):
                continue
            last[rank] = box
            for _, owner, there in held:
                shared = intersection(box, there)
                if shared is None or owner == rank:
                    continue
                size, name = box_size(shared), use.kernel.name
                again = 1 if use.change == READ else chunks
                for _ in range(again):
                    if use.change != UPDATED:
                        nbytes = size * itemsize(use)
                        yield LoopMessage(FETCH, name, owner, rank, step - 1, step, nbytes)
                    if use.change != READ:
                        yield LoopMessage(
                            PUT_BACK, name, rank, owner, step, step + 1, size * back_size
                        )


def _rows(
    use: ArrayUse, schedule: TileSchedule, facts: DealFacts, chunks: int
) -> Iterator[LoopMessage]:
    """Rows that are fetched: at most one for each element, or all; as many from everybody."""
    kernel, count = use.kernel, schedule.processes
    if not kernel.keyed:  # all rows of a table
        kernel = replace(kernel, keyed=(kernel.order[0],))
    row = math.prod(kernel.row_shape) * itemsize(use)
    back = row + (math.prod(kernel.row_shape) if use.change == WRITTEN else 0)
    for step, rank, time in schedule.tiles():
        for _ in range(chunks):
            rows = min(kernel.rows, -(-facts.counts[rank][time] // chunks)) / count
            for owner in range(count):
                if owner == rank or not rows:
                    continue
                if use.change != UPDATED:
                    nbytes = int(rows * row)
                    yield LoopMessage(FETCH, kernel.name, owner, rank, step - 1, step, nbytes)
                if use.change != READ:
                    nbytes = int(rows * back)
                    yield LoopMessage(PUT_BACK, kernel.name, rank, owner, step, step + 1, nbytes)
