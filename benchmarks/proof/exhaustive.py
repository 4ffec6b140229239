"""exhaustive: the best combination of the options of all units by simulated step time, proven.

In: a Problem and Units, each with its options. Out: an OptimalityProof.

Depth-first over the units, the most promising option first. A partial decision is given up if no
completion of it can be better than the best that is known (floor.py), or if it is the image of
another under a renaming of devices that the cluster does not notice. Complete decisions that are
left are simulated, all their images too: lowering goes by the numbers of devices where several hold
the same piece, so that images may differ by a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from random import Random
from time import process_time

import numpy as np
from proof.floor import anneal, floors
from proof.loops import find_loops
from proof.needs import find_needs

from apportion.machine.topology import Cluster
from apportion.search.problem import Problem, Progress
from apportion.search.walks.units import Unit, size_of
from apportion.simulate.delta.delta import Delta
from apportion.split.strategy import Choice, Strategy

CHAINS, TRIES = 2, 60_000  # of the annealing to begin with, at least
SHARE = 0.05  # of the budget that it may take
HOT, COLD = 0.02, 0.001  # its temperatures, as shares of the step time
Renaming = tuple[int, ...]


@dataclass(frozen=True)
class OptimalityProof:
    """What an exhaustive search has shown.

    strategy       the best combination of options, `picks` in the order of the units given
    step_ns        its simulated step time
    bound_ns       what no combination takes less than; equal to step_ns if `proven`
    combinations   in the space
    symmetries     renamings of devices that the cluster and the options do not notice
    visited        partial decisions whose floor was worked out, by depth
    pruned         those given up because of their floor, by depth
    images         those given up because they are images of others, by depth
    simulated      complete decisions that were simulated
    seconds        processor time
    """

    strategy: Strategy
    picks: tuple[int, ...]
    step_ns: int
    bound_ns: int
    proven: bool
    combinations: int
    symmetries: int
    visited: tuple[int, ...]
    pruned: tuple[int, ...]
    images: tuple[int, ...]
    simulated: int
    seconds: float


def prove_optimum(
    problem: Problem,
    units: Sequence[Unit],
    *,
    budget: float = 600.0,
    start: Sequence[int] | None = None,
    seed: int = 0,
    order: Sequence[int] | None = None,
) -> OptimalityProof:
    """The best combination of options and the proof that it is; if the budget in processor seconds
    runs out, the best found with a bound on all others.

    `start` has an option for each unit, to begin with; `order` is the order in which units are
    decided, which changes nothing but the time. A memory limit is not looked at.
    """
    return _BranchAndBound(problem, units, budget, start, seed, order).proof()


def renamings(cluster: Cluster) -> list[Renaming]:
    """Permutations of the devices under which devices and links are the same, but for names."""
    devices = [replace(d, name="", provenance="") for d in cluster.devices]
    found = []
    for names in permutations(range(len(devices))):
        alike = all(devices[k] == devices[names[k]] for k in range(len(devices)))
        if alike and _same_links(cluster, names):
            found.append(names)
    return found


def _same_links(cluster: Cluster, names: Renaming) -> bool:
    """Whether links can be renamed along with devices."""
    links: dict[int, int] = {}
    for a, row in enumerate(cluster.routes):
        for b, route in enumerate(row):
            other = cluster.routes[names[a]][names[b]]
            if len(other) != len(route):
                return False
            for one, another in zip(route, other, strict=True):
                if links.setdefault(one, another) != another:
                    return False
    if len(set(links.values())) < len(links):
        return False
    kinds = [(link.bandwidth, link.latency) for link in cluster.links]
    return all(kinds[one] == kinds[another] for one, another in links.items())


def images(unit: Unit, names: Renaming) -> list[int] | None:
    """For every option of a unit which one it is under other names of the devices; None if one of
    them is then no option."""
    numbers = {_replicas_sorted(option): k for k, option in enumerate(unit.options)}
    found = []
    for option in unit.options:
        renamed = tuple(Choice(c.parts, tuple(names[d] for d in c.devices)) for c in option)
        number = numbers.get(_replicas_sorted(renamed))
        if number is None:
            return None
        found.append(number)
    return found


def _replicas_sorted(option: Sequence[Choice]) -> tuple[object, ...]:
    """An option with the replicas of every Op in rising order: which is which does not matter."""
    return tuple(
        (c.parts, *sorted(c.devices[k : k + c.count] for k in range(0, len(c.devices), c.count)))
        for c in option
    )


class _OutOfTime(Exception):
    pass


class _BranchAndBound:
    def __init__(
        self,
        problem: Problem,
        units: Sequence[Unit],
        budget: float,
        start: Sequence[int] | None,
        seed: int,
        order: Sequence[int] | None,
    ) -> None:
        self.begun, self.budget = process_time(), budget
        self.problem = problem
        self.order = list(range(len(units))) if order is None else list(order)
        self.units = [units[k] for k in self.order]
        self.rng = Random(seed)
        count = len(units)
        self.visited, self.pruned, self.images = [0] * count, [0] * count, [0] * count
        first = [0] * count if start is None else [start[k] for k in self.order]
        self.live = Delta(problem.space, self._strategy(first), problem.cluster, problem.cost)
        self.now = list(first)
        self.best, self.picks = self.live.step_ns, list(first)
        self.seen: dict[tuple[int, ...], int] = {tuple(first): self.best}
        self.simulated = 0
        self.open = 1 << 60  # the least floor of what was left when time ran out
        self._symmetries()

    def _symmetries(self) -> None:
        """Renamings that the cluster does not notice and all units have the options for."""
        found = []
        for names in renamings(self.problem.cluster):
            tables = [images(unit, names) for unit in self.units]
            if all(table is not None for table in tables):
                found.append(tables)
        self.renamed = [
            np.array([tables[depth] for tables in found], np.int64)
            for depth in range(len(self.units))
        ]

    def proof(self) -> OptimalityProof:
        self.needs = find_needs(self.problem, self.units)
        self.loops = find_loops(self.needs)
        ops, _, copies = self.needs.where.shape
        self.end = np.zeros((ops, copies), np.int64)
        self.have = np.zeros((len(self.needs.maker), 2 * copies), np.int64)
        self.chosen = np.zeros(len(self.units), np.int64)
        everything = np.arange(len(self.renamed[0]))
        self._begin()
        proven = True
        try:
            self._descend(0, everything)
        except _OutOfTime:
            proven = False
        picks = [0] * len(self.units)
        for place, number in enumerate(self.order):
            picks[number] = self.picks[place]
        return OptimalityProof(
            self._strategy(self.picks), tuple(picks), self.best,
            self.best if proven else min(self.best, self.open), proven, size_of(self.units),
            len(everything), tuple(self.visited), tuple(self.pruned), tuple(self.images),
            self.simulated, process_time() - self.begun,
        )  # fmt: skip

    # Depth first

    def _descend(self, depth: int, fixing: np.ndarray) -> None:
        """Decides the unit at a depth; `fixing` are the renamings under which what is decided stays
        as it is."""
        room = (self.end, self.have)
        found = floors(self.needs, self.loops, self.chosen, depth + 1, self.best, *room)
        table = self.renamed[depth][fixing]
        least = table.min(axis=0) == np.arange(table.shape[1])
        self.visited[depth] += int(least.sum())
        self.images[depth] += int((~least).sum())
        order = np.flatnonzero(least)
        order = order[np.argsort(found[order], kind="stable")].tolist()
        for at, option in enumerate(order):
            if found[option] >= self.best:
                self.pruned[depth] += len(order) - at
                return
            if process_time() - self.begun > self.budget:
                self.open = min(self.open, int(found[option]))
                raise _OutOfTime
            self.chosen[depth] = option
            if depth + 1 == len(self.units):
                self._all_images(self.chosen.tolist())
                continue
            try:
                self._descend(depth + 1, fixing[table[:, option] == option])
            except _OutOfTime:
                rest = order[at + 1 : at + 2]
                self.open = min([self.open, *(int(found[k]) for k in rest)])
                raise

    def _all_images(self, picks: list[int]) -> None:
        """Simulates a complete decision and all its images."""
        several = {
            tuple(int(self.renamed[d][r, k]) for d, k in enumerate(picks))
            for r in range(len(self.renamed[0]))
        }
        for image in sorted(several):
            self._note(list(image), self._simulated(image))

    def _simulated(self, picks: tuple[int, ...]) -> int:
        found = self.seen.get(picks)
        if found is None:
            self.simulated += 1
            found = self.seen[picks] = self._try(list(picks))
            self.live.undo()
        return found

    def _try(self, picks: list[int]) -> int:
        """Changes what is simulated to other options."""
        changed: dict[int, Choice] = {}
        for unit, old, new in zip(self.units, self.now, picks, strict=True):
            if old != new:
                changed.update(zip(unit.ops, unit.options[new], strict=True))
        return self.live.change(changed)

    def _note(self, picks: list[int], step: int) -> None:
        if step < self.best:
            self.best, self.picks = step, picks
            self.problem.report_progress(Progress("exhaustive", step / 1e9))

    def _strategy(self, picks: Sequence[int]) -> Strategy:
        choices: dict[int, Choice] = {}
        for unit, option in zip(self.units, picks, strict=True):
            choices.update(zip(unit.ops, unit.options[option], strict=True))
        return Strategy(tuple(choices[op] for op in range(len(choices))))

    # A good one to begin with

    def _begin(self) -> None:
        """Simulates what annealing by floors finds, which takes a hundredth of the time that
        simulating does."""
        chains, tries = 0, min(TRIES, size_of(self.units))
        while chains < CHAINS or (
            tries == TRIES and process_time() - self.begun < SHARE * self.budget
        ):
            start = np.array([self.rng.randrange(len(unit.options)) for unit in self.units])
            seed = self.rng.randrange(1 << 30)
            found = anneal(self.needs, self.loops, start, tries, HOT, COLD, seed)
            chains += 1
            self._all_images(found.tolist())
