"""joint_levels: the choices of several levels at once, as values of one sum of tables.

In: Levels, and which of them are to be decided together. Out: a SharedEnergy, and the way back from
a choice of its values to Levels.

A class of atoms has only so many digits, so that not every set of levels can cut it (levels.py).
Which levels may is one decision for all sites, and no table can say so. Two sums stand for it:

    given    every class has one largest set of levels that may cut it, one that has the levels
             that do cut it in a partition already known: every choice is a partition
    free     every site may use any set that its classes allow: a choice need not be a partition,
             but every partition is one, so that a bound on this sum is a bound on all of them;
             classes in *dispute* are those that sites would give to different levels
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from apportion.columns import Bools, Ints
from apportion.search.levels.levels import Levels
from apportion.search.levels.sites import Sites
from apportion.search.tables.eliminate import SharedEnergy

LevelSets = tuple[frozenset[int], ...]

LARGEST = 1500  # joint choices of the widest site


# Which levels may cut a class


def can_all_cut(extent: int, rigid: bool, factors: Sequence[int]) -> bool:
    """Whether levels of these factors can all cut a class: all but one evenly."""
    if rigid and len(factors) > 1:
        return False
    left, uneven = extent, 1
    for k in sorted(factors, reverse=True):
        if left % k == 0 and left // k >= uneven:
            left //= k
        elif uneven == 1 and left >= k:
            uneven = k
        else:
            return False
    return True


def free_sets(levels: Levels, window: Sequence[int]) -> list[LevelSets]:
    """Per class the sets of these levels that may cut it, as no largest set of all levels has
    more of them."""
    sites = levels.sites
    known: dict[tuple[int, bool], LevelSets] = {}
    found = []
    for key in zip(sites.extents.tolist(), sites.rigid.tolist(), strict=True):
        if key not in known:
            sets = _largest_sets(*key, levels.factors, range(len(levels.factors)), frozenset())
            known[key] = tuple(dict.fromkeys(some & frozenset(window) for some in sets))
        found.append(known[key])
    return found


def given_sets(levels: Levels, window: Sequence[int]) -> list[LevelSets]:
    """Per class one largest set of these levels, beside the others that cut it, that has those of
    them that do and, if there is one, none at which a site was left whole that should be cut."""
    sites, inside = levels.sites, frozenset(window)
    known: dict[tuple[object, ...], LevelSets] = {}
    found = []
    for group, (used, idle) in enumerate(users_and_idlers(levels)):
        extent, rigid = int(sites.extents[group]), bool(sites.rigid[group])
        key = (extent, rigid, used, idle)
        if key not in known:
            sets = _largest_sets(extent, rigid, levels.factors, window, used - inside)
            able = [(len(some & idle), n) for n, some in enumerate(sets) if used & inside <= some]
            known[key] = tuple(sets[n] for _, n in sorted(able)[:1])
        found.append(known[key])
    return found


def users_and_idlers(levels: Levels) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Per class the levels that cut it, and those that leave a site whole which has it and should
    be cut where it can be."""
    users: list[set[int]] = [set() for _ in levels.sites.extents]
    idlers: list[set[int]] = [set() for _ in levels.sites.extents]
    for n in levels.decided():
        for group in levels.classes_cut(n).tolist():
            users[group].add(n)
        for group in _idle_classes(levels, n):
            idlers[group].add(n)
    return [(frozenset(a), frozenset(b)) for a, b in zip(users, idlers, strict=True)]


def disputed_class(levels: Levels, sets: Sequence[LevelSets]) -> int | None:
    """A class that its sites do not give to the levels of any one of its sets; None if these
    levels are a partition. Of several the one that most sites have."""
    count = np.bincount(np.maximum(levels.sites.classes, 0), minlength=len(sets))
    found = [
        group
        for group, (used, idle) in enumerate(users_and_idlers(levels))
        if not any(used <= some and not some & idle for some in sets[group])
    ]
    return max(found, key=lambda group: int(count[group]), default=None)


def _idle_classes(levels: Levels, level: int) -> list[int]:
    """Classes of sites that a level leaves whole though they should be cut where they can be."""
    sites, chosen = levels.sites, levels.chosen[level]
    assert chosen is not None
    whole = (sites.classes[sites.at[:-1] + chosen] < 0) & ~sites.uncut
    classes = sites.classes[np.repeat(whole, sites.choices)]
    found: list[int] = np.unique(classes[classes >= 0]).tolist()
    return found


