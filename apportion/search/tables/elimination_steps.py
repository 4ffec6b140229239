"""elimination_steps: the steps of a variable elimination run, compiled.

In: an EliminationOrder and the tables. Out: the choice of all variables that makes the sum of the
tables smallest (eliminate.py says how). Where that is little work, elimination_in_numpy.py does it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import Bools, Floats, Ints, compiled, inlined, row_hash
from apportion.search.tables.elimination_in_numpy import Tables, run_in_numpy
from apportion.search.tables.elimination_order import EliminationOrder

# In compiled functions `steps` is an EliminationOrder, `tables` are Tables,
# `terms` are _StepInputs, `made` are _StepTables, `table_of` has the number of the table that each
# step left, and s is the number of a step.


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


@compiled(plain=run_in_numpy)
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
