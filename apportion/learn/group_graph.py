"""GroupGraph: what Placeto and ColocRL see of a problem: groups of units, and who reads from whom.

In: a PlacementProblem, and how many groups a network is made for. Out: the groups' order, costs,
bytes and edges, and who comes before whom. A placement of groups is a placement of the problem's
units, and is judged there: grouping limits what can be said, not how it is judged.

Forward and backward nodes of a group make its graph cyclic. Groups are ordered by the first of
their nodes, and edges that lead back are left out: what remains is the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.columns import Bools, Floats, Ints
from apportion.place import PlacementProblem, coarsen


@dataclass(frozen=True, eq=False)
class GroupGraph:
    """Groups of a problem's units: g of them, in an order in which they begin."""

    problem: PlacementProblem
    group: Ints  # u: the group of each unit
    seconds: Floats  # g: time units that a group takes, on average over devices that can run it
    out_bytes: Floats  # g: bytes of its outputs
    edges: Ints  # e x 2: (group, later group that reads from it)
    allowed: Bools  # g x k

    @property
    def groups(self) -> int:
        return len(self.seconds)

    @property
    def devices(self) -> int:
        return len(self.problem.devices)

    @cached_property
    def node_group(self) -> Ints:
        """The group of each node."""
        return self.group[self.problem.columns.unit]

    @cached_property
    def ancestors(self) -> Bools:
        """g x g: whether there is a path from the second group to the first."""
        before = np.zeros((self.groups, self.groups), bool)
        order = np.argsort(self.edges[:, 1], kind="stable")
        for source, target in self.edges[order]:
            before[target] |= before[source]
            before[target, source] = True
        return before

    @cached_property
    def one_device_seconds(self) -> float:
        """Time units of all nodes on the device where that is shortest."""
        duration = self.problem.columns.duration.sum(axis=0)
        return float(duration.min()) / self.problem.tick

    def spread(self, place: Ints) -> Ints:
        """The placement of units that a placement of groups says."""
        return place[self.group]

    def gathered(self, units: Ints) -> Ints:
        """The devices of groups under a placement of units: that of the first unit of each."""
        found = np.zeros(self.groups, np.int64)
        found[self.group[::-1]] = np.asarray(units)[::-1]
        return found

    def first_starts(self, start: Ints) -> Ints:
        """When each group starts, if nodes start at `start`."""
        found = np.full(self.groups, np.iinfo(np.int64).max)
        np.minimum.at(found, self.node_group, start)
        return found


def group_graph(problem: PlacementProblem, groups: int = 160) -> GroupGraph:
    """The graph of a problem; one with more units than `groups` is grouped first."""
    units = problem.units
    of_unit = np.arange(units) if units <= groups else coarsen(problem, groups)[1]
    return graph_of_groups(problem, of_unit)


def graph_of_groups(problem: PlacementProblem, of_unit: Ints) -> GroupGraph:
    """The graph of groups that are given, renumbered in the order in which they begin."""
    c = problem.columns
    first = np.full(int(of_unit.max()) + 1, len(c.unit))
    np.minimum.at(first, of_unit[c.unit], np.arange(len(c.unit)))
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    group = rank[of_unit]
    g = len(first)
    allowed = np.ones((g, len(problem.devices)), bool)
    np.logical_and.at(allowed, group, c.allowed)
    if not allowed.any(axis=1).all():
        raise ValueError("the units of a group have no device in common that can run them all")
    each = np.zeros((g, len(problem.devices)))
    np.add.at(each, group, np.where(c.allowed, problem.unit_seconds, 0.0))
    pairs = group[problem.unit_edges[0]]
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    return GroupGraph(
        problem=problem,
        group=group,
        seconds=(each * allowed).sum(axis=1) / allowed.sum(axis=1),
        out_bytes=np.asarray(np.bincount(group[c.unit[c.source]], c.nbytes, g), np.float64),
        edges=np.unique(pairs, axis=0).reshape(-1, 2),
        allowed=allowed,
    )
