"""shrink: a smaller sum of tables with the same minimum, and the way back.

In: an Energy. Out: a ReducedEnergy, which lifts choices of what is left to choices of everything.
Three steps, each exact, repeated until none applies:

    a value i is dropped   if another, j, is never worse, whatever the neighbours do:
                           u[i] - u[j] + sum over tables of min_y (t[i, y] - t[j, y]) >= 0
    a variable is dropped  if it has one value, or at most two neighbours: what is left of it is a
                           table over those, minimised over it
    equal tables           are compared once

What remains is the part that is hard: variables with three neighbours or more that have a real
choice. Relaxations over it are faster and never weaker than over the whole. Nothing is forced to
be equal and nothing approximated; sums are rounded as all floats are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from apportion.columns import Bools, compiled
from apportion.search.tables.eliminate import Energy, Table

Indices = npt.NDArray[np.intp]

LARGEST = 2_000_000  # entries of a table that dropping a variable may make
DEAREST = 20_000_000  # entries that comparing the values of a variable may look at
ROUNDING = 2.0**-50  # error of a sum of a few floats, as a share of the largest of them


@dataclass(frozen=True, slots=True)
class RemovedVariable:
    """A variable that was dropped: its best value for each choice of its neighbours' values."""

    variable: int
    values: Indices
    neighbours: tuple[int, ...]
    neighbour_values: tuple[Indices, ...]
    best: npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ReducedEnergy:
    """What is left: `energy` over `variables`, each restricted to `values`, plus a `constant`.

    margin  by which rounding may have changed the minimum on the way
    """

    energy: Energy
    constant: float
    margin: float
    variables: tuple[int, ...]
    values: tuple[Indices, ...]
    removed: tuple[RemovedVariable, ...]

    def lift(self, choice: Sequence[int]) -> list[int]:
        """The choice of all variables that a choice of those left stands for; the dropped ones at
        their best."""
        found = {
            v: int(values[pick])
            for v, values, pick in zip(self.variables, self.values, choice, strict=True)
        }
        for gone in reversed(self.removed):
            at = tuple(
                int(np.searchsorted(values, found[n]))
                for n, values in zip(gone.neighbours, gone.neighbour_values, strict=True)
            )
            found[gone.variable] = int(gone.values[gone.best[at]])
        return [found[v] for v in range(len(found))]

    def picks(self, choice: Sequence[int]) -> list[int]:
        """Which of the values left a choice of all variables has; -1 where it is not left."""
        found = []
        for v, values in zip(self.variables, self.values, strict=True):
            at = int(np.searchsorted(values, choice[v]))
            found.append(at if at < len(values) and values[at] == choice[v] else -1)
        return found

    def reduced_to(self, inner: ReducedEnergy) -> ReducedEnergy:
        """This one, its energy replaced by what was left of it."""
        variables, values = self.variables, self.values
        dropped = tuple(
            RemovedVariable(
                variables[d.variable],
                values[d.variable][d.values],
                tuple(variables[n] for n in d.neighbours),
                tuple(
                    values[n][own] for n, own in zip(d.neighbours, d.neighbour_values, strict=True)
                ),
                d.best,
            )
            for d in inner.removed
        )
        return ReducedEnergy(
            inner.energy,
            self.constant + inner.constant,
            self.margin + inner.margin,
            tuple(variables[v] for v in inner.variables),
            tuple(values[v][own] for v, own in zip(inner.variables, inner.values, strict=True)),
            (*self.removed, *dropped),
        )


def unreduced(energy: Energy) -> ReducedEnergy:
    """All of an energy."""
    values = tuple(np.arange(n) for n in energy.sizes)
    return ReducedEnergy(energy, 0.0, 0.0, tuple(range(len(values))), values, ())


def rounding_error(energy: Energy) -> float:
    """The error of sums of tables that each entry has a part in a few times."""
    largest: dict[int, float] = {}
    for table in energy.pairs.values():
        if id(table) not in largest:
            largest[id(table)] = float(np.abs(table).max())
    pairs = math.fsum(largest[id(table)] for table in energy.pairs.values())
    return ROUNDING * (pairs + math.fsum(float(np.abs(u).max()) for u in energy.unary))


def shrink(energy: Energy, keep: Sequence[Bools] | None = None) -> ReducedEnergy:
    """The hard part of an energy; with `keep`, of its values only those marked."""
    return _EnergyReduction(energy, keep).run()


