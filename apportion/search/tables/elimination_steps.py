"""elimination_steps: the order of a variable elimination, and its steps run, compiled.

In: which variables share a table, and then the tables. Out: an EliminationOrder, and with it the
choice of all variables that makes the sum of the tables smallest (eliminate.py says how).

Step s eliminates variable `order[s]`: it adds up the tables that mention it, takes the minimum over
it, and leaves a table over its `scope`, the neighbours that it has by then. A table is an input of
the step of whichever of its variables is eliminated first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Bools,
    Floats,
    Ints,
    compiled,
    inlined,
    row_hash,
    slot_of,
    with_more_slots,
)


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


@compiled
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


# Running the steps. In compiled functions `steps` is an EliminationOrder, `tables` are Tables,
# `terms` are _StepInputs, `made` are _StepTables, `table_of` has the number of the table that each
# step left, and s is the number of a step.


class Tables(NamedTuple):  # numba takes no dataclass
    """The tables of a sum: variable v has the table `unary[v]`, pair e the table `pairs[e]`, and
    table t begins at `starts[t]` of `entries`."""

    sizes: Ints
    unary: Ints
    pairs: Ints
    entries: Floats
    starts: Ints


class _StepTables(NamedTuple):  # numba takes no dataclass
    """The distinct tables that steps leave. Table n has its entries from `at[n]` on in `entries`,
    less their minimum `least[n]`, and beside them in `best` the values that attain them."""

    entries: Floats
    best: npt.NDArray[np.int32]
    at: Ints
    least: Floats


class _StepInputs(NamedTuple):  # numba takes no dataclass
    """The tables that one step adds up, and the work space of adding them.

    place   per variable its place in the scope of the step, -1 for none; the eliminated one is last
    base    per term where the entry is that is wanted next
    stride  per term and place how far apart entries are
    given   per term whether it is one of the given tables; else a step has made it
    values  per place of the scope the value that is wanted next
    row     the sum of all terms, per value of the eliminated variable
    """

    place: Ints
    base: Ints
    stride: Ints
    given: Bools
    values: Ints
    row: Floats


def run_elimination(steps: EliminationOrder, tables: Tables) -> tuple[Ints, float]:
    """The best choice of all variables, and the minimum."""
    choice, least = _run(steps, tables)
    return choice, float(least)


def _run_in_numpy(steps: EliminationOrder, tables: Tables) -> tuple[Ints, float]:
    """What `_run` does, a step at a time in NumPy's terms. Terms are added in the same order, and
    of equal entries the first is the best, so that both give the same, bit for bit."""
    numbers: dict[tuple[object, ...], int] = {}
    made: list[tuple[Floats, Ints, float]] = []  # entries less their minimum, the best, the minimum
    table_of: list[int] = []
    constant, least = np.zeros(len(steps.order)), 0.0
    scopes = [steps.scope[a:b].tolist() for a, b in pairwise(steps.scope_at.tolist())]
    for s, (variable, scope) in enumerate(zip(steps.order.tolist(), scopes, strict=True)):
        place = {v: k for k, v in enumerate([*scope, variable])}
        shape = tuple(tables.sizes[[*scope, variable]].tolist())
        given = [(int(tables.unary[variable]), (variable,))]
        for e in steps.edge[steps.edge_at[s] : steps.edge_at[s + 1]].tolist():
            given.append((int(tables.pairs[e]), tuple(steps.edges[e].tolist())))
        left = steps.left[steps.left_at[s] : steps.left_at[s + 1]].tolist()
        earlier = [(table_of[t], tuple(scopes[t])) for t in left]
        key = (shape, *_placed(given, place), -1, *_placed(earlier, place))
        if key not in numbers:
            numbers[key] = len(made)
            terms = [(_given_table(tables, *term), term[1]) for term in given]
            terms += [(made[number][0], variables) for number, variables in earlier]
            total = np.zeros(shape)
            total[...] = _spread(*terms[0], place)
            for term in terms[1:]:
                total += _spread(*term, place)
            entries = total.min(axis=-1)
            lowest = float(entries.min())
            made.append((entries - lowest, total.argmin(axis=-1), lowest))
        table_of.append(numbers[key])
        for t in left:
            constant[s] += constant[t]
        constant[s] += made[table_of[s]][2]
        if not scope:
            least += constant[s]
    choice = np.zeros(len(tables.sizes), np.int64)
    for s in range(len(steps.order) - 1, -1, -1):
        choice[steps.order[s]] = made[table_of[s]][1][tuple(choice[scopes[s]])]
    return choice, least


def _placed(
    terms: Sequence[tuple[int, tuple[int, ...]]], place: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Each term by its table and the places of its variables: what is added up follows from it."""
    return ((number, *(place.get(v, -1) for v in variables)) for number, variables in terms)


