"""Program: the steps of a variable elimination, and running them, compiled.

Step s eliminates variable `order[s]`: it adds up the tables that mention it, takes the minimum over
it, and leaves a table over its `scope`, the neighbours it has by then. A table is an input of the
step of whichever of its variables is eliminated first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from apportion.columns import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Program:
    """The steps of an elimination, for any tables over the same pairs of variables.

    scope_at, scope     the variables that the table of each step is over
    edge_at, edge       the pairs that are inputs of each step
    left_at, left       the earlier steps whose tables are inputs of each step
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


def program(sizes: Ints, edges: Ints, cap: float) -> Program:
    """The steps for variables of these sizes and tables over these pairs.

    Variables of one value are nobody's neighbours. It is given up where a table would exceed `cap`.
    """
    order, scope_at, scope, whole = _order(sizes, edges, cap)
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
    return Program(order, scope_at, scope, edge_at, edge, left_at, left, edges, whole)


def _grouped(keys: Ints, count: int) -> tuple[Ints, Ints]:
    """Offsets per key, and the indices by key, in order."""
    at = np.zeros(count + 2, np.int64)
    np.cumsum(np.bincount(keys, minlength=count + 1), out=at[1:])
    return at[: count + 1], np.argsort(keys, kind="stable")[: at[count]].astype(np.int64)


@compiled
def _order(sizes: Ints, edges: Ints, cap: float) -> tuple[Ints, Ints, Ints, bool]:
    """Greedy order, and the neighbours of each variable at its step.

    Neighbours are linked lists (`head`, `follow`, `near`); a hash set of pairs keeps them distinct.
    """
    whole = True
    count = len(sizes)
    room = 64
    while room < 8 * (len(edges) + 8):
        room *= 2
    keys = np.full(room, -1, np.int64)
    used = 0
    head = np.full(count, -1, np.int64)
    near = np.empty(4 * len(edges) + 16, np.int64)
    follow = np.empty(4 * len(edges) + 16, np.int64)
    links = 0
    cost = np.ones(count, np.float64)  # entries of the table that a step would leave
    done = np.zeros(count, np.bool_)
    todo_a = edges[:, 0].copy()
    todo_b = edges[:, 1].copy()
    todo = len(edges)
    heap = [(0.0, np.int64(0))]
    heap.pop()
    started = False
    order = np.empty(count, np.int64)
    scope_at = np.zeros(count + 1, np.int64)
    scope = np.empty(4 * count + 16, np.int64)
    scoped = 0
    step = 0
    while True:
        for t in range(todo):
            a, b = todo_a[t], todo_b[t]
            if sizes[a] == 1 or sizes[b] == 1:
                continue
            if a > b:
                a, b = b, a
            key = a * count + b
            slot = (key * 2654435761) & (room - 1)
            while keys[slot] != -1 and keys[slot] != key:
                slot = (slot + 1) & (room - 1)
            if keys[slot] == key:
                continue
            keys[slot] = key
            used += 1
            if 2 * used > room:
                old = keys
                room *= 2
                keys = np.full(room, -1, np.int64)
                for k in old:
                    if k != -1:
                        slot = (k * 2654435761) & (room - 1)
                        while keys[slot] != -1:
                            slot = (slot + 1) & (room - 1)
                        keys[slot] = k
            if links + 2 > len(near):
                near = np.concatenate((near, np.empty(len(near), np.int64)))
                follow = np.concatenate((follow, np.empty(len(follow), np.int64)))
            near[links], follow[links], head[a] = b, head[a], links
            near[links + 1], follow[links + 1], head[b] = a, head[b], links + 1
            links += 2
            cost[a] *= sizes[b]
            cost[b] *= sizes[a]
            if started:
                heappush(heap, (cost[a], a))
                heappush(heap, (cost[b], b))
        todo = 0
        if not started:
            for n in range(count):
                heap.append((cost[n], np.int64(n)))
            heapify(heap)
            started = True
        variable = -1
        while len(heap) > 0:
            price, v = heappop(heap)
            if not done[v] and price == cost[v]:
                variable = int(v)
                break
        if variable < 0:
            break
        done[variable] = True
        order[step] = variable
        begin = scoped
        link = head[variable]
        while link >= 0:
            other = near[link]
            if not done[other]:
                if scoped == len(scope):
                    scope = np.concatenate((scope, np.empty(len(scope), np.int64)))
                scope[scoped] = other
                scoped += 1
            link = follow[link]
        found = np.sort(scope[begin:scoped])
        scope[begin:scoped] = found
        step += 1
        scope_at[step] = scoped
        for a in found:
            cost[a] /= sizes[variable]
            heappush(heap, (cost[a], a))
        if cost[variable] * sizes[variable] > cap:
            whole = False
            continue  # hopeless: no more neighbours are joined
        width = len(found)
        if width * (width - 1) // 2 > len(todo_a):
            todo_a = np.empty(width * width, np.int64)
            todo_b = np.empty(width * width, np.int64)
        for i in range(width):
            for j in range(i + 1, width):
                todo_a[todo], todo_b[todo] = found[i], found[j]
                todo += 1
    return order, scope_at, scope[:scoped].copy(), whole


