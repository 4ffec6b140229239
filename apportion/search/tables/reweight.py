"""reweight: costs moved between the tables of a sum so that what they prove of its minimum rises.

In: an Energy. Out: its FlatEnergy with costs moved, choices met on the way, and a ProvenBound.

    minimise  sum_i u_i[x_i] + sum_e t_e[x_a, x_b]

Moving costs between tables and variables changes no total: with any a_e, b_e

    u_i        becomes  u_i less the a_e and b_e of its tables
    t_e[x, y]  becomes  t_e[x, y] + a_e[x] + b_e[y]

and the sum of the least entries of all of them is a lower bound. Sequential reweighted message
passing (Kolmogorov 2015; on pairs it is TRW-S) moves costs so that this bound never falls.
Variables are visited in order, forwards and backwards. Each *pulls* what its tables to earlier
variables know of it, min_x (t[x, y] + a[x]) + b[y], and then *pushes* equal shares of its costs
into its tables to later ones. A choice is made on the way, each variable given the earlier ones.

What is proven is worked out anew from the moved costs and lowered by what rounding may have added:
it holds however they were moved. At the fixed point it is about that of the local linear program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from apportion.columns import Bools, Floats, Ints, compiled
from apportion.search.tables.eliminate import Energy
from apportion.search.tables.shrink import ROUNDING

DESCENTS = 50


class FlatEnergy(NamedTuple):  # numba takes no dataclass
    """An energy in flat arrays; variables are visited in `order`, and of a pair the one visited
    earlier comes first. A table has its first variable's values as rows; `table_at` and
    `turned_at` are where it and its transpose begin in `entries`, `one` and `other` where a_e and
    b_e begin in `moved`."""

    order: Ints
    start: Ints
    unary: Floats
    first: Ints
    second: Ints
    table_at: Ints
    turned_at: Ints
    entries: Floats
    one: Ints
    other: Ints
    moved: Floats
    ahead_start: Ints
    ahead: Ints
    behind_start: Ints
    behind: Ints

    def table(self, pair: int) -> Floats:
        """The table of a pair, nothing moved."""
        a, b = self.first[pair], self.second[pair]
        rows, columns = self.start[a + 1] - self.start[a], self.start[b + 1] - self.start[b]
        begin = self.table_at[pair]
        return self.entries[begin : begin + rows * columns].reshape(rows, columns)


def move_costs(flat: FlatEnergy, pair: int, one: Floats, other: Floats) -> None:
    """Moves costs from a pair's variables into its table."""
    a, b = flat.first[pair], flat.second[pair]
    flat.unary[flat.start[a] : flat.start[a + 1]] -= one
    flat.unary[flat.start[b] : flat.start[b + 1]] -= other
    flat.moved[flat.one[pair] : flat.one[pair] + len(one)] += one
    flat.moved[flat.other[pair] : flat.other[pair] + len(other)] += other


def flatten(energy: Energy) -> FlatEnergy:
    """The flat form, nothing moved; equal tables are held once."""
    count = len(energy.sizes)
    ends = np.array(list(energy.pairs), np.int64).reshape(-1, 2)
    order = _narrow_band_order(ends, count)
    rank = np.argsort(order)
    swapped = rank[ends[:, 0]] > rank[ends[:, 1]]
    first = np.where(swapped, ends[:, 1], ends[:, 0])
    second = np.where(swapped, ends[:, 0], ends[:, 1])
    start = _offsets(energy.sizes)
    unary = np.concatenate([*energy.unary, np.empty(0)]).astype(np.float64)
    known: dict[tuple[int, int, bytes], int] = {}
    chunks, used = [np.empty(0)], 0
    at = np.empty((2, len(ends)), np.int64)
    for e, table in enumerate(energy.pairs.values()):
        for k, turned in enumerate((table, table.T)):
            place = known.setdefault((*turned.shape, turned.tobytes()), used)
            if place == used:
                chunks.append(np.ascontiguousarray(turned, np.float64).reshape(-1))
                used += table.size
            at[k, e] = place
    at = np.where(swapped, at[::-1], at)
    sizes = np.diff(start)
    lengths = np.stack([sizes[first], sizes[second]], 1).reshape(-1)
    places_of = _offsets(lengths.tolist())
    ahead_start, ahead = _pairs_by_variable(first, count)
    behind_start, behind = _pairs_by_variable(second, count)
    return FlatEnergy(
        order,
        start,
        unary,
        first,
        second,
        at[0],
        at[1],
        np.concatenate(chunks),
        places_of[:-1:2].copy(),
        places_of[1::2].copy(),
        np.zeros(int(places_of[-1])),
        ahead_start,
        ahead,
        behind_start,
        behind,
    )


def _narrow_band_order(ends: Ints, count: int) -> Ints:
    """Variables in an order of small bandwidth: passes then carry costs far."""
    ones = np.ones(len(ends))
    graph = csr_matrix((ones, (ends[:, 0], ends[:, 1])), (count, count))
    if not count:
        return np.empty(0, np.int64)
    return np.asarray(reverse_cuthill_mckee((graph + graph.T).tocsr(), True), np.int64)


