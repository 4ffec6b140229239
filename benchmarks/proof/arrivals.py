"""arrivals: when a part can have what it reads, at the soonest, given when what it reads is made.

In: PartNeeds, the options chosen so far, and when makers end. Out: nanoseconds. All is compiled; n
is a PartNeeds, e an edge, a and b options of its maker and its reader.

Two answers to it. `delays` takes no account of time: how long it takes from each copy of the maker
to a copy of the reader, for paths through what is not decided. `arrival` and those after it know
when the copies of the maker end, and that a device's link takes in one message at a time.
"""

from __future__ import annotations

import numpy as np
from proof.needs import COPIED, EQUAL, ROUNDING

from apportion.columns import compiled

NONE = -1


@compiled
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


@compiled
def may_be_termwise(n, chosen, depth, e):  # type: ignore[no-untyped-def]
    """The same, as far as is decided: all that the reader reads must be in terms on the same
    devices."""
    i, j = n.maker[e], n.reader[e]
    a, b = chosen[n.unit[i]], chosen[n.unit[j]]
    if not _termwise(n, e, a, b):
        return False
    for f in range(n.start[j], n.start[j + 1]):
        other = n.maker[f]
        if n.unit[other] >= depth:
            continue
        c = chosen[n.unit[other]]
        if n.terms[f, n.grid[other, c]] == 1:
            if n.linear[other] == 0:
                return False
            continue
        if n.size[other, c] != n.size[i, a]:
            return False
        for p in range(n.size[i, a]):
            for q in range(n.size[i, a]):
                alike = n.term[f, n.grid[other, c], q] == n.term[e, n.grid[i, a], p]
                if alike and n.where[other, c, q] != n.where[i, a, p]:
                    return False
    return True


@compiled
def is_all_known(n, chosen, depth, e):  # type: ignore[no-untyped-def]
    """Whether an edge is the first of a Value, and all that later ones ask for is asked for by it:
    then all about the Value is known."""
    j = n.reader[e]
    if n.sole[e] == 0 or n.begins[e] or n.unit[j] >= depth:
        return False
    b = chosen[n.unit[j]]
    if not _apart(n, j, b):
        return False
    h = n.grid[j, b]
    for at in range(n.after_start[e], n.after_start[e + 1]):
        f = n.after[at]
        other = n.reader[f]
        if n.unit[other] >= depth:
            return False
        c = chosen[n.unit[other]]
        k = n.grid[other, c]
        for s in range(n.size[other, c]):
            found = False
            for q in range(n.size[j, b]):
                same = n.region[f, k, s % n.parts[other, k]] == n.region[e, h, q % n.parts[j, h]]
                found = found or (same and n.where[other, c, s] == n.where[j, b, q])
            if not found:
                return False
    return True


@compiled
def _message(n, source, target, nbytes):  # type: ignore[no-untyped-def]
    """Nanoseconds that bytes take between two devices at the least."""
    if source == target:
        return 0
    return max(int(n.lag[source, target] + n.pace[source, target] * nbytes) - ROUNDING, 0)


@compiled
def _holders(n, e, a, p):  # type: ignore[no-untyped-def]
    """How many copies have the box that a copy has."""
    i = n.maker[e]
    g = n.grid[i, a]
    parts, count = n.parts[i, g], 0
    for other in range(n.size[i, a]):
        count += n.box[e, g, other % parts] == n.box[e, g, p % parts]
    return count


@compiled
def delays(n, e, a, b, q, found):  # type: ignore[no-untyped-def]
    """From the end of each copy of the maker to when a copy of the reader has its region and its
    device has done what the maker's unit has for it before; NONE where it need not wait. The last
    is from the end of the first copy that ends: of several that hold a box, none need be waited
    for, but one of them must."""
    found[:] = NONE
    _regions(n, e, a, b, q, found)
    i, d = n.maker[e], n.where[n.reader[e], b, q]
    if n.unit[i] != n.unit[n.reader[e]]:
        for p in range(n.size[i, a]):
            if n.where[i, a, p] == d:
                found[p] = max(found[p], n.gap[e, a, d])
                found[-1] = max(found[-1], n.gap[e, a, d])


