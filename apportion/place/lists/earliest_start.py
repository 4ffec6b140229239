"""earliest_start: schedule the pair of a ready node and a device that can start first; the loop
of m-ETF and m-SCT.

In: ListCosts, an order that decides between equal starts, favourite children or none, and the
bytes that each device may take. Out: the device of every group.

Searching all pairs at every step would take n times k for each node. Instead each device has heaps:

    ahead    nodes that are ready later than the device is free, by when they are ready
    likely   the same nodes, by when they are ready plus what they take longer on this device
    waiting  nodes that are ready before the device is free: they all could start then
    urgent   all nodes, by when every device could run them (m-SCT only)

A node moves from `ahead` to `waiting` once at most. When a node is ready can only become later, as
links fill up, so what is first in a heap is computed again before it is believed. Entries of nodes
that have been scheduled elsewhere are dropped when they come first.

The start counts together with `extra`, what a unit takes longer on a device than on its fastest:
for equal devices, of which alone Baechi's paper speaks, that is nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, compiled_part, pop, push
from apportion.place.lists.list_state import (
    FAR,
    ListCosts,
    ListState,
    empty_state,
    fits,
    least_excess,
    pending_inputs,
    ready_on,
    run_on,
    settle,
    take,
)
from apportion.place.placement_problem import PlacementProblem

AHEAD, LIKELY, WAITING, URGENT = 0, 1, 2, 3
LAST = 1 << 60  # a rank after all


class DeviceHeaps(NamedTuple):
    """Four heaps for each device, of rows (key, rank of a node), and how many rows each has."""

    rows: Ints  # k x 4 x room x 2
    sizes: Ints  # k x 4
    stage: Ints  # n x k: 1 where the node is ahead, 2 where it waits
    wake: Ints  # k: until when the device waits for the favourite child of its last node
    child: Ints  # k: which one that is, or -1


def earliest_start(
    problem: PlacementProblem,
    costs: ListCosts,
    order: Ints,
    room: Floats,
    favourite: Ints | None = None,
) -> ListState:
    """The schedule; `order` has all nodes, those first that win when starts are equal."""
    state, n, k = empty_state(problem, costs), len(order), len(problem.devices)
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    heaps = DeviceHeaps(
        np.empty((k, 4, 2 * n + 2, 2), np.int64), np.zeros((k, 4), np.int64),
        np.zeros((n, k), np.int64), np.zeros(k, np.int64), np.full(k, -1),
    )  # fmt: skip
    child = np.full(0, -1) if favourite is None else favourite
    _schedule(
        costs, state, heaps, pending_inputs(problem, costs), order,
        rank, child, room,
    )  # fmt: skip
    settle(costs, state)
    return state


@compiled
def _schedule(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, pending: Ints, order: Ints, rank: Ints, favourite: Ints, room: Floats,
) -> None:  # fmt: skip
    n, devices = len(order), len(room)
    for node in range(n):
        if pending[node] == 0 and not costs.given[node]:
            _enter(costs, state, heaps, rank, len(favourite), node)
    for _ in range(n - costs.given.sum()):
        best, best_key, best_rank, at = -1, FAR, LAST, -1
        while best < 0:
            for device in range(devices):
                _move(costs, state, heaps, order, device)
                for heap in range(LIKELY, URGENT + 1):
                    key, first = _first(
                        costs, state, heaps, order, rank, room, len(favourite), device, heap
                    )
                    if key < best_key or (key == best_key and first < best_rank):
                        best, best_key, best_rank, at = device, key, first, heap
                key, first = _child(costs, state, heaps, rank, room, device)
                if key < best_key or (key == best_key and first < best_rank):
                    best, best_key, best_rank, at = device, key, first, -1
        node = order[best_rank]
        earliest = np.int64(0)
        if at in (LIKELY, WAITING):
            earliest = heaps.wake[best]
        run_on(costs, state, node, best, earliest)
        if len(favourite):
            _stay_awake(costs, state, heaps, favourite, node, best)
        for output in range(costs.output_start[node], costs.output_start[node + 1]):
            for reader in range(costs.reader_start[output], costs.reader_start[output + 1]):
                later = costs.reader[reader]
                pending[later] -= 1
                if pending[later] == 0:
                    _enter(costs, state, heaps, rank, len(favourite), later)


@compiled
def _add(heaps: DeviceHeaps, device: int, heap: int, key: int, item: int) -> None:
    push(heaps.rows[device, heap], heaps.sizes[device, heap], key, item)
    heaps.sizes[device, heap] += 1


@compiled
def _drop(heaps: DeviceHeaps, device: int, heap: int) -> None:
    pop(heaps.rows[device, heap], heaps.sizes[device, heap])
    heaps.sizes[device, heap] -= 1


@compiled
def _enter_on(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, rank: Ints, node: int, device: int,
) -> int:  # fmt: skip
    """A node may run on a device from now on; when that has all that the node reads."""
    ready: int = ready_on(costs, state, node, device)
    heaps.stage[node, device] = 1
    _add(heaps, device, AHEAD, ready, rank[node])
    _add(heaps, device, LIKELY, ready + costs.extra[costs.group[node], device], rank[node])
    return ready


@compiled
def _enter(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, rank: Ints, urgency: int, node: int,
) -> None:  # fmt: skip
    """All that a node reads is scheduled."""
    group, everywhere = costs.group[node], np.int64(0)
    for device in range(len(state.free)):
        if costs.allowed[group, device] and (
            state.place[group] < 0 or state.place[group] == device
        ):
            ready = _enter_on(costs, state, heaps, rank, node, device)
            everywhere = max(everywhere, ready)
    if urgency:
        for device in range(len(state.free)):
            if heaps.stage[node, device]:
                _add(heaps, device, URGENT, everywhere, rank[node])


@compiled_part
def _gone(costs: ListCosts, state: ListState, node: int, device: int) -> bool:
    """Whether a node needs this device no longer."""
    place = state.place[costs.group[node]]
    found: bool = state.end[node] >= 0 or (place >= 0 and place != device)
    return found


@compiled
def _move(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, order: Ints, device: int,
) -> None:  # fmt: skip
    """Nodes that are ready by the time at which a device is free wait for it."""
    rows = heaps.rows[device, AHEAD]
    while heaps.sizes[device, AHEAD] and rows[0, 0] <= state.free[device]:
        item = rows[0, 1]
        node = order[item]
        _drop(heaps, device, AHEAD)
        if _gone(costs, state, node, device) or heaps.stage[node, device] != 1:
            continue
        ready = ready_on(costs, state, node, device)
        if ready > state.free[device]:
            _add(heaps, device, AHEAD, ready, item)
        else:
            heaps.stage[node, device] = 2
            _add(heaps, device, WAITING, costs.extra[costs.group[node], device], item)


@compiled
def _first(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, order: Ints, rank: Ints, room: Floats, urgency: int, device: int,
    heap: int,
) -> tuple[int, int]:  # fmt: skip
    """Key and rank of what a heap of a device has to offer; FAR if nothing."""
    awake = heaps.wake[device] > state.free[device]
    if heap == URGENT and not awake:
        return FAR, LAST
    rows = heaps.rows[device, heap]
    while heaps.sizes[device, heap]:
        key, item = rows[0, 0], rows[0, 1]
        node = order[item]
        group = costs.group[node]
        stale = heap == LIKELY and heaps.stage[node, device] != 1
        if _gone(costs, state, node, device) or stale:
            _drop(heaps, device, heap)
            continue
        if state.place[group] < 0 and not fits(costs, state, room, group, device):
            _drop(heaps, device, heap)
            _close(costs, state, heaps, rank, room, urgency, node)
            continue
        extra = costs.extra[group, device]
        if heap == WAITING:
            return max(state.free[device], heaps.wake[device]) + extra, item
        ready = ready_on(costs, state, node, device)
        if heap == URGENT:
            return max(state.free[device], max(key, ready)) + extra, item
        if ready + extra > key:
            _drop(heaps, device, heap)
            _add(heaps, device, heap, ready + extra, item)
            continue
        return max(max(ready, state.free[device]), heaps.wake[device]) + extra, item
    return FAR, LAST


@compiled
def _close(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, rank: Ints, room: Floats, urgency: int, node: int,
) -> None:  # fmt: skip
    """A node's group does not fit on some device. If it fits on none, it goes where it does least
    harm, and those of its nodes that are ready with it."""
    group = costs.group[node]
    for device in range(len(room)):
        if fits(costs, state, room, group, device):
            return
    device = least_excess(costs, state, room, group)
    take(costs, state, group, device)
    for at in range(costs.node_start[group], costs.node_start[group + 1]):
        other = costs.nodes[at]
        entered = False
        for any_device in range(len(room)):
            entered = entered or heaps.stage[other, any_device] > 0
        if entered and state.end[other] < 0:
            ready = _enter_on(costs, state, heaps, rank, other, device)
            if urgency:
                _add(heaps, device, URGENT, ready, rank[other])


@compiled
def _child(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, rank: Ints, room: Floats, device: int,
) -> tuple[int, int]:  # fmt: skip
    """Key and rank of the favourite child that a device waits for, if that can run."""
    node = heaps.child[device]
    if node < 0 or heaps.wake[device] <= state.free[device]:
        return FAR, LAST
    group = costs.group[node]
    if _gone(costs, state, node, device) or heaps.stage[node, device] == 0:
        return FAR, LAST
    if state.place[group] < 0 and not fits(costs, state, room, group, device):
        return FAR, LAST
    ready = max(ready_on(costs, state, node, device), state.free[device])
    return ready + costs.extra[group, device], rank[node]


@compiled
def _stay_awake(
    costs: ListCosts, state: ListState,
    heaps: DeviceHeaps, favourite: Ints, node: int, device: int,
) -> None:  # fmt: skip
    """A device that has run a node waits for its favourite child, for as long as the message that
    this saves would take: until then no other device can have it."""
    if heaps.child[device] == node:
        heaps.child[device], heaps.wake[device] = -1, 0
    child = favourite[node]
    if child < 0 or _gone(costs, state, child, device):
        return
    group = costs.group[child]
    if not costs.allowed[group, device]:
        return
    until = np.int64(FAR)
    for at in range(costs.input_start[child], costs.input_start[child + 1]):
        output = costs.inputs[at]
        if costs.source[output] == node:
            for other in range(len(state.free)):
                if other != device and costs.allowed[group, other]:
                    slow = costs.lag[device, other] + costs.drag[device, other] * costs.send[output]
                    route, most = device * len(state.free) + other, 0.0
                    for hop in range(costs.hop_start[route], costs.hop_start[route + 1]):
                        most = max(most, costs.send[output] * costs.hop_pace[hop])
                    until = min(until, state.end[node] + np.int64(np.rint(slow + most)))
    if until < FAR:
        heaps.child[device], heaps.wake[device] = child, until
