"""levels: a partition decided factor by factor, each level the exact optimum given the others.

In: Sites, the factors of the device count, and an Objective. Out: Levels, which say for every site
and factor what is cut.

Level i divides the devices into k_i groups and says of every site which of its atoms is cut into
k_i, if any. Between two sites a Value of S bytes moves S times

    rho - phi     rho: what the readers of all groups require, phi: what is already there

and over levels both are products, so that whatever the order of the levels, the bytes of all add up
to those of all devices:

    reader                   source cut on the same atom   on another atom   whole       partial
    cut on an atom           rho x 1, phi x 1              x 1, x 1/k        x 1, x 1    x k, x 1
    whole                    x k, x 1                      x k, x 1          x k, x k    x kk, x k
    whole, first group only  x 1, x 1/k                    x 1, x 1/k        x 1, x 1    x k, x 1

Levels commute because a level that cuts a class of atoms takes a digit of it: an atom of its own
(split/atoms.py). A class is cut unevenly by one level at most, which takes what the others leave.
Where Ops must know their place along a class, that restricts the levels that cut it
(level_places.py). Level 0 decides the highest digit of the device.

With all other levels fixed, the cost is a sum of tables over pairs of sites; that is solved exactly
(eliminate.py) for one level, or for several jointly. Going round the levels until nothing improves
makes recursion's result better than the order in which it took its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from apportion.columns import Bools, Floats, Ints, distinct_rows
from apportion.search.levels.level_places import scattering_choices, scatters_parts
from apportion.search.levels.sites import COPY, OP, Sites
from apportion.search.tables.eliminate import CAP, SharedEnergy, TooWide, descend, minimise_shared
from apportion.search.tables.elimination_order import EliminationOrder, elimination_order
from apportion.split import PARTIAL, WHOLE

PASSES = 60  # of messages, where elimination is too wide
GAIN = 1e-4  # improvements below this share do not keep polishing alive


@dataclass(frozen=True)
class Objective:
    """What the levels minimise, in any unit.

    weights   per level, of a byte that moves there; falling or equal: the first is the slowest
    fixed     per level, of a transfer, however small
    burden    per site, of its being whole; a cut into k divides it by k (compute, memory)
    """

    weights: tuple[float, ...]
    fixed: tuple[float, ...] = ()
    burden: Floats | None = None


def fewest_bytes(levels: int) -> Objective:
    """Bytes moved and nothing else."""
    return Objective((1.0,) * levels)


@dataclass
class Levels:
    """The levels of one partition. `chosen[i]` is None until level i is decided; `exact` tells
    whether every decision was the optimum given the others."""

    sites: Sites
    factors: tuple[int, ...]
    objective: Objective
    chosen: list[Ints | None] = field(default_factory=list)
    exact: bool = True
    steps: EliminationOrder | None = None

    def __post_init__(self) -> None:
        self.chosen = self.chosen or [None] * len(self.factors)
        sites = self.sites
        self._edges = _site_pairs(sites)
        self._site_of = np.repeat(np.arange(len(sites)), sites.choices)
        self._matrices: dict[int, tuple[Floats, Floats, Floats]] = {}
        self._effects: dict[int, tuple[Ints, Floats, Floats]] = {}
        self._takings: dict[int, tuple[Ints, Ints]] = {}
        self._burden = self.objective.burden
        self._patterns = _pattern_matrices(sites)
        column = np.arange(len(sites.classes)) - np.repeat(sites.at[:-1], sites.choices)
        self._place = self._site_of * self._width + column  # of each choice, sites padded
        self._sampled = (
            (
                (sites.classes >= 0)
                & sites.samples[sites.classes]
                & (sites.kind[self._site_of] == OP)
            )
            if len(sites.samples)
            else np.zeros(len(sites.classes), np.bool_)
        )

    # State

    def decided(self) -> list[int]:
        return [level for level, chosen in enumerate(self.chosen) if chosen is not None]

    def classes_cut(self, level: int) -> Ints:
        """The classes that a level cuts."""
        chosen = self._chosen(level)
        known = self._takings.get(level)
        if known is None or known[0] is not chosen:
            found = np.zeros(len(self.sites.extents) + 1, np.bool_)
            found[self.sites.classes[self.sites.at[:-1] + chosen]] = True
            known = self._takings[level] = (chosen, np.flatnonzero(found[:-1]))
        return known[1]

    def _chosen(self, level: int) -> Ints:
        chosen = self.chosen[level]
        assert chosen is not None
        return chosen

    @property
    def scattered(self) -> bool:
        """Whether parts that must know their place would not be ranges (level_places.py)."""
        chosen = {level: self._chosen(level) for level in self.decided()}
        return len(chosen) > 1 and scatters_parts(self.sites, chosen, self.factors)

    def factors_of(self, level: int) -> tuple[Floats, Floats]:
        """What a level does to rho and phi of every dependency."""
        sites, chosen = self.sites, self._chosen(level)
        known = self._effects.get(level)
        if known is None or known[0] is not chosen:
            rho, phi, _ = self._factor(self.factors[level])
            where = sites.pattern, chosen[sites.source], chosen[sites.target]
            known = self._effects[level] = (chosen, rho[where], phi[where])
        return known[1], known[2]

    def _factor(self, k: int) -> tuple[Floats, Floats, Floats]:
        """Per pattern and pair of choices: rho, phi, and whether something new moves."""
        found = self._matrices.get(k)
        if found is None:
            source, target, halo = self._patterns
            found = self._matrices[k] = rho_and_phi(
                source[:, :, None], target[:, None, :], k, halo[:, None, :]
            )
        return found

    @property
    def bytes_moved(self) -> float:
        """Bytes of all levels so far, as the tables count them."""
        rho, phi = self.sites.nbytes.copy(), self.sites.nbytes.copy()
        for level in self.decided():
            more_rho, more_phi = self.factors_of(level)
            rho, phi = rho * more_rho, phi * more_phi
        return float((rho - phi).sum())

    def bytes_by_level(self) -> list[float]:
        """What each level adds, in order."""
        rho, phi = self.sites.nbytes.copy(), self.sites.nbytes.copy()
        total, found = 0.0, []
        for level in self.decided():
            more_rho, more_phi = self.factors_of(level)
            rho, phi = rho * more_rho, phi * more_phi
            found.append(float((rho - phi).sum()) - total)
            total += found[-1]
        return found

    @property
    def cost(self) -> float:
        """The objective of the levels decided, ties aside."""
        sites, weights = self.sites, self.objective.weights
        rho, phi = sites.nbytes.copy(), sites.nbytes.copy()
        total, before = 0.0, 0.0
        burden = None if self._burden is None else self._burden.copy()
        for level in self.decided():
            k = self.factors[level]
            more_rho, more_phi = self.factors_of(level)
            if self.objective.fixed:
                _, _, moves = self._factor(k)
                chosen = self._chosen(level)
                moved = moves[sites.pattern, chosen[sites.source], chosen[sites.target]]
                total += self.objective.fixed[level] * float((moved * sites.count).sum())
            rho, phi = rho * more_rho, phi * more_phi
            now = float((rho - phi).sum())
            total += weights[level] * (now - before)
            before = now
            if burden is not None:
                burden = burden * self.burden_left(level)
        return total + (0.0 if burden is None else float(burden.sum()))

    def burden_left(self, level: int) -> Floats:
        """What a level leaves of each site's burden."""
        classes = self.sites.classes[self.sites.at[:-1] + self._chosen(level)]
        return np.where(classes >= 0, 1.0 / self.factors[level], 1.0)

    # One level, or several jointly

    def solve(self, levels: Sequence[int], cap: int = CAP) -> float:
        """Decides these levels, optimally given those decided; returns the change of cost. If then
        parts were scattered, levels are decided one by one, with fewer choices."""
        before = self.cost if all(self.chosen[n] is not None for n in levels) else math.inf
        old = [self.chosen[n] for n in levels]
        self._decide(levels, self._domains(levels), cap)
        if len(levels) > 1 and self.scattered:
            self._restore(levels, old)
            for level in levels:
                self.solve([level], cap)
        elif self.scattered:
            self.exact = False
            others = {n: self._chosen(n) for n in self.decided() if n not in levels}
            for every in (False, True):
                if self.scattered:
                    narrowed = self._domains(levels, scattering_choices(self.sites, others, every))
                    self._decide(levels, narrowed, cap)
        after = self.cost
        if after > before:  # ties were broken for something else
            self._restore(levels, old)
            return 0.0
        return after - before

    def _decide(self, levels: Sequence[int], domains: Bools, cap: int) -> None:
        shared = self.tables(levels, domains)
        try:
            steps = self._program(cap)
            if not steps.whole:  # made for wider domains
                steps = elimination_order(shared.sizes, shared.edges, float(cap))
            picks, _ = minimise_shared(shared, steps, cap)
        except TooWide:
            if len(levels) > 1:
                raise
            picks, proven = self._pass_messages(shared, domains)
            self.exact &= proven
        self._take(levels, domains, picks)

    def _restore(self, levels: Sequence[int], old: Sequence[Ints | None]) -> None:
        for level, chosen in zip(levels, old, strict=True):
            self.chosen[level] = chosen

    def _program(self, cap: int) -> EliminationOrder:
        """The steps of elimination for any level, made for domains that nothing has narrowed."""
        if self.steps is None:
            fresh = Levels(self.sites, self.factors, self.objective)  # what 2 can cut, 3 may not
            domains = fresh._domains([self.factors.index(min(self.factors))])
            sizes = domains.sum(axis=1).astype(np.int64)
            self.steps = elimination_order(sizes, self._edges.ends, float(cap))
        return self.steps

    def energy(self, levels: Sequence[int]) -> tuple[SharedEnergy, Bools]:
        """The cost of these levels given those decided, as tables over sites; and which joint
        choices of each site its values are, in order."""
        domains = self._domains(levels)
        return self.tables(levels, domains), domains

    def take(self, levels: Sequence[int], domains: Bools, picks: Ints) -> None:
        """Decides these levels by values of their `energy`."""
        self._take(levels, domains, np.asarray(picks, np.int64))

    def _take(self, levels: Sequence[int], domains: Bools, picks: Ints) -> None:
        order = np.argsort(~domains, axis=1, kind="stable")
        joint = order[np.arange(len(picks)), picks]
        width = self._width
        for level in reversed(levels):
            self.chosen[level] = joint % width
            joint = joint // width

    @property
    def _width(self) -> int:
        return int(self.sites.choices.max(initial=1))

    def _domains(self, levels: Sequence[int], without: Bools | None = None) -> Bools:
        """Which (joint) choices each site has, choices padded to the widest site; none `without`
        which it should do."""
        sites, width = self.sites, self._width
        rows = np.arange(len(sites))
        domain = np.ones((len(rows), 1), np.bool_)
        for able in self._allowed(levels):
            one = np.zeros((len(sites), width), np.bool_)
            one.ravel()[self._place] = np.append(able, False)[sites.classes]
            if without is not None:
                one.ravel()[self._place[without]] = False
            last = self._place[sites.at[1:] - 1]
            one.ravel()[last] = sites.uncut | ~one.any(axis=1)
            domain = (domain[:, :, None] & one[:, None, :]).reshape(len(rows), -1)
        return domain

    def _allowed(self, levels: Sequence[int]) -> list[Bools]:
        """Per level the classes that it may cut, whatever the others of these levels take."""
        sites = self.sites
        divided = np.ones(len(sites.extents), np.int64)  # by levels that divide evenly
        uneven = np.zeros(len(sites.extents), np.int64)  # the factor of the one that does not
        times = np.zeros(len(sites.extents), np.int64)
        others = [n for n in self.decided() if n not in levels]
        for level in sorted(others, key=lambda n: -self.factors[n]):
            self._account(level, self.classes_cut(level), divided, uneven, times)
        found = []
        for level in levels:
            k = self.factors[level]
            left = sites.extents // divided
            even = (left % k == 0) & (left // k >= np.maximum(uneven, 1))
            able = even | ((uneven == 0) & (left >= k))
            able &= ~(sites.rigid & (times > 0)) & (sites.extents > 1)
            found.append(able)
            self._account(level, np.flatnonzero(able), divided, uneven, times)
        return found

    def _account(self, level: int, taken: Ints, divided: Ints, uneven: Ints, times: Ints) -> None:
        k, left = self.factors[level], self.sites.extents[taken] // divided[taken]
        even = (left % k == 0) & (left // k >= np.maximum(uneven[taken], 1))
        divided[taken[even]] *= k
        uneven[taken[~even]] = k
        times[taken] += 1

    def tables(self, levels: Sequence[int], domains: Bools) -> SharedEnergy:
        """The cost as a function of these levels' choices."""
        sites = self.sites
        rho, phi = self._coefficients(levels)
        kinds, kind_of = distinct_rows(domains)
        lists = [np.flatnonzero(row) for row in domains[kinds]]
        a, b = kind_of[sites.source], kind_of[sites.target]
        dependencies, dependency_of = distinct_rows(
            np.stack([sites.pattern, rho, phi, sites.count, a, b], axis=1).astype(np.float64)
        )
        made = [self._table(levels, n, rho, phi, lists[a[n]], lists[b[n]]) for n in dependencies]
        costs = self._costs(levels, domains)
        for dependency in self._edges.selves:
            site, table = sites.source[dependency], made[dependency_of[dependency]]
            costs[site, domains[site]] += np.diagonal(table)
        unary, unary_of = distinct_rows(costs)
        tables = [costs[n, domains[n]] for n in unary]
        edges = self._edges
        signs = np.full(edges.rows.shape, -1, np.int64)
        signs[edges.rows >= 0] = dependency_of[edges.dependencies] * 2 + edges.turned
        signs.sort(axis=1)
        distinct, pairs = distinct_rows(signs)
        pairs += len(tables)
        for edge in distinct:
            own = [_turned(made[s >> 1], s & 1) for s in signs[edge].tolist() if s >= 0]
            tables.append(own[0] if len(own) == 1 else sum(own[1:], own[0]))
        sizes = domains.sum(axis=1).astype(np.int64)
        return SharedEnergy(sizes, unary_of, self._edges.ends, pairs, tuple(tables))

    def _coefficients(self, levels: Sequence[int]) -> tuple[Floats, Floats]:
        """A and B of each dependency: given the other levels it costs A rho - B phi, where rho and
        phi are those of these levels. Levels after them multiply what they move; a level's own
        bytes have its weight."""
        sites, weights = self.sites, self.objective.weights
        rho, phi = sites.nbytes.copy(), sites.nbytes.copy()
        a, b = np.zeros(len(rho)), np.zeros(len(rho))
        present = sorted({*self.decided(), *levels})
        joint = len(levels) > 1
        for n, level in enumerate(present):
            if level not in levels:
                more_rho, more_phi = self.factors_of(level)
                rho, phi = rho * more_rho, phi * more_phi
            if level < (max(levels) if joint else levels[0]):
                continue
            later = weights[present[n + 1]] if n + 1 < len(present) else 0.0
            share = weights[level] - later
            a, b = a + share * rho, b + share * phi
        return a, b

    def _table(
        self,
        levels: Sequence[int],
        dependency: int,
        rho: Floats,
        phi: Floats,
        here: Ints,
        there: Ints,
    ) -> Floats:
        """The table of a dependency over the (joint) choices of its ends."""
        pattern = self.sites.pattern[dependency]
        r, p, moves = (m[pattern] for m in self._factor(self.factors[levels[0]]))
        fixed = self._fixed(levels[0], dependency) * moves
        for level in levels[1:]:
            more_r, more_p, moves = (m[pattern] for m in self._factor(self.factors[level]))
            r, p = np.kron(r, more_r), np.kron(p, more_p)
            fixed = _outer_sum(fixed, self._fixed(level, dependency) * moves)
        table: Floats = (rho[dependency] * r - phi[dependency] * p + fixed)[here[:, None], there]
        return table

    def _fixed(self, level: int, dependency: int) -> float:
        fixed = self.objective.fixed
        return fixed[level] * float(self.sites.count[dependency]) if fixed else 0.0

    def _costs(self, levels: Sequence[int], domains: Bools) -> Floats:
        """The burden of each (joint) choice of each site, and what breaks ties: long classes
        first, so that none is used up; state sharded; samples cut."""
        sites, width = self.sites, self._width
        left = np.maximum(sites.extents, 1).astype(np.float64)
        for level in self.decided():
            if level not in levels:
                left[self.classes_cut(level)] /= self.factors[level]
        prefer = 0.1 / left + 0.1
        whole = np.where(sites.kind == COPY, 0.0, 0.5)[self._site_of]
        ties = np.where(sites.classes >= 0, prefer[sites.classes] - 0.05 * self._sampled, whole)
        grid = np.zeros((len(sites), width))
        grid.ravel()[self._place] = ties * 1e-3 * min(self.objective.weights)
        cut = np.zeros((len(sites), width))
        cut.ravel()[self._place] = sites.classes >= 0
        total = np.zeros((len(sites), 1))
        burden = None if self._burden is None else self._burden[:, None].copy()
        for level in self.decided():
            if burden is not None and level not in levels:
                burden = burden * self.burden_left(level)[:, None]
        for level in levels:
            total = (total[:, :, None] + grid[:, None, :]).reshape(len(sites), -1)
            if burden is not None:
                share = np.where(cut > 0, 1.0 / self.factors[level], 1.0)
                burden = (burden[:, :, None] * share[:, None, :]).reshape(len(sites), -1)
        if burden is not None:
            total = total + burden
        return np.where(domains, total, np.inf)  # so that rows of other domains differ

    def _pass_messages(self, shared: SharedEnergy, domains: Bools) -> tuple[Ints, bool]:
        """Where elimination is too wide: message passing, from a descent that begins with cutting
        samples; and whether the result is proven to be the optimum."""
        from apportion.search.tables.ascend import pass_messages  # needs scipy

        sites = self.sites
        start = []
        for site in range(len(sites)):
            own = np.flatnonzero(domains[site])
            groups = sites.classes[sites.at[site] + own]
            sampled = np.flatnonzero((groups >= 0) & sites.samples[groups])
            start.append(int(sampled[0]) if len(sampled) else 0)
        energy = shared.energy()
        found = pass_messages(energy, rounds=PASSES, start=descend(energy, start)[0])
        return np.array(found.choice, np.int64), found.optimal


def recurse(
    sites: Sites,
    factors: Sequence[int],
    objective: Objective | None = None,
    *,
    steps: EliminationOrder | None = None,
    cap: int = CAP,
) -> Levels:
    """Every level decided in order, given those before it; by the `steps` of other levels of these
    sites whose least factor is no larger, if at hand."""
    levels = Levels(sites, tuple(factors), objective or fewest_bytes(len(factors)), steps=steps)
    for level in range(len(levels.factors)):
        levels.solve([level], cap)
    return levels


def levels_from_likes(sites: Sites, few: Levels, likes: Ints) -> Levels | None:
    """Levels that decide for each site what those of fewer sites decide for its like; None if a
    site would be left whole that can be cut, or parts scattered."""
    chosen: list[Ints | None] = [few._chosen(level)[likes] for level in few.decided()]
    levels = Levels(sites, few.factors, fewest_bytes(len(few.factors)), chosen, few.exact)
    for level in levels.decided():
        picks = levels._chosen(level)
        whole = (sites.classes[sites.at[:-1] + picks] < 0) & ~sites.uncut
        if whole.any() and not levels._domains([level])[np.arange(len(sites)), picks].all():
            return None
    return None if levels.scattered else levels


def polish(levels: Levels, rounds: int = 3, joint: int = 1, cap: int = CAP) -> Levels:
    """Decides level after level anew, given all others, until nothing improves by more than GAIN;
    with `joint` 2, neighbouring pairs of levels too."""
    count = len(levels.factors)
    if count < 2:
        return levels
    groups = [tuple(range(n, n + size)) for size in range(1, joint + 1) for n in range(count)]
    weights = levels.objective.weights
    groups = [g for g in groups if g[-1] < count and weights[g[0]] == weights[g[-1]]]
    stale = 0
    for group in groups * rounds:
        try:
            gained = levels.solve(group, cap) < -GAIN * abs(levels.cost)
        except TooWide:
            gained = False
        stale = 0 if gained else stale + 1
        if stale >= len(groups):
            break
    return levels


def rho_and_phi(
    source: Ints, target: Ints, k: int, halo: Floats | float = 0.0
) -> tuple[Floats, Floats, Floats]:
    """What a level of k does to rho and phi, by the table above, and whether anything moves there.

    Parts that read a halo require that much more at each of their borders; where the source is cut
    on the same atom, all but the halo is there.
    """
    source, target = np.broadcast_arrays(source, target)
    cut = source >= 0
    aligned = cut & (source == target)
    spread = 1 + (k - 1) * np.broadcast_to(np.asarray(halo, np.float64), source.shape)
    rho = np.where(target == WHOLE, float(k), spread)
    phi = np.where(
        target == WHOLE,
        np.where(cut, 1.0, float(k)),
        np.where(aligned, 1.0, np.where(cut, spread / k, spread)),
    )
    rho = np.where(source == PARTIAL, rho * k, rho)
    moves = (rho != phi).astype(np.float64)
    return rho, phi, moves


def _pattern_matrices(sites: Sites) -> tuple[Ints, Ints, Floats]:
    """Cuts of all patterns, padded: of the source, of the target, and the halos of these."""
    width = int(sites.choices.max(initial=1))
    source = np.full((len(sites.patterns), width), WHOLE, np.int64)
    target = np.full((len(sites.patterns), width), WHOLE, np.int64)
    halo = np.zeros((len(sites.patterns), width))
    for n, (here, there) in enumerate(sites.patterns):
        source[n, : len(here)] = [atom for atom, _ in here]
        target[n, : len(there)] = [atom for atom, _ in there]
        halo[n, : len(there)] = [share for _, share in there]
    return source, target, halo


@dataclass(frozen=True)
class _SitePairs:
    """Pairs of sites between which there are dependencies.

    ends          the two sites of each pair, the smaller first
    rows          for each pair the places of its own in `dependencies`, -1 where it has fewer
    dependencies  all dependencies between two different sites, by pair
    turned        for each of these whether it leads from the larger site to the smaller
    selves        the dependencies of a site on itself
    """

    ends: Ints
    rows: Ints
    dependencies: Ints
    turned: Ints
    selves: list[int]


def _site_pairs(sites: Sites) -> _SitePairs:
    low, high = np.minimum(sites.source, sites.target), np.maximum(sites.source, sites.target)
    proper = np.flatnonzero(low != high)
    keys = low[proper] * len(sites) + high[proper]
    order = np.argsort(keys, kind="stable")
    dependencies = proper[order]
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    ends = np.stack([low[dependencies[starts]], high[dependencies[starts]]], axis=1).astype(
        np.int64
    )
    counts = np.diff(np.append(starts, len(dependencies)))
    rows = np.full((len(counts), int(counts.max(initial=1))), -1, np.int64)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = np.arange(len(dependencies))
    turned = (sites.source[dependencies] > sites.target[dependencies]).astype(np.int64)
    return _SitePairs(ends, rows, dependencies, turned, np.flatnonzero(low == high).tolist())


def _turned(table: Floats, turned: int) -> Floats:
    return np.ascontiguousarray(table.T) if turned else table


def _outer_sum(a: Floats, b: Floats) -> Floats:
    """As np.kron, with + for *."""
    rows, columns = a.shape[0] * b.shape[0], a.shape[1] * b.shape[1]
    return (a[:, None, :, None] + b[None, :, None, :]).reshape(rows, columns)
