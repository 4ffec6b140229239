"""Prices: durations of tasks that were looked up before, by what they follow from.

A task that stands in a lane alone takes as long as any other of the same operator, sizes and kind
of device. A search asks for the same few thousand again and again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.draft import TASKS, Sheet
from apportion.tasks import COLLECTIVE, TRANSFER, Floats, Ints

ROOM = 1 << 15  # a power of 2


class Prices(NamedTuple):  # numba takes no dataclass
    """A table with open addresses; a row is free if its kind is -1."""

    known: Ints  # 1: how many
    kind: Ints
    call: Ints
    flops: Floats
    nbytes: Ints
    itemsize: Ints
    taken: Ints
    alike: Ints  # kind of device
    duration: Ints
    issue: Ints


def prices() -> Prices:
    """None known yet."""
    zeros = [np.zeros(ROOM, np.int64) for _ in range(6)]
    kind = np.full(ROOM, -1)
    return Prices(
        np.zeros(1, np.int64), kind, zeros[0], np.zeros(ROOM), zeros[1], zeros[2], zeros[3],
        zeros[4], zeros[5], np.zeros(ROOM, np.int64),
    )  # fmt: skip


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _find(prices, sheet, task, alike):  # type: ignore[no-untyped-def]
    """The row of a task, or the free row where it belongs."""
    kind, call, nbytes = sheet.kind[task], sheet.call[task], sheet.nbytes[task]
    flops, size, taken = sheet.flops[task], sheet.itemsize[task], sheet.taken[task]
    mixed = np.uint64(nbytes) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(flops)
    mixed = mixed * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(call * 64 + kind * 16 + size)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64(taken * 64 + alike)
    mixed ^= mixed >> np.uint64(29)
    row = np.int64(mixed & np.uint64(ROOM - 1))
    while prices.kind[row] >= 0 and not (
        prices.kind[row] == kind
        and prices.call[row] == call
        and prices.nbytes[row] == nbytes
        and prices.flops[row] == flops
        and prices.itemsize[row] == size
        and prices.taken[row] == taken
        and prices.alike[row] == alike
    ):
        row = (row + 1) & (ROOM - 1)
    return row


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def look_up(
    prices: Prices, sheet: Sheet, alike: Ints, duration: Ints, issue: Ints, new: Ints
) -> int:
    """Writes the durations that are known of the tasks of a sheet, and those tasks whose are not;
    how many these are. Messages take no time in a lane."""
    count = 0
    for task in range(sheet.used[TASKS]):
        if sheet.kind[task] == TRANSFER or sheet.kind[task] == COLLECTIVE:
            duration[task] = issue[task] = 0
            continue
        row = _find(prices, sheet, task, alike[sheet.device[task]])
        if prices.kind[row] < 0:
            new[count] = task
            count += 1
        else:
            duration[task], issue[task] = prices.duration[row], prices.issue[row]
    return count


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def learn(
    prices: Prices, sheet: Sheet, alike: Ints, new: Ints, duration: Ints, issue: Ints
) -> None:
    """Remembers the durations of tasks; forgets all others if there are too many."""
    if 2 * (prices.known[0] + len(new)) > ROOM:
        prices.kind[:] = -1
        prices.known[0] = 0
    for k in range(min(len(new), ROOM // 2)):
        task = new[k]
        where = alike[sheet.device[task]]
        row = _find(prices, sheet, task, where)
        if prices.kind[row] < 0:
            prices.known[0] += 1
        prices.kind[row], prices.call[row] = sheet.kind[task], sheet.call[task]
        prices.flops[row], prices.nbytes[row] = sheet.flops[task], sheet.nbytes[task]
        prices.itemsize[row], prices.taken[row] = sheet.itemsize[task], sheet.taken[task]
        prices.alike[row] = where
        prices.duration[row], prices.issue[row] = duration[k], issue[k]
