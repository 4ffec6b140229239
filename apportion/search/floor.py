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
    """Loops l from sets of copies s of one Op to copies of another of the same unit, tails t from
    sets, heads h. `some` is what at least one copy, whichever, has to wait."""

    start: Ints  # o + 1: loops by the Op that they end at
    source: Ints  # l: Op
    via: Ints  # l: unit
    length: Ints  # l x k x s x (m + 1): to each copy, and to some
    tail_start: Ints  # o + 1: tails by Op
    tail_via: Ints  # t: unit
    tail: Ints  # t x k x s
    head_start: Ints  # o + 1: heads by Op
    head_via: Ints  # h: unit
    head: Ints  # h x k x (m + 1)


# Sets of copies: of m copies at most, set s < m has the copy s, set m + s all but that, set 2 m all.


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _exists(s, size, most):  # type: ignore[no-untyped-def]
    return s == 2 * most or s < size or (s >= most and s - most < size and size > 2)


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _least(row, s, size, most):  # type: ignore[no-untyped-def]
    """The least that a set has in a row."""
    if s < most:
        return row[s]
    found = 1 << 60
    for p in range(size):
        if s - most != p:
            found = min(found, row[p])
    return found


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _most(row, s, size, most):  # type: ignore[no-untyped-def]
    """The most that a set has in a row of delays."""
    if s < most:
        return row[s]
    if s == 2 * most:
        return row[most]
    found = NONE
    for p in range(size):
        if s - most != p:
            found = max(found, row[p])
    return found


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
    """From the end of each copy of the maker to when a copy of the reader has its region and its
    device has done what the maker's unit has for it before; NONE where it need not wait. The last is from the end of the first copy that ends: of several
    that hold a box, none need be waited for, but one of them must."""
    found[:] = NONE
    _regions(n, e, a, b, q, found)
    i, d = n.maker[e], n.where[n.reader[e], b, q]
    if n.unit[i] != n.unit[n.reader[e]]:
        for p in range(n.size[i, a]):
            if n.where[i, a, p] == d:
                found[p] = max(found[p], n.gap[e, a, d])
                found[-1] = max(found[-1], n.gap[e, a, d])


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _regions(n, e, a, b, q, found):  # type: ignore[no-untyped-def]
    """Delays because of what is read."""
    i, j = n.maker[e], n.reader[e]
    g, h = n.grid[i, a], n.grid[j, b]
    have, want = n.parts[i, g], n.parts[j, h]
    d, r = n.where[j, b, q], q % want
    size, any_ = n.size[i, a], n.where.shape[2]
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
def floor(n, loops, chosen, depth, enough, end, have):  # type: ignore[no-untyped-def]
    """The floor, in nanoseconds, where the units before `depth` have the chosen options; something
    below it as soon as that is `enough`. `end` and `have` are room to work in: Ops x copies, edges
    x copies."""
    devices, most = n.lag.shape[0], n.where.shape[2]
    free, issued = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    ready = np.zeros(most, np.int64)
    last, some = 0, False
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
                some = True
                source = loops.source[loop]
                for s in range(2 * most + 1):
                    if _exists(s, n.size[source, k], most):
                        time = _least(end[source], s, n.size[source, k], most)
                        for q in range(size):
                            ready[q] = max(ready[q], time + loops.length[loop, k, s, q])
        for t in range(loops.head_start[op], loops.head_start[op + 1]):
            if loops.head_via[t] >= depth:
                some = True
                for q in range(size):
                    ready[q] = max(ready[q], loops.head[t, k, q])
        for q in range(size):
            d = n.where[op, k, q]
            issued[d] += n.issue[op, d]
            start = max(ready[q], free[d], issued[d])
            free[d] = end[op, q] = start + n.duration[op, g, q % n.parts[op, g], d]
            last = max(last, end[op, q] + n.rest[op])
        for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
            if loops.tail_via[t] >= depth:
                for s in range(2 * most + 1):
                    if _exists(s, size, most):
                        time = _least(end[op], s, size, most)
                        last = max(last, time + loops.tail[t, k, s])
        if last >= enough:
            return last
    if some:
        last = max(last, _by_some(n, loops, chosen, depth, end))
    return last


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _by_some(n, loops, chosen, depth, end):  # type: ignore[no-untyped-def]
    """The longest path by a copy of which it is not known which it is: to it as late as some copy
    is, and on from there as from the one that has the least to do."""
    most = n.where.shape[2]
    after = np.zeros((len(n.unit), most), np.int64)  # from the end of a copy to that of the step
    following = np.zeros(n.lag.shape[0], np.int64)
    delay = np.zeros(most + 1, np.int64)
    last = 0
    for op in range(len(n.unit) - 1, -1, -1):
        u = n.unit[op]
        if u >= depth:
            continue
        k = chosen[u]
        g, size = n.grid[op, k], n.size[op, k]
        for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
            if loops.tail_via[t] >= depth:
                for q in range(size):
                    after[op, q] = max(after[op, q], loops.tail[t, k, q])
        least = 1 << 60
        for q in range(size - 1, -1, -1):
            d = n.where[op, k, q]
            left = max(after[op, q], following[d]) + n.duration[op, g, q % n.parts[op, g], d]
            following[d] = left
            least = min(least, left)
            for e in range(n.start[op], n.start[op + 1]):
                i = n.maker[e]
                if n.unit[i] >= depth or n.begins[e]:
                    continue
                a = chosen[n.unit[i]]
                delays(n, e, a, k, q, delay)
                for p in range(n.size[i, a]):
                    if delay[p] >= 0:
                        after[i, p] = max(after[i, p], delay[p] + left)
        for t in range(loops.head_start[op], loops.head_start[op + 1]):
            if loops.head_via[t] >= depth:
                last = max(last, loops.head[t, k, most] + least)
        for loop in range(loops.start[op], loops.start[op + 1]):
            if loops.via[loop] >= depth:
                i = loops.source[loop]
                for s in range(2 * most + 1):
                    if _exists(s, n.size[i, k], most):
                        time = _least(end[i], s, n.size[i, k], most)
                        last = max(last, time + loops.length[loop, k, s, most] + least)
                for p in range(n.size[i, k]):
                    after[i, p] = max(after[i, p], loops.length[loop, k, p, most] + least)
    return last


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def floors(n, loops, chosen, depth, enough, end, have):  # type: ignore[no-untyped-def]
    """The floor for every option of the unit before `depth`."""
    count = n.options[depth - 1]
    found = np.zeros(count, np.int64)
    mine = chosen.copy()
    for k in range(count):
        mine[depth - 1] = k
        found[k] = floor(n, loops, mine, depth, enough, end, have)
    return found


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def cooled(n, loops, chosen, tries, hot, cold, seed):  # type: ignore[no-untyped-def]
    """A complete decision with a low floor, by annealing from the chosen one; temperatures are
    shares of the floor."""
    np.random.seed(seed)
    units, (ops, _, most) = len(n.options), n.where.shape
    end, have = np.zeros((ops, most), np.int64), np.zeros((len(n.maker), most), np.int64)
    now, best = chosen.copy(), chosen.copy()
    never = 1 << 60
    here = least = floor(n, loops, now, units, never, end, have)
    for k in range(tries):
        heat = hot * (cold / hot) ** (k / tries) * least
        limit = here - heat * np.log(1.0 - np.random.random())
        new = now.copy()
        unit = np.random.randint(units)
        new[unit] = np.random.randint(n.options[unit])
        if units > 1 and np.random.random() < 0.5:
            unit = unit - 1 if unit > 0 else 1
            new[unit] = np.random.randint(n.options[unit])
        there = floor(n, loops, new, units, int(limit) + 1, end, have)
        if there <= limit:
            now, here = new, there
            if here < least:
                least, best = here, new.copy()
    return best


