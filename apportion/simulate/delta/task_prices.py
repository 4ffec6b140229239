"""TaskPrices: what tasks take, and what their messages travel on, in compiled code. A part of
simulate/delta/.

In: OpTasks of lower/, a PriceTable of machine/ and a RouteTable. Out: TaskPrices, for the Blocks of
block_store.py. They are those of a full simulation (durations.py, routes.py), bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, mixed
from apportion.lower import ASSEMBLE, COLLECTIVE, COMPUTE, TASKS, TRANSFER, OpTasks
from apportion.machine import PriceTable, assembly_price, compute_price, whole_nanoseconds
from apportion.simulate.routes import Lines, cheapest_line


class TaskPrices(NamedTuple):  # numba takes no dataclass
    """What tasks take, and what their messages travel on: a row for every task."""

    duration: Ints  # nanoseconds in its lane
    issue: Ints  # nanoseconds that its host needs to issue it
    line: Ints  # of a message, or -1 if it is not known


@compiled
def empty_prices(tasks: OpTasks) -> TaskPrices:
    """Prices of tasks, which all take nothing."""
    count = tasks.used[TASKS]
    return TaskPrices(np.zeros(count, np.int64), np.zeros(count, np.int64), np.full(count, -1))


@compiled
def price_tasks(table: PriceTable, issue: Ints, tasks: OpTasks, prices: TaskPrices) -> None:
    """Writes what computing and assembling take. Messages take no time in a lane. `issue` is, by
    device, that of every operator and last that of an assembly."""
    kind, device, operator, nbytes = tasks.kind, tasks.device, tasks.operator, tasks.nbytes
    flops, itemsize, taken = tasks.flops, tasks.itemsize, tasks.taken
    duration, issued, assembly = prices.duration, prices.issue, issue.shape[1] - 1
    for task in range(tasks.used[TASKS]):
        if kind[task] == COMPUTE:
            seconds, _ = compute_price(
                table, operator[task], device[task], flops[task], nbytes[task], itemsize[task]
            )
            duration[task] = whole_nanoseconds(seconds)
            issued[task] = issue[device[task], operator[task]]
        elif kind[task] == ASSEMBLE:
            seconds, _ = assembly_price(table, device[task], taken[task], nbytes[task])
            duration[task] = whole_nanoseconds(seconds)
            issued[task] = issue[device[task], assembly]


# Routes

PATTERN, SIZE, FIRST, COUNT, MEMBERS = range(5)  # of what is known of a group


class RouteTable(NamedTuple):
    """What messages travel on: a line for every pair of devices, then those of groups."""

    lines: Lines
    alpha: Floats  # by line: seconds that a collective takes
    beta: Floats  # and per byte
    group: Ints  # what is known of groups, one after another
    at: Ints  # where that of a group begins, by a hash of it, or the next free place; or -1


def pair_routes(lines: Lines) -> RouteTable:
    """The routes between pairs of devices."""
    none = np.zeros(len(lines.lag))
    return RouteTable(lines, none, none, np.zeros(0, np.int64), np.full(64, -1))


def with_group(
    table: RouteTable,
    pattern: int,
    group: Sequence[int],
    lines: Lines,
    costs: Sequence[Sequence[float]],
) -> RouteTable:
    """The table with the lines of a group, one for each algorithm; it costs (seconds, per byte)."""
    old, at, where = table.lines, table.at, len(table.group)
    start = np.concatenate([old.start, lines.start[1:] + old.start[-1]])
    lag, drag, link, pace = (
        np.concatenate([getattr(old, name), getattr(lines, name)])
        for name in ("lag", "drag", "link", "pace")
    )
    alpha, beta = (
        np.append(known, [cost[k] for cost in costs])
        for k, known in enumerate((table.alpha, table.beta))
    )
    mine = np.array([pattern, len(group), len(old.lag), len(costs), *group], np.int64)
    groups = np.concatenate([table.group, mine])
    if 2 * np.count_nonzero(at >= 0) >= len(at):
        places = at[at >= 0]
        at = np.full(2 * len(at), -1)
        for place in places.tolist():
            members = groups[place + MEMBERS :][: groups[place + SIZE]]
            at[_find(groups, at, groups[place + PATTERN], members)] = place
    at[_find(groups, at, pattern, mine[MEMBERS:])] = where
    return RouteTable(Lines(lag, drag, start, link, pace), alpha, beta, groups, at)


@compiled
def _find(group, at, pattern, members):  # type: ignore[no-untyped-def]
    """Where in `at` a group is, or the free place where it belongs. All are int64 columns."""
    found = mixed(np.int64(0), pattern)
    for member in members:
        found = mixed(found, member + 1)
    row = found & (len(at) - 1)
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
def route_messages(table: RouteTable, tasks: OpTasks, prices: TaskPrices) -> bool:
    """Writes the lines of messages, of all that a group has the one that is cheapest for it;
    whether all groups are known."""
    known, devices = True, len(tasks.parent)
    for task in range(tasks.used[TASKS]):
        if tasks.kind[task] == TRANSFER:
            prices.line[task] = tasks.device[task] * devices + tasks.peer[task]
        elif tasks.kind[task] == COLLECTIVE:
            prices.line[task] = _group_line(table, tasks, task)
            known = known and prices.line[task] >= 0
    return known


@compiled
def _group_line(table, tasks, task):  # type: ignore[no-untyped-def]
    """The cheapest line of a collective, or -1 if its group is not known."""
    number = tasks.group[task]
    members = tasks.member[tasks.group_start[number] : tasks.group_start[number + 1]]
    place = table.at[_find(table.group, table.at, tasks.pattern[task], members)]
    if place < 0:
        return -1
    first = table.group[place + FIRST]
    end = first + table.group[place + COUNT]
    return cheapest_line(table.alpha, table.beta, first, end, tasks.nbytes[task])


def unknown_groups(tasks: OpTasks, prices: TaskPrices) -> set[tuple[int, tuple[int, ...]]]:
    """The (pattern, group) of all collectives that have no line."""
    together = tasks.kind[: tasks.used[TASKS]] == COLLECTIVE
    found = set()
    for task in np.flatnonzero(together & (prices.line < 0)):
        low, high = tasks.group_start[tasks.group[task] : tasks.group[task] + 2]
        found.add((int(tasks.pattern[task]), tuple(tasks.member[low:high].tolist())))
    return found
