"""list_state: what all list schedulers share: when a node could start on a device, and the record
of the nodes that they have scheduled so far.

In: a PlacementProblem, perhaps with units joined. Out: ListCosts, an empty ListState, and the
compiled parts `ready_on` (when all that a node reads is at a device) and `run_on` (put it there).

A list scheduler takes one node after the other and puts it behind those that the device has
already. The first node of a unit decides the device of the whole unit, so it is judged by the time
and memory of all of it: `extra` is what the unit takes longer on a device than on its fastest.
Parameters and whatever else a unit makes from nothing decide nothing: they are given, and go where
the unit's first node goes that reads something; until then they are as good as on any device.
Messages take their turns on links as in step_time.py, in the order in which they are decided, and
what a device has received once it keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, compiled_part, offsets
from apportion.place.lists.path_levels import mean_duration, mean_transfer
from apportion.place.lists.unit_memory import unit_bytes
from apportion.place.placement_problem import (
    NEVER,
    PlacementProblem,
)

FAR = 1 << 60  # later than any tick
SHORT = 0.01  # of a group's time is hardly any


class ListCosts(NamedTuple):
    """What is known before the first node is scheduled: g groups of units that stay together."""

    group: Ints  # n: the group of the node
    allowed: Bools  # g x k
    took: Ints  # g x k: ticks of all nodes
    extra: Ints  # g x k: ticks beyond those on the fastest device
    need: Ints  # g: bytes
    input_start: Ints  # n + 1: offsets into inputs
    inputs: Ints  # outputs that the node reads
    node_start: Ints  # g + 1: offsets into nodes
    nodes: Ints  # the nodes of each group
    given: Ints  # n: 1 for nodes that are there from the start, such as parameters
    contend: int  # 1: messages wait for links; 0: links are as many as one likes
    tie_start: Ints  # g + 1: offsets into ties
    tie: Ints  # groups that a group sends to or receives from
    tie_ticks: Floats  # what all messages between the two take, one after the other
    # What follows is of the problem's columns and links, by the same names.
    duration: Ints
    source: Ints
    send: Floats
    output_start: Ints
    reader_start: Ints
    reader: Ints
    once: int
    device_hold: int
    link_hold: int
    hop_start: Ints
    hop_link: Ints
    hop_pace: Floats
    lag: Floats
    drag: Floats


class ListState(NamedTuple):
    """What is scheduled so far."""

    place: Ints  # g: device, or -1
    end: Ints  # n: tick, or -1
    free: Ints  # k: when each device is free again
    link_free: Ints
    arrival: Ints  # m x k: when the output is at the device, or -1
    used: Ints  # k: bytes of the groups that are there
    load: Ints  # k: ticks of the groups that are there


def list_costs(
    problem: PlacementProblem, joined: Ints | None = None, contend: bool = True
) -> ListCosts:
    """The costs of units, or of groups of them: `joined` has the group of each unit."""
    c, links = problem.columns, problem.links
    join = np.arange(problem.units) if joined is None else joined
    count = int(join.max(initial=-1)) + 1
    group = np.ascontiguousarray(join[c.unit], np.int64)
    allowed = np.ones((count, len(problem.devices)), np.bool_)
    np.logical_and.at(allowed, join, c.allowed)
    took = np.zeros((count, len(problem.devices)), np.int64)
    np.add.at(took, group, np.minimum(c.duration, NEVER >> 10))
    fastest = np.where(allowed, took, FAR).min(axis=1, initial=FAR)
    need = np.bincount(join, unit_bytes(problem), count).astype(np.int64)
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    order = np.argsort(c.reader, kind="stable")
    given = _given(problem, group, need)
    tie_start, tie, tie_ticks = _ties(problem, group, count)
    return ListCosts(
        group, allowed, took, np.maximum(took - fastest[:, None], 0), need,
        offsets(np.bincount(c.reader, minlength=len(c.unit))), outputs[order],
        offsets(np.bincount(group, minlength=count)), np.argsort(group, kind="stable"),
        given, int(contend), tie_start, tie, tie_ticks, c.duration, c.source, c.send,
        c.output_start, c.reader_start, c.reader, links.once, links.device_hold, links.link_hold,
        links.hop_start, links.hop_link, links.hop_pace, links.lag, links.drag,
    )  # fmt: skip


def _given(problem: PlacementProblem, group: Ints, need: Ints) -> Ints:
    """n: 1 for nodes that read nothing, if they take hardly any time of their group's and others of
    it read something in the forward pass; or if they take no time and need no room."""
    c = problem.columns
    bare = np.bincount(c.reader, minlength=len(group)) == 0
    took = mean_duration(problem)
    reads = np.bincount(group, ~bare & (c.backward == 0), len(need)) > 0
    short = took <= SHORT * np.bincount(group, took, len(need))[group]
    nothing = (took == 0) & (need[group] == 0)
    found: Ints = (bare & ((reads[group] & short) | nothing)).astype(np.int64)
    return found


def _ties(problem: PlacementProblem, group: Ints, count: int) -> tuple[Ints, Ints, Floats]:
    """The messages between each pair of groups, in both directions, by mean times; an output counts
    once for each group that reads it."""
    c = problem.columns
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    one, two = group[c.source[outputs]], group[c.reader]
    apart = one != two
    one, two, outputs = one[apart], two[apart], outputs[apart]
    first = np.unique(outputs * count + two, return_index=True)[1]
    one, two, ticks = one[first], two[first], mean_transfer(problem)[outputs[first]]
    pair, which = np.unique(np.append(one * count + two, two * count + one), return_inverse=True)
    total = np.bincount(which.ravel(), np.tile(ticks, 2), len(pair))
    return (
        offsets(np.bincount(pair // count, minlength=count)),
        pair % count,
        total.astype(np.float64),
    )


def pending_inputs(problem: PlacementProblem, costs: ListCosts) -> Ints:
    """n: of how many outputs each node waits for."""
    c = problem.columns
    waits = 1 - costs.given[np.repeat(c.source, np.diff(c.reader_start))]
    return np.bincount(c.reader, waits, len(c.unit)).astype(np.int64)


def empty_state(problem: PlacementProblem, costs: ListCosts) -> ListState:
    """Nothing is scheduled."""
    devices, links = len(problem.devices), max(problem.links.links, 1)
    outputs = len(problem.columns.source)
    return ListState(
        np.full(len(costs.need), -1), costs.given - 1, np.zeros(devices, np.int64),
        np.zeros(links, np.int64), np.full((outputs, devices), -1), np.zeros(devices, np.int64),
        np.zeros(devices, np.int64),
    )  # fmt: skip


@compiled_part
def received(costs: ListCosts, state: ListState, output: int, device: int, send: int) -> int:
    """When an output that is made is at a device; with `send` it takes its turn on the links."""
    source = costs.source[output]
    here = state.place[costs.group[source]]
    if here == device or here < 0:
        made: int = state.end[source]
        return made
    arrives: int = state.arrival[output, device]
    if arrives >= 0:
        return arrives
    devices = len(state.free)
    route = here * devices + device
    begin = state.end[source]
    arrives = begin
    for hop in range(costs.hop_start[route], costs.hop_start[route + 1]):
        link = costs.hop_link[hop]
        turn = begin
        if costs.contend:
            turn = max(begin, state.link_free[link])
        passed = turn + np.int64(np.rint(costs.send[output] * costs.hop_pace[hop]))
        if send:
            state.link_free[link] = max(state.link_free[link], passed + costs.link_hold)
        arrives = max(arrives, passed)
    beyond = costs.lag[here, device] + costs.drag[here, device] * costs.send[output]
    arrives += int(np.rint(beyond))
    if send:
        state.arrival[output, device] = arrives
        if costs.once:
            for other in range(devices):
                state.arrival[output, other] = arrives
    return arrives


@compiled
def ready_on(costs: ListCosts, state: ListState, node: int, device: int) -> int:
    """When all that a node reads could be at a device; all of it is made."""
    ready = 0
    for at in range(costs.input_start[node], costs.input_start[node + 1]):
        ready = max(ready, received(costs, state, costs.inputs[at], device, 0))
    return ready


@compiled
def run_on(costs: ListCosts, state: ListState, node: int, device: int, earliest: int) -> None:
    """Puts a node on a device behind what is there, not before `earliest`; and its group with it,
    if no device has that yet."""
    group = costs.group[node]
    if state.place[group] < 0:
        take(costs, state, group, device)
    ready = max(earliest, state.free[device])
    for at in range(costs.input_start[node], costs.input_start[node + 1]):
        ready = max(ready, received(costs, state, costs.inputs[at], device, 1))
    took = costs.duration[node, device]
    state.end[node] = ready + took
    state.free[device] = ready + took + (costs.device_hold if took > 0 else 0)


@compiled_part
def take(costs: ListCosts, state: ListState, group: int, device: int) -> None:
    """A group goes to a device."""
    state.place[group] = device
    state.used[device] += costs.need[group]
    state.load[device] += costs.took[group, device]


@compiled_part
def fits(costs: ListCosts, state: ListState, room: Floats, group: int, device: int) -> bool:
    """Whether a device can run a group, and has room for it."""
    if not costs.allowed[group, device]:
        return False
    found: bool = state.used[device] + costs.need[group] <= room[device]
    return found


def settle(costs: ListCosts, state: ListState) -> None:
    """Groups of given nodes alone, which need no room, go where most of their messages end."""
    for group in np.flatnonzero(state.place < 0):
        pull = np.zeros(len(state.free))
        for at in range(costs.tie_start[group], costs.tie_start[group + 1]):
            if state.place[costs.tie[at]] >= 0:
                pull[state.place[costs.tie[at]]] += costs.tie_ticks[at]
        state.place[group] = int(np.where(costs.allowed[group], pull, -1.0).argmax())


@compiled_part
def least_excess(costs: ListCosts, state: ListState, room: Floats, group: int) -> int:
    """Where a group that fits nowhere goes: the device that is then over its room by the least
    share of it."""
    best, least = -1, np.inf
    for device in range(len(room)):
        if costs.allowed[group, device]:
            total = state.used[device] + costs.need[group]
            over = (total - room[device]) / max(room[device], 1.0)
            if best < 0 or over < least:
                best, least = device, over
    return best