@compiled
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
                time = 0 if inside == EQUAL else n.viewing[d]
                found[p] = found[any_] = n.assembly[e, h, r, d] if inside == COPIED else time
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
    if n.first[e] and n.terms[e, g] == 1 and _apart(n, j, b):
        incoming = _intake(n, d, _incoming(n, e, a, b, q), _moved(n, e, a, b))
        found[any_] = max(found[any_], incoming + assembly)


@compiled
def _apart(n, op, k):  # type: ignore[no-untyped-def]
    """Whether all copies are on different devices, so that none finds what another fetched."""
    for q in range(n.size[op, k]):
        for other in range(q):
            if n.where[op, k, q] == n.where[op, k, other]:
                return False
    return True


@compiled
def _incoming(n, e, a, b, q):  # type: ignore[no-untyped-def]
    """Bytes that a copy of the reader of an edge needs from other devices; for a partial Value, of
    all its terms."""
    i, j = n.maker[e], n.reader[e]
    g, h = n.grid[i, a], n.grid[j, b]
    have, r, d = n.parts[i, g], q % n.parts[j, h], n.where[j, b, q]
    size, total = n.size[i, a], 0
    if n.region[e, h, r] < 0 or n.apart[e, g] == 0:
        return 0
    if n.terms[e, g] == 1:
        for p in range(size):
            if n.where[i, a, p] == d and n.inside[e, g, h, p % have, r] > 0:
                return 0
    for p in range(min(have, size)):
        new = n.nbytes[e, g, h, p, r] > 0
        for other in range(p):
            new = new and n.box[e, g, other] != n.box[e, g, p]
        if new:
            here = False
            for other in range(size):
                same = n.box[e, g, other % have] == n.box[e, g, p]
                here = here or (same and n.where[i, a, other] == d)
            if not here:
                total += n.nbytes[e, g, h, p, r]
    return total


@compiled
def _moved(n, e, a, b):  # type: ignore[no-untyped-def]
    """Bytes that all copies of the reader need from other devices, each region once."""
    j, total = n.reader[e], 0
    h = n.grid[j, b]
    want = n.parts[j, h]
    for q in range(n.size[j, b]):
        new = True
        for other in range(q):
            same = n.region[e, h, other % want] == n.region[e, h, q % want]
            new = new and not (same and n.where[j, b, other] == n.where[j, b, q])
        if new:
            total += _incoming(n, e, a, b, q)
    return total


@compiled
def _intake(n, d, nbytes, moved):  # type: ignore[no-untyped-def]
    """Nanoseconds that a device's link needs for the bytes it receives in an exchange, of all that
    it moves."""
    if nbytes == 0:
        return 0
    least = 1e18
    for source in range(n.lag.shape[0]):
        if source != d:
            least = min(least, n.lag[source, d])
    if n.lag.shape[0] >= 6:
        moved = nbytes  # there may be several collectives side by side
    busy = min(n.intake[d] * nbytes, n.share[d] * moved)
    return max(int(least + busy) - 2 * ROUNDING, 0)


@compiled
def arrival(n, e, a, b, q, end):  # type: ignore[no-untyped-def]
    """When all boxes of a region have come, given when the copies of the maker end."""
    i, j = n.maker[e], n.reader[e]
    g, h = n.grid[i, a], n.grid[j, b]
    have, r, d = n.parts[i, g], q % n.parts[j, h], n.where[j, b, q]
    size, ready, soonest = n.size[i, a], 0, 1 << 60
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
                soonest = min(soonest, time)
        ready = max(ready, best)
    if n.first[e] and _apart(n, j, b):
        ready = max(ready, soonest + _intake(n, d, _incoming(n, e, a, b, q), _moved(n, e, a, b)))
    return ready


# A partial Value that one Op reads is fetched term by term, or laid out in slices first


@compiled
def _owners(n, e, a, b, owners):  # type: ignore[no-untyped-def]
    """The devices over which a partial Value is laid out, how many; 0 if it is not."""
    i, j = n.maker[e], n.reader[e]
    g, h = n.grid[i, a], n.grid[j, b]
    have, want, size = n.parts[i, g], n.parts[j, h], n.size[i, a]
    count = 0
    for t in range(n.terms[e, g]):
        for p in range(size):
            if n.term[e, g, p % have] == t:
                new = True
                for w in range(count):
                    new = new and owners[w] != n.where[i, a, p]
                if new:
                    owners[count] = n.where[i, a, p]
                    count += 1
    if count < 2:
        return 0
    direct, moved = _moved(n, e, a, b), 0
    for w in range(count):
        moved += n.slice[e, count, w] * _remote_terms(n, e, a, owners[w])
    for q in range(n.size[j, b]):
        new = n.region[e, h, q % want] >= 0
        for other in range(q):
            same = n.region[e, h, other % want] == n.region[e, h, q % want]
            new = new and not (same and n.where[j, b, other] == n.where[j, b, q])
        if new:
            for w in range(count):
                if owners[w] != n.where[j, b, q]:
                    moved += n.laid[e, h, q % want, count, w]
    return count if moved < direct else 0