def _largest_sets(
    extent: int, rigid: bool, factors: Sequence[int], window: Sequence[int], others: frozenset[int]
) -> LevelSets:
    """Sets of levels of a window that fit beside others, none of them part of another."""
    found: list[frozenset[int]] = []
    for size in range(len(window), -1, -1):
        for some in map(frozenset, combinations(window, size)):
            if not any(some < larger for larger in found) and can_all_cut(
                extent, rigid, [factors[n] for n in some | others]
            ):
                found.append(some)
    return tuple(found)


# Values


def width_of(sites: Sites) -> int:
    """Choices of the widest site."""
    return int(sites.choices.max(initial=1))


def domains_of(sites: Sites, window: Sequence[int], sets: Sequence[LevelSets]) -> Bools:
    """Which joint choices of these levels each site has, choices padded to the widest site, if each
    of its classes may be cut by the levels of one of the class's sets."""
    found = np.zeros((len(sites), width_of(sites) ** len(window)), np.bool_)
    known: dict[tuple[int, ...], Bools] = {}
    ends, classes = sites.at.tolist(), sites.classes.tolist()
    for site, uncut in enumerate(sites.uncut.tolist()):
        own = classes[ends[site] : ends[site + 1] - 1]
        key = (uncut, *own)
        if key not in known:
            known[key] = _domain(sites, own, uncut, window, sets)
        found[site] = known[key]
    return found


def _domain(
    sites: Sites,
    classes: Sequence[int],
    uncut: bool,
    window: Sequence[int],
    sets: Sequence[LevelSets],
) -> Bools:
    """The joint choices of a site: its classes are independent, each needs a set that has all
    levels that cut it and none at which the site is whole, unless it may be."""
    width, bits = width_of(sites), 1 << np.arange(len(window))
    choices = np.stack(np.unravel_index(np.arange(width ** len(window)), (width,) * len(window)), 1)
    whole = (choices == len(classes)) @ bits
    found: Bools = np.asarray((choices <= len(classes)).all(axis=1))
    kinds = np.array([*classes, *[-1] * (width - len(classes))])[choices]
    for group in set(classes):
        used = (kinds == group) @ bits
        able = np.zeros(len(found), np.bool_)
        for some in sets[group] if sites.extents[group] > 1 else (frozenset[int](),):
            may = sum(1 << n for n, level in enumerate(window) if level in some)
            able |= ((used & ~may) == 0) & (uncut | ((whole & may) == 0))
        found &= able
    return found


def table_entries(sites: Sites, window: Sequence[int], sets: Sequence[LevelSets]) -> float:
    """Entries of all tables of a joint energy; infinite if even a site has too many choices."""
    if width_of(sites) ** len(window) > LARGEST:
        return float("inf")
    sizes = domains_of(sites, window, sets).sum(axis=1).astype(np.float64)
    return float((sizes[sites.source] * sizes[sites.target]).sum())


# The sum


def joint_energy(
    levels: Levels, window: Sequence[int], sets: Sequence[LevelSets]
) -> tuple[SharedEnergy, Bools]:
    """The cost of these levels, given those decided besides, as a sum of tables over sites; and
    the joint choices that the values of each site are, in order."""
    domains = domains_of(levels.sites, window, sets)
    return levels.tables(window, domains), domains


def picks_of(levels: Levels, window: Sequence[int], domains: Bools) -> Ints:
    """The values that the decided levels are; the first value of a site where they are none."""
    joint = np.zeros(len(levels.sites), np.int64)
    for n in window:
        chosen = levels.chosen[n]
        assert chosen is not None
        joint = joint * width_of(levels.sites) + chosen
    rows = np.arange(len(joint))
    rank = np.cumsum(domains, axis=1) - 1
    return np.where(domains[rows, joint], rank[rows, joint], 0).astype(np.int64)


def levels_of(
    levels: Levels, window: Sequence[int], domains: Bools, picks: Sequence[int]
) -> Levels:
    """The levels, these ones decided as a choice of the joint energy says."""
    found = Levels(levels.sites, levels.factors, levels.objective, list(levels.chosen))
    found.take(window, domains, np.array(picks, np.int64))
    return found


def levels_on_sites(levels: Levels, sites: Sites) -> Levels:
    """The same decisions on other sites of the same Space, such as those of Ops that are not tied
    to be cut alike."""
    old = levels.sites
    same = np.zeros(len(sites), np.int64)
    same[sites.op_site] = old.op_site
    for mine, theirs in ((sites.store, old.store), (sites.copy, old.copy)):
        for value, site in mine.items():
            same[site] = theirs[value]
    chosen = [None if c is None else c[same] for c in levels.chosen]
    return Levels(sites, levels.factors, levels.objective, chosen, levels.exact)
