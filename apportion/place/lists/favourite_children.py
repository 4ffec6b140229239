"""favourite_children: for each node the one reader that should run on the same device next; what
m-SCT schedules by.

In: a PlacementProblem. Out: the favourite child of each node, from the linear relaxation of
scheduling with short transfers on unlimited devices (Hanen and Munier; as used by Baechi):

    minimise w over starts s and 0 <= x <= 1, where x of an edge is 0 if its reader is favourite
    s_j >= s_i + p_i + c_ij x_ij          for each edge
    sum of x over the edges out of i >= their number - 1, and likewise over those into j
    w >= s_i + p_i

An edge with x below THRESHOLD is a favourite; a later edge takes it from an earlier one, so that
each node has one favourite child and is that of one parent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.lists.path_levels import mean_duration, mean_transfer
from apportion.place.placement_problem import PlacementProblem

THRESHOLD = 0.1  # as in Baechi's code
LP_EDGES = 60_000  # more are not given to the solver: it would take minutes


class FavouriteChildren(NamedTuple):
    """The favourite child of each node, or -1; the value of the linear program in ticks, or None
    where the rule for large graphs decided."""

    child: Ints  # n
    value: float | None


def favourite_children(problem: PlacementProblem, seconds: float = 10.0) -> FavouriteChildren:
    """By the linear program if HiGHS solves it in time, else by the dearest edges."""
    edges, cost = node_edges(problem)
    solved = None
    if 0 < len(edges) <= LP_EDGES:
        solved = relaxed(mean_duration(problem), edges, cost, seconds)
    if solved is None:
        return FavouriteChildren(dearest(problem, edges, cost), None)
    x, value = solved
    child, parent = np.full(len(problem.columns.unit), -1), np.full(len(problem.columns.unit), -1)
    for one, two in edges[x < THRESHOLD]:
        if child[one] >= 0:
            parent[child[one]] = -1
        if parent[two] >= 0:
            child[parent[two]] = -1
        child[one], parent[two] = two, one
    return FavouriteChildren(child, value)


def node_edges(problem: PlacementProblem) -> tuple[Ints, Floats]:
    """Pairs (node, node of another unit that reads from it), each once, and the ticks that what is
    sent between them takes; nodes of one unit are together anyway, at no cost."""
    c = problem.columns
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    pairs = np.stack([c.source[outputs], c.reader], axis=1)
    cost = mean_transfer(problem)[outputs] * (c.unit[pairs[:, 0]] != c.unit[pairs[:, 1]])
    if not len(pairs):
        return np.zeros((0, 2), np.int64), np.zeros(0)
    found, which = np.unique(pairs, axis=0, return_inverse=True)
    return found, np.bincount(which.ravel(), cost, len(found)).astype(np.float64)


def relaxed(took: Floats, edges: Ints, cost: Floats, seconds: float) -> tuple[Floats, float] | None:
    """x of each edge and the optimum, or None if the time did not suffice."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, vstack

    n, m = len(took), len(edges)
    unit = max(float(took.max(initial=0)), float(cost.max(initial=0)), 1.0)  # numbers near 1
    edge, node, wide = np.arange(m), np.arange(n), m + n + 1  # columns: x of edges, s of nodes, w

    def entries(values: Floats, row: Ints, column: Ints, count: int) -> csr_array:
        return csr_array((values, (row, column)), shape=(count, wide))

    rows = [
        entries(
            np.concatenate([cost / unit, np.ones(m), -np.ones(m)]),
            np.tile(edge, 3),
            np.concatenate([edge, m + edges[:, 0], m + edges[:, 1]]),
            m,
        )
    ]
    most: list[Floats] = [-took[edges[:, 0]] / unit]
    for side in (0, 1):
        degree = np.bincount(edges[:, side], minlength=n)
        rows.append(entries(-np.ones(m), edges[:, side], edge, n)[degree > 0])
        most.append((1 - degree[degree > 0]).astype(np.float64))
    ends = np.concatenate([m + node, np.full(n, m + n)])
    rows.append(entries(np.repeat([1.0, -1.0], n), np.tile(node, 2), ends, n))
    most.append(-took / unit)
    bounds = np.zeros((wide, 2))
    bounds[:m, 1], bounds[m:, 1] = 1.0, np.inf
    found = linprog(
        np.append(np.zeros(m + n), 1.0), vstack(rows, format="csr"), np.concatenate(most),
        bounds=bounds, method="highs", options={"time_limit": max(seconds, 0.1)},
    )  # fmt: skip
    if found.status != 0:
        return None
    return found.x[:m], float(found.fun) * unit


def dearest(problem: PlacementProblem, edges: Ints, cost: Floats) -> Ints:
    """Favourite children by the dearest edges first: what is left without a linear program."""
    child, taken = np.full(len(problem.columns.unit), -1), np.zeros(len(problem.columns.unit), bool)
    for row in np.argsort(-cost, kind="stable"):
        one, two = edges[row]
        if cost[row] > 0 and child[one] < 0 and not taken[two]:
            child[one] = two
            taken[two] = True
    return child
