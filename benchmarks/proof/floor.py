"""floor: a step time that no completion of a partial decision can go below.

In: PartNeeds, UndecidedLoops and the options of the first units. Out: nanoseconds.

The units before `depth` have options, the others do not. The floor is the longest path through

    decided Ops    all their parts, and the assemblies that are sure to be; lanes keep their order
                   and hosts issue what is decided, but links are free for every exchange
    loops          from a decided Op through undecided units and back,
    heads, tails   from the beginning of the step through undecided units to a decided Op, and from
                   one to the end; all with the options of undecided units that make them shortest

All of these are dependencies, or the order of a lane, of the step that is simulated in the end:
times without contention are never later. With everything decided little but contention is left out.
"""

from __future__ import annotations

import numpy as np
from proof.arrivals import (
    NONE,
    arrival,
    arrival_of_terms,
    delays,
    is_all_known,
    lay_out_terms,
    may_be_termwise,
)
from proof.loops import least_of, set_exists
from proof.needs import COPIED, EQUAL

from apportion.columns import compiled


@compiled
def _fetch_time(n, chosen, depth, e, q, end, have, free, issued):  # type: ignore[no-untyped-def]
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
    if partial and n.begins[e]:
        return 0
    if partial and may_be_termwise(n, chosen, depth, e):
        for p in range(n.size[i, a]):
            if n.where[i, a, p] == d:
                return end[i, p]
    if partial and n.whole[e, g] and is_all_known(n, chosen, depth, e):
        laid = have[e, n.where.shape[2] :]
        return arrival_of_terms(n, e, a, b, q, end, laid, free, issued)
    ready, duration, whole = 0, n.viewing[d], False
    if not partial:
        for p in range(n.size[i, a]):
            inside = n.inside[e, g, h, p % parts, r]
            if n.where[i, a, p] == d and inside > 0:
                ready = 0 if n.begins[e] else end[i, p]
                if inside == EQUAL:
                    return ready
                if inside == COPIED:
                    duration = n.assembly[e, h, r, d]
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
            ready = arrival(n, e, a, b, q, end)
            duration = n.assembly[e, h, r, d]
    elif around >= 0:
        duration = n.viewing[d]  # of what was fetched, perhaps
    issued[d] += n.assembly_issue[d]
    if partial or n.lane[e] >= depth:  # it may be done earlier in the lane
        return ready + duration
    start = max(ready, free[d], issued[d])
    free[d] = start + duration
    return free[d]


@compiled
def floor(n, loops, chosen, depth, enough, end, have):  # type: ignore[no-untyped-def]
    """The floor, in nanoseconds, where the units before `depth` have the chosen options; something
    below it as soon as that is `enough`. `end` and `have` are room to work in: Ops x copies, edges
    x twice the copies."""
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
                have[e, q] = _fetch_time(n, chosen, depth, e, q, end, have, free, issued)
                ready[q] = max(ready[q], have[e, q])
        for loop in range(loops.start[op], loops.start[op + 1]):
            if loops.via[loop] >= depth:
                some = True
                source = loops.source[loop]
                for s in range(2 * most + 1):
                    if set_exists(s, n.size[source, k], most):
                        time = least_of(end[source], s, n.size[source, k], most)
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
        for at in range(n.late_start[op], n.late_start[op + 1]):
            e = n.late[at]
            partial = n.terms[e, g] > 1 and n.whole[e, g] == 1
            if not partial or not is_all_known(n, chosen, depth, e):
                continue
            if not may_be_termwise(n, chosen, depth, e):
                b = chosen[n.unit[n.reader[e]]]
                lay_out_terms(n, e, k, b, end, have[e, most:], free, issued)
        for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
            if loops.tail_via[t] >= depth:
                for s in range(2 * most + 1):
                    if set_exists(s, size, most):
                        time = least_of(end[op], s, size, most)
                        last = max(last, time + loops.tail[t, k, s])
        if last >= enough:
            return last
    if some:
        last = max(last, _by_some(n, loops, chosen, depth, end))
    return last


@compiled
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
                    if set_exists(s, n.size[i, k], most):
                        time = least_of(end[i], s, n.size[i, k], most)
                        last = max(last, time + loops.length[loop, k, s, most] + least)
                for p in range(n.size[i, k]):
                    after[i, p] = max(after[i, p], loops.length[loop, k, p, most] + least)
    return last


@compiled
def floors(n, loops, chosen, depth, enough, end, have):  # type: ignore[no-untyped-def]
    """The floor for every option of the unit before `depth`."""
    count = n.options[depth - 1]
    found = np.zeros(count, np.int64)
    mine = chosen.copy()
    for k in range(count):
        mine[depth - 1] = k
        found[k] = floor(n, loops, mine, depth, enough, end, have)
    return found


@compiled
def anneal(n, loops, chosen, tries, hot, cold, seed):  # type: ignore[no-untyped-def]
    """A complete decision with a low floor, by annealing from the chosen one; temperatures are
    shares of the floor."""
    np.random.seed(seed)
    units, (ops, _, most) = len(n.options), n.where.shape
    end, have = np.zeros((ops, most), np.int64), np.zeros((len(n.maker), 2 * most), np.int64)
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
