"""level_grids: the cuts of all levels as grids over digits of the classes of atoms.

In: Levels, all decided. Out: their Strategy, and its Space, in which classes are divided into
digits.

Digits of a class that every site cuts together are one: a batch that all levels cut is cut once,
into all devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from apportion.columns import Ints, distinct_rows
from apportion.describe import IllegalCut
from apportion.search.levels.level_places import even_and_uneven_levels, level_sets_of_classes
from apportion.search.levels.levels import Levels
from apportion.search.problem import SearchResult
from apportion.split import Choice, Layout, Space, Strategy, unsplit_choice


@dataclass(frozen=True, slots=True)
class _Digit:
    """An atom that a class is divided into, and the levels that cut it, the highest first; none
    for what is left."""

    extent: int
    levels: tuple[int, ...]


def strategy_of_levels(levels: Levels) -> Strategy:
    """The Strategy of all levels."""
    return _StrategyBuilder(levels).strategy()[0]


def result_of_levels(levels: Levels, notes: tuple[str, ...] = ()) -> SearchResult:
    """The Strategy of all levels, with its Space."""
    return checked_result(levels, notes)[0]


def checked_result(levels: Levels, notes: tuple[str, ...] = ()) -> tuple[SearchResult, bool]:
    """As `result`; and whether every Op is cut as the levels say, so that their bytes are those
    of the Strategy."""
    maker = _StrategyBuilder(levels)
    found, space = maker.strategy()
    return SearchResult(found, notes=notes, space=space), not maker.refused


class _StrategyBuilder:
    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.sites = levels.sites
        self.graph = levels.sites.space.graph
        self.count = math.prod(levels.factors)
        self.picked = np.stack([c for c in levels.chosen if c is not None], axis=1)
        self.digits = self._digits()
        self.sign = self._signs()
        self.row_of = distinct_rows(self.picked)[1].tolist()
        self.rows = self.picked.tolist()
        self.choices: dict[tuple[object, ...], Choice] = {}
        self.layouts: dict[tuple[object, ...], Layout] = {}
        self.devices: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.refused = False

    def strategy(self) -> tuple[Strategy, Space]:
        divided = {
            group: tuple(digit.extent for digit in digits)
            for group, digits in sorted(self.digits.items())
            if len(digits) > 1
        }
        space = self.sites.space.with_digits(tuple(divided.items()))
        sites = self.sites.op_site.tolist()
        choices = tuple([self._choice(space, op, site) for op, site in enumerate(sites)])
        layouts = {value: self._layout(value, site) for value, site in self.sites.store.items()}
        terms: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for value, site in self.sites.copy.items():
            made = self.graph.producer[value]
            if made:
                key = (space.alike[made[0]], choices[made[0]].parts)
                if key not in terms:
                    terms[key] = space.split(made[0], key[1]).terms
                if terms[key][made[1]] > 1:
                    layouts[value] = self._layout(value, site)
        return Strategy(choices, layouts, space.digits, space.opening), space

    def _signs(self) -> list[int]:
        """Per class a number, equal for classes that are divided alike."""
        known: dict[tuple[_Digit, ...], int] = {(): 0}
        signs = [0] * len(self.sites.extents)
        for group, digits in self.digits.items():
            signs[group] = known.setdefault(digits, len(known))
        return signs

    def _digits(self) -> dict[int, tuple[_Digit, ...]]:
        """Per class that is cut its digits: levels that divide evenly in order, then the one that
        does not, or what is left. Levels that Ops cut which must know their place come first, so
        that a part of theirs is a range."""
        sites, levels = self.sites, self.levels
        cut = sites.classes[sites.at[:-1, None] + self.picked]
        placed = level_sets_of_classes(
            sites, {n: self.picked[:, n] for n in range(len(levels.factors))}
        )
        takers: dict[int, list[int]] = {}
        touched: dict[int, list[Ints]] = {}
        for level in range(len(levels.factors)):
            order = np.argsort(cut[:, level], kind="stable")
            groups, starts = np.unique(cut[order, level], return_index=True)
            for group, rows in zip(groups.tolist(), np.split(order, starts[1:]), strict=True):
                if group >= 0:
                    takers.setdefault(group, []).append(level)
                    touched.setdefault(group, []).append(rows)
        found = {}
        for group, taken in takers.items():
            extent, sets = int(sites.extents[group]), placed.get(group, set())
            even, uneven = even_and_uneven_levels(extent, taken, levels.factors, sets)
            ordered = sorted(
                [*even, *uneven], key=lambda n: (-sum(n in some for some in sets), n in uneven)
            )
            runs = self._together(ordered, np.concatenate(touched[group]))
            digits, left = [], extent // math.prod(levels.factors[n] for n in even)
            for run in runs:
                k = math.prod(levels.factors[n] for n in run if n in even)
                if not uneven or uneven[0] not in run:
                    digits.append(_Digit(k, run))
                else:
                    digits.append(_Digit(k * left, run))
                    left = 1
            if left > 1:
                if len(digits) == 1:  # one cut needs no digits: parts of the whole are the same
                    digits = [_Digit(extent, digits[0].levels)]
                else:
                    digits.append(_Digit(left, ()))
            found[group] = tuple(digits)
        return found

    def _together(self, taken: list[int], touched: Ints) -> list[tuple[int, ...]]:
        """Neighbouring levels that every site touched cuts alike, as one."""
        runs: list[tuple[int, ...]] = [(taken[0],)]
        for level in taken[1:]:
            if (self.picked[touched, level] == self.picked[touched, runs[-1][-1]]).all():
                runs[-1] = (*runs[-1], level)
            else:
                runs.append((level,))
        return runs

    def _choice(self, space: Space, op: int, site: int) -> Choice:
        groups = self.sites.space.groups(op)
        signs = tuple([self.sign[group] for group in groups])
        key = (space.alike[op], signs, self.sites.atoms[site], self.row_of[site])
        found = self.choices.get(key)
        if found is None:
            found = self.choices[key] = self._legal(space, op, site, groups)
        return found

    def _legal(self, space: Space, op: int, site: int, groups: tuple[int, ...]) -> Choice:
        row = self.rows[site]
        for kept in range(len(row), 0, -1):
            parts, devices = self._grid(site, groups, row[:kept])
            try:
                space.split(op, parts)
            except IllegalCut:  # each level's cut is legal, but not their product
                self.refused = True
                continue
            return Choice(parts, devices)
        return unsplit_choice(space, op, range(self.count))

    def _layout(self, value: int, site: int) -> Layout:
        groups = self.sites.space.atoms.value_classes[value]
        signs = tuple([self.sign[group] for group in groups])
        key = (signs, self.sites.atoms[site], self.row_of[site])
        found = self.layouts.get(key)
        if found is None:
            found = self.layouts[key] = Layout(*self._grid(site, groups, self.rows[site]))
        return found

    def _grid(
        self, site: int, groups: tuple[int, ...], row: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parts per (divided) atom of a site, and the device of each part."""
        atoms = self.sites.atoms[site]
        cuts = [atoms[choice] if choice < len(atoms) else -1 for choice in row]
        parts: list[int] = []
        order: list[int] = []
        factors = self.levels.factors
        for position, group in enumerate(groups):
            for digit in self.digits.get(group, (_Digit(1, ()),)):
                run = [n for n in digit.levels if n < len(cuts) and cuts[n] == position]
                parts.append(math.prod(factors[n] for n in run))
                order += run
        return tuple(parts), self._devices(tuple(order))

    def _devices(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """The device of each part of each replica, where the levels of `order` name the part, the
        first one slowest, and all others the replica."""
        found = self.devices.get(order)
        if found is None:
            factors = self.levels.factors
            numbers = np.arange(self.count).reshape(factors)
            others = [n for n in range(len(factors)) if n not in order]
            found = tuple(numbers.transpose(*others, *order).ravel().tolist())
            self.devices[order] = found
        return found
