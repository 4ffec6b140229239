"""chains: units that are placed together because two devices would gain nothing.

In: a PlacementProblem. Out: the group of each unit. Two units join where one reads from the other
in the forward pass, and

    nobody else reads from the first, and the second reads from nobody else
    nobody else reads from the first, and its messages would take as long as all its work
    the second reads from nobody else, and its messages would take as long as all its work

(Baechi calls it co-placement and fusion.) None of these joins makes a cycle. Groups stay within a
share of the memory, so that devices can still be filled.
"""

from __future__ import annotations

import numpy as np

from apportion.columns import Floats, Ints, compiled, distinct
from apportion.place.lists.path_levels import mean_duration, mean_transfer
from apportion.place.lists.unit_memory import unit_bytes
from apportion.place.placement_problem import PlacementProblem

SHARES = 4  # a group needs at most a quarter of what the mean device gets
PASSES = 30  # in each of which a group joins one other at most


def joined_chains(problem: PlacementProblem) -> Ints:
    """u: the group of each unit, by the order of their first units."""
    c = problem.columns
    edges, count = forward_edges(problem), problem.units
    group = np.arange(count)
    need = unit_bytes(problem).astype(np.float64)
    took = np.bincount(c.unit, mean_duration(problem), count).astype(np.float64)
    kind = np.unique(c.allowed, axis=0, return_inverse=True)[1].ravel().astype(np.int64)
    one, two, ticks = _messages(problem)
    finite = problem.limit[np.isfinite(problem.limit)]
    most = np.inf
    if finite.size:
        most = min(need.sum() / len(problem.devices), finite.min()) / SHARES
    for _ in range(PASSES):
        pairs = group[edges]
        pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).reshape(-1, 2)
        lone = np.bincount(pairs[:, 0], minlength=count) == 1
        sole = np.bincount(pairs[:, 1], minlength=count) == 1
        code = np.sort(np.stack([group[one], group[two]]), axis=0)
        keys = code[0] * count + code[1]
        wanted = np.sort(pairs, axis=1)
        between = _sums(keys, ticks, wanted[:, 0] * count + wanted[:, 1])
        first, second = pairs[:, 0], pairs[:, 1]
        join = lone[first] & sole[second]
        join |= lone[first] & (between >= took[first])
        join |= sole[second] & (between >= took[second])
        join &= (need[first] + need[second] <= most) & (kind[first] == kind[second])
        head = _matching(pairs[join], count)
        if (head == np.arange(count)).all():
            break
        need = np.bincount(head, need, count).astype(np.float64)
        took = np.bincount(head, took, count).astype(np.float64)
        group = head[group]
    return np.unique(group, return_inverse=True)[1].ravel().astype(np.int64)


def _messages(problem: PlacementProblem) -> tuple[Ints, Ints, Floats]:
    """Units that send and units that receive, and the ticks of each message, forward and back."""
    c = problem.columns
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    rows = distinct(outputs * problem.units + c.unit[c.reader])
    output, two = rows // problem.units, rows % problem.units
    return c.unit[c.source[output]], two, mean_transfer(problem)[output]


def _sums(keys: Ints, values: Floats, wanted: Ints) -> Floats:
    """The sum of the values of each wanted key."""
    names, which = np.unique(keys, return_inverse=True)
    total = np.append(np.bincount(which.ravel(), values, len(names)), 0.0)
    at = np.searchsorted(names, wanted)
    found = at < len(names)
    found[found] = names[at[found]] == wanted[found]
    return total[np.where(found, at, len(names))]


@compiled
def _matching(pairs: Ints, count: int) -> Ints:
    """For each group the one it joins, or itself; none is in two joins."""
    head, free = np.arange(count), np.ones(count, np.bool_)
    for row in range(len(pairs)):
        one, two = pairs[row, 0], pairs[row, 1]
        if free[one] and free[two]:
            free[one] = free[two] = False
            head[max(one, two)] = min(one, two)
    return head


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