def _given_table(tables: Tables, number: int, variables: tuple[int, ...]) -> Floats:
    shape = tables.sizes[list(variables)]
    start = tables.starts[number]
    return tables.entries[start : start + shape.prod()].reshape(shape)


def _spread(table: Floats, variables: tuple[int, ...], place: Mapping[int, int]) -> Floats:
    """A table with one dimension for every place, of length 1 where it does not depend on it. A
    variable that has no place has one value only."""
    order = sorted(range(len(variables)), key=lambda k: place.get(variables[k], -1))
    shape = [1] * len(place)
    for k in order:
        if variables[k] in place:
            shape[place[variables[k]]] = table.shape[k]
    return table.transpose(order).reshape(shape)


@compiled(plain=_run_in_numpy)
def _run(steps: EliminationOrder, tables: Tables) -> tuple[Ints, float]:
    """Runs the steps. Step s leaves table `table_of[s]`, plus `constant[s]`; steps with equal keys
    leave the same table, which is worked out once."""
    count = len(steps.order)
    terms, key, all_keys = _work_space(steps, tables)
    made = _StepTables(
        np.empty(1 << 12, np.float64),
        np.empty(1 << 12, np.int32),
        np.zeros(count + 1, np.int64),
        np.zeros(count, np.float64),
    )
    slots, key_at = np.full(_slots_for(count), -1, np.int64), np.zeros(count + 1, np.int64)
    table_of, constant = np.full(count, -1, np.int64), np.zeros(count, np.float64)
    distinct, least = 0, 0.0
    for s in range(count):
        entries = _set_places(steps, tables, s, terms)
        length = _write_key(steps, tables, s, terms, table_of, key)
        slot = _slot_of_key(slots, key_at, all_keys, key, length)
        found = int(slots[slot])
        if found < 0:
            found = distinct
            distinct += 1
            slots[slot] = found
            begin = key_at[found]
            all_keys[begin : begin + length] = key[:length]
            key_at[found + 1] = begin + length
            made = _with_room(made, made.at[found] + entries)
            several = _set_terms(steps, tables, s, terms, table_of, made)
            made.least[found] = _minimise(steps, tables, s, terms, several, made, made.at[found])
            made.at[found + 1] = made.at[found] + entries
        _clear_places(steps, s, terms)
        table_of[s] = found
        for n in range(steps.left_at[s], steps.left_at[s + 1]):
            constant[s] += constant[steps.left[n]]
        constant[s] += made.least[found]
        if steps.scope_at[s] == steps.scope_at[s + 1]:
            least += constant[s]
    return _substitute(steps, tables, table_of, made), least


