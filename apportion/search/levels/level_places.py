"""level_places: which levels may cut a class along which an Op must know where its parts are.

In: Sites, and what levels choose for them. Out: whether parts would be scattered, and which choices
would scatter them.

The number of a word is a place along the words. An Op for which a place is a value takes parts that
are ranges: the levels at which it cuts such a class must have the highest digits of the class. So
of any two such Ops the levels of one must be among those of the other, else no order of digits
suits both, and parts would be *scattered*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from apportion.columns import Bools, Ints
from apportion.search.levels.sites import Sites

Sets = set[frozenset[int]]


def even_and_uneven_levels(
    extent: int, taken: Sequence[int], factors: Sequence[int], sets: Iterable[frozenset[int]] = ()
) -> tuple[list[int], list[int]]:
    """The levels that divide the extent evenly, and the one that takes what they leave. Of equal
    factors those come first that are in more of the sets."""
    even: list[int] = []
    uneven: list[int] = []
    left = extent
    count = {n: sum(n in some for some in sets) for n in taken}
    for level in sorted(taken, key=lambda n: (extent % factors[n] != 0, -count[n], n)):
        k = factors[level]
        if left % k == 0 and left // k >= math.prod(factors[n] for n in uneven):
            even.append(level)
            left //= k
        else:
            uneven.append(level)
    return even, uneven


def level_sets_of_classes(sites: Sites, chosen: Mapping[int, Ints]) -> dict[int, Sets]:
    """Per class the sets of levels at which Ops that must know their place along it cut it."""
    found: dict[int, Sets] = {}
    marks = _level_bits(sites, chosen).tolist()
    for group, mark in set(zip(sites.placed[:, 1].tolist(), marks, strict=True)):
        levels = frozenset([n for n in chosen if mark >> n & 1])
        found.setdefault(group, set()).add(levels)
    return found


def scatters_parts(sites: Sites, chosen: Mapping[int, Ints], factors: Sequence[int]) -> bool:
    """Whether an Op that must know its place would get parts that are not ranges: the levels at
    which such Ops cut a class are not nested, or a cut is finer than an uneven one."""
    for group, sets in level_sets_of_classes(sites, chosen).items():
        if len(sets) < 2:
            continue
        ordered = sorted(sets, key=len)
        if not all(a < b for a, b in pairwise(ordered)):
            return True
        taken = [n for n, own in chosen.items() if (_class_cut(sites, own) == group).any()]
        _, uneven = even_and_uneven_levels(int(sites.extents[group]), taken, factors, sets)
        if any(n in some for n in uneven for some in ordered[:-1]):
            return True
    return False


def scattering_choices(sites: Sites, others: Mapping[int, Ints], every: bool) -> Bools:
    """Choices of one more level without which it scatters nothing: an Op that must know its place
    along a class cuts it there only if no such Op cuts it at more of the other levels; with
    `every`, no such Op does."""
    marks = _level_bits(sites, others).tolist()
    most: dict[int, int] = {}
    placed = sites.placed.tolist()
    for (_, group), mark in zip(placed, marks, strict=True):
        most[group] = max(most.get(group, 0), mark, key=int.bit_count)
    found = np.zeros(len(sites.classes), np.bool_)
    for (site, group), mark in zip(placed, marks, strict=True):
        if every or mark != most[group]:
            own = slice(sites.at[site], sites.at[site + 1])
            found[own] |= sites.classes[own] == group
    return found


def _class_cut(sites: Sites, chosen: Ints) -> Ints:
    """The class that each site cuts, -1 for none."""
    found: Ints = sites.classes[sites.at[:-1] + chosen]
    return found


def _level_bits(sites: Sites, chosen: Mapping[int, Ints]) -> Ints:
    """Per pair of `placed` a bit for each level that cuts the class at the site."""
    site, group = sites.placed.T
    found = np.zeros(len(site), np.int64)
    for level, own in chosen.items():
        found |= (_class_cut(sites, own)[site] == group).astype(np.int64) << level
    return found
