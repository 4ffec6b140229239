"""loops: the shortest ways through units that are not decided yet.

In: PartNeeds. Out: UndecidedLoops.

Loops go from an Op of a unit through a later one and back, heads from the beginning of the step
through a later unit, tails through one to the end of the step; later units are decided later. Each
is the shortest over the options of that unit of the longest of its paths: an exchange, a path
inside (its own loops by units that are later still counted), and an exchange back. They are found
from the last unit to the first.

A path may begin at any copy of an Op, so the copies that it begins at are taken in sets: if all of
a set have ended, whoever reads from several of them waits for the farthest. Otherwise a unit of
four parts would be left by each of them for a unit on its own device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from proof.arrivals import NONE, delays
from proof.needs import PartNeeds

from apportion.columns import Ints, compiled

FAR = -(1 << 40)


class UndecidedLoops(NamedTuple):  # numba takes no dataclass
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


# Sets of copies. Of m copies at most: set s < m has the copy s, set m + s all but it, set 2 m all.


@compiled
def set_exists(s, size, most):  # type: ignore[no-untyped-def]
    return s == 2 * most or s < size or (s >= most and s - most < size and size > 2)


@compiled
def least_of(row, s, size, most):  # type: ignore[no-untyped-def]
    """The least that a set has in a row."""
    if s < most:
        return row[s]
    found = 1 << 60
    for p in range(size):
        if s - most != p:
            found = min(found, row[p])
    return found


@compiled
def most_of(row, s, size, most):  # type: ignore[no-untyped-def]
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


# Paths inside a unit


@compiled
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
                least = least_of(end[i], 2 * most, n.size[i, k], most)
                if least >= 0:
                    time = max(time, least + delay[most])
            for loop in range(loops.start[op], loops.start[op + 1]):
                i = loops.source[loop]
                for z in range(2 * most + 1):
                    if set_exists(z, n.size[i, k], most):
                        least = least_of(end[i], z, n.size[i, k], most)
                        if least >= 0:
                            time = max(time, least + loops.length[loop, k, z, c])
            if time >= 0:
                end[op, c] = time + n.duration[op, g, c % n.parts[op, g], d]
                free[d] = end[op, c]


@compiled
def _rest(n, loops, op, k, row):  # type: ignore[no-untyped-def]
    """From ends of the copies of an Op the longest path by its tails."""
    most, found = n.where.shape[2], FAR
    size = n.size[op, k]
    for c in range(size):
        found = max(found, row[c])
    for t in range(loops.tail_start[op], loops.tail_start[op + 1]):
        for s in range(2 * most + 1):
            if set_exists(s, size, most):
                least = least_of(row, s, size, most)
                if least >= 0:
                    found = max(found, least + loops.tail[t, k, s])
    return found


@compiled
def _path_through(n, loops, ops, entries, exits):  # type: ignore[no-untyped-def]
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
                    if not set_exists(s, n.size[entries[x - 1], k], most):
                        continue
                    _inside(
                        n, loops, ops, k, entries[x - 1], s, False, end, np.full(devices, FAR),
                        np.zeros(devices, np.int64),
                    )  # fmt: skip
                for y in range(len(exits)):
                    size = n.size[exits[y], k]
                    found[k, x, s, y, sets] = end[exits[y]].max()
                    for z in range(sets):
                        if set_exists(z, size, most):
                            found[k, x, s, y, z] = least_of(end[exits[y]], z, size, most)
                for op in ops:
                    last[k, x, s] = max(last[k, x, s], _rest(n, loops, op, k, end[op]))
                    for loop in range(loops.start[op], loops.start[op + 1]):
                        at, i = loop - loops.start[ops[0]], loops.source[loop]
                        for z in range(sets):
                            if not set_exists(z, n.size[i, k], most):
                                continue
                            time = least_of(end[i], z, n.size[i, k], most)
                            if time < 0:
                                continue
                            time += loops.length[loop, k, z, most]
                            last[k, x, s] = max(last[k, x, s], time + onward[at, len(exits)])
                            for y in range(len(exits)):
                                late = max(found[k, x, s, y, sets], time + onward[at, y])
                                found[k, x, s, y, sets] = late
    return found, last


@compiled
def _path_back(n, e, b, a, back):  # type: ignore[no-untyped-def]
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
            if set_exists(s, made, most):
                back[s, q] = most_of(delay, s, made, most)
                back[s, most] = max(back[s, most], back[s, q])
    for r in range(made):
        worst = min(worst, some[r])
    back[2 * most + 1, most] = worst


@compiled
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
                _path_back(n, inward[x], b, a, back[x])
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
                    if not set_exists(s, made, most):
                        continue
                    for q in range(size):
                        reach[q] = most_of(out[q], s, made, most)
                    for v in range(sets):
                        if not set_exists(v, size, most):
                            continue
                        begun = least_of(reach, v, size, most)
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


def no_loops(n: PartNeeds) -> UndecidedLoops:
    """No loops, heads and tails: what is undecided takes no time."""
    return _gathered(n, [], [], [])


Row = tuple[int, int, int, Ints]
"""Op, unit by which it goes, source of a loop, lengths."""


def find_loops(n: PartNeeds) -> UndecidedLoops:
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
            through, last = _path_through(n, known, ops, entries, exits)
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


def _gathered(n: PartNeeds, loops: list[Row], tails: list[Row], heads: list[Row]) -> UndecidedLoops:
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
    return UndecidedLoops(*found)