@compiled
def _remote_terms(n, e, a, d):  # type: ignore[no-untyped-def]
    """How many terms are not on a device."""
    i = n.maker[e]
    g = n.grid[i, a]
    have, count = n.parts[i, g], n.terms[e, g]
    for t in range(n.terms[e, g]):
        here = False
        for p in range(n.size[i, a]):
            here = here or (n.term[e, g, p % have] == t and n.where[i, a, p] == d)
        count -= here
    return count


@compiled
def lay_out_terms(n, e, a, b, end, laid, free, issued):  # type: ignore[no-untyped-def]
    """Lays a partial Value out, if it will be: writes when each slice is there."""
    owners = np.zeros(n.where.shape[2], np.int64)
    count = _owners(n, e, a, b, owners)
    i = n.maker[e]
    g = n.grid[i, a]
    have, moved = n.parts[i, g], 0
    for w in range(count):
        moved += n.slice[e, count, w] * _remote_terms(n, e, a, owners[w])
    for w in range(count):
        d, nbytes = owners[w], n.slice[e, count, w]
        laid[w] = 0
        if nbytes == 0:
            continue
        ready, soonest = 0, 1 << 60
        for t in range(n.terms[e, g]):
            best = 1 << 60
            for p in range(n.size[i, a]):
                if n.term[e, g, p % have] == t:
                    if n.where[i, a, p] == d:
                        best = end[i, p]
                        break
                    best = min(best, end[i, p] + _message(n, n.where[i, a, p], d, 0))
                    soonest = min(soonest, end[i, p])
            ready = max(ready, best)
        remote = _remote_terms(n, e, a, d) * nbytes
        if remote:
            ready = max(ready, soonest + _intake(n, d, remote, moved))
        issued[d] += n.assembly_issue[d]
        spent = max(int(n.assembling[d] * 2 * n.terms[e, g] * nbytes) - 1, 1)
        free[d] = max(ready, free[d], issued[d]) + spent
        laid[w] = free[d]


@compiled
def arrival_of_terms(n, e, a, b, q, end, laid, free, issued):  # type: ignore[no-untyped-def]
    """When the only reader of a partial Value has its region."""
    owners = np.zeros(n.where.shape[2], np.int64)
    count = _owners(n, e, a, b, owners)
    j = n.reader[e]
    h = n.grid[j, b]
    want, d = n.parts[j, h], n.where[j, b, q]
    r = q % want
    issued[d] += n.assembly_issue[d]
    if count == 0:
        ready = arrival(n, e, a, b, q, end)
        terms, size = n.terms[e, n.grid[n.maker[e], a]], 0
        for w in range(2):
            size += n.laid[e, h, r, 2, w]
        spent = max(int(n.assembling[d] * 2 * terms * size) - 1, n.assembly[e, h, r, d])
    else:
        ready, soonest, remote, size, moved = 0, 1 << 60, 0, 0, 0
        for w in range(count):
            nbytes = n.laid[e, h, r, count, w]
            size += nbytes
            if nbytes:
                ready = max(ready, laid[w] + _message(n, owners[w], d, nbytes))
                if owners[w] != d:
                    remote += nbytes
                    soonest = min(soonest, laid[w])
        spent = n.assembly[e, h, r, d]
        if remote == 0:
            spent = n.viewing[d]
            for w in range(count):
                if owners[w] == d and n.slice[e, count, w] == size:
                    issued[d] -= n.assembly_issue[d]
                    return laid[w]
        else:
            for other in range(n.size[j, b]):
                for w in range(count):
                    if owners[w] != n.where[j, b, other]:
                        moved += n.laid[e, h, other % want, count, w]
            ready = max(ready, soonest + _intake(n, d, remote, moved))
    free[d] = max(ready, free[d], issued[d]) + spent
    return free[d]
