"""priority_schedule: items that wait for lanes and links by priority -> when each starts and ends.

A part of simulate/, for steps whose messages overtake each other. In: a PriorityNetwork. Out: start
and end of every item, in integer nanoseconds. Where all is first come first served, schedule.py
gives the same with less work.

An item is ready at its release or when the last of its predecessors ends, whichever is later.

    work     waits for its lane. A lane that is free takes the ready item of the least rank, of
             equals the first, and is not interrupted
    message  waits for every link that it crosses, with an occupancy on each. A link that is free
             takes the ready message of the least priority, of equals the first. One that is more
             urgent, and becomes ready while a link serves another, gets it at the next slice: what
             the link has served and its credit are rounded up to whole slices, and the rest waits;
             an express message does not wait for the credit. A message starts when a link first
             turns to it, and ends its latency after the last link is done with it
    mark     waits for nothing more: it starts when it is ready, and ends its latency later

All that ends or becomes ready at one time does so before any lane or link takes the next item.

`schedule_by_priority` is the specification, `schedule_by_priority_compiled` its twin for speed.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, compiled, compiled_part, offsets, pop, push
from apportion.simulate.schedule import LinkSpans


class PriorityNetwork(NamedTuple):  # numba takes no dataclass
    """Items in columns: precedence, and what they wait for."""

    lanes: int
    links: int
    lane: Ints  # n: of work; -1 for a message and a mark
    rank: Ints  # n: of work in its lane, and of a message the priority
    duration: Ints  # n: of work, at least 1
    release: Ints  # n: not ready before
    latency: Ints  # n: of a message
    pending: Ints  # n: how many predecessors
    next_start: Ints  # n + 1: offsets into next
    next: Ints  # successors of each item
    hop_start: Ints  # n + 1: offsets into the hops; none for work
    hop_link: Ints
    hop_occupancy: Ints
    hop_slice: Ints  # how long a slice occupies the link; 0: all of it is one
    hop_credit: Ints  # how much of what follows the link has taken already
    express: Bools  # n


class PrioritySchedule(NamedTuple):
    """Start and end of every item, and when links served messages: a row for each stretch, in the
    order in which they ended."""

    start: Ints
    end: Ints
    use: LinkSpans


ENDS, SERVED, ARRIVES, RELEASED = range(4)


def schedule_by_priority(net: PriorityNetwork) -> PrioritySchedule:
    """When everything happens."""
    return _PriorityRun(net).schedule()


class _PriorityRun:
    """What happens and what waits, by the specification."""

    def __init__(self, net: PriorityNetwork) -> None:
        n = len(net.lane)
        self.net, self.rank = net, net.rank.tolist()
        self.lane, self.duration = net.lane.tolist(), net.duration.tolist()
        self.latency, self.pending = net.latency.tolist(), net.pending.tolist()
        self.after = _rows(net.next_start, net.next)
        self.hops = [range(a, b) for a, b in pairwise(net.hop_start.tolist())]
        self.owner = np.repeat(np.arange(n), np.diff(net.hop_start)).tolist()
        self.start, self.end = [-1] * n, [-1] * n
        self.left = [len(each) for each in self.hops]
        self.waits: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by lane
        self.queue: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by link: (priority, hop)
        self.busy = set[int]()  # lanes
        self.serving: dict[int, tuple[int, int, int]] = {}  # by link: hop, since when, until when
        self.rest = net.hop_occupancy.tolist()  # of hops
        self.events: list[tuple[int, int, int]] = []  # heap of (time, kind, which)
        self.use: list[tuple[int, int, int, int]] = []  # item, link, start, end

    def schedule(self) -> PrioritySchedule:
        """Lets everything happen."""
        for item, others in enumerate(self.net.pending.tolist()):
            if not others:
                self._becomes_ready(item, 0)
        now, events = 0, self.events
        while True:
            while events and events[0][0] == now:
                _, kind, which = heappop(events)
                self._happens(kind, which, now)
            self._lanes_take(now)
            self._links_take(now)
            if not events:
                break
            now = events[0][0]
        spans = LinkSpans(*np.array(self.use, np.int64).reshape(-1, 4).T)
        return _all_ran(np.array(self.start, np.int64), np.array(self.end, np.int64), spans)

    def _becomes_ready(self, item: int, now: int) -> None:
        if self.net.release[item] > now:
            heappush(self.events, (int(self.net.release[item]), RELEASED, item))
        elif self.lane[item] >= 0:
            heappush(self.waits[self.lane[item]], (self.rank[item], item))
        elif not self.left[item]:
            self.start[item] = now
            heappush(self.events, (now + self.latency[item], ARRIVES, item))
        else:
            for hop in self.hops[item]:
                self._waits_for_link(hop, int(self.net.hop_link[hop]), now)

    def _waits_for_link(self, hop: int, link: int, now: int) -> None:
        heappush(self.queue[link], (self.rank[self.owner[hop]], hop))
        if link in self.serving:
            before = self.serving[link]
            after = _interrupted(self.net, self.rank, self.owner, before, hop, now)
            self.serving[link] = after
            if after[2] < before[2]:
                heappush(self.events, (after[2], SERVED, link))

    def _is_over(self, item: int, now: int) -> None:
        self.end[item] = now
        for later in self.after[item]:
            self.pending[later] -= 1
            if not self.pending[later]:
                self._becomes_ready(later, now)

    def _happens(self, kind: int, which: int, now: int) -> None:
        if kind == ENDS:
            self.busy.remove(self.lane[which])
            self._is_over(which, now)
        elif kind == ARRIVES:
            self._is_over(which, now)
        elif kind == RELEASED:
            self._becomes_ready(which, now)
        elif which in self.serving and self.serving[which][2] == now:  # else it was interrupted
            self._is_served(which, now)

    def _is_served(self, link: int, now: int) -> None:
        hop, since, _ = self.serving.pop(link)
        self.rest[hop] -= now - since
        item = self.owner[hop]
        self.use.append((item, link, since, now))
        if self.rest[hop]:
            heappush(self.queue[link], (self.rank[item], hop))
            return
        self.left[item] -= 1
        if not self.left[item]:
            heappush(self.events, (now + self.latency[item], ARRIVES, item))

    def _lanes_take(self, now: int) -> None:
        for lane in sorted(self.waits):
            if self.waits[lane] and lane not in self.busy:
                _, item = heappop(self.waits[lane])
                self.busy.add(lane)
                self.start[item] = now
                heappush(self.events, (now + self.duration[item], ENDS, item))

    def _links_take(self, now: int) -> None:
        for link in sorted(self.queue):
            if self.queue[link] and link not in self.serving:
                _, hop = heappop(self.queue[link])
                item = self.owner[hop]
                self.start[item] = now if self.start[item] < 0 else self.start[item]
                self.serving[link] = hop, now, now + self.rest[hop]
                heappush(self.events, (now + self.rest[hop], SERVED, link))


def _interrupted(
    net: PriorityNetwork,
    rank: list[int],
    owner: list[int],
    service: tuple[int, int, int],
    hop: int,
    now: int,
) -> tuple[int, int, int]:
    """What a link serves, and until when, now that a message waits for it: to the end of the slice
    that it has taken, if that message is more urgent."""
    current, since, until = service
    size = int(net.hop_slice[current])
    if not size or (rank[owner[hop]], hop) >= (rank[owner[current]], current):
        return service
    credit = 0 if net.express[owner[hop]] else int(net.hop_credit[current])
    taken = -((since - now - credit) // size) * size
    return current, since, min(until, since + max(taken, size))


def schedule_by_priority_compiled(net: PriorityNetwork) -> PrioritySchedule:
    """What `schedule_by_priority` gives, faster."""
    n, hops = len(net.lane), len(net.hop_link)
    of_lane = offsets(np.bincount(net.lane[net.lane >= 0], minlength=net.lanes))
    of_link = offsets(np.bincount(net.hop_link, minlength=net.links))
    state = _RunColumns(
        np.zeros(4, np.int64), np.zeros((2 * n + 4 * hops + 16, 2), np.int64),
        of_lane, np.zeros((int(of_lane[-1]), 2), np.int64), np.zeros(net.lanes, np.int64),
        np.zeros(net.lanes, np.int64),
        of_link, np.zeros((hops, 2), np.int64), np.zeros(net.links, np.int64),
        np.full(net.links, -1), np.zeros(net.links, np.int64), np.zeros(net.links, np.int64),
        net.pending.copy(), net.hop_occupancy.copy(), np.diff(net.hop_start),
        np.repeat(np.arange(n), np.diff(net.hop_start)), np.full(n, -1), np.full(n, -1),
        np.zeros((2 * hops, 4), np.int64),
    )  # fmt: skip
    _run(net, state)
    spans = LinkSpans(*state.use[: state.counters[STRETCHES]].T)
    return _all_ran(state.start, state.end, spans)


class _RunColumns(NamedTuple):
    """What happens, and what waits."""

    counters: Ints  # EVENTS and STRETCHES: how many there are
    events: Ints  # heap of rows (time, kind and which)
    lane_start: Ints  # where the rows of a lane begin
    lane_heap: Ints  # rows (rank, item)
    lane_size: Ints  # how many wait for a lane
    lane_busy: Ints
    link_start: Ints
    link_heap: Ints  # rows (priority, hop)
    link_size: Ints
    serving: Ints  # by link: a hop, or -1
    since: Ints
    until: Ints
    pending: Ints  # by item
    rest: Ints  # by hop
    left: Ints  # by item: hops that are not served
    owner: Ints  # by hop: the item
    start: Ints
    end: Ints
    use: Ints  # rows (item, link, start, end); a message that becomes ready interrupts at most one


EVENTS, STRETCHES = 0, 1
KIND = 48  # bits of which


@compiled
def _run(net, state):  # type: ignore[no-untyped-def]
    """Lets everything happen."""
    counters, events = state.counters, state.events
    for item in range(len(state.pending)):
        if state.pending[item] == 0:
            _become_ready(net, state, item, 0)
    now = 0
    while True:
        while counters[EVENTS] and events[0, 0] == now:
            code = events[0, 1]
            pop(events, counters[EVENTS])
            counters[EVENTS] -= 1
            _happen(net, state, code >> KIND, code & ((1 << KIND) - 1), now)
        for lane in range(net.lanes):
            if state.lane_size[lane] and not state.lane_busy[lane]:
                heap = state.lane_heap[state.lane_start[lane] : state.lane_start[lane + 1]]
                item = heap[0, 1]
                pop(heap, state.lane_size[lane])
                state.lane_size[lane] -= 1
                state.lane_busy[lane] = 1
                state.start[item] = now
                _plan_event(state, now + net.duration[item], ENDS, item)
        for link in range(net.links):
            if state.link_size[link] and state.serving[link] < 0:
                _turn_to_next(state, link, now)
        if counters[EVENTS] == 0:
            return
        now = events[0, 0]


@compiled_part
def _turn_to_next(state, link, now):  # type: ignore[no-untyped-def]
    heap = state.link_heap[state.link_start[link] : state.link_start[link + 1]]
    hop = heap[0, 1]
    pop(heap, state.link_size[link])
    state.link_size[link] -= 1
    item = state.owner[hop]
    if state.start[item] < 0:
        state.start[item] = now
    state.serving[link], state.since[link] = hop, now
    state.until[link] = now + state.rest[hop]
    _plan_event(state, state.until[link], SERVED, link)


@compiled_part
def _plan_event(state, when, kind, which):  # type: ignore[no-untyped-def]
    push(state.events, state.counters[EVENTS], when, kind << KIND | which)
    state.counters[EVENTS] += 1


@compiled_part
def _become_ready(net, state, item, now):  # type: ignore[no-untyped-def]
    lane = net.lane[item]
    if net.release[item] > now:
        _plan_event(state, net.release[item], RELEASED, item)
    elif lane >= 0:
        heap = state.lane_heap[state.lane_start[lane] : state.lane_start[lane + 1]]
        push(heap, state.lane_size[lane], net.rank[item], item)
        state.lane_size[lane] += 1
    elif state.left[item] == 0:
        state.start[item] = now
        _plan_event(state, now + net.latency[item], ARRIVES, item)
    else:
        for hop in range(net.hop_start[item], net.hop_start[item + 1]):
            link = net.hop_link[hop]
            heap = state.link_heap[state.link_start[link] : state.link_start[link + 1]]
            push(heap, state.link_size[link], net.rank[item], hop)
            state.link_size[link] += 1
            if state.serving[link] >= 0:
                _interrupt(net, state, link, hop, now)


@compiled_part
def _interrupt(net, state, link, hop, now):  # type: ignore[no-untyped-def]
    current, since = state.serving[link], state.since[link]
    size = net.hop_slice[current]
    mine, others = net.rank[state.owner[hop]], net.rank[state.owner[current]]
    if size == 0 or mine > others or (mine == others and hop >= current):
        return
    credit = 0 if net.express[state.owner[hop]] else net.hop_credit[current]
    taken = -((since - now - credit) // size) * size
    until = since + max(taken, size)
    if until < state.until[link]:
        state.until[link] = until
        _plan_event(state, until, SERVED, link)


@compiled_part
def _end_item(net, state, item, now):  # type: ignore[no-untyped-def]
    state.end[item] = now
    for at in range(net.next_start[item], net.next_start[item + 1]):
        later = net.next[at]
        state.pending[later] -= 1
        if state.pending[later] == 0:
            _become_ready(net, state, later, now)


@compiled_part
def _happen(net, state, kind, which, now):  # type: ignore[no-untyped-def]
    if kind == ENDS:
        state.lane_busy[net.lane[which]] = 0
        _end_item(net, state, which, now)
    elif kind == ARRIVES:
        _end_item(net, state, which, now)
    elif kind == RELEASED:
        _become_ready(net, state, which, now)
    elif state.serving[which] >= 0 and state.until[which] == now:
        hop = state.serving[which]
        state.serving[which] = -1
        state.rest[hop] -= now - state.since[which]
        item = state.owner[hop]
        row = state.use[state.counters[STRETCHES]]
        row[0], row[1], row[2], row[3] = item, which, state.since[which], now
        state.counters[STRETCHES] += 1
        if state.rest[hop]:
            heap = state.link_heap[state.link_start[which] : state.link_start[which + 1]]
            push(heap, state.link_size[which], net.rank[item], hop)
            state.link_size[which] += 1
            return
        state.left[item] -= 1
        if state.left[item] == 0:
            _plan_event(state, now + net.latency[item], ARRIVES, item)


def _rows(start: Ints, items: Ints) -> list[list[int]]:
    edges, flat = start.tolist(), items.tolist()
    return [flat[a:b] for a, b in pairwise(edges)]


def _all_ran(start: Ints, end: Ints, use: LinkSpans) -> PrioritySchedule:
    assert (end >= 0).all(), "an item never ran: some wait for each other"
    return PrioritySchedule(start, end, use)
