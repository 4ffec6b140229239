"""elimination_order: in which order a variable elimination goes, and what each of its steps reads.

In: the sizes of variables and which of them share a table. Out: an EliminationOrder, by which
elimination_steps.py eliminates them, whatever the tables are.

Step s eliminates variable `order[s]`: it adds up the tables that mention it, takes the minimum over
it, and leaves a table over its `scope`, the neighbours that it has by then. A table is an input of
the step of whichever of its variables is eliminated first.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import combinations
from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, inlined, offsets, slot_of, with_more_slots


class EliminationOrder(NamedTuple):  # numba takes no dataclass
    """The steps of an elimination, for any tables over the same pairs of variables.

    order               the variable that each step eliminates
    scope_at, scope     the variables that the table of each step is over
    edge_at, edge       the pairs that are inputs of each step
    left_at, left       the earlier steps whose tables are inputs of each step
    edges               the two variables of each pair
    whole               false if it was given up: it is then no use for smaller variables either
    """

    order: Ints
    scope_at: Ints
    scope: Ints
    edge_at: Ints
    edge: Ints
    left_at: Ints
    left: Ints
    edges: Ints
    whole: bool = True

    def widest(self, sizes: Ints) -> float:
        """Entries of the largest table, were the variables of these sizes."""
        if not self.whole:
            return math.inf
        if not len(self.order):
            return 1.0
        logs = np.log(sizes.astype(np.float64))
        running = np.concatenate([[0.0], np.cumsum(logs[self.scope])])
        sums = running[self.scope_at[1:]] - running[self.scope_at[:-1]] + logs[self.order]
        step = int(sums.argmax())
        scope = self.scope[self.scope_at[step] : self.scope_at[step + 1]]
        return float(np.prod(sizes[[*scope, self.order[step]]].astype(np.float64)))


def elimination_order(sizes: Ints, edges: Ints, cap: float) -> EliminationOrder:
    """The steps for variables of these sizes and tables over these pairs.

    Variables of one value are nobody's neighbours. It is given up where a table would exceed `cap`.
    """
    order, scope_at, scope, whole = _greedy_order(sizes, edges, cap)
    place = np.empty(len(sizes), np.int64)
    place[order] = np.arange(len(sizes))
    first = place[edges].copy()
    single = sizes[edges] == 1
    first[single] = len(sizes)  # the other one's step takes the table
    both = single.all(axis=1)
    first[both, 0] = place[edges[both, 0]]
    edge_at, edge = _grouped(first.min(axis=1) if len(edges) else np.zeros(0, np.int64), len(sizes))
    nexts = np.full(len(sizes), len(sizes), np.int64)
    filled = scope_at[1:] > scope_at[:-1]
    if filled.any():
        nexts[filled] = np.minimum.reduceat(place[scope], scope_at[:-1][filled])
    left_at, left = _grouped(nexts, len(sizes))
    return EliminationOrder(order, scope_at, scope, edge_at, edge, left_at, left, edges, whole)


def _grouped(keys: Ints, count: int) -> tuple[Ints, Ints]:
    """Offsets per key, and the indices by key, in order."""
    at = np.zeros(count + 2, np.int64)
    np.cumsum(np.bincount(keys, minlength=count + 1), out=at[1:])
    return at[: count + 1], np.argsort(keys, kind="stable")[: at[count]].astype(np.int64)


def _greedy_order_by_sets(sizes: Ints, edges: Ints, cap: float) -> tuple[Ints, Ints, Ints, bool]:
    """What `_greedy_order` does, with a set of neighbours for each variable."""
    size = sizes.tolist()
    near: list[set[int]] = [set() for _ in size]
    entries = [1.0] * len(size)

    def link(a: int, b: int) -> bool:
        if size[a] == 1 or size[b] == 1 or b in near[a]:
            return False
        near[a].add(b)
        near[b].add(a)
        entries[a] *= size[b]
        entries[b] *= size[a]
        return True

    for a, b in edges.tolist():
        link(a, b)
    heap = [(number, variable) for variable, number in enumerate(entries)]
    heapify(heap)
    done = [False] * len(size)
    order: list[int] = []
    scopes: list[list[int]] = []
    whole = True
    for _ in size:
        variable = _pop_cheapest(heap, entries, done)
        done[variable] = True
        scope = sorted(near[variable])
        order.append(variable)
        scopes.append(scope)
        for other in scope:
            near[other].remove(variable)
            entries[other] /= size[variable]
            heappush(heap, (entries[other], other))
        if entries[variable] * size[variable] > cap:
            whole = False
            continue  # hopeless: no more neighbours are linked
        for a, b in combinations(scope, 2):
            if link(a, b):
                heappush(heap, (entries[a], a))
                heappush(heap, (entries[b], b))
    scope_at = offsets(np.array([len(scope) for scope in scopes], np.int64))
    flat = np.array([v for scope in scopes for v in scope], np.int64)
    return np.array(order, np.int64), scope_at, flat, whole


@compiled(plain=_greedy_order_by_sets)
def _greedy_order(sizes: Ints, edges: Ints, cap: float) -> tuple[Ints, Ints, Ints, bool]:
    """The variables in the order of the smallest table left, and the neighbours of each at its
    step: the order, where scopes begin, the scopes, and whether all tables are within `cap`."""
    count = len(sizes)
    links = _unlinked(count, len(edges))
    entries = np.ones(count, np.float64)  # of the table that eliminating a variable would leave
    for e in range(len(edges)):
        links, _ = _link(links, sizes, entries, edges[e, 0], edges[e, 1])
    heap = [(entries[n], np.int64(n)) for n in range(count)]
    heapify(heap)
    done = np.zeros(count, np.bool_)
    order, scope_at = np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    scope = np.empty(4 * count + 16, np.int64)
    whole = True
    for step in range(count):
        variable = _pop_cheapest(heap, entries, done)
        done[variable] = True
        order[step] = variable
        begin = scope_at[step]
        scope, end = _append_neighbours(links, variable, done, scope, begin)
        near = np.sort(scope[begin:end])
        scope[begin:end] = near
        scope_at[step + 1] = end
        for other in near:
            entries[other] /= sizes[variable]
            heappush(heap, (entries[other], other))
        if entries[variable] * sizes[variable] > cap:
            whole = False
            continue  # hopeless: no more neighbours are linked
        for i in range(len(near)):
            for j in range(i + 1, len(near)):
                links, new = _link(links, sizes, entries, near[i], near[j])
                if new:
                    heappush(heap, (entries[near[i]], near[i]))
                    heappush(heap, (entries[near[j]], near[j]))
    return order, scope_at, scope[: scope_at[count]].copy(), whole


class _NeighbourLists(NamedTuple):  # numba takes no dataclass
    """Which variables share a table: linked lists of neighbours, and a set that keeps them
    distinct.

    latest  per variable its latest link, -1 for none
    near    per link the neighbour that it leads to
    before  per link the one before it of the same variable
    pairs   the hash set of all pairs
    total   how many links there are, two for each pair
    """

    latest: Ints
    near: Ints
    before: Ints
    pairs: Ints
    total: int


@compiled
def _unlinked(variables: int, edges: int) -> _NeighbourLists:
    slots = 64
    while slots < 8 * (edges + 8):
        slots *= 2
    return _NeighbourLists(
        np.full(variables, -1, np.int64),
        np.empty(4 * edges + 16, np.int64),
        np.empty(4 * edges + 16, np.int64),
        np.full(slots, -1, np.int64),
        0,
    )


@inlined
def _link(
    links: _NeighbourLists, sizes: Ints, entries: Floats, a: int, b: int
) -> tuple[_NeighbourLists, bool]:
    """Makes two variables neighbours, and whether they were none before."""
    if sizes[a] == 1 or sizes[b] == 1:
        return links, False
    latest, near, before, pairs, count = links
    pair = min(a, b) * len(sizes) + max(a, b)
    slot = slot_of(pairs, pair)
    if pairs[slot] == pair:
        return links, False
    pairs[slot] = pair
    if count + 2 > len(pairs):
        pairs = with_more_slots(pairs)
    if count + 2 > len(near):
        near = np.concatenate((near, np.empty(len(near), np.int64)))
        before = np.concatenate((before, np.empty(len(before), np.int64)))
    near[count], before[count], latest[a] = b, latest[a], count
    near[count + 1], before[count + 1], latest[b] = a, latest[b], count + 1
    entries[a] *= sizes[b]
    entries[b] *= sizes[a]
    return _NeighbourLists(latest, near, before, pairs, count + 2), True


@inlined
def _pop_cheapest(heap, entries, done):  # type: ignore[no-untyped-def]
    """The variable that would leave the smallest table. The heap has pairs (entries, variable);
    those that are out of date are skipped."""
    while True:
        size, variable = heappop(heap)
        if not done[variable] and size == entries[variable]:
            return variable


@inlined
def _append_neighbours(links, variable, done, scope, end):  # type: ignore[no-untyped-def]
    """Writes the neighbours of a variable that are not eliminated yet into a scope, from `end` on;
    the scope, which may have grown, and its new end."""
    link = links.latest[variable]
    while link >= 0:
        other = links.near[link]
        if not done[other]:
            if end == len(scope):
                scope = np.concatenate((scope, np.empty(len(scope), np.int64)))
            scope[end] = other
            end += 1
        link = links.before[link]
    return scope, end
