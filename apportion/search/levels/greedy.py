"""greedy: the greedy partitions of the papers, one cut of everything into all devices.

In: a Problem. Out: the Strategy of one of two rules:

allrow-greedy   every tensor is cut along its first dimension (the first that is long enough), and
                each Op takes what is cheapest given that
spartan         the largest tensor takes the dimension that is cheapest for the Ops around it, these
                take their best cuts, then the next tensor (Huang et al., USENIX ATC 2015, as the
                Tofu paper describes it)

Both store every Value cut and let each reader fetch for itself: `shared` sites would have no
tensors to decide on.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Bools, Floats, Ints
from apportion.search.levels.level_grids import result_of_levels
from apportion.search.levels.levels import Levels, fewest_bytes
from apportion.search.levels.sites import OP
from apportion.search.levels.tofu import sites_of
from apportion.search.problem import Problem, SearchResult
from apportion.search.tables.eliminate import SharedEnergy


def allrow_greedy(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """All tensors along their first dimension, each Op its best."""
    levels, shared, domains = _single_level(problem)
    picks = np.zeros(len(shared.sizes), np.int64)  # choices are in the order of dimensions
    near = _neighbours(shared)
    for site in np.flatnonzero(levels.sites.kind == OP):
        costs = shared.tables[shared.unary[site]].copy()
        for other, table in near[site]:
            costs += table[:, picks[other]]
        picks[site] = int(costs.argmin())
    levels.take([0], domains, picks)
    return result_of_levels(levels)


def spartan(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Largest tensors first, each with the Ops around it."""
    levels, shared, domains = _single_level(problem)
    sites = levels.sites
    near = _neighbours(shared)
    picks = np.full(len(shared.sizes), -1, np.int64)
    values = sites.space.graph.values
    tensors = np.flatnonzero(sites.kind != OP)
    sizes = [values[sites.first[site]].nbytes for site in tensors]
    for tensor in tensors[np.argsort(-np.array(sizes), kind="stable")]:
        costs = shared.tables[shared.unary[tensor]].copy()
        for op, table in near[tensor]:
            if picks[op] >= 0:
                costs += table[:, picks[op]]
            else:
                costs += (table + _costs_given(shared, near, picks, op)).min(axis=1)
        picks[tensor] = int(costs.argmin())
        for op, _ in near[tensor]:
            if picks[op] < 0:
                picks[op] = int(_costs_given(shared, near, picks, op).argmin())
    for op in np.flatnonzero(picks < 0).tolist():
        picks[op] = int(_costs_given(shared, near, picks, op).argmin())
    levels.take([0], domains, picks)
    return result_of_levels(levels)


def _single_level(problem: Problem) -> tuple[Levels, SharedEnergy, Bools]:
    sites = sites_of(problem.space, shared=False)
    levels = Levels(sites, (problem.devices,), fewest_bytes(1))
    shared, domains = levels.energy([0])
    return levels, shared, domains


def _neighbours(shared: SharedEnergy) -> list[list[tuple[int, Floats]]]:
    """Per site its neighbours and the tables towards them."""
    near: list[list[tuple[int, Floats]]] = [[] for _ in shared.sizes]
    for (a, b), table in zip(shared.edges.tolist(), shared.pairs, strict=True):
        near[a].append((b, shared.tables[table]))
        near[b].append((a, shared.tables[table].T))
    return near


def _costs_given(
    shared: SharedEnergy, near: list[list[tuple[int, Floats]]], picks: Ints, site: int
) -> Floats:
    """What each choice of a site costs given those made."""
    costs: Floats = shared.tables[shared.unary[site]].copy()
    for other, table in near[site]:
        if picks[other] >= 0:
            costs += table[:, picks[other]]
    return costs
