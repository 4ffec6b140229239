"""elimination_in_numpy: the steps of a variable elimination run by NumPy.

In: an EliminationOrder and Tables. Out: the choice of all variables that makes the sum of the
tables smallest, and that sum, as elimination_steps.py finds them compiled: where there is little to
do, this takes less time than to compile that.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints
from apportion.search.tables.elimination_order import EliminationOrder


class Tables(NamedTuple):  # numba takes no dataclass
    """The tables of a sum: variable v has the table `unary[v]`, pair e the table `pairs[e]`, and
    table t begins at `starts[t]` of `entries`."""

    sizes: Ints
    unary: Ints
    pairs: Ints
    entries: Floats
    starts: Ints


class _StepPatterns(NamedTuple):
    """What does not depend on tables: per step the variable, its scope, the pairs and the earlier
    steps that are inputs, the places of their variables as one number for all steps that have the
    same, and the places themselves."""

    variable: list[int]
    scope: list[list[int]]
    pairs: list[list[int]]
    left: list[list[int]]
    number: list[int]
    places: list[tuple[tuple[int, ...], ...]]


_PATTERNS: dict[bytes, _StepPatterns] = {}
"""Of the latest EliminationOrders, by what they say."""
KEPT = 64


def _patterns_of(steps: EliminationOrder) -> _StepPatterns:
    """An elimination runs again and again with other tables: its patterns are found once."""
    said = blake2b(digest_size=16)
    for column in steps[:-1]:
        said.update(str(len(column)).encode() + np.ascontiguousarray(column).tobytes())
    key = said.digest()
    if key not in _PATTERNS:
        if len(_PATTERNS) >= KEPT:
            _PATTERNS.clear()
        _PATTERNS[key] = _step_patterns(steps)
    return _PATTERNS[key]


def _step_patterns(steps: EliminationOrder) -> _StepPatterns:
    def rows(at: Ints, flat: Ints) -> list[list[int]]:
        numbers = flat.tolist()
        return [numbers[a:b] for a, b in pairwise(at.tolist())]

    order, ends = steps.order.tolist(), steps.edges.tolist()
    scopes, pairs = rows(steps.scope_at, steps.scope), rows(steps.edge_at, steps.edge)
    left = rows(steps.left_at, steps.left)
    numbers: dict[tuple[tuple[int, ...], ...], int] = {}
    found = []
    for variable, scope, some, before in zip(order, scopes, pairs, left, strict=True):
        place = {v: k for k, v in enumerate([variable, *scope])}
        terms = [(variable,), *(ends[e] for e in some), *(scopes[t] for t in before)]
        found.append(tuple(tuple(place.get(v, -1) for v in term) for term in terms))
    number = [numbers.setdefault(places, len(numbers)) for places in found]
    return _StepPatterns(order, scopes, pairs, left, number, found)


def run_in_numpy(steps: EliminationOrder, tables: Tables) -> tuple[Ints, float]:
    """The best choice and the minimum, a step at a time. Terms are added in the compiled loop's
    order, and of equal entries the first is the best, so that both give the same, bit for bit."""
    patterns = _patterns_of(steps)
    unary, pairs, sizes = tables.unary.tolist(), tables.pairs.tolist(), tables.sizes.tolist()
    numbers: dict[tuple[int, ...], int] = {}
    made: list[tuple[Floats, Ints, float]] = []  # entries less their minimum, the best, the minimum
    table_of: list[int] = []
    constants: list[float] = []
    least = 0.0
    for s, (variable, scope, some, left, number, _) in enumerate(zip(*patterns, strict=True)):
        given, earlier = [pairs[e] for e in some], [table_of[t] for t in left]
        shape = [sizes[v] for v in (variable, *scope)]  # tables of other sizes may begin alike
        key = (number, *shape, unary[variable], *given, -1, *earlier)
        found = numbers.get(key, -1)
        if found < 0:
            found = numbers[key] = len(made)
            given = [unary[variable], *given]
            made.append(
                _eliminated(steps, patterns, tables, s, given, [made[t][0] for t in earlier])
            )
        table_of.append(found)
        constant = 0.0
        for t in left:
            constant += constants[t]
        constant += made[found][2]
        constants.append(constant)
        if not scope:
            least += constant
    choice = [0] * len(tables.sizes)
    for s in range(len(table_of) - 1, -1, -1):
        variable, scope, number = patterns.variable[s], patterns.scope[s], table_of[s]
        choice[variable] = made[number][1].item(*[choice[v] for v in scope])
    return np.array(choice, np.int64), least


def _eliminated(
    steps: EliminationOrder,
    patterns: _StepPatterns,
    tables: Tables,
    s: int,
    given: list[int],
    earlier: list[Floats],
) -> tuple[Floats, Ints, float]:
    """The table that a step leaves, less its minimum; the best values; and the minimum. The values
    of the variable are the first dimension: NumPy is slow to compare along the last."""
    variable, scope, places = patterns.variable[s], patterns.scope[s], patterns.places[s]
    over = [[variable], *(steps.edges[e].tolist() for e in patterns.pairs[s])]
    terms = [_given_table(tables, *term) for term in zip(given, over, strict=True)] + earlier
    total = np.zeros(tuple(tables.sizes[[variable, *scope]].tolist()))
    total[...] = _spread(terms[0], places[0], total.ndim)
    for term, where in zip(terms[1:], places[1:], strict=True):
        total += _spread(term, where, total.ndim)
    entries: Floats = total.min(axis=0)
    best = np.zeros(entries.shape, np.int64)
    for value in range(len(total) - 1, 0, -1):
        best[total[value] == entries] = value
    best[total[0] == entries] = 0
    lowest = float(entries.min())
    return entries - lowest, best, lowest


def _given_table(tables: Tables, number: int, variables: list[int]) -> Floats:
    shape = tables.sizes[variables]
    start = tables.starts[number]
    return tables.entries[start : start + shape.prod()].reshape(shape)


def _spread(table: Floats, places: tuple[int, ...], dimensions: int) -> Floats:
    """A table with one dimension for every place, of length 1 where it does not depend on it. A
    variable that has no place, -1, has one value only."""
    order = sorted(range(len(places)), key=places.__getitem__)
    shape = [1] * dimensions
    for k in order:
        if places[k] >= 0:
            shape[places[k]] = table.shape[k]
    return table.transpose(order).reshape(shape)