def _offsets(lengths: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)


def _pairs_by_variable(ends: Ints, count: int) -> tuple[Ints, Ints]:
    """For each variable the pairs that end there."""
    order = np.argsort(ends, kind="stable").astype(np.int64)
    return _offsets(np.bincount(ends, minlength=count).tolist()), order


# Passes. In compiled functions f is a FlatEnergy, i the number of a variable, e that of a pair, and
# `room` or `costs` an array of floats that is as long as the largest variable has values.


@compiled
def _pull(  # type: ignore[no-untyped-def]
    entries, begin, moved, there, rows, here, columns, costs, low, least
):
    """Moves what a table knows of a variable (its columns) into the variable's costs."""
    for y in range(columns):
        least[y] = np.inf
    for x in range(rows):
        add, row = moved[there + x], begin + x * columns
        for y in range(columns):
            least[y] = min(least[y], entries[row + y] + add)
    constant = np.inf
    for y in range(columns):
        least[y] += moved[here + y]
        constant = min(constant, least[y])
    for y in range(columns):
        costs[low + y] += least[y] - constant
        moved[here + y] -= least[y] - constant


@compiled
def _choose(f, i, forward, choice, costs):  # type: ignore[no-untyped-def]
    """The best value of a variable, given those of the variables before it in this pass."""
    low, size = f.start[i], f.start[i + 1] - f.start[i]
    for v in range(size):
        costs[v] = f.unary[low + v]
    starts, edges = (f.behind_start, f.behind) if forward else (f.ahead_start, f.ahead)
    for p in range(starts[i], starts[i + 1]):
        e = edges[p]
        there = f.first[e] if forward else f.second[e]
        begin = f.table_at[e] if forward else f.turned_at[e]
        here = f.other[e] if forward else f.one[e]
        row = begin + choice[there] * size
        for v in range(size):
            costs[v] += f.entries[row + v] + f.moved[here + v]
    best = 0
    for v in range(1, size):
        if costs[v] < costs[best]:
            best = v
    choice[i] = best


@compiled
def _descend(f, choice, rounds, costs):  # type: ignore[no-untyped-def]
    """Each variable in turn takes its best value, all others given, until nothing changes."""
    for _ in range(rounds):
        changed = False
        for i in f.order:
            low, size = f.start[i], f.start[i + 1] - f.start[i]
            for v in range(size):
                costs[v] = f.unary[low + v]
            for p in range(f.behind_start[i], f.behind_start[i + 1]):
                e = f.behind[p]
                row = f.table_at[e] + choice[f.first[e]] * size
                for v in range(size):
                    costs[v] += f.entries[row + v] + f.moved[f.other[e] + v]
            for p in range(f.ahead_start[i], f.ahead_start[i + 1]):
                e = f.ahead[p]
                row = f.turned_at[e] + choice[f.second[e]] * size
                for v in range(size):
                    costs[v] += f.entries[row + v] + f.moved[f.one[e] + v]
            best = choice[i]
            for v in range(size):
                if costs[v] < costs[best]:
                    best = v
            if best != choice[i]:
                choice[i], changed = best, True
        if not changed:
            break


@compiled
def _visit(f, i, forward, room):  # type: ignore[no-untyped-def]
    """Pulls from the tables behind a variable and pushes into those ahead of it."""
    low, size = f.start[i], f.start[i + 1] - f.start[i]
    if forward:
        behind_start, behind, ahead_start, ahead = (
            f.behind_start,
            f.behind,
            f.ahead_start,
            f.ahead,
        )
    else:
        behind_start, behind, ahead_start, ahead = (
            f.ahead_start,
            f.ahead,
            f.behind_start,
            f.behind,
        )
    for p in range(behind_start[i], behind_start[i + 1]):
        e = behind[p]
        if forward:
            there, here, other, begin = f.one[e], f.other[e], f.first[e], f.table_at[e]
        else:
            there, here, other, begin = f.other[e], f.one[e], f.second[e], f.turned_at[e]
        rows = f.start[other + 1] - f.start[other]
        _pull(f.entries, begin, f.moved, there, rows, here, size, f.unary, low, room)
    forth = ahead_start[i + 1] - ahead_start[i]
    if forth == 0:
        return
    share = 1.0 / max(forth, behind_start[i + 1] - behind_start[i])
    least = np.inf
    for v in range(size):
        least = min(least, f.unary[low + v])
    for v in range(size):
        part = share * (f.unary[low + v] - least)
        for p in range(ahead_start[i], ahead_start[i + 1]):
            e = ahead[p]
            f.moved[(f.one[e] if forward else f.other[e]) + v] += part
        f.unary[low + v] -= forth * part


@compiled
def _run_passes(f, rounds, choice, room):  # type: ignore[no-untyped-def]
    """Passes forwards and backwards; fills in the choice of the last one forwards."""
    for _ in range(rounds):
        for i in f.order:
            _choose(f, i, True, choice, room)
            _visit(f, i, True, room)
        for i in f.order[::-1]:
            _visit(f, i, False, room)


