"""schedule: a Network of items -> when each starts and ends, in integer nanoseconds.

An item is ready at its release or when the last of its predecessors ends, whichever is later.

    work     has no hops: it starts when it is ready and lasts its duration
    message  has a hop for every link it crosses, each with its own occupancy. A link serves
             messages one at a time, first come first served by (ready, index):

                 s_j = max(ready, free_j)        when link j turns to it
                 free_j = s_j + occupancy_j + hold

             and the message starts at max_j s_j and ends at max_j (s_j + occupancy_j) + latency

    both     a message that burns its devices has a duration as well, and its links turn to it
             `lead` after it began: those in the same lanes wait for its duration only, those that
             depend on it until it has ended

    urgent   an item that crosses one link, which when it is free turns to the most urgent of those
             that are ready, the smallest `urgency` first, and not to the one that came first

A device that takes whatever is ready first, as in FlexFlow and Placeto, is a link that each of its
items crosses.

Every predecessor has a smaller index. So what becomes ready through a message comes after it in
(ready, index), and of all messages that are ready, while no work is left to resolve, the first one
is final: one heap of messages is all the state there is. When a link that serves by urgency is next
free is in the same heap, after all messages of that time: then all that is ready by then is known.

`schedule` is the specification. `schedule_compiled` is its twin for speed, equal bit for bit, and
the same where it is not worth compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled, compiled_part, pop, push

Times = tuple[Ints, Ints]
"""Start and end of every item."""


NO_ROWS = np.zeros(0, np.int64)


class Network(NamedTuple):  # numba takes no dataclass
    """Items in columns: precedence, durations, and the links that messages cross."""

    links: int
    duration: Ints  # n: of work; not read for a message
    release: Ints  # n: not ready before
    hold: Ints  # n: how long a message's links stay busy after it
    latency: Ints  # n: of a message
    pending: Ints  # n: how many predecessors
    next_start: Ints  # n + 1: offsets into next
    next: Ints  # successors of each item
    hop_start: Ints  # n + 1: offsets into the hops; none for work
    hop_link: Ints
    hop_occupancy: Ints
    lead: Ints = (
        NO_ROWS  # n: of an item that has a duration and hops, else -1; empty: there is none
    )
    next_lane: Ints = NO_ROWS  # as next: whether it waits for the duration only; empty: none does
    urgency: Ints = NO_ROWS  # n: of an item whose link serves by it, else -1; empty: there is none


def queued(
    queue: Ints, occupancy: Ints, hold: Ints, before: Sequence[Sequence[int]], queues: int
) -> Network:
    """The Network of items that each wait in one queue: devices and links that take whatever is
    ready first. `before` are the predecessors of each."""
    n = len(queue)
    zeros = np.zeros(n, np.int64)
    counts = np.array([len(each) for each in before], np.int64)
    first = np.fromiter(chain.from_iterable(before), np.int64, int(counts.sum()))
    order = np.argsort(first, kind="stable")
    next_start = np.searchsorted(first[order], np.arange(n + 1)).astype(np.int64)
    return Network(
        links=queues,
        duration=zeros,
        release=zeros,
        hold=hold,
        latency=zeros,
        pending=counts,
        next_start=next_start,
        next=np.repeat(np.arange(n), counts)[order],
        hop_start=np.arange(n + 1),
        hop_link=queue,
        hop_occupancy=occupancy,
    )


class LinkSpans(NamedTuple):
    """When messages occupied links: a row per hop, in the order of the Network's hops."""

    item: Ints
    link: Ints
    start: Ints
    end: Ints  # without the hold


def schedule(net: Network) -> Times:
    """Start and end of every item."""
    return _all_ran(*_in_turn(net, net.release, net.pending))


def schedule_compiled(net: Network) -> Times:
    """What `schedule` gives, faster where there are many items."""
    return _all_ran(*_schedule(net, net.release.copy(), net.pending.copy()))


def _all_ran(start: Ints, end: Ints) -> Times:
    assert (start >= 0).all(), "an item never ran: the order is not topological"
    return start, end