# Loops


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _inside(n, loops, ops, k, first, s, begin, end, free, issued):  # type: ignore[no-untyped-def]
    """Longest paths from the start of a set of copies of an Op to the ends of all in its unit, FAR
    where there is none; or, with `begin`, from the beginning of the step."""
    u, most = n.unit[ops[0]], n.where.shape[2]
    delay = np.zeros(most + 1, np.int64)
    for op in ops:
        g, size = n.grid[op, k], n.size[op, k]
        end[op, :] = FAR
        if op < first:
            continue
        for c in range(size):
            d = n.where[op, k, c]
            time = free[d]
            if begin:
                issued[d] += n.issue[op, d]
                time = max(time, issued[d])
                for t in range(loops.head_start[op], loops.head_start[op + 1]):
                    time = max(time, loops.head[t, k, c])
            elif op == first and (s == 2 * most or s == c or (s >= most and s - most != c)):
                time = max(time, 0)
            for e in range(n.start[op], n.start[op + 1]):
                i = n.maker[e]
                if n.unit[i] != u or n.begins[e]:
                    continue
                delays(n, e, k, k, c, delay)
                for p in range(n.size[i, k]):
                    if delay[p] >= 0 and end[i, p] >= 0:
                        time = max(time, end[i, p] + delay[p])
                least = _least(end[i], 2 * most, n.size[i, k], most)
                if least >= 0:
                    time = max(time, least + delay[most])
            for loop in range(loops.start[op], loops.start[op + 1]):
                i = loops.source[loop]
                for z in range(2 * most + 1):
                    if _exists(z, n.size[i, k], most):
                        least = _least(end[i], z, n.size[i, k], most)
                        if least >= 0:
                            time = max(time, least + loops.length[loop, k, z, c])
            if time >= 0:
                end[op, c] = time + n.duration[op, g, c % n.parts[op, g], d]
                free[d] = end[op, c]


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _rest(n, loops, op, k, row):  # type: ignore[no-untyped-def]
    """From ends of the copies of an Op the longest path by its tails."""
    most, found = n.where.shape[2], FAR
    size = n.size[op, k]
    for c in range(size):
        found = max(found, row[c])
    for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
        for s in range(2 * most + 1):
            if _exists(s, size, most):
                least = _least(row, s, size, most)
                if least >= 0:
                    found = max(found, least + loops.tail[t, k, s])
    return found


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _through(n, loops, ops, entries, exits):  # type: ignore[no-untyped-def]
    """For every option of a unit the longest paths from the start of each set of copies of each
    entry to the end of all in each set of each exit, to the end of some copy of it, and to the end
    of the step. Entry 0 is the beginning of the step."""
    count, most = n.options[n.unit[ops[0]]], n.where.shape[2]
    sets, devices = 2 * most + 1, n.lag.shape[0]
    found = np.full((count, len(entries) + 1, sets, len(exits), sets + 1), FAR)
    last = np.full((count, len(entries) + 1, sets), FAR)
    end = np.full((len(n.unit), most), FAR)
    wide = loops.start[ops[-1] + 1] - loops.start[ops[0]]
    onward = np.zeros((wide, len(exits) + 1), np.int64)  # from some copy of a loop's target on
    for k in range(count):
        for at in range(wide):
            loop = loops.start[ops[0]] + at
            onward[at] = 1 << 40
            op = ops[0]
            while loops.start[op + 1] <= loop:
                op += 1
            if n.unit[op] != n.unit[ops[0]]:
                continue
            for c in range(n.size[op, k]):
                _inside(
                    n, loops, ops, k, op, c, False, end, np.full(devices, FAR),
                    np.zeros(devices, np.int64),
                )  # fmt: skip
                for y in range(len(exits)):
                    onward[at, y] = min(onward[at, y], end[exits[y]].max())
                rest = FAR
                for other in ops:
                    rest = max(rest, _rest(n, loops, other, k, end[other]))
                onward[at, len(exits)] = min(onward[at, len(exits)], rest)
        for x in range(len(entries) + 1):
            for s in range(sets):
                if x == 0:
                    if s != 2 * most:
                        continue
                    _inside(
                        n, loops, ops, k, 0, s, True, end, np.zeros(devices, np.int64),
                        np.zeros(devices, np.int64),
                    )  # fmt: skip
                else:
                    if not _exists(s, n.size[entries[x - 1], k], most):
                        continue
                    _inside(
                        n, loops, ops, k, entries[x - 1], s, False, end, np.full(devices, FAR),
                        np.zeros(devices, np.int64),
                    )  # fmt: skip
                for y in range(len(exits)):
                    size = n.size[exits[y], k]
                    found[k, x, s, y, sets] = end[exits[y]].max()
                    for z in range(sets):
                        if _exists(z, size, most):
                            found[k, x, s, y, z] = _least(end[exits[y]], z, size, most)
                for op in ops:
                    last[k, x, s] = max(last[k, x, s], _rest(n, loops, op, k, end[op]))
                    for loop in range(loops.start[op], loops.start[op + 1]):
                        at, i = loop - loops.start[ops[0]], loops.source[loop]
                        for z in range(sets):
                            if not _exists(z, n.size[i, k], most):
                                continue
                            time = _least(end[i], z, n.size[i, k], most)
                            if time < 0:
                                continue
                            time += loops.length[loop, k, z, most]
                            last[k, x, s] = max(last[k, x, s], time + onward[at, len(exits)])
                            for y in range(len(exits)):
                                late = max(found[k, x, s, y, sets], time + onward[at, y])
                                found[k, x, s, y, sets] = late
    return found, last


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _back(n, e, b, a, back):  # type: ignore[no-untyped-def]
    """Delays along an edge from sets of copies of the maker, and from some copy of it, to the
    copies of the reader, and to some copy of it."""
    most = n.where.shape[2]
    delay = np.zeros(most + 1, np.int64)
    some = np.full(most, NONE)
    made, size = n.size[n.maker[e], b], n.size[n.reader[e], a]
    back[:] = NONE
    worst = 1 << 40
    for q in range(size):
        delays(n, e, b, a, q, delay)
        every = 1 << 40
        for r in range(made):
            every = min(every, delay[r])
            some[r] = max(some[r], delay[r])
        back[2 * most + 1, q] = every
        for s in range(2 * most + 1):
            if _exists(s, made, most):
                back[s, q] = _most(delay, s, made, most)
                back[s, most] = max(back[s, most], back[s, q])
    for r in range(made):
        worst = min(worst, some[r])
    back[2 * most + 1, most] = worst


