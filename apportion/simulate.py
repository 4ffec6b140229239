"""simulate: TaskGraph + Cluster + CostModel -> predicted Timeline. Integer nanoseconds throughout.

A device's lane runs its tasks in the order of their indices, each when the one before and all it
depends on have ended. So a lane is nothing but one more dependency per task, and only links are
left to contend for:

    COMPUTE, ASSEMBLE  start the moment their last predecessor ends
    TRANSFER           starts when, besides, all links of its route are free, and holds them all to
                       its end. Whoever became ready first comes first, equals by index; one that
                       must wait does not keep back later ones that need none of its busy links.

Where communication burns the device (`Cluster.communication_on_device`) a transfer also stands in
the lanes of its sender and its receiver. Every predecessor has a smaller index, so the unfinished
task with the smallest index can always run once the links are free: there is no deadlock.

`schedule` is the specification. `schedule_compiled` is its twin for speed, equal bit for bit.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.cluster import Cluster
from apportion.cost import CostModel, nanoseconds
from apportion.tasks import TRANSFER, Ints, TaskGraph
from apportion.timeline import SIMULATED, Timeline, timeline

Times = tuple[Ints, Ints]
"""Start and end of every task."""


class Network(NamedTuple):  # numba takes no dataclass
    """What the two schedulers read: precedence, durations and routes, in columns."""

    links: int
    duration: Ints  # n
    moves: Ints  # n: 1 for a TRANSFER
    pending: Ints  # n: how many predecessors
    next_start: Ints  # n + 1: offsets into next
    next: Ints  # successors of each task
    route_start: Ints  # n + 1: offsets into route; empty unless a TRANSFER
    route: Ints  # links


def simulate(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Timeline:
    """The Timeline that the Cluster would show; ValueError if it has too few devices."""
    start, end = schedule_compiled(network(tasks, cluster, cost))
    on_device = cluster.communication_on_device
    return timeline(tasks, start, end, source=SIMULATED, communication_on_device=on_device)


def network(tasks: TaskGraph, cluster: Cluster, cost: CostModel) -> Network:
    """Precedence of dependencies and lanes together, and the route of every transfer."""
    duration = nanoseconds(tasks, cluster, cost)
    n = len(tasks)
    before, after = _lanes(tasks, cluster.communication_on_device)
    before = np.concatenate([tasks.dep, before])
    after = np.concatenate([np.repeat(np.arange(n), np.diff(tasks.dep_start)), after])
    route_start, route = _routes(tasks, cluster)
    return Network(
        links=len(cluster.links),
        duration=duration,
        moves=(tasks.kind == TRANSFER).astype(np.int64),
        pending=np.bincount(after, minlength=n),
        next_start=_offsets(np.bincount(before, minlength=n)),
        next=after[np.argsort(before, kind="stable")],
        route_start=route_start,
        route=route,
    )


def _lanes(tasks: TaskGraph, on_device: bool) -> tuple[Ints, Ints]:
    """Pairs of tasks that follow each other in a lane."""
    index = np.arange(len(tasks))
    moving = tasks.kind == TRANSFER
    here = np.ones(len(tasks), bool) if on_device else ~moving
    there = moving & on_device
    lane = np.concatenate([tasks.device[here], tasks.peer[there]])
    task = np.concatenate([index[here], index[there]])
    order = np.lexsort((task, lane))
    lane, task = lane[order], task[order]
    follows = np.flatnonzero(lane[1:] == lane[:-1])
    return task[follows], task[follows + 1]


def _routes(tasks: TaskGraph, cluster: Cluster) -> tuple[Ints, Ints]:
    moving = tasks.kind == TRANSFER
    ends = zip(tasks.device[moving].tolist(), tasks.peer[moving].tolist(), strict=True)
    routes = [cluster.routes[a][b] for a, b in ends]
    lengths = np.zeros(len(tasks), np.int64)
    lengths[moving] = [len(route) for route in routes]
    return _offsets(lengths), np.array([k for route in routes for k in route], np.int64)


def _offsets(counts: Ints) -> Ints:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


# The readable one


def schedule(net: Network) -> Times:
    """Start and end of every task."""
    n = len(net.duration)
    duration, pending = net.duration.tolist(), net.pending.tolist()
    successors, routes = _rows(net.next_start, net.next), _rows(net.route_start, net.route)
    moves = net.moves.tolist()
    start = [-1] * n
    busy = [False] * net.links
    parked: list[list[tuple[int, int]]] = [[] for _ in range(net.links)]
    running: list[tuple[int, int]] = []  # heap of (end, task)
    now, freed = 0, set[int]()
    ready = [task for task in range(n) if not pending[task]]
    while True:
        starting = [task for task in ready if not moves[task]]
        arrived = [(now, task) for task in ready if moves[task]]
        if arrived or freed:
            starting += _dispatch(arrived, freed, parked, busy, routes)
        for task in starting:
            start[task] = now
            heappush(running, (now + duration[task], task))
        if not running:
            break
        now, ready, freed = running[0][0], [], set()
        while running and running[0][0] == now:
            for link in routes[running[0][1]]:
                busy[link] = False
                freed.add(link)
            for task in successors[heappop(running)[1]]:
                pending[task] -= 1
                if not pending[task]:
                    ready.append(task)
    assert all(time >= 0 for time in start), "a task never ran: the order is not topological"
    started = np.array(start, np.int64)
    return started, started + net.duration


def _dispatch(
    arrived: list[tuple[int, int]],
    freed: set[int],
    parked: list[list[tuple[int, int]]],
    busy: list[bool],
    routes: list[list[int]],
) -> list[int]:
    """Transfers that start now; the others are parked, each on one link that keeps it waiting.

    Of those parked on a freed link only the first is a candidate: if it takes the link, the rest
    cannot start, and if another link stops it, it is parked there and the next one's turn comes.
    """
    starting = []
    queue = [(since, task, -1) for since, task in arrived]
    queue += [(*parked[link][0], link) for link in freed if parked[link]]
    heapify(queue)
    while queue:
        since, task, link = heappop(queue)
        if link >= 0:
            if busy[link]:
                continue
            heappop(parked[link])
        blocking = next((k for k in routes[task] if busy[k]), -1)
        if blocking >= 0:
            heappush(parked[blocking], (since, task))
        else:
            starting.append(task)
            for k in routes[task]:
                busy[k] = True
        if link >= 0 and parked[link]:
            heappush(queue, (*parked[link][0], link))
    return starting


def _rows(offsets: Ints, items: Ints) -> list[list[int]]:
    edges, flat = offsets.tolist(), items.tolist()
    return [flat[a:b] for a, b in pairwise(edges)]


# The fast one: the same steps on arrays. A heap is a stretch of an array of tasks, ordered by
# (key[task], task); a link's parked transfers are the stretch of `parked` from parked_start[link].


class _Waiting(NamedTuple):
    """What `_dispatch_compiled` writes to."""

    since: Ints  # n: when a TRANSFER became ready
    via: Ints  # n: the freed link whose first it is, -1 for one that has just become ready
    queue: Ints  # n: heap of candidates
    busy: Ints  # links: 1 while held
    parked_start: Ints  # links + 1
    parked_size: Ints  # links
    parked: Ints


def schedule_compiled(net: Network) -> Times:
    """What `schedule` gives, faster."""
    n = len(net.duration)
    waiting = _Waiting(
        since=np.zeros(n, np.int64),
        via=np.full(n, -1),
        queue=np.empty(n, np.int64),
        busy=np.zeros(net.links, np.int64),
        parked_start=_offsets(np.bincount(net.route, minlength=net.links)),
        parked_size=np.zeros(net.links, np.int64),
        parked=np.empty(len(net.route), np.int64),
    )
    start: Ints = _run(net, waiting, net.pending.copy())
    assert (start >= 0).all(), "a task never ran: the order is not topological"
    return start, start + net.duration


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _run(net: Network, waiting: _Waiting, pending: Ints) -> Ints:
    n = len(pending)
    start, end = np.full(n, -1), np.zeros(n, np.int64)
    running, size = np.empty(n, np.int64), 0  # heap by end
    ready, starting = np.empty(n, np.int64), np.empty(n, np.int64)
    freed, released = np.empty(net.links, np.int64), 0
    roots = np.flatnonzero(pending == 0)
    count, now = len(roots), 0
    ready[:count] = roots
    while True:
        begun = _dispatch_compiled(net, waiting, now, ready[:count], freed[:released], starting)
        for task in starting[:begun]:
            start[task], end[task] = now, now + net.duration[task]
            _push(running, 0, size, end, task)
            size += 1
        if size == 0:
            return start
        now, count, released = end[running[0]], 0, 0
        while size and end[running[0]] == now:
            done = _pop(running, 0, size, end)
            size -= 1
            for link in net.route[net.route_start[done] : net.route_start[done + 1]]:
                waiting.busy[link] = 0
                freed[released] = link
                released += 1
            for task in net.next[net.next_start[done] : net.next_start[done + 1]]:
                pending[task] -= 1
                if pending[task] == 0:
                    ready[count] = task
                    count += 1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _dispatch_compiled(
    net: Network, waiting: _Waiting, now: int, ready: Ints, freed: Ints, starting: Ints
) -> int:
    """Writes the tasks that start now to `starting` and returns how many."""
    begun, size = 0, 0
    for task in ready:
        if net.moves[task]:
            waiting.since[task], waiting.via[task] = now, -1
            _push(waiting.queue, 0, size, waiting.since, task)
            size += 1
        else:
            starting[begun] = task
            begun += 1
    for link in freed:
        size += _first_parked(waiting, link, size)
    while size:
        task = _pop(waiting.queue, 0, size, waiting.since)
        size -= 1
        link = waiting.via[task]
        if link >= 0:
            if waiting.busy[link]:
                continue
            at, held = waiting.parked_start[link], waiting.parked_size[link]
            _pop(waiting.parked, at, held, waiting.since)
            waiting.parked_size[link] -= 1
        if _take_links(net, waiting, task):
            starting[begun] = task
            begun += 1
        if link >= 0:
            size += _first_parked(waiting, link, size)
    return begun


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _first_parked(waiting: _Waiting, link: int, size: int) -> int:
    """Makes the first transfer parked on `link` a candidate; 0 if there is none, else 1."""
    if waiting.parked_size[link] == 0:
        return 0
    task = waiting.parked[waiting.parked_start[link]]
    waiting.via[task] = link
    _push(waiting.queue, 0, size, waiting.since, task)
    return 1


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _take_links(net: Network, waiting: _Waiting, task: int) -> bool:
    """Holds all links of the transfer, or parks it on the first busy one."""
    route = net.route[net.route_start[task] : net.route_start[task + 1]]
    for link in route:
        if waiting.busy[link]:
            at, held = waiting.parked_start[link], waiting.parked_size[link]
            _push(waiting.parked, at, held, waiting.since, task)
            waiting.parked_size[link] += 1
            return False
    for link in route:
        waiting.busy[link] = 1
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _push(heap: Ints, at: int, size: int, key: Ints, task: int) -> None:
    """Adds `task` to the heap heap[at : at + size]."""
    hole = size
    while hole > 0:
        above = (hole - 1) // 2
        if _precedes(key, heap[at + above], task):
            break
        heap[at + hole] = heap[at + above]
        hole = above
    heap[at + hole] = task


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _pop(heap: Ints, at: int, size: int, key: Ints) -> int:
    """Takes the first task from the heap heap[at : at + size]."""
    first, last, hole = heap[at], heap[at + size - 1], 0
    while 2 * hole + 1 < size - 1:
        below = 2 * hole + 1
        if below + 1 < size - 1 and _precedes(key, heap[at + below + 1], heap[at + below]):
            below += 1
        if _precedes(key, last, heap[at + below]):
            break
        heap[at + hole] = heap[at + below]
        hole = below
    heap[at + hole] = last
    return int(first)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _precedes(key: Ints, a: int, b: int) -> bool:
    return bool(key[a] < key[b] or (key[a] == key[b] and a < b))