class _EnergyReduction:
    def __init__(self, energy: Energy, keep: Sequence[Bools] | None) -> None:
        count = len(energy.sizes)
        self.values: list[Indices] = [np.arange(n) for n in energy.sizes]
        self.unary = [np.asarray(u, np.float64) for u in energy.unary]
        self.near: list[dict[int, int]] = [{} for _ in range(count)]  # neighbour: table, own rows
        self.tables: list[Table] = []
        self.turned: list[int] = []
        self.known: dict[tuple[int, int, bytes], int] = {}
        self.differences: dict[int, Table] = {}
        self.constant = 0.0
        self.margin = rounding_error(energy)
        self.removed: list[RemovedVariable] = []
        self.is_removed = [False] * count
        identity: dict[int, int] = {}
        for (a, b), table in energy.pairs.items():
            number = identity.get(id(table))
            if number is None:
                number = identity[id(table)] = self._intern(table)
            self._join(a, b, number)
        if keep is not None:
            for variable, marked in enumerate(keep):
                self._restrict(variable, np.flatnonzero(marked))

    def _intern(self, table: Table) -> int:
        """The number of a table; that of its transpose is kept in `turned`."""
        table = np.ascontiguousarray(table, np.float64)
        key = (*table.shape, table.tobytes())
        number = self.known.get(key)
        if number is None:
            number = self.known[key] = len(self.tables)
            self.tables.append(table)
            self.turned.append(-1)
            self.turned[number] = self._intern(table.T)
        return number

    def _join(self, a: int, b: int, number: int) -> None:
        if b in self.near[a]:
            number = self._intern(self.tables[self.near[a][b]] + self.tables[number])
        self.near[a][b] = number
        self.near[b][a] = self.turned[number]

    def run(self) -> ReducedEnergy:
        count = len(self.values)
        waiting = deque(range(count))
        inside = [True] * count
        while waiting:
            variable = waiting.popleft()
            inside[variable] = False
            if self.is_removed[variable]:
                continue
            before = len(self.values[variable])
            changed = set(self.near[variable])
            if not self._try_to_remove(variable):
                self._compare(variable)
                if len(self.values[variable]) == before:
                    continue
                if self._try_to_remove(variable):
                    changed.discard(variable)
            for n in changed:
                if not inside[n]:
                    inside[n] = True
                    waiting.append(n)
        return self._result()

    def _restrict(self, variable: int, kept: Indices) -> None:
        if len(kept) == len(self.values[variable]):
            return
        self.values[variable] = self.values[variable][kept]
        self.unary[variable] = self.unary[variable][kept]
        for n, number in self.near[variable].items():
            number = self._intern(self.tables[number][kept])
            self.near[variable][n], self.near[n][variable] = number, self.turned[number]

    def _compare(self, variable: int) -> None:
        """Drops the values that another is never worse than."""
        size = len(self.values[variable])
        if size == 1 or self._effort(variable) > DEAREST:
            return
        worse = self.unary[variable][:, None] - self.unary[variable][None, :]
        for number in self.near[variable].values():
            worse = worse + self._difference(number)
        kept = np.ones(size, np.bool_)
        beaten = worse >= 0
        np.fill_diagonal(beaten, False)
        for i in range(size):
            if beaten[i, kept].any():
                kept[i] = False
        self._restrict(variable, np.flatnonzero(kept))

    def _effort(self, variable: int) -> int:
        size = len(self.values[variable])
        new = {t for t in self.near[variable].values() if t not in self.differences}
        return sum(size * self.tables[t].size for t in new)

    def _difference(self, number: int) -> Table:
        found = self.differences.get(number)
        if found is None:
            found = self.differences[number] = _least_difference(self.tables[number])
        return found

    def _try_to_remove(self, variable: int) -> bool:
        """Drops a variable that its neighbours can stand for; whether it could be."""
        near = self.near[variable]
        if len(self.values[variable]) == 1:
            for n, number in near.items():
                self.unary[n] = self.unary[n] + self.tables[number][0]
            self._remove(variable, (), np.zeros((), np.intp))
            self.constant += float(self.unary[variable][0])
            return True
        if len(near) > 2:
            return False
        around = tuple(near)
        entries = len(self.values[variable])
        for n in around:
            entries *= len(self.values[n])
        if entries > LARGEST:
            return False
        total = self.unary[variable].reshape(-1, *(1 for _ in around))
        for k, n in enumerate(around):
            table = self.tables[near[n]]
            shape = (table.shape[0], *(table.shape[1] if j == k else 1 for j in range(len(around))))
            total = total + table.reshape(shape)
        best = total.argmin(axis=0)
        least = np.take_along_axis(total, best[None], 0)[0]
        self._remove(variable, around, best)
        if len(around) == 2:
            self._join(*around, self._intern(least))
        elif around:
            self.unary[around[0]] = self.unary[around[0]] + least
        else:
            self.constant += float(least)
        return True

    def _remove(self, variable: int, around: tuple[int, ...], best: npt.NDArray[np.intp]) -> None:
        values = tuple(self.values[n] for n in around)
        self.removed.append(RemovedVariable(variable, self.values[variable], around, values, best))
        for n in self.near[variable]:
            del self.near[n][variable]
        self.near[variable] = {}
        self.is_removed[variable] = True

    def _result(self) -> ReducedEnergy:
        left = tuple(v for v, gone in enumerate(self.is_removed) if not gone)
        place = {v: k for k, v in enumerate(left)}
        small = Energy()
        for v in left:
            small.variable(self.unary[v].tolist())
        for v in left:
            for n, number in self.near[v].items():
                if v < n:
                    small.pair(place[v], place[n], self.tables[number])
        values = tuple(self.values[v] for v in left)
        return ReducedEnergy(small, self.constant, self.margin, left, values, tuple(self.removed))


@compiled
def _least_difference(table: Table) -> Table:
    """min_y (t[i, y] - t[j, y]) for all i and j."""
    rows, columns = table.shape
    found = np.empty((rows, rows))
    for i in range(rows):
        for j in range(rows):
            least = table[i, 0] - table[j, 0]
            for y in range(1, columns):
                least = min(least, table[i, y] - table[j, y])
            found[i, j] = least
    return found