def _in_turn(net: Network, release: Ints, waits_for: Ints) -> Times:
    n = len(net.duration)
    duration, latency, hold = net.duration.tolist(), net.latency.tolist(), net.hold.tolist()
    ready, pending = release.tolist(), waits_for.tolist()
    successors, in_lane = (_rows(net.next_start, c) for c in (net.next, _in_lane(net)))
    links, occupancies = (_rows(net.hop_start, c) for c in (net.hop_link, net.hop_occupancy))
    start, end, free = [-1] * n, [-1] * n, [0] * net.links
    lead = net.lead.tolist() or [-1] * n
    urgency = net.urgency.tolist() or [-1] * n
    waiting: list[list[tuple[int, int]]] = [[] for _ in range(net.links)]  # (urgency, item)
    resolvable = [item for item in range(n) if not pending[item]]
    messages: list[tuple[int, int]] = []  # heap of (ready, item), or (free, n + link)

    def go_on(item: int, lane: int | None) -> None:
        """Whatever waits for the item, or for it in a lane only (1) or otherwise (0)."""
        for later, waits in zip(successors[item], in_lane[item], strict=True):
            if lane is None or waits == lane:
                ready[later] = max(ready[later], end[item])
                pending[later] -= 1
                if not pending[later]:
                    resolvable.append(later)

    while resolvable or messages:
        if resolvable:
            item = resolvable.pop()
            if links[item] and lead[item] < 0:
                heappush(messages, (ready[item], item))
                continue
            start[item] = ready[item]
            end[item] = start[item] + duration[item]
            if links[item]:
                heappush(messages, (start[item] + lead[item], item))
            go_on(item, 1 if links[item] else None)
        elif messages[0][1] >= n:
            now, link = messages[0][0], messages[0][1] - n
            heappop(messages)
            if free[link] <= now and waiting[link]:
                _, item = heappop(waiting[link])
                (occupancy,) = occupancies[item]
                start[item], end[item] = now, now + occupancy
                free[link] = end[item]
                heappush(messages, (free[link], n + link))
                go_on(item, None)
        elif urgency[messages[0][1]] >= 0:
            since, item = heappop(messages)
            (link,) = links[item]
            heappush(waiting[link], (urgency[item], item))
            heappush(messages, (max(since, free[link]), n + link))
        else:
            since, item = heappop(messages)
            began = -1
            for link, occupancy in zip(links[item], occupancies[item], strict=True):
                turn = max(since, free[link])
                began = max(began, turn)
                end[item] = max(end[item], turn + occupancy + latency[item])
                free[link] = turn + occupancy + hold[item]
            start[item] = began if lead[item] < 0 else start[item]
            go_on(item, None if lead[item] < 0 else 0)
    return np.array(start, np.int64), np.array(end, np.int64)


def _in_lane(net: Network) -> Ints:
    return net.next_lane if len(net.next_lane) else np.zeros(len(net.next), np.int64)


def _rows(offsets: Ints, items: Ints) -> list[list[int]]:
    edges, flat = offsets.tolist(), items.tolist()
    return [flat[a:b] for a, b in pairwise(edges)]