def run_passes(flat: FlatEnergy, rounds: int) -> list[int]:
    """Passes there and back, and the choice that the last of them made, improved by descent."""
    sizes = np.diff(flat.start)
    room, choice = np.empty(sizes.max(initial=0)), np.zeros(len(sizes), np.int64)
    _run_passes(flat, rounds, choice, room)
    _descend(flat, choice, DESCENTS, room)
    found: list[int] = choice.tolist()
    return found


def improve_by_descent(flat: FlatEnergy, choice: Sequence[int]) -> list[int]:
    """A choice improved by descent."""
    room = np.empty(np.diff(flat.start).max(initial=0))
    better = np.array(choice, np.int64)
    _descend(flat, better, DESCENTS, room)
    found: list[int] = better.tolist()
    return found


# What the moved costs prove


@compiled
def _prove_columns(f, unary, slack, least, error):  # type: ignore[no-untyped-def]
    """From the original costs of the variables and what was moved: the least entries of all, how
    far each value is above them, and the size of the numbers that were added up.

    `least` has the variables first, then the tables.
    """
    count, pairs = len(f.start) - 1, len(f.first)
    slack[:] = unary
    for i in range(count):
        for v in range(f.start[i], f.start[i + 1]):
            error[i] = max(error[i], abs(unary[v]))
    for e in range(pairs):
        for begin, i in ((f.one[e], f.first[e]), (f.other[e], f.second[e])):
            largest = 0.0
            for v in range(f.start[i + 1] - f.start[i]):
                slack[f.start[i] + v] -= f.moved[begin + v]
                largest = max(largest, abs(f.moved[begin + v]))
            error[i] += largest
            error[count + e] += largest
    for i in range(count):
        least[i] = np.inf
        for v in range(f.start[i], f.start[i + 1]):
            least[i] = min(least[i], slack[v])
        for v in range(f.start[i], f.start[i + 1]):
            slack[v] -= least[i]
    for e in range(pairs):
        _prove_table(f, e, slack, least, error)


@compiled
def _prove_table(f, e, slack, least, error):  # type: ignore[no-untyped-def]
    a, b, count = f.first[e], f.second[e], len(f.start) - 1
    rows, columns = f.start[a + 1] - f.start[a], f.start[b + 1] - f.start[b]
    by_row, by_column = np.full(rows, np.inf), np.full(columns, np.inf)
    largest = 0.0
    for x in range(rows):
        for y in range(columns):
            entry = f.entries[f.table_at[e] + x * columns + y]
            largest = max(largest, abs(entry))
            moved = entry + f.moved[f.one[e] + x] + f.moved[f.other[e] + y]
            by_row[x] = min(by_row[x], moved)
            by_column[y] = min(by_column[y], moved)
    error[count + e] += largest
    least[count + e] = by_row.min()
    slack[f.start[a] : f.start[a + 1]] += by_row - least[count + e]
    slack[f.start[b] : f.start[b + 1]] += by_column - least[count + e]


@dataclass(frozen=True, slots=True)
class ProvenBound:
    """A lower bound, and for each value of each variable by how much the best choice with it
    exceeds the bound at least. `margin` is what rounding may have added, already taken off."""

    bound: float
    slack: list[Floats]
    margin: float


def prove_bound(energy: Energy, flat: FlatEnergy) -> ProvenBound:
    """What the costs that were moved in `flat` prove of `energy`, rounding accounted for."""
    unary = np.concatenate([*energy.unary, np.empty(0)]).astype(np.float64)
    slack = np.empty_like(unary)
    terms = len(energy.sizes) + len(flat.first)
    least, error = np.zeros(terms), np.zeros(terms)
    _prove_columns(flat, unary, slack, least, error)
    margin = ROUNDING * math.fsum(error)
    bound = math.fsum(least) - margin
    ends = flat.start.tolist()
    lowered = slack - 2 * margin
    return ProvenBound(bound, [lowered[a:b] for a, b in pairwise(ends)], margin)


def moved_energy(energy: Energy, flat: FlatEnergy, keep: Sequence[Bools]) -> Energy:
    """The energy of the moved costs over the values kept: the same totals there, up to rounding."""
    small = Energy()
    unary = [u.copy() for u in energy.unary]
    pairs = []
    for e, (a, b) in enumerate(zip(flat.first.tolist(), flat.second.tolist(), strict=True)):
        one = flat.moved[flat.one[e] : flat.one[e] + energy.sizes[a]]
        other = flat.moved[flat.other[e] : flat.other[e] + energy.sizes[b]]
        unary[a] -= one
        unary[b] -= other
        table = flat.table(e) + one[:, None] + other[None, :]
        pairs.append((a, b, table[np.ix_(keep[a], keep[b])]))
    for costs, kept in zip(unary, keep, strict=True):
        small.variable(costs[kept].tolist())
    for a, b, table in pairs:
        small.pair(a, b, table)
    return small
