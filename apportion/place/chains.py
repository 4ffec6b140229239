"""chains: units that are placed together because nothing else could run meanwhile.

In: a PlacementProblem. Out: the group of each unit. A unit joins the one unit that reads from it
if nobody else does, and that one reads from nobody else: one after the other they gain nothing from
two devices. (Baechi calls it co-placement.) Joining such a pair makes no cycle. A chain stays
within its share of the memory, so that devices can still be filled.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Ints
from apportion.place.placement_problem import PlacementProblem
from apportion.place.unit_memory import unit_bytes

SHARES = 4  # a chain takes at most so much less than the mean of all devices


def joined_chains(problem: PlacementProblem) -> Ints:
    """u: the group of each unit, by the order of their first units."""
    edges = forward_edges(problem)
    count = problem.units
    reads = np.bincount(edges[:, 1], minlength=count)
    read_by = np.bincount(edges[:, 0], minlength=count)
    pairs = edges[(read_by[edges[:, 0]] == 1) & (reads[edges[:, 1]] == 1)]
    need, allowed = unit_bytes(problem), problem.columns.allowed
    finite = problem.limit[np.isfinite(problem.limit)]
    most = np.inf
    if finite.size:
        most = min(need.sum() / len(problem.devices), finite.min()) / SHARES
    head = np.arange(count)
    total = need.astype(np.float64)
    for source, target in pairs[np.argsort(_first_nodes(problem)[pairs[:, 0]], kind="stable")]:
        top = head[source]
        fits = total[top] + need[target] <= most
        if head[target] == target and fits and (allowed[top] == allowed[target]).all():
            total[top] += total[target]
            head[target] = top
    while (head != head[head]).any():
        head = head[head]
    return np.unique(head, return_inverse=True)[1].ravel().astype(np.int64)


def forward_edges(problem: PlacementProblem) -> Ints:
    """Pairs (unit, unit that reads from it) of the forward pass, each once. Units that are only in
    the backward pass stand before what their results are computed from: as in a forward pass whose
    backward pass they were."""
    c = problem.columns
    source = np.repeat(c.source, np.diff(c.reader_start))
    one, two = c.unit[source], c.unit[c.reader]
    ahead = np.zeros(problem.units, np.bool_)
    ahead[c.unit[c.backward == 0]] = True
    forward = (c.backward[source] == 0) & (c.backward[c.reader] == 0)
    mirrored = (c.backward[source] == 1) & (c.backward[c.reader] == 1) & ~(ahead[one] & ahead[two])
    pairs = np.concatenate(
        [np.stack([one, two], axis=1)[forward], np.stack([two, one], axis=1)[mirrored]]
    )
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return np.unique(pairs, axis=0) if len(pairs) else pairs


def _first_nodes(problem: PlacementProblem) -> Ints:
    first = np.full(problem.units, len(problem.columns.unit))
    np.minimum.at(first, problem.columns.unit, np.arange(len(problem.columns.unit)))
    return first
