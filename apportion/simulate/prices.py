"""price: what the tasks of a sheet take, and what its messages travel on, in compiled code.

The seconds of a task are those of cost.py, bit for bit, and the lines of messages those of hops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.columns import (
    Floats,
    Ints,
    compiled,
)
from apportion.lower import (
    ASSEMBLE,
    COLLECTIVE,
    COMPUTE,
    TASKS,
    TRANSFER,
    Sheet,
)
from apportion.machine import ASSEMBLE_LINE, Cluster, CostModel, classes, fit_columns, rates
from apportion.simulate.routes import Lines

PATTERN, SIZE, FIRST, COUNT, MEMBERS = range(5)  # of what is known of a group


class Prices(NamedTuple):  # numba takes no dataclass
    """What computing and assembling take, on classes c of devices."""

    of: Ints  # d: which class
    efficiency: float
    rate: Floats  # c x bytes per element: operations per second
    bandwidth: Floats  # c
    launch: Floats  # c
    views: Ints  # c: whether they are free
    fit: Floats  # c x operator x bytes per element x 3; zeros where nothing is known
    join: Floats  # c x 3
    fits: Ints  # c: whether `join` is known
    issue: Ints  # c x operator, and last what it takes to issue an assembly: nanoseconds


class Routes(NamedTuple):
    """What messages travel on: a line for every pair of devices, then those of groups."""

    lines: Lines
    alpha: Floats  # by line: what a collective takes
    beta: Floats  # and per byte
    group: Ints  # what is known of groups, one after another
    at: Ints  # where that of a group begins, by a mix of it, or the next free place; or -1


def prices(cost: CostModel, cluster: Cluster, kinds: Sequence[str], issue: Ints) -> Prices:
    """Of Tasks of these operators; `issue` is device x operator."""
    of, names = np.zeros(len(cluster.devices), np.int64), (*kinds, "")
    them = [device for _, device in classes(cluster)]
    for number, (where, _) in enumerate(classes(cluster)):
        of[where] = number
    tables = [cost.tables.get(one.kind) for one in them]
    sizes = np.array([rates(one) for one in them])
    nothing = np.zeros((3, len(names), sizes.shape[1]))
    fit = [nothing if table is None else fit_columns(table, names)[0] for table in tables]
    join = [None if table is None else table.lines.get(ASSEMBLE_LINE) for table in tables]
    return Prices(
        of, cost.efficiency, sizes, np.array([one.memory_bandwidth for one in them]),
        np.array([0.0 if one.asynchronous else one.launch_seconds for one in them]),
        np.array([one.asynchronous for one in them], np.int64),
        np.ascontiguousarray(np.moveaxis(np.array(fit), 1, 3)),
        np.array([(0.0, 0.0, 0.0) if line is None else line[:3] for line in join]),
        np.array([line is not None for line in join], np.int64),
        issue[[int(np.flatnonzero(where)[0]) for where, _ in classes(cluster)]],
    )  # fmt: skip


@compiled
def charge(prices: Prices, sheet: Sheet) -> None:
    """Writes what the tasks of a sheet take. Messages take no time in a lane."""
    most, joins = prices.rate.shape[1] - 1, prices.issue.shape[1] - 1
    for task in range(sheet.used[TASKS]):
        kind, nbytes, own = sheet.kind[task], sheet.nbytes[task], prices.of[sheet.device[task]]
        sheet.duration[task] = sheet.issue[task] = 0
        if kind == COMPUTE:
            call, size = sheet.call[task], min(max(sheet.itemsize[task], 0), most)
            fit, flops = prices.fit[own, call, size], sheet.flops[task]
            seconds = fit[0] + flops * fit[1] + nbytes * fit[2]
            if not seconds > 0:
                arithmetic = flops / prices.rate[own, size]
                memory = nbytes / prices.bandwidth[own]
                seconds = max(arithmetic, memory) / prices.efficiency + prices.launch[own]
            sheet.duration[task] = _nanoseconds(seconds)
            sheet.issue[task] = prices.issue[own, call]
        elif kind == ASSEMBLE:
            line = prices.join[own]
            seconds = line[0] + sheet.taken[task] * line[1] + nbytes * line[2]
            if not prices.fits[own]:
                moved = nbytes / prices.bandwidth[own]
                seconds = moved / prices.efficiency + prices.launch[own]
            if nbytes == 0 and prices.views[own]:
                seconds = 0.0
            sheet.duration[task] = _nanoseconds(seconds)
            sheet.issue[task] = prices.issue[own, joins]


@compiled
def _nanoseconds(seconds):  # type: ignore[no-untyped-def]
    return max(np.int64(np.rint(seconds * 1e9)), 1)


# Lines


def routes(lines: Lines) -> Routes:
    """Those of pairs of devices."""
    none = np.zeros(len(lines.lag))
    return Routes(lines, none, none, np.zeros(0, np.int64), np.full(64, -1))


def with_group(
    held: Routes, pattern: int, group: Sequence[int], lines: Lines, costs: Sequence[Sequence[float]]
) -> Routes:
    """With the lines of a group, one for each algorithm, which costs (seconds, per byte)."""
    old, at, where = held.lines, held.at, len(held.group)
    start = np.concatenate([old.start, lines.start[1:] + old.start[-1]])
    lag, drag, link, pace = (
        np.concatenate([getattr(old, name), getattr(lines, name)])
        for name in ("lag", "drag", "link", "pace")
    )
    alpha, beta = (
        np.append(known, [cost[k] for cost in costs])
        for k, known in enumerate((held.alpha, held.beta))
    )
    mine = np.array([pattern, len(group), len(old.lag), len(costs), *group], np.int64)
    groups = np.concatenate([held.group, mine])
    if 2 * np.count_nonzero(at >= 0) >= len(at):
        places = at[at >= 0]
        at = np.full(2 * len(at), -1)
        for place in places.tolist():
            members = groups[place + MEMBERS :][: groups[place + SIZE]]
            at[_find(groups, at, groups[place + PATTERN], members)] = place
    at[_find(groups, at, pattern, mine[MEMBERS:])] = where
    return Routes(Lines(lag, drag, start, link, pace), alpha, beta, groups, at)


@compiled
def _find(group, at, pattern, members):  # type: ignore[no-untyped-def]
    """Where in `at` a group is, or the free place where it belongs."""
    mixed = np.uint64(pattern)
    for member in members:
        mixed = (mixed ^ np.uint64(member + 1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    row = np.int64(mixed & np.uint64(len(at) - 1))
    while at[row] >= 0:
        place = at[row]
        same = group[place + PATTERN] == pattern and group[place + SIZE] == len(members)
        for k in range(len(members)):
            same = same and group[place + MEMBERS + k] == members[k]
        if same:
            break
        row = (row + 1) & (len(at) - 1)
    return row


@compiled
def route(routes: Routes, sheet: Sheet) -> bool:
    """Writes the lines of the messages of a sheet, of all that a group has the one that is cheapest
    for it; whether all groups are known."""
    known, devices = True, len(sheet.parent)
    for task in range(sheet.used[TASKS]):
        if sheet.kind[task] == TRANSFER:
            sheet.line[task] = sheet.device[task] * devices + sheet.peer[task]
        elif sheet.kind[task] == COLLECTIVE:
            sheet.line[task] = _cheapest(routes, sheet, task)
            known = known and sheet.line[task] >= 0
    return known


@compiled
def _cheapest(routes, sheet, task):  # type: ignore[no-untyped-def]
    number = sheet.group[task]
    members = sheet.member[sheet.group_start[number] : sheet.group_start[number + 1]]
    place = routes.at[_find(routes.group, routes.at, sheet.pattern[task], members)]
    if place < 0:
        return -1
    first = routes.group[place + FIRST]
    best, least = first, np.inf
    for line in range(first, first + routes.group[place + COUNT]):
        seconds = routes.alpha[line] + routes.beta[line] * sheet.nbytes[task]
        if seconds < least:
            best, least = line, seconds
    return best


def unknown(sheet: Sheet) -> set[tuple[int, tuple[int, ...]]]:
    """The (pattern, group) of all collectives of a sheet that have no line."""
    count = sheet.used[TASKS]
    found = set()
    for task in np.flatnonzero((sheet.kind[:count] == COLLECTIVE) & (sheet.line[:count] < 0)):
        low, high = sheet.group_start[sheet.group[task] : sheet.group[task] + 2]
        found.add((int(sheet.pattern[task]), tuple(sheet.member[low:high].tolist())))
    return found
