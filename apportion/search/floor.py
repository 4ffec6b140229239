"""floor: a step time that no completion of a partial decision can go below.

The units before `depth` have options, the others do not. The floor is the longest path through

    decided Ops    all their parts, and the assemblies that are sure to be; lanes keep their order
                   and hosts issue what is decided, but links are never busy
    loops          from a decided Op through undecided units and back, and
    heads, tails   from the beginning of the step through undecided units to a decided Op, and from
                   one to the end; all with the options of undecided units that make them shortest

Every one of these is a dependency, or the order of a lane, of the step that is simulated in the end:
times without contention are never later. With everything decided only contention is left out, and
what a partial Value's reduction does to lanes.

Loops are found from the last unit to the first. A loop from unit u by its neighbour v is the
shortest over the options of v of: an exchange, a path inside v (its own loops by later units
counted), and an exchange back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from apportion.search.needs import EQUAL, INSIDE, ROUNDING, Needs
from apportion.tasks import Ints

NONE = -1
FAR = -(1 << 40)


class Loops(NamedTuple):  # numba takes no dataclass
    """Loops l from copies of one Op to those of another of the same unit, tails t, heads h."""

    start: Ints  # o + 1: loops by the Op that they end at
    source: Ints  # l: Op
    target: Ints  # l: Op
    via: Ints  # l: unit
    length: Ints  # l x k x (m + 1) x m, or FAR; the last source is whichever copy ends first
    tail_start: Ints  # o + 1: tails by Op
    tail_via: Ints  # t: unit
    tail: Ints  # t x k x (m + 1), or FAR
    head_start: Ints  # o + 1: heads by Op
    head_via: Ints  # h: unit
    head: Ints  # h x k x m, or FAR


# Exchanges


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _termwise(n, e, a, b):  # type: ignore[no-untyped-def]
    """Whether the reader may take the terms of a partial Value where they are."""
    i, j = n.maker[e], n.reader[e]
    if n.linear[j] == 0 or n.parts[j, n.grid[j, b]] != 1:
        return False
    for q in range(n.size[j, b]):
        found = False
        for p in range(n.size[i, a]):
            found = found or n.where[i, a, p] == n.where[j, b, q]
        if not found:
            return False
    return True


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _message(n, source, target, nbytes):  # type: ignore[no-untyped-def]
    """Nanoseconds that bytes take between two devices at the least."""
    if source == target:
        return 0
    return max(int(n.lag[source, target] + n.pace[source, target] * nbytes) - ROUNDING, 0)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _holders(n, e, a, p):  # type: ignore[no-untyped-def]
    """How many copies have the box that a copy has."""
    i = n.maker[e]
    g = n.grid[i, a]
    parts, count = n.parts[i, g], 0
    for other in range(n.size[i, a]):
        count += n.box[e, g, other % parts] == n.box[e, g, p % parts]
    return count


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def delays(n, e, a, b, q, found):  # type: ignore[no-untyped-def]
    """From the end of each copy of the maker to when a copy of the reader has its region; NONE
    where it need not wait for it. The last is from the end of the first copy that ends: of several
    that hold a box, none need be waited for, but one of them must."""
    i, j = n.maker[e], n.reader[e]
    g, h = n.grid[i, a], n.grid[j, b]
    have, want = n.parts[i, g], n.parts[j, h]
    d, r = n.where[j, b, q], q % want
    size, any_ = n.size[i, a], n.where.shape[2]
    found[:] = NONE
    if n.region[e, h, r] < 0:
        return
    if n.terms[e, g] == 1:
        for p in range(size):
            inside = n.inside[e, g, h, p % have, r]
            if n.where[i, a, p] == d and inside > 0:
                found[p] = found[any_] = 0 if inside == EQUAL else n.viewing[d]
                return
    elif _termwise(n, e, a, b):
        for p in range(size):
            if n.where[i, a, p] == d:
                found[p] = found[any_] = 0
        return
    found[any_] = 0
    if n.apart[e, g] == 0:
        return
    assembly = n.assembly[e, h, r, d]
    for p in range(size):
        nbytes = n.nbytes[e, g, h, p % have, r]
        if nbytes == 0:
            continue
        many, least = 0, 1 << 60
        for other in range(size):
            if n.box[e, g, other % have] == n.box[e, g, p % have]:
                many += 1
                least = min(least, _message(n, n.where[i, a, other], d, 0))
        source = n.where[i, a, p]
        if source == d or many == 1:
            found[p] = _message(n, source, d, nbytes) + assembly
            least = max(least, found[p] - assembly)
        found[any_] = max(found[any_], least + assembly)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _arrival(n, e, a, b, q, end):  # type: ignore[no-untyped-def]
    """When all boxes of a region have come, given when the copies of the maker end."""
    i, j = n.maker[e], n.reader[e]
    g, h = n.grid[i, a], n.grid[j, b]
    have, r, d = n.parts[i, g], q % n.parts[j, h], n.where[j, b, q]
    size, ready = n.size[i, a], 0
    if n.apart[e, g] == 0:
        return 0
    for p in range(min(have, size)):
        nbytes = n.nbytes[e, g, h, p, r]
        if nbytes == 0:
            continue
        many, best = _holders(n, e, a, p), 1 << 60
        for other in range(size):
            if n.box[e, g, other % have] == n.box[e, g, p]:
                time = 0 if n.begins[e] else end[i, other]
                source = n.where[i, a, other]
                if source == d:
                    best = time
                    break
                best = min(best, time + _message(n, source, d, nbytes / many))
        ready = max(ready, best)
    return ready


# The longest path


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _fetch(n, chosen, depth, e, q, end, have, free, issued):  # type: ignore[no-untyped-def]
    """When a copy of the reader of an edge has its region; puts what has to be done for it into
    the lane of its device."""
    i, j = n.maker[e], n.reader[e]
    a, b = chosen[n.unit[i]], chosen[n.unit[j]]
    g, h = n.grid[i, a], n.grid[j, b]
    parts, r, d = n.parts[i, g], q % n.parts[j, h], n.where[j, b, q]
    region = n.region[e, h, r]
    if region < 0:
        return NONE
    partial = n.terms[e, g] > 1
    if partial and _termwise(n, e, a, b):
        for p in range(n.size[i, a]):
            if n.where[i, a, p] == d:
                return end[i, p]
    ready, duration, whole = 0, n.viewing[d], False
    if not partial:
        for p in range(n.size[i, a]):
            inside = n.inside[e, g, h, p % parts, r]
            if n.where[i, a, p] == d and inside > 0:
                ready = 0 if n.begins[e] else end[i, p]
                if inside == EQUAL:
                    return ready
                whole = True
                break
    around = NONE
    for at in range(n.before_start[e], n.before_start[e + 1]):
        f = n.before[at]
        other = n.reader[f]
        if n.unit[other] >= depth:
            continue
        c = chosen[n.unit[other]]
        k = n.grid[other, c]
        for s in range(n.size[other, c]):
            held = n.region[f, k, s % n.parts[other, k]]
            if n.where[other, c, s] == d and held >= 0 and have[f, s] >= 0:
                if held == region:
                    return have[f, s]
                if n.around[held, region]:
                    around = have[f, s] if around < 0 else min(around, have[f, s])
    if not whole:
        if around >= 0:
            ready = around
        else:
            ready = _arrival(n, e, a, b, q, end)
            duration = n.assembly[e, h, r, d]
    issued[d] += n.assembly_issue[d]
    if partial or n.lane[e] >= depth:  # it may be done earlier in the lane
        return ready + duration
    start = max(ready, free[d], issued[d])
    free[d] = start + duration
    return free[d]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def floor(n, loops, chosen, depth, end, have):  # type: ignore[no-untyped-def]
    """The floor, in nanoseconds, where the units before `depth` have the chosen options. `end` and
    `have` are room to work in: Ops x copies and one, edges x copies."""
    devices, any_ = n.lag.shape[0], n.where.shape[2]
    free, issued = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    ready = np.zeros(end.shape[1], np.int64)
    last = 0
    for op in range(len(n.unit)):
        u = n.unit[op]
        if u >= depth:
            continue
        k = chosen[u]
        g, size = n.grid[op, k], n.size[op, k]
        ready[:size] = 0
        for e in range(n.start[op], n.start[op + 1]):
            if n.unit[n.maker[e]] >= depth:
                have[e, :size] = NONE
                continue
            for q in range(size):
                have[e, q] = _fetch(n, chosen, depth, e, q, end, have, free, issued)
                ready[q] = max(ready[q], have[e, q])
        for loop in range(loops.start[op], loops.start[op + 1]):
            if loops.via[loop] >= depth:
                source = loops.source[loop]
                for p in range(n.size[source, k]):
                    for q in range(size):
                        ready[q] = max(ready[q], end[source, p] + loops.length[loop, k, p, q])
                for q in range(size):
                    ready[q] = max(ready[q], end[source, any_] + loops.length[loop, k, any_, q])
        for t in range(loops.head_start[op], loops.head_start[op + 1]):
            if loops.head_via[t] >= depth:
                for q in range(size):
                    ready[q] = max(ready[q], loops.head[t, k, q])
        end[op, any_] = 1 << 60
        for q in range(size):
            d = n.where[op, k, q]
            issued[d] += n.issue[op, d]
            start = max(ready[q], free[d], issued[d])
            free[d] = end[op, q] = start + n.duration[op, g, q % n.parts[op, g], d]
            last, end[op, any_] = max(last, end[op, q]), min(end[op, any_], end[op, q])
        for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
            if loops.tail_via[t] >= depth:
                last = max(last, end[op, any_] + loops.tail[t, k, any_])
                for q in range(size):
                    last = max(last, end[op, q] + loops.tail[t, k, q])
    return last


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def floors(n, loops, chosen, depth, end, have):  # type: ignore[no-untyped-def]
    """The floor for every option of the unit before `depth`."""
    count = n.options[depth - 1]
    found = np.zeros(count, np.int64)
    mine = chosen.copy()
    for k in range(count):
        mine[depth - 1] = k
        found[k] = floor(n, loops, mine, depth, end, have)
    return found


# Loops


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _inside(n, loops, ops, k, first, q, end, delay):  # type: ignore[no-untyped-def]
    """Longest paths from the start of a copy of an Op, or of all of them, to the ends of all in its
    unit; FAR where there is none."""
    u, any_ = n.unit[first], n.where.shape[2]
    lane = np.full(n.lag.shape[0], FAR)
    for op in ops:
        g, size = n.grid[op, k], n.size[op, k]
        end[op, :] = FAR
        if op < first:
            continue
        least = 1 << 60
        for c in range(size):
            d = n.where[op, k, c]
            time = lane[d]
            if op == first and (c == q or q == any_):
                time = max(time, 0)
            for e in range(n.start[op], n.start[op + 1]):
                i = n.maker[e]
                if n.unit[i] != u or n.begins[e]:
                    continue
                delays(n, e, k, k, c, delay)
                for p in range(any_ + 1):
                    if delay[p] >= 0 and end[i, p] >= 0:
                        time = max(time, end[i, p] + delay[p])
            for loop in range(loops.start[op], loops.start[op + 1]):
                source = loops.source[loop]
                for p in range(any_ + 1):
                    if end[source, p] >= 0:
                        time = max(time, end[source, p] + loops.length[loop, k, p, c])
            if time >= 0:
                end[op, c] = time + n.duration[op, g, c % n.parts[op, g], d]
                lane[d] = end[op, c]
            least = min(least, end[op, c])
        if least >= 0:
            end[op, any_] = least


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _through(n, loops, ops, entries, exits):  # type: ignore[no-untyped-def]
    """For every option of a unit the longest paths from the start of each copy of each entry, and of
    all, to the end of each copy of each exit, and of any, and to the end of the step."""
    count, any_ = n.options[n.unit[ops[0]]], n.where.shape[2]
    found = np.full((count, len(entries), any_ + 1, len(exits), any_ + 1), FAR)
    last = np.full((count, len(entries), any_ + 1), FAR)
    end = np.full((len(n.unit), any_ + 1), FAR)
    delay = np.zeros(any_ + 1, np.int64)
    for k in range(count):
        for x in range(len(entries)):
            for q in range(any_ + 1):
                if n.size[entries[x], k] <= q < any_:
                    continue
                _inside(n, loops, ops, k, entries[x], q, end, delay)
                for y in range(len(exits)):
                    for r in range(any_ + 1):
                        found[k, x, q, y, r] = end[exits[y], r]
                for op in ops:
                    for c in range(any_ + 1):
                        if end[op, c] < 0:
                            continue
                        last[k, x, q] = max(last[k, x, q], end[op, c])
                        for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
                            beyond = end[op, c] + loops.tail[t, k, c]
                            last[k, x, q] = max(last[k, x, q], beyond)
    return found, last


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _begun(n, loops, ops, exits):  # type: ignore[no-untyped-def]
    """For every option of a unit when the copies of each exit, and any of them, end at the
    soonest."""
    count, any_ = n.options[n.unit[ops[0]]], n.where.shape[2]
    found = np.full((count, len(exits), any_ + 1), FAR)
    end = np.full((len(n.unit), any_ + 1), FAR)
    delay = np.zeros(any_ + 1, np.int64)
    for k in range(count):
        free, issued = np.zeros(n.lag.shape[0], np.int64), np.zeros(n.lag.shape[0], np.int64)
        for op in ops:
            g, least = n.grid[op, k], 1 << 60
            end[op, :] = FAR
            for c in range(n.size[op, k]):
                d = n.where[op, k, c]
                issued[d] += n.issue[op, d]
                time = max(free[d], issued[d])
                for e in range(n.start[op], n.start[op + 1]):
                    i = n.maker[e]
                    if n.unit[i] != n.unit[op] or n.begins[e]:
                        continue
                    delays(n, e, k, k, c, delay)
                    for p in range(any_ + 1):
                        if delay[p] >= 0:
                            time = max(time, end[i, p] + delay[p])
                for loop in range(loops.start[op], loops.start[op + 1]):
                    source = loops.source[loop]
                    for p in range(any_ + 1):
                        time = max(time, end[source, p] + loops.length[loop, k, p, c])
                for t in range(loops.head_start[op], loops.head_start[op + 1]):
                    time = max(time, loops.head[t, k, c])
                free[d] = end[op, c] = time + n.duration[op, g, c % n.parts[op, g], d]
                least = min(least, end[op, c])
            end[op, any_] = least
        for y in range(len(exits)):
            found[k, y] = end[exits[y]]
    return found


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _shortest(n, unit, via, outward, inward, ends, through, last, begun):  # type: ignore[no-untyped-def]
    """Loops of `unit` by `via`: for every option the least, over the options of `via`, of the
    longest path out by an edge of `outward`, through, and back by one of `inward`. `ends` numbers
    the Ops of these edges: where they enter, where they exit, whence they come, where they go."""
    entry, exit_, source, target = ends
    any_ = n.where.shape[2]
    count, others = n.options[unit], n.options[via]
    sources, targets = 0, 0
    if len(source):
        sources = source.max() + 1
    if len(target):
        targets = target.max() + 1
    head = np.full((count, targets, any_), 1 << 40)
    soonest = np.zeros((targets, any_), np.int64)
    length = np.full((count, sources, any_ + 1, targets, any_), 1 << 40)
    tail = np.full((count, sources, any_ + 1), 1 << 40)
    delay = np.zeros(any_ + 1, np.int64)
    back = np.zeros((len(inward), any_ + 1, any_), np.int64)
    path = np.zeros((sources, any_ + 1, targets, any_), np.int64)
    beyond = np.zeros((sources, any_ + 1), np.int64)
    for a in range(count):
        for b in range(others):
            for x in range(len(inward)):
                for q in range(n.size[n.reader[inward[x]], a]):
                    delays(n, inward[x], b, a, q, delay)
                    back[x, :, q] = delay
            path[:], beyond[:], soonest[:] = FAR, FAR, 0
            for x in range(len(inward)):
                for r in range(any_ + 1):
                    for c in range(n.size[n.reader[inward[x]], a]):
                        if back[x, r, c] >= 0:
                            time = begun[b, exit_[x], r] + back[x, r, c]
                            soonest[target[x], c] = max(soonest[target[x], c], time)
            for o in range(len(outward)):
                e, z = outward[o], source[o]
                least = 1 << 40
                for q in range(n.size[n.reader[e], b] + 1):
                    if q == n.size[n.reader[e], b]:  # all copies, when any of the maker's has ended
                        delay[:] = NONE
                        delay[any_] = least
                        q = any_
                    else:
                        delays(n, e, a, b, q, delay)
                        least = min(least, delay[any_])
                    for p in range(any_ + 1):
                        if delay[p] < 0:
                            continue
                        beyond[z, p] = max(beyond[z, p], delay[p] + last[b, entry[o], q])
                        for x in range(len(inward)):
                            y, size = target[x], n.size[n.reader[inward[x]], a]
                            for r in range(any_ + 1):
                                way = delay[p] + through[b, entry[o], q, exit_[x], r]
                                if way < 0:
                                    continue
                                for c in range(size):
                                    if back[x, r, c] >= 0:
                                        path[z, p, y, c] = max(
                                            path[z, p, y, c], way + back[x, r, c]
                                        )
            for y in range(targets):
                for c in range(any_):
                    head[a, y, c] = min(head[a, y, c], soonest[y, c])
            for z in range(sources):
                for p in range(any_ + 1):
                    tail[a, z, p] = min(tail[a, z, p], beyond[z, p])
                    for y in range(targets):
                        for c in range(any_):
                            length[a, z, p, y, c] = min(length[a, z, p, y, c], path[z, p, y, c])
    return length, tail, head


def no_loops(n: Needs) -> Loops:
    """No loops, heads and tails: what is undecided takes no time."""
    return _gathered(n, [], [], [])


Row = tuple[int, int, int, Ints]
"""Op, unit by which it goes, source of a loop, lengths."""


def find_loops(n: Needs) -> Loops:
    """Loops, tails and heads of all units, from the last to the first."""
    _, options, copies = n.where.shape
    loops, tails, heads = list[Row](), list[Row](), list[Row]()
    makers, readers, made = n.unit[n.maker], n.unit[n.reader], n.begins == 0
    for via in range(len(n.options) - 1, 0, -1):
        known = _gathered(n, loops, tails, heads)
        ops = np.flatnonzero(n.unit == via)
        for unit in range(via):
            outward = np.flatnonzero((makers == unit) & (readers == via) & made)
            inward = np.flatnonzero((makers == via) & (readers == unit) & made)
            if not len(outward) and not len(inward):
                continue
            entries, entry = np.unique(n.reader[outward], return_inverse=True)
            exits, exit_ = np.unique(n.maker[inward], return_inverse=True)
            sources, source = np.unique(n.maker[outward], return_inverse=True)
            targets, target = np.unique(n.reader[inward], return_inverse=True)
            through, last = _through(n, known, ops, entries, exits)
            begun = _begun(n, known, ops, exits)
            ends = (entry, exit_, source, target)
            length, tail, head = _shortest(
                n, unit, via, outward, inward, ends, through, last, begun
            )
            for y, op in enumerate(targets.tolist()):
                heads.append((op, via, -1, _padded(head[:, y], options)))
            for z, op in enumerate(sources.tolist()):
                tails.append((op, via, -1, _padded(tail[:, z], options)))
                for y, other in enumerate(targets.tolist()):
                    table = _padded(length[:, z, :, y], options)
                    if other > op and (table >= 0).any():
                        loops.append((other, via, op, table))
    return _gathered(n, loops, tails, heads)


def _padded(table: Ints, options: int) -> Ints:
    found = np.full((options, *table.shape[1:]), FAR)
    found[: len(table)] = table
    return found


def _gathered(n: Needs, loops: list[Row], tails: list[Row], heads: list[Row]) -> Loops:
    ops, options, copies = n.where.shape
    shapes = ((copies + 1, copies), (copies + 1,), (copies,))
    found: list[Ints] = []
    for rows, shape in zip((loops, tails, heads), shapes, strict=True):
        rows = sorted(rows, key=lambda row: row[:3])
        owners, vias, sources = (np.array([row[k] for row in rows], np.int64) for k in range(3))
        start = np.zeros(ops + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=ops), out=start[1:])
        tables = np.array([row[3] for row in rows], np.int64).reshape(-1, options, *shape)
        found += (
            [start, sources, owners, vias, tables] if len(shape) == 2 else [start, vias, tables]
        )
    return Loops(*found)