def run(
    steps: Program, sizes: Ints, unary: Ints, pairs: Ints, flat: Floats, starts: Ints
) -> tuple[Ints, float]:
    """The best choice and the minimum, where variable v has the table `unary[v]` and pair e the
    table `pairs[e]`."""
    widest = int(np.diff(steps.scope_at).max(initial=0)) + 1
    choice, least = _run(
        steps.order, steps.scope_at, steps.scope, steps.edge_at, steps.edge, steps.left_at,
        steps.left, steps.edges, sizes, unary, pairs, flat, starts, widest,
    )  # fmt: skip
    return choice, float(least)


@compiled
def _run(
    order: Ints, scope_at: Ints, scope: Ints, edge_at: Ints, edge: Ints, left_at: Ints, left: Ints,
    edges: Ints, sizes: Ints, unary: Ints, pairs: Ints, flat: Floats, starts: Ints, widest: int,
) -> tuple[Ints, float]:  # fmt: skip
    """Tables are numbered: first the given ones, then those that steps leave. Step s leaves table
    `made[s]`, at `made_at` in `pool`, and the arguments of its minima at the same place of
    `picks`. `memory` finds the number by a step's key."""
    count = len(order)
    known = len(starts) - 1
    made = np.full(count, -1, np.int64)
    constant_of = np.zeros(count, np.float64)
    pool = np.empty(1 << 12, np.float64)
    picks = np.empty(1 << 12, np.int32)
    made_at = np.zeros(count + 1, np.int64)
    made_constant = np.zeros(count, np.float64)
    tables = 0
    room = 16
    while room < 4 * count:
        room *= 2
    memory = np.full(room, -1, np.int64)
    key_at = np.zeros(count + 1, np.int64)
    all_keys = np.empty(16 * count + 64, np.int64)
    longest = 0
    for s in range(count):
        inputs = 1 + edge_at[s + 1] - edge_at[s] + left_at[s + 1] - left_at[s]
        longest = max(longest, inputs)
    key = np.empty(longest * (widest + 3) + widest + 5, np.int64)
    stride = np.empty((longest, widest + 1), np.int64)
    base = np.empty(longest, np.int64)
    given = np.empty(longest, np.bool_)
    place = np.full(len(sizes), -1, np.int64)
    index = np.empty(widest + 1, np.int64)
    jumps = np.empty(longest, np.int64)
    row = np.empty(sizes.max() if len(sizes) else 1, np.float64)
    least = 0.0
    for s in range(count):
        v = order[s]
        low, high = scope_at[s], scope_at[s + 1]
        width = high - low
        key[0] = width
        length = 1
        entries = 1
        for k in range(width):
            place[scope[low + k]] = k
            key[length] = sizes[scope[low + k]]
            entries *= sizes[scope[low + k]]
            length += 1
        place[v] = width
        own = sizes[v]
        key[length] = own
        key[length + 1] = unary[v]
        length += 2
        for n in range(edge_at[s], edge_at[s + 1]):
            e = edge[n]
            key[length] = pairs[e]
            key[length + 1] = place[edges[e, 0]] * 1024 + place[edges[e, 1]]
            length += 2
        constant = 0.0
        for n in range(left_at[s], left_at[s + 1]):
            t = left[n]
            constant += constant_of[t]
            key[length] = known + made[t]
            length += 1
            for k in range(scope_at[t + 1] - 1, scope_at[t] - 1, -1):
                key[length] = place[scope[k]]
                length += 1
        code = np.int64(1469598103934665603)
        for k in range(length):
            code = (code ^ key[k]) * np.int64(1099511628211)
            code ^= code >> 29
        slot = code & (room - 1)
        found = -1
        while memory[slot] >= 0:
            other = int(memory[slot])
            begin = key_at[other]
            if key_at[other + 1] - begin == length:
                same = True
                for k in range(length):
                    if all_keys[begin + k] != key[k]:
                        same = False
                        break
                if same:
                    found = other
                    break
            slot = (slot + 1) & (room - 1)
        if found < 0:
            found = tables
            memory[slot] = found
            begin = key_at[found]
            while begin + length > len(all_keys):
                all_keys = np.concatenate((all_keys, np.empty(len(all_keys), np.int64)))
            for k in range(length):
                all_keys[begin + k] = key[k]
            key_at[found + 1] = begin + length
            at = made_at[found]
            if at + entries > len(pool):
                size = max(2 * len(pool), at + entries)
                new_pool = np.empty(size, np.float64)
                new_pool[:at] = pool[:at]
                pool = new_pool
                new_picks = np.empty(size, np.int32)
                new_picks[:at] = picks[:at]
                picks = new_picks
            stride[0, :] = 0
            stride[0, width] = 1
            base[0] = starts[unary[v]]
            given[0] = True
            terms = 1
            for n in range(edge_at[s], edge_at[s + 1]):
                e = edge[n]
                a, b = edges[e, 0], edges[e, 1]
                stride[terms, :] = 0
                if sizes[a] > 1:
                    stride[terms, place[a]] = sizes[b]
                if sizes[b] > 1:
                    stride[terms, place[b]] = 1
                base[terms] = starts[pairs[e]]
                given[terms] = True
                terms += 1
            for n in range(left_at[s], left_at[s + 1]):
                t = left[n]
                stride[terms, :] = 0
                step = 1
                for k in range(scope_at[t + 1] - 1, scope_at[t] - 1, -1):
                    u = scope[k]
                    stride[terms, place[u]] = step
                    step *= sizes[u]
                base[terms] = made_at[made[t]]
                given[terms] = False
                terms += 1
            for t in range(terms):
                jumps[t] = stride[t, width]
            index[:] = 0
            lowest = np.inf
            for entry in range(entries):
                where = base[0]
                for x in range(own):
                    row[x] = flat[where + x]
                for t in range(1, terms):
                    where = base[t]
                    jump = jumps[t]
                    if given[t]:
                        for x in range(own):
                            row[x] += flat[where]
                            where += jump
                    else:
                        for x in range(own):
                            row[x] += pool[where]
                            where += jump
                best = np.inf
                which = 0
                for x in range(own):
                    if row[x] < best:
                        best, which = row[x], x
                pool[at + entry] = best
                picks[at + entry] = which
                lowest = min(lowest, best)
                k = width - 1
                while k >= 0:
                    index[k] += 1
                    if index[k] < sizes[scope[low + k]]:
                        for t in range(terms):
                            base[t] += stride[t, k]
                        break
                    for t in range(terms):
                        base[t] -= stride[t, k] * (index[k] - 1)
                    index[k] = 0
                    k -= 1
            for entry in range(entries):
                pool[at + entry] -= lowest
            made_constant[found] = lowest
            made_at[found + 1] = at + entries
            tables += 1
        for k in range(low, high):
            place[scope[k]] = -1
        place[v] = -1
        made[s] = found
        constant_of[s] = constant + made_constant[found]
        if width == 0:
            least += constant_of[s]
    choice = np.zeros(len(sizes), np.int64)
    for s in range(count - 1, -1, -1):
        where = made_at[made[s]]
        step = 1
        for k in range(scope_at[s + 1] - 1, scope_at[s] - 1, -1):
            where += choice[scope[k]] * step
            step *= sizes[scope[k]]
        choice[order[s]] = picks[where]
    return choice, least