@njit(cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _shortest(n, unit, via, outward, inward, ends, through, last):  # type: ignore[no-untyped-def]
    """Loops of `unit` by `via`: for every option the least, over the options of `via`, of the
    longest path out by an edge of `outward`, through, and back by one of `inward`. `ends` numbers
    the Ops of these edges: where they enter, where they exit, whence they come, where they go."""
    entry, exit_, source, target = ends
    most = n.where.shape[2]
    sets = 2 * most + 1
    count, others = n.options[unit], n.options[via]
    sources, targets = 0, 0
    if len(source):
        sources = source.max() + 1
    if len(target):
        targets = target.max() + 1
    far = 1 << 40
    length = np.full((count, sources, sets, targets, most + 1), far)
    tail = np.full((count, sources, sets), far)
    head = np.full((count, targets, most + 1), far)
    back = np.zeros((len(inward), sets + 1, most + 1), np.int64)
    out = np.zeros((most, most + 1), np.int64)
    reach = np.zeros(most, np.int64)
    path = np.zeros((sources, sets, targets, most + 1), np.int64)
    beyond = np.zeros((sources, sets), np.int64)
    soonest = np.zeros((targets, most + 1), np.int64)
    for a in range(count):
        for b in range(others):
            path[:], beyond[:], soonest[:] = FAR, FAR, 0
            for x in range(len(inward)):
                _back(n, inward[x], b, a, back[x])
                for z in range(sets + 1):
                    time = through[b, 0, 2 * most, exit_[x], z]
                    if time >= 0:
                        for c in range(most + 1):
                            if back[x, z, c] >= 0:
                                late = max(soonest[target[x], c], time + back[x, z, c])
                                soonest[target[x], c] = late
            for o in range(len(outward)):
                e, w = outward[o], source[o]
                made, size = n.size[n.maker[e], a], n.size[n.reader[e], b]
                for q in range(size):
                    delays(n, e, a, b, q, out[q])
                for s in range(sets):
                    if not _exists(s, made, most):
                        continue
                    for q in range(size):
                        reach[q] = _most(out[q], s, made, most)
                    for v in range(sets):
                        if not _exists(v, size, most):
                            continue
                        begun = _least(reach, v, size, most)
                        if begun < 0:
                            continue
                        beyond[w, s] = max(beyond[w, s], begun + last[b, entry[o] + 1, v])
                        for x in range(len(inward)):
                            for z in range(sets + 1):
                                way = begun + through[b, entry[o] + 1, v, exit_[x], z]
                                if way < 0:
                                    continue
                                for c in range(most + 1):
                                    if back[x, z, c] >= 0:
                                        late = max(path[w, s, target[x], c], way + back[x, z, c])
                                        path[w, s, target[x], c] = late
            for y in range(targets):
                for c in range(most + 1):
                    head[a, y, c] = min(head[a, y, c], soonest[y, c])
            for w in range(sources):
                for s in range(sets):
                    tail[a, w, s] = min(tail[a, w, s], beyond[w, s])
                    for y in range(targets):
                        for c in range(most + 1):
                            known = min(length[a, w, s, y, c], path[w, s, y, c])
                            length[a, w, s, y, c] = known
    return length, tail, head


def no_loops(n: Needs) -> Loops:
    """No loops, heads and tails: what is undecided takes no time."""
    return _gathered(n, [], [], [])


Row = tuple[int, int, int, Ints]
"""Op, unit by which it goes, source of a loop, lengths."""


def find_loops(n: Needs) -> Loops:
    """Loops, tails and heads of all units, from the last to the first."""
    options = n.where.shape[1]
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
            ends = (entry, exit_, source, target)
            length, tail, head = _shortest(n, unit, via, outward, inward, ends, through, last)
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
    ops, options, most = n.where.shape
    shapes = ((2 * most + 1, most + 1), (2 * most + 1,), (most + 1,))
    found: list[Ints] = []
    for rows, shape in zip((loops, tails, heads), shapes, strict=True):
        rows = sorted(rows, key=lambda row: row[:3])
        owners, vias, sources = (np.array([row[k] for row in rows], np.int64) for k in range(3))
        start = np.zeros(ops + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=ops), out=start[1:])
        tables = np.array([row[3] for row in rows], np.int64).reshape(-1, options, *shape)
        found += [start, sources, vias, tables] if len(shape) == 2 else [start, vias, tables]
    return Loops(*found)
