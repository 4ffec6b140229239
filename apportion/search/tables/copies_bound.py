"""copies_bound: a bound by elimination where elimination is too wide.

In: an Energy, and what message passing has moved in it. Out: rising lower bounds, with choices.

A variable that would make a table too large is copied: each of its copies has some of its tables
and a share of its costs. What results is narrow enough to be minimised exactly, and since copies
may differ, its minimum is a lower bound:

    min_x  sum of all tables   >=   min over copies  sum of all tables,   shares adding up to u

Where copies differ, costs are moved between them so that they differ less (a subgradient step, as
long as Polyak's towards a level that it is hoped to reach), and it is minimised again.

The first shares are those of message passing (reweight.py), so that the bound is at least what that
has proved: what was moved from a variable into a table goes to the copy that has the table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from apportion.columns import Floats
from apportion.search.tables.eliminate import Energy, SharedEnergy, minimise_shared, share_tables
from apportion.search.tables.elimination_order import elimination_order
from apportion.search.tables.reweight import FlatEnergy, improve_by_descent
from apportion.search.tables.shrink import ROUNDING, rounding_error

WIDER = 4  # a table may exceed the cap so many times: the order of elimination is another one
HOPE, DESPAIR = 0.5, 0.001  # shares of the gap that steps are to close: the first, the last
PATIENCE = 4  # steps without a better bound, after which the best one is gone back to, hope halved


@dataclass(frozen=True, slots=True)
class VariableCopies:
    """Which variable each copy is of; the first copies are the variables themselves. And for each
    pair the copies that it is between."""

    variable: list[int]
    ends: dict[tuple[int, int], tuple[int, int]]


def copy_variables(energy: Energy, cap: float) -> VariableCopies:
    """Copies such that elimination needs no table of more than `cap` entries, or not many."""
    return _CopyingElimination(energy, cap).run()


class _CopyingElimination:
    """Elimination on scopes alone. A factor is a scope, and for each variable in it the pairs of
    this variable that went into it."""

    def __init__(self, energy: Energy, cap: float) -> None:
        self.sizes, self.cap = energy.sizes, cap
        self.scopes: list[set[int]] = []
        self.pairs_of: list[dict[int, list[tuple[int, int]]]] = []
        self.at: list[set[int]] = [set() for _ in energy.sizes]
        self.variable = list(range(len(energy.sizes)))
        self.ends = {pair: list(pair) for pair in energy.pairs}
        for pair in energy.pairs:
            self._add(set(pair), {pair[0]: [pair], pair[1]: [pair]})

    def _add(self, scope: set[int], pairs_of: dict[int, list[tuple[int, int]]]) -> None:
        for v in scope:
            self.at[v].add(len(self.scopes))
        self.scopes.append(scope)
        self.pairs_of.append(pairs_of)

    def _cost(self, factors: Iterable[int]) -> float:
        return math.prod(float(self.sizes[v]) for v in self._scope(factors))

    def _scope(self, factors: Iterable[int]) -> set[int]:
        found: set[int] = set()
        return found.union(*(self.scopes[f] for f in factors))

    def run(self) -> VariableCopies:
        heap = [(self._cost(own), v) for v, own in enumerate(self.at)]
        heapq.heapify(heap)
        done = [False] * len(self.at)
        while heap:
            cost, v = heapq.heappop(heap)
            if done[v]:
                continue
            now = self._cost(self.at[v])
            if now > cost:
                heapq.heappush(heap, (now, v))
                continue
            done[v] = True
            for n in self._eliminate(v):
                heapq.heappush(heap, (self._cost(self.at[n]), n))
        ends = {pair: (a, b) for pair, (a, b) in self.ends.items()}
        return VariableCopies(self.variable, ends)

    def _eliminate(self, v: int) -> set[int]:
        touched: set[int] = set()
        for number, group in enumerate(self._groups(v)):
            if number:
                self.variable.append(v)
                for f in group:
                    for pair in self.pairs_of[f][v]:
                        self.ends[pair][pair.index(v)] = len(self.variable) - 1
            scope = self._scope(group) - {v}
            pairs_of: dict[int, list[tuple[int, int]]] = {n: [] for n in scope}
            for f in group:
                for n in self.scopes[f]:
                    self.at[n].discard(f)
                    if n != v:
                        pairs_of[n] += self.pairs_of[f][n]
            if scope:
                self._add(scope, pairs_of)
            touched |= scope
        return touched

    def _groups(self, v: int) -> list[list[int]]:
        """The factors of a variable, in groups of which none makes too large a table."""
        groups: list[list[int]] = []
        for f in sorted(self.at[v], key=lambda f: (-self._cost([f]), f)):
            fitting = [g for g in groups if self._cost([*g, f]) <= self.cap]
            if fitting:
                min(fitting, key=lambda g: self._cost([*g, f])).append(f)
            else:
                groups.append([f])
        return groups


# Bounds


@dataclass(frozen=True, slots=True)
class SubgradientStep:
    """A bound, and choices of all variables that were met beside it."""

    bound: float
    choices: tuple[list[int], ...]


def tighten(energy: Energy, flat: FlatEnergy, best: float, cap: float) -> Iterator[SubgradientStep]:
    """Bounds, each proven by itself, and choices, as subgradient steps yield them.

    `flat` holds the costs that passes have moved; `best` is the value of a choice known. Ends by
    itself if steps no longer help or copies agree.
    """
    made = _CopiedEnergy(energy, flat, cap)
    least, hope, tired, stand, at = -math.inf, HOPE, 0, made.costs, list[int]()
    while hope >= DESPAIR:
        value, picks = made.minimum()
        first = picks[: len(energy.sizes)]
        choices = (first, improve_by_descent(flat, first))
        best = min(best, *map(energy.value, choices))
        yield SubgradientStep(value - made.margin, choices)
        tired += 1
        if value > least:
            tired, least, stand, at = 0, value, list(made.costs), picks
        elif tired == PATIENCE:
            tired, hope, made.costs, value, picks = 0, hope / 2, list(stand), least, at
        if not made.agree(picks, least + hope * (best - least) - value):
            return


class _CopiedEnergy:
    def __init__(self, energy: Energy, flat: FlatEnergy, cap: float) -> None:
        self.energy = energy
        largest = max((table.size for table in energy.pairs.values()), default=1)
        while True:
            self.copies = copy_variables(energy, cap)
            self.costs = _cost_shares(energy, flat, self.copies)
            shared = self._shared()
            self.cap = int(WIDER * max(cap, largest))
            self.steps = elimination_order(shared.sizes, shared.edges, float(self.cap))
            if self.steps.widest(shared.sizes) <= self.cap:
                break
            cap /= WIDER
        self.several = _copied_variables(self.copies)

    @property
    def margin(self) -> float:
        """By which rounding may have raised a minimum."""
        shares = math.fsum(float(np.abs(costs).max()) for costs in self.costs)
        return rounding_error(self.energy) + ROUNDING * shares

    def minimum(self) -> tuple[float, list[int]]:
        picks, value = minimise_shared(self._shared(), self.steps, self.cap)
        return value, picks.tolist()

    def _shared(self) -> SharedEnergy:
        made = Energy()
        for costs in self.costs:
            made.variable(costs)
        for pair, table in self.energy.pairs.items():
            made.pair(*self.copies.ends[pair], table)
        return share_tables(made)

    def agree(self, picks: list[int], excess: float) -> bool:
        """Moves costs between copies that differ, by a step that would raise the bound by `excess`
        were it linear; whether any do."""
        moves: list[tuple[int, Floats]] = []
        for copies in self.several:
            values = [picks[k] for k in copies]
            if len(set(values)) > 1:
                size = len(self.costs[copies[0]])
                marks = np.zeros((len(copies), size))
                marks[np.arange(len(copies)), values] = 1.0
                moves += zip(copies, marks - marks.mean(axis=0), strict=True)
        length = sum(float((move**2).sum()) for _, move in moves)
        if not moves or excess <= 0:
            return False
        for k, move in moves:
            self.costs[k] = self.costs[k] + excess / length * move
        return True


def _copied_variables(copies: VariableCopies) -> list[list[int]]:
    """The copies of each variable that has more than one."""
    found: dict[int, list[int]] = {}
    for k, v in enumerate(copies.variable):
        found.setdefault(v, []).append(k)
    return [own for own in found.values() if len(own) > 1]


def _cost_shares(energy: Energy, flat: FlatEnergy, copies: VariableCopies) -> list[Floats]:
    """The costs of each copy; of a variable that is not split, its own."""
    found = [energy.unary[v] for v in copies.variable]
    for own in _copied_variables(copies):
        v = own[0]
        rest = flat.unary[flat.start[v] : flat.start[v + 1]]
        for k in own:
            found[k] = rest / len(own)
    split_ones = {k for own in _copied_variables(copies) for k in own}
    for e, (a, b) in enumerate(zip(flat.first.tolist(), flat.second.tolist(), strict=True)):
        ends = copies.ends[min(a, b), max(a, b)]
        for v, at in ((a, flat.one[e]), (b, flat.other[e])):
            k = ends[0] if v < max(a, b) else ends[1]
            if k in split_ones:
                found[k] = found[k] + flat.moved[at : at + energy.sizes[v]]
    # Rounding must not make shares add up to more than there is.
    for own in _copied_variables(copies):
        v = own[0]
        found[v] = energy.unary[v] - sum(found[k] for k in own[1:])
    return found
