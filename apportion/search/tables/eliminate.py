"""eliminate: the exact minimum of a sum of tables over small variables, by variable elimination.

In: an Energy, the sum. Out: the value of every variable at the minimum, and the minimum.

    minimise  sum_i u_i[x_i] + sum_(i,j) t_ij[x_i, x_j]

Eliminating x replaces all tables that mention it by one over their other variables: the sum
minimised over x. The order is greedy, the smallest resulting table first; it depends on which
variables share a table, not on what is in them, so that an EliminationOrder made once serves every
Energy of the same structure. The arguments of the minima are kept and substituted backwards, and
the energy of the result is evaluated again from the original tables: it must be the minimum found.

Steps whose tables are equal, at equal places, are worked out once. Every new table is kept less
its minimum, so that the tables along a chain of equal layers soon repeat: depth costs next to
nothing, and no layer is tied to another.

Cost: the largest table, which is exponential in the width of the order. `eliminate` gives up before
a table would exceed `cap` entries; `descend` is the fallback, coordinate descent from a given
start, with no guarantee.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints
from apportion.search.tables.elimination_in_numpy import Tables
from apportion.search.tables.elimination_order import EliminationOrder, elimination_order
from apportion.search.tables.elimination_steps import run_elimination

Table = npt.NDArray[np.float64]
CAP = 20_000_000


@dataclass
class Energy:
    """A sum of tables. `sizes[i]` is the number of values of variable i."""

    sizes: list[int] = field(default_factory=list)
    unary: list[Table] = field(default_factory=list)
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)

    def variable(self, costs: Sequence[float] | Table) -> int:
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


@dataclass(frozen=True)
class SharedEnergy:
    """A sum of tables that many pairs share: each variable and each edge names its table.

    edges     (a, b) of each pair of variables; no pair occurs twice
    """

    sizes: Ints
    unary: Ints
    edges: Ints
    pairs: Ints
    tables: tuple[Table, ...]

    def value(self, choice: Ints) -> float:
        """The sum at a choice of all variables."""
        flat, starts = self.flat
        widths = np.array([t.shape[-1] for t in self.tables], np.int64)
        total = flat[starts[self.unary] + choice].sum()
        if len(self.edges):
            a, b = self.edges.T
            total += flat[starts[self.pairs] + choice[a] * widths[self.pairs] + choice[b]].sum()
        return float(total)

    @property
    def flat(self) -> tuple[Table, Ints]:
        """All tables in a row, and where each begins."""
        starts = np.zeros(len(self.tables) + 1, np.int64)
        np.cumsum([t.size for t in self.tables], out=starts[1:])
        pieces = [t.ravel() for t in self.tables]
        return (np.concatenate(pieces) if pieces else np.zeros(0)), starts

    def energy(self) -> Energy:
        """The same sum, each pair with its own table."""
        energy = Energy()
        for table in self.unary:
            energy.variable(self.tables[table])
        for (a, b), table in zip(self.edges.tolist(), self.pairs, strict=True):
            energy.pair(a, b, self.tables[table])
        return energy


def share_tables(energy: Energy) -> SharedEnergy:
    """An Energy whose equal tables are one."""
    numbers: dict[tuple[tuple[int, ...], bytes], int] = {}
    tables: list[Table] = []

    def number(table: Table) -> int:
        key = (table.shape, table.tobytes())
        found = numbers.setdefault(key, len(tables))
        if found == len(tables):
            tables.append(table)
        return found

    unary = [number(u) for u in energy.unary]
    pairs = [number(t) for t in energy.pairs.values()]
    return SharedEnergy(
        np.array(energy.sizes, np.int64),
        np.array(unary, np.int64),
        np.array(list(energy.pairs), np.int64).reshape(-1, 2),
        np.array(pairs, np.int64),
        tuple(tables),
    )


def eliminate(energy: Energy, cap: int = CAP) -> tuple[list[int], float]:
    """The best choice and its value; raises TooWide if a table would have more than `cap`
    entries."""
    choice = minimise_shared(share_tables(energy), None, cap)[0].tolist()
    return choice, energy.value(choice)


def minimise_shared(
    shared: SharedEnergy, steps: EliminationOrder | None = None, cap: int = CAP
) -> tuple[Ints, float]:
    """The best choice and its value, by a EliminationOrder for this structure if one is at hand."""
    if steps is None:
        steps = elimination_order(shared.sizes, shared.edges, float(cap))
    widest = steps.widest(shared.sizes)
    if widest > cap:
        raise TooWide(f"a table of more than {cap} entries")
    flat, starts = shared.flat
    tables = Tables(shared.sizes, shared.unary, shared.pairs, flat, starts)
    choice, least = run_elimination(steps, tables)
    found = shared.value(choice)
    assert math.isclose(found, least, rel_tol=1e-9, abs_tol=1e-6), (found, least)
    return choice, found


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


def try_all_choices(energy: Energy) -> tuple[list[int], float]:
    """All choices tried: the truth for tests."""
    best = min(itertools.product(*(range(n) for n in energy.sizes)), key=energy.value)
    return list(best), energy.value(best)
