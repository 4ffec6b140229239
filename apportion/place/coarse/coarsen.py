"""coarsen: fewer, larger units, for placers that cannot search over each operator.

In: a PlacementProblem and how many units are wanted. Out: the problem with so many units, and the
coarse unit of every unit. A placement of the coarse problem is one of the fine problem
(`coarse_placement[which]`), with the same loads.

In three steps, each only while there are too many units:

1. Units that exchange nothing with others, such as the counters of batch normalisation, join the
   unit before them: they would use up the groups.
2. Co-location, as in ColocRL (Mirhoseini et al., ICML 2017): a unit whose outputs only one other
   unit reads joins it, again and again, as long as the two are not more than their share.
3. The smallest unit joins a neighbour, as in Placeto (Addanki et al., NeurIPS 2019), which does not
   say which: here that with the most bytes between them for the size of the two.

The size of a unit is its share of the time or of the memory, whichever is larger. Units only join
where a device can run both and hold what stays there. merge_nodes.py makes the problem.
"""

from __future__ import annotations

import heapq

import numpy as np

from apportion.columns import Ints
from apportion.place.coarse.merge_nodes import merge_nodes
from apportion.place.placement_problem import PlacementProblem


def coarsen(problem: PlacementProblem, units: int) -> tuple[PlacementProblem, Ints]:
    """A problem with at most `units` units, more only if devices or memory forbid to join them;
    and the coarse unit of each unit. A problem that is small enough is returned as it is."""
    if units < 1:
        raise ValueError(f"cannot group operators into {units} units; ask for 1 or more")
    if problem.units <= units:
        return problem, np.arange(problem.units)
    groups = UnitGroups(problem)
    groups.join_isolated(units)
    groups.join_only_readers(units)
    groups.join_smallest(units)
    leader = groups.leaders()
    # Numbered by their first node, so that coarse units stand in the order of their work.
    first = np.full(problem.units, len(problem.columns.unit))
    np.minimum.at(first, leader[problem.columns.unit], np.arange(len(problem.columns.unit)))
    alive = np.unique(leader)
    number = np.empty(problem.units, np.int64)
    number[alive[np.argsort(first[alive], kind="stable")]] = np.arange(len(alive))
    which = number[leader]
    return merge_nodes(problem, which), which


