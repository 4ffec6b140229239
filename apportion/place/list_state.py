"""list_state: what all list schedulers share: when a node could start on a device, and the record
of the nodes that they have scheduled so far.

In: a PlacementProblem, perhaps with units joined. Out: ListCosts, an empty ListState, and the
compiled parts `ready_on` (when all that a node reads is at a device) and `run_on` (put it there).

A list scheduler takes one node after the other and puts it behind those that the device has
already. The first node of a unit decides the device of the whole unit, so it is judged by the time
and memory of all of it: `extra` is what the unit takes longer on a device than on its fastest.
Messages take their turns on links as in step_time.py, in the order in which they are decided, and
what a device has received once it keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, compiled_part, offsets
from apportion.place.placement_problem import (
    NEVER,
    PlacementColumns,
    PlacementLinks,
    PlacementProblem,
)
from apportion.place.unit_memory import unit_bytes

FAR = 1 << 60  # later than any tick


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
    contend: int  # 1: messages wait for links; 0: links are as many as one likes


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
    c = problem.columns
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
    return ListCosts(
        group, allowed, took, np.maximum(took - fastest[:, None], 0), need,
        offsets(np.bincount(c.reader, minlength=len(c.unit))), outputs[order],
        offsets(np.bincount(group, minlength=count)), np.argsort(group, kind="stable"),
        int(contend),
    )  # fmt: skip


def empty_state(problem: PlacementProblem, costs: ListCosts) -> ListState:
    """Nothing is scheduled."""
    devices, links = len(problem.devices), max(problem.links.links, 1)
    nodes, outputs = len(costs.group), len(problem.columns.source)
    return ListState(
        np.full(len(costs.need), -1), np.full(nodes, -1), np.zeros(devices, np.int64),
        np.zeros(links, np.int64), np.full((outputs, devices), -1), np.zeros(devices, np.int64),
        np.zeros(devices, np.int64),
    )  # fmt: skip


@compiled_part
def received(
    c: PlacementColumns, links: PlacementLinks, costs: ListCosts, state: ListState,
    output: int, device: int, send: int,
) -> int:  # fmt: skip
    """When an output that is made is at a device; with `send` it takes its turn on the links."""
    source = c.source[output]
    here = state.place[costs.group[source]]
    if here == device:
        return state.end[source]
    if state.arrival[output, device] >= 0:
        return state.arrival[output, device]
    devices = len(state.free)
    route = here * devices + device
    begin = state.end[source]
    arrives = begin
    for hop in range(links.hop_start[route], links.hop_start[route + 1]):
        link = links.hop_link[hop]
        turn = begin
        if costs.contend:
            turn = max(begin, state.link_free[link])
        passed = turn + np.int64(np.rint(c.send[output] * links.hop_pace[hop]))
        if send:
            state.link_free[link] = max(state.link_free[link], passed + links.link_hold)
        arrives = max(arrives, passed)
    beyond = links.lag[here, device] + links.drag[here, device] * c.send[output]
    arrives += np.int64(np.rint(beyond))
    if send:
        state.arrival[output, device] = arrives
        if links.once:
            for other in range(devices):
                state.arrival[output, other] = arrives
    return arrives


@compiled
def ready_on(
    c: PlacementColumns, links: PlacementLinks, costs: ListCosts, state: ListState,
    node: int, device: int,
) -> int:  # fmt: skip
    """When all that a node reads could be at a device; all of it is made."""
    ready = np.int64(0)
    for at in range(costs.input_start[node], costs.input_start[node + 1]):
        ready = max(ready, received(c, links, costs, state, costs.inputs[at], device, 0))
    return ready


@compiled
def run_on(
    c: PlacementColumns, links: PlacementLinks, costs: ListCosts, state: ListState,
    node: int, device: int, earliest: int,
) -> None:  # fmt: skip
    """Puts a node on a device behind what is there, not before `earliest`; and its group with it,
    if no device has that yet."""
    group = costs.group[node]
    if state.place[group] < 0:
        take(costs, state, group, device)
    ready = max(earliest, state.free[device])
    for at in range(costs.input_start[node], costs.input_start[node + 1]):
        ready = max(ready, received(c, links, costs, state, costs.inputs[at], device, 1))
    took = c.duration[node, device]
    state.end[node] = ready + took
    state.free[device] = ready + took + (links.device_hold if took > 0 else 0)


@compiled_part
def take(costs: ListCosts, state: ListState, group: int, device: int) -> None:
    """A group goes to a device."""
    state.place[group] = device
    state.used[device] += costs.need[group]
    state.load[device] += costs.took[group, device]


@compiled_part
def fits(costs: ListCosts, state: ListState, room: Floats, group: int, device: int) -> bool:
    """Whether a device can run a group, and has room for it."""
    return costs.allowed[group, device] and (state.used[device] + costs.need[group] <= room[device])


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