@compiled
def _work_space(steps, tables):  # type: ignore[no-untyped-def]
    """Empty _StepInputs, room for one key, and room for the keys of all steps."""
    count, widest, longest, total, most = len(steps.order), 0, 0, 0, 0
    for s in range(count):
        width = steps.scope_at[s + 1] - steps.scope_at[s]
        pairs = steps.edge_at[s + 1] - steps.edge_at[s]
        length = 3 + width + 2 * pairs
        for n in range(steps.left_at[s], steps.left_at[s + 1]):
            t = steps.left[n]
            length += 1 + steps.scope_at[t + 1] - steps.scope_at[t]
        widest, longest, total = max(widest, width), max(longest, length), total + length
        most = max(most, 1 + pairs + steps.left_at[s + 1] - steps.left_at[s])
    terms = _StepInputs(
        np.full(len(tables.sizes), -1, np.int64),
        np.empty(most, np.int64),
        np.empty((most, widest + 1), np.int64),
        np.empty(most, np.bool_),
        np.empty(widest + 1, np.int64),
        np.empty(tables.sizes.max() if len(tables.sizes) else 1, np.float64),
    )
    return terms, np.empty(longest, np.int64), np.empty(total, np.int64)


@compiled
def _slots_for(count: int) -> int:
    slots = 16
    while slots < 4 * count:
        slots *= 2
    return slots


@inlined
def _set_places(steps, tables, s, terms):  # type: ignore[no-untyped-def]
    """Notes the places of the variables of step s; the number of entries of its table."""
    low, high = steps.scope_at[s], steps.scope_at[s + 1]
    entries = 1
    for k in range(low, high):
        terms.place[steps.scope[k]] = k - low
        entries *= tables.sizes[steps.scope[k]]
    terms.place[steps.order[s]] = high - low
    return entries


@inlined
def _clear_places(steps, s, terms):  # type: ignore[no-untyped-def]
    for k in range(steps.scope_at[s], steps.scope_at[s + 1]):
        terms.place[steps.scope[k]] = -1
    terms.place[steps.order[s]] = -1


@inlined
def _write_key(steps, tables, s, terms, table_of, key):  # type: ignore[no-untyped-def]
    """Writes all that the table of step s depends on: the sizes of its scope and of its variable,
    and which tables it adds up at which places. Returns the length of the key."""
    low, high, place = steps.scope_at[s], steps.scope_at[s + 1], terms.place
    key[0] = high - low
    length = 1
    for k in range(low, high):
        key[length] = tables.sizes[steps.scope[k]]
        length += 1
    key[length] = tables.sizes[steps.order[s]]
    key[length + 1] = tables.unary[steps.order[s]]
    length += 2
    for n in range(steps.edge_at[s], steps.edge_at[s + 1]):
        e = steps.edge[n]
        key[length] = tables.pairs[e]
        key[length + 1] = place[steps.edges[e, 0]] * 1024 + place[steps.edges[e, 1]]
        length += 2
    given = len(tables.starts) - 1
    for n in range(steps.left_at[s], steps.left_at[s + 1]):
        t = steps.left[n]
        key[length] = given + table_of[t]
        length += 1
        for k in range(steps.scope_at[t + 1] - 1, steps.scope_at[t] - 1, -1):
            key[length] = place[steps.scope[k]]
            length += 1
    return length


@inlined
def _slot_of_key(slots, key_at, all_keys, key, length):  # type: ignore[no-untyped-def]
    """The slot of the table that has this key, or the free one where it belongs."""
    slot = row_hash(key, length) & (len(slots) - 1)
    while slots[slot] >= 0:
        begin, end = key_at[slots[slot]], key_at[slots[slot] + 1]
        same = end - begin == length
        k = 0
        while same and k < length:
            same = all_keys[begin + k] == key[k]
            k += 1
        if same:
            break
        slot = (slot + 1) & (len(slots) - 1)
    return slot


@inlined
def _with_room(made, end):  # type: ignore[no-untyped-def]
    """The same tables, with room for entries as far as `end`."""
    if end <= len(made.entries):
        return made
    size = max(2 * len(made.entries), end)
    entries, best = np.empty(size, np.float64), np.empty(size, np.int32)
    entries[: len(made.entries)] = made.entries
    best[: len(made.best)] = made.best
    return _StepTables(entries, best, made.at, made.least)


