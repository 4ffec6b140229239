"""Exact minimum of a sum of tables over small variables, by variable elimination.

    minimise  sum_i u_i[x_i] + sum_(i,j) t_ij[x_i, x_j] + ...

Eliminating x replaces all tables that mention it by one over their other variables: the sum
minimised over x. The order is greedy, the smallest resulting table first. The arguments of the
minima are kept and substituted backwards, and the energy of the result is evaluated again from the
original tables: it must be the minimum found.

Cost: the largest table, which is exponential in the width of the order. `eliminate` gives up before
a table would exceed `cap` entries; `descend` is the fallback, coordinate descent from a given
start, with no guarantee.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]


@dataclass
class Energy:
    """A sum of tables. `sizes[i]` is the number of values of variable i."""

    sizes: list[int] = field(default_factory=list)
    unary: list[Table] = field(default_factory=list)
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)

    def variable(self, costs: Sequence[float]) -> int:
        """A new variable with the given cost of each of its values."""
        self.sizes.append(len(costs))
        self.unary.append(np.array(costs, np.float64))
        return len(self.sizes) - 1

    def pair(self, a: int, b: int, table: Table) -> None:
        """Adds a table over two variables; a == b means its diagonal."""
        if a == b:
            self.unary[a] = self.unary[a] + np.diagonal(table)
            return
        if a > b:
            a, b, table = b, a, table.T
        known = self.pairs.get((a, b))
        self.pairs[a, b] = table if known is None else known + table

    def value(self, choice: Sequence[int]) -> float:
        """The sum at a choice of all variables."""
        total = sum(float(u[x]) for u, x in zip(self.unary, choice, strict=True))
        return total + sum(float(t[choice[a], choice[b]]) for (a, b), t in self.pairs.items())


class TooWide(Exception):
    """A table would exceed the cap."""


def eliminate(energy: Energy, cap: int = 20_000_000) -> tuple[list[int], float]:
    """The best choice and its value; raises TooWide if a table would have more than `cap`
    entries."""
    return _Elimination(energy, cap).solve()


class _Elimination:
    def __init__(self, energy: Energy, cap: int) -> None:
        self.energy = energy
        self.cap = cap
        self.sizes = energy.sizes
        self.neighbours: list[set[int]] = [set() for _ in energy.sizes]
        self.tables: dict[int, tuple[tuple[int, ...], Table]] = {}
        self.at: list[set[int]] = [set() for _ in energy.sizes]
        self.serial = itertools.count()
        for index, table in enumerate(energy.unary):
            self._add((index,), table)
        for (a, b), table in energy.pairs.items():
            # A variable of one value is no dimension: numpy has no more than 64.
            names = tuple(n for n in (a, b) if self.sizes[n] > 1) or (a,)
            self._add(names, table.reshape([self.sizes[n] for n in names]))

    def _add(self, names: tuple[int, ...], table: Table) -> None:
        number = next(self.serial)
        self.tables[number] = (names, table)
        for a in names:
            self.at[a].add(number)
            self.neighbours[a].update(n for n in names if n != a)

    def _cost(self, variable: int) -> int:
        return math.prod(self.sizes[n] for n in self.neighbours[variable]) * self.sizes[variable]

    def solve(self) -> tuple[list[int], float]:
        heap = [(self._cost(v), v) for v in range(len(self.sizes))]
        heapq.heapify(heap)
        done = [False] * len(self.sizes)
        trail: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
        constant = 0.0
        while heap:
            cost, variable = heapq.heappop(heap)
            if done[variable]:
                continue
            now = self._cost(variable)
            if now != cost:
                heapq.heappush(heap, (now, variable))
                continue
            if cost > self.cap:
                raise TooWide(f"a table of {cost} entries")
            done[variable] = True
            names, best, arguments = self._remove(variable)
            trail.append((variable, names, arguments))
            if names:
                self._add(names, best)
                for n in names:
                    heapq.heappush(heap, (self._cost(n), n))
            else:
                constant += float(best)
        return self._substitute(trail, constant)

    def _remove(self, variable: int) -> tuple[tuple[int, ...], Table, npt.NDArray[np.intp]]:
        names = (*sorted(self.neighbours[variable]), variable)
        place = {n: k for k, n in enumerate(names)}
        total = np.zeros([self.sizes[n] for n in names])
        for number in sorted(self.at[variable]):
            own, table = self.tables.pop(number)
            total += _aligned(own, table, place)
            for n in own:
                self.at[n].discard(number)
        for n in names[:-1]:
            self.neighbours[n].discard(variable)
        return names[:-1], total.min(axis=-1), total.argmin(axis=-1)

    def _substitute(
        self, trail: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]], least: float
    ) -> tuple[list[int], float]:
        choice = [0] * len(self.sizes)
        for variable, names, arguments in reversed(trail):
            choice[variable] = int(arguments[tuple(choice[n] for n in names)])
        found = self.energy.value(choice)
        assert math.isclose(found, least, rel_tol=1e-9, abs_tol=1e-6), (found, least)
        return choice, found


def _aligned(own: tuple[int, ...], table: Table, place: dict[int, int]) -> Table:
    """The table with its axes in the order of `place`, of extent 1 where it has none."""
    order = sorted(range(len(own)), key=lambda k: place[own[k]])
    shape = [1] * len(place)
    for k in order:
        shape[place[own[k]]] = table.shape[k]
    return table.transpose(order).reshape(shape)


def descend(energy: Energy, start: Sequence[int], rounds: int = 50) -> tuple[list[int], float]:
    """Coordinate descent: each variable in turn takes its best value until nothing changes."""
    choice = list(start)
    near: list[list[tuple[int, Table]]] = [[] for _ in energy.sizes]
    for (a, b), table in energy.pairs.items():
        near[a].append((b, table))
        near[b].append((a, table.T))
    for _ in range(rounds):
        changed = False
        for variable, unary in enumerate(energy.unary):
            costs = unary.copy()
            for other, table in near[variable]:
                costs += table[:, choice[other]]
            best = int(costs.argmin())
            if costs[best] < costs[choice[variable]]:
                choice[variable], changed = best, True
        if not changed:
            break
    return choice, energy.value(choice)


def exhaust(energy: Energy) -> tuple[list[int], float]:
    """All choices tried: the truth for tests."""
    best = min(itertools.product(*(range(n) for n in energy.sizes)), key=energy.value)
    return list(best), energy.value(best)