class UnitGroups:
    """Units as they join; each group is called by one of its units.

    near     for each group the groups it exchanges outputs with, and how much
    readers  for each group those that read its forward outputs, and those it reads from
    """

    def __init__(self, problem: PlacementProblem) -> None:
        c, u = problem.columns, problem.units
        self.count = u
        self.leader = list(range(u))
        self.near: list[dict[int, float]] = [{} for _ in range(u)]
        self.readers: list[set[int]] = [set() for _ in range(u)]
        self.read: list[set[int]] = [set() for _ in range(u)]
        pairs, sends = problem.unit_edges
        for (a, b), send in zip(pairs.tolist(), sends.tolist(), strict=True):
            self.near[a][b] = self.near[b][a] = self.near[a].get(b, 0.0) + send + 1.0
        outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
        heads = c.source[outputs]
        forward = (c.backward[heads] == 0) & (c.backward[c.reader] == 0)
        edges = np.stack([c.unit[heads], c.unit[c.reader]], axis=1)[forward]
        for a, b in np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0).tolist():
            self.readers[a].add(b)
            self.read[b].add(a)
        self._measure(problem)
        self.allowed = [sum(1 << k for k in np.flatnonzero(row).tolist()) for row in c.allowed]
        self.limit = problem.limit.tolist()
        # The unit of the node before the first of each unit.
        first = np.full(u, len(c.unit) - 1)
        np.minimum.at(first, c.unit, np.arange(len(c.unit)))
        self.before = c.unit[np.maximum(first - 1, 0)].tolist()

    def _measure(self, problem: PlacementProblem) -> None:
        c, u = problem.columns, problem.units
        seconds = np.where(c.allowed, problem.unit_seconds, np.inf).min(axis=1)
        held = np.bincount(c.unit, c.resident, u)
        self.resident = held.tolist()
        if problem.links.live:
            held = held + np.bincount(c.unit[c.source], c.nbytes, u)
        shares = [x / max(float(x.sum()), 1e-300) for x in (seconds, held)]
        self.size: list[float] = np.maximum(*shares).tolist()

    def find(self, unit: int) -> int:
        """The group of a unit."""
        while self.leader[unit] != unit:
            self.leader[unit] = self.leader[self.leader[unit]]
            unit = self.leader[unit]
        return unit

    def leaders(self) -> Ints:
        """The group of every unit."""
        return np.array([self.find(unit) for unit in range(len(self.leader))], np.int64)

    def can_join(self, a: int, b: int) -> bool:
        """Whether some device can run both groups and hold what stays there."""
        both, needs = self.allowed[a] & self.allowed[b], self.resident[a] + self.resident[b]
        return any(both >> k & 1 and needs <= limit for k, limit in enumerate(self.limit))

    def join(self, a: int, b: int) -> int:
        """Makes two groups one; the one with more neighbours gives its name."""
        if len(self.near[a]) > len(self.near[b]):
            a, b = b, a
        self.leader[a] = b
        self.count -= 1
        self.size[b] += self.size[a]
        self.resident[b] += self.resident[a]
        self.allowed[b] &= self.allowed[a]
        for other, send in self.near[a].items():
            del self.near[other][a]
            if other != b:
                self.near[b][other] = self.near[other][b] = self.near[b].get(other, 0.0) + send
        for mine, theirs in ((self.readers, self.read), (self.read, self.readers)):
            for other in mine[a]:
                theirs[other].discard(a)
                if other != b:
                    theirs[other].add(b)
                    mine[b].add(other)
            mine[a] = set()
        self.near[a] = {}
        return b

    def join_isolated(self, units: int) -> None:
        """Those without neighbours that are less than their share join what stands before them."""
        for unit in range(len(self.leader)):
            if self.count <= units:
                return
            if not self.near[unit] and self.size[unit] < 1 / units:
                into = self.find(self.before[unit])
                if into != self.find(unit) and self.can_join(self.find(unit), into):
                    self.join(self.find(unit), into)

    def join_only_readers(self, units: int) -> None:
        """Those with one reader join it, small ones first."""
        heap = [(self.size[g], g) for g in range(len(self.leader)) if self.leader[g] == g]
        heapq.heapify(heap)
        while heap and self.count > units:
            size, group = heapq.heappop(heap)
            if self.leader[group] != group or size != self.size[group]:
                continue
            if len(self.readers[group]) != 1:
                continue
            (reader,) = self.readers[group]
            if size + self.size[reader] <= 1 / units and self.can_join(group, reader):
                into = self.join(group, reader)
                heapq.heappush(heap, (self.size[into], into))
                for other in self.read[into]:
                    if len(self.readers[other]) == 1:
                        heapq.heappush(heap, (self.size[other], other))

    def join_smallest(self, units: int) -> None:
        """The smallest joins a neighbour, or, where it has none that it can join, the smallest
        group that it can."""
        heap = [(self.size[g], g) for g in range(len(self.leader)) if self.leader[g] == g]
        heapq.heapify(heap)
        alone: list[int] = []
        while heap and self.count > units:
            size, group = heapq.heappop(heap)
            if self.leader[group] != group or size != self.size[group]:
                continue
            best = max(
                ((send / (size + self.size[other] + 1e-12), -other)
                 for other, send in self.near[group].items() if self.can_join(group, other)),
                default=None,
            )  # fmt: skip
            into = -best[1] if best else next((g for g in alone if self.can_join(group, g)), -1)
            if into < 0:
                alone.append(group)
                continue
            joint = self.join(group, into)
            alone = [g for g in alone if g not in (group, into)]
            heapq.heappush(heap, (self.size[joint], joint))