@inlined
def _set_terms(steps, tables, s, terms, table_of, made):  # type: ignore[no-untyped-def]
    """Sets the terms of step s, the variable's own table first; how many there are."""
    place, base, stride, given = terms.place, terms.base, terms.stride, terms.given
    sizes, variable = tables.sizes, steps.order[s]
    stride[0, :] = 0
    stride[0, place[variable]] = 1
    base[0], given[0] = tables.starts[tables.unary[variable]], True
    count = 1
    for n in range(steps.edge_at[s], steps.edge_at[s + 1]):
        e = steps.edge[n]
        a, b = steps.edges[e, 0], steps.edges[e, 1]
        stride[count, :] = 0
        if sizes[a] > 1:
            stride[count, place[a]] = sizes[b]
        if sizes[b] > 1:
            stride[count, place[b]] = 1
        base[count], given[count] = tables.starts[tables.pairs[e]], True
        count += 1
    for n in range(steps.left_at[s], steps.left_at[s + 1]):
        t = steps.left[n]
        stride[count, :] = 0
        step = 1
        for k in range(steps.scope_at[t + 1] - 1, steps.scope_at[t] - 1, -1):
            stride[count, place[steps.scope[k]]] = step
            step *= sizes[steps.scope[k]]
        base[count], given[count] = made.at[table_of[t]], False
        count += 1
    return count


@inlined
def _minimise(steps, tables, s, terms, several, made, at):  # type: ignore[no-untyped-def]
    """Adds up the terms of step s and takes the minimum over its variable, for every choice of its
    scope. Writes the minima, less the least of them, and where they are, from `at` on. Returns the
    least."""
    shape = tables.sizes[steps.scope[steps.scope_at[s] : steps.scope_at[s + 1]]]
    own, width = tables.sizes[steps.order[s]], len(shape)
    values, base, stride, row = terms.values, terms.base, terms.stride, terms.row
    values[:] = 0
    least = np.inf
    for entry in range(at, at + shape.prod()):
        _add_terms(
            row, own, several, base, stride[:, width], terms.given, tables.entries, made.entries
        )
        best, which = np.inf, 0
        for x in range(own):
            if row[x] < best:
                best, which = row[x], x
        made.entries[entry], made.best[entry] = best, which
        least = min(least, best)
        _advance(values, shape, base, stride, several)
    for entry in range(at, at + shape.prod()):
        made.entries[entry] -= least
    return least


@inlined
def _add_terms(row, own, several, base, jumps, given, entries, made):  # type: ignore[no-untyped-def]
    """Sums all terms at the current choice of the scope, for each value of the variable. They are
    entries of given tables and of made ones."""
    where = base[0]
    for x in range(own):
        row[x] = entries[where + x]
    for t in range(1, several):
        where, jump = base[t], jumps[t]
        if given[t]:
            for x in range(own):
                row[x] += entries[where]
                where += jump
        else:
            for x in range(own):
                row[x] += made[where]
                where += jump


@inlined
def _advance(values, shape, base, stride, several):  # type: ignore[no-untyped-def]
    """Goes on to the next choice of the scope, its last variable fastest."""
    k = len(shape) - 1
    while k >= 0:
        values[k] += 1
        if values[k] < shape[k]:
            for t in range(several):
                base[t] += stride[t, k]
            return
        for t in range(several):
            base[t] -= stride[t, k] * (values[k] - 1)
        values[k] = 0
        k -= 1


@compiled
def _substitute(steps, tables, table_of, made):  # type: ignore[no-untyped-def]
    """The best value of every variable, the last step first: its scope is chosen by then."""
    choice = np.zeros(len(tables.sizes), np.int64)
    for s in range(len(steps.order) - 1, -1, -1):
        where, step = made.at[table_of[s]], 1
        for k in range(steps.scope_at[s + 1] - 1, steps.scope_at[s] - 1, -1):
            where += choice[steps.scope[k]] * step
            step *= tables.sizes[steps.scope[k]]
        choice[steps.order[s]] = made.best[where]
    return choice