@compiled(plain=_in_turn)
def _schedule(net: Network, ready: Ints, pending: Ints) -> Times:
    n = len(pending)
    start, end, free = np.full(n, -1), np.full(n, -1), np.zeros(net.links, np.int64)
    resolvable = np.empty(n, np.int64)
    count = 0
    for item in range(n):
        if pending[item] == 0:
            resolvable[count] = item
            count += 1
    by_need = len(net.urgency) > 0
    room = 3 * n if by_need else n  # each may wake its link when it comes and when it is done
    messages, size = np.empty((room, 2), np.int64), 0  # heap of rows (ready, item)
    queue, queued = np.empty(n if by_need else 0, np.int64), 0  # urgent items that are ready
    split = len(net.lead) > 0
    while count or size:
        waits = -1  # go on with all that wait; 1: in a lane only, 0: otherwise
        if count:
            count -= 1
            item = resolvable[count]
            crosses = net.hop_start[item] < net.hop_start[item + 1]
            if crosses and not (split and net.lead[item] >= 0):
                push(messages, size, ready[item], item)
                size += 1
                continue
            start[item] = ready[item]
            end[item] = start[item] + net.duration[item]
            if crosses:
                push(messages, size, start[item] + net.lead[item], item)
                size += 1
                waits = 1
        elif by_need and (messages[0, 1] >= n or net.urgency[messages[0, 1]] >= 0):
            now, item = messages[0, 0], messages[0, 1]
            pop(messages, size)
            size -= 1
            if item < n:
                link = net.hop_link[net.hop_start[item]]
                queue[queued] = item
                queued += 1
                push(messages, size, max(now, free[link]), n + link)
                size += 1
                continue
            link = item - n
            best = _most_urgent(net, queue, queued, link) if free[link] <= now else -1
            if best < 0:
                continue
            item = queue[best]
            queued -= 1
            queue[best] = queue[queued]
            start[item] = now
            end[item] = free[link] = now + net.hop_occupancy[net.hop_start[item]]
            push(messages, size, free[link], n + link)
            size += 1
        else:
            since, item = messages[0, 0], messages[0, 1]
            pop(messages, size)
            size -= 1
            begin, done = np.int64(-1), np.int64(-1)
            for hop in range(net.hop_start[item], net.hop_start[item + 1]):
                link = net.hop_link[hop]
                turn = max(since, free[link])
                passed = turn + net.hop_occupancy[hop]
                begin, done = max(begin, turn), max(done, passed)
                free[link] = passed + net.hold[item]
            if split and net.lead[item] >= 0:
                end[item] = max(end[item], done + net.latency[item])
                waits = 0
            else:
                start[item], end[item] = begin, done + net.latency[item]
        for at in range(net.next_start[item], net.next_start[item + 1]):
            if waits >= 0 and net.next_lane[at] != waits:
                continue
            later = net.next[at]
            ready[later] = max(ready[later], end[item])
            pending[later] -= 1
            if pending[later] == 0:
                resolvable[count] = later
                count += 1
    return start, end


@compiled_part
def _most_urgent(net: Network, queue: Ints, queued: int, link: int) -> int:
    """Where in the queue the most urgent item of a link is, -1 if there is none."""
    best = -1
    for k in range(queued):
        item = queue[k]
        if net.hop_link[net.hop_start[item]] != link:
            continue
        if best >= 0:
            other = queue[best]
            before = net.urgency[item] < net.urgency[other]
            if not before and (net.urgency[item] > net.urgency[other] or item > other):
                continue
        best = k
    return best


def readiness(net: Network, times: Times) -> Ints:
    """When each item was ready: of one that has a duration and hops, when its links could turn to
    it."""
    start, end = times
    until = np.repeat(end, np.diff(net.next_start))
    if len(net.lead):
        first = np.repeat(start + net.duration, np.diff(net.next_start))
        both = np.repeat(net.lead >= 0, np.diff(net.next_start))
        until = np.where(both & (net.next_lane == 1), first, until)
    ready = net.release.copy()
    np.maximum.at(ready, net.next, until)
    if len(net.lead):
        ready = np.where(net.lead >= 0, start + net.lead, ready)
    return ready


def link_spans(net: Network, times: Times) -> LinkSpans:
    """When each link was occupied by which message, given what the schedulers said."""
    n, ready = len(net.duration), readiness(net, times)
    hops = np.diff(net.hop_start)
    if len(net.urgency):  # these began when their link turned to them, and nothing else crosses it
        ready = np.where(net.urgency >= 0, times[0], ready)
    messages = np.flatnonzero(hops)
    order = messages[np.lexsort((messages, ready[messages]))]
    turn = _turns(net, ready, order)
    return LinkSpans(np.repeat(np.arange(n), hops), net.hop_link, turn, turn + net.hop_occupancy)


@compiled
def _turns(net: Network, ready: Ints, order: Ints) -> Ints:
    turn, free = np.empty(len(net.hop_link), np.int64), np.zeros(net.links, np.int64)
    for item in order:
        for hop in range(net.hop_start[item], net.hop_start[item + 1]):
            link = net.hop_link[hop]
            turn[hop] = max(ready[item], free[link])
            free[link] = turn[hop] + net.hop_occupancy[hop] + net.hold[item]
    return turn
