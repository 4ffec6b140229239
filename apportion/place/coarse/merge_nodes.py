"""merge_nodes: a problem in which nodes of one unit that can run in one go are one node.

In: a PlacementProblem, and the group of every unit. Out: the problem whose units are the groups.

Units may be grouped at will; nodes may not, for two nodes of a group with a third of another
group between them would wait for each other. So nodes get a level: the most changes of group, or
from the forward to the backward pass, on any path that leads to them. Nodes of one group, pass and
level that are connected become one node. Every edge between two of the new nodes leads to a higher
level, so there are no cycles. What nobody else reads, such as updates, becomes one node; and what
takes next to nothing and only one other node of its group and pass reads joins that node.

What is conserved: time, resident bytes, and every output that leaves its node, with its own size,
so that a placement of groups moves the same bytes. Outputs that only the same group reads never
travel; those of one node with the same readers become one. Outputs within a new node are gone; the
most bytes they take at a time, its nodes run in their order, are an output that nobody reads.

Graphs whose nodes have a cost of crossing each (`transfer`) keep their nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from apportion.columns import Bools, Ints, compiled, offsets
from apportion.place.placement_problem import NEVER, PlacementColumns, PlacementProblem

SHORT = 0.01  # of a unit's average time


def merge_nodes(problem: PlacementProblem, group: Ints) -> PlacementProblem:
    """The problem of placing groups of units; `group[unit]` counts from 0 without gaps."""
    c = problem.columns
    groups = int(group.max(initial=-1)) + 1
    allowed = np.ones((groups, c.allowed.shape[1]), bool)
    np.logical_and.at(allowed, group, c.allowed)
    unit = group[c.unit]
    expert = None if problem.expert is None else _of_groups(problem, group, groups)
    if problem.transfer is not None:
        columns = c._replace(unit=unit, allowed=allowed)
        return replace(problem, columns=columns, expert=expert)
    heads, outputs, readers = _edges(c)
    cluster = _clusters(c, unit, heads, readers)
    cluster = _order(cluster, heads, readers)[cluster]
    columns = _merge_columns(problem, unit, cluster, outputs, readers, allowed)
    names, kinds = _names(problem, cluster, len(columns.unit))
    return replace(
        problem, columns=columns, expert=expert, node_names=names, node_kinds=kinds
    )  # fmt: skip


def _edges(c: PlacementColumns) -> tuple[Ints, Ints, Ints]:
    """Source, output and reader of every edge."""
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    return c.source[outputs], outputs, c.reader


def _of_groups(problem: PlacementProblem, group: Ints, groups: int) -> Ints:
    """For each group the device on which the expert has most of its time."""
    assert problem.expert is not None
    share = np.zeros((groups, len(problem.devices)))
    np.add.at(share, (group, problem.expert), 1e-9 + problem.unit_seconds.min(axis=1))
    found: Ints = share.argmax(axis=1).astype(np.int64)
    return found


def _clusters(c: PlacementColumns, unit: Ints, heads: Ints, readers: Ints) -> Ints:
    """The new node of every node: numbers with gaps."""
    n = len(c.unit)
    level = np.zeros(n, np.int64)
    _levels(unit, c.backward, heads, readers, level)
    together = (
        (unit[heads] == unit[readers])
        & (c.backward[heads] == c.backward[readers])
        & (level[heads] == level[readers])
    )
    cluster = np.arange(n)
    _connect(heads[together], readers[together], cluster)
    leaves = cluster[heads] != cluster[readers]
    inner = np.ones(n, bool)
    inner[cluster[heads[leaves]]] = False
    last = inner[cluster]
    # Clusters that nobody reads: one for each group and pass, named by its first node.
    _, first, which = np.unique(
        2 * unit[last] + c.backward[last], return_index=True, return_inverse=True
    )
    cluster[last] = cluster[last][first][which]
    _join_short(c, unit, heads, readers, cluster)
    return cluster


def _join_short(c: PlacementColumns, unit: Ints, heads: Ints, readers: Ints, cluster: Ints) -> None:
    """Clusters of next to no time join the only other one that reads them. No cycle comes of it:
    another path between the two would need another reader."""
    n = len(cluster)
    time = np.bincount(cluster, c.duration.min(axis=1).astype(float), n)
    short = time < SHORT * time.sum() / (int(unit.max(initial=0)) + 1)
    pairs = np.stack([cluster[heads], cluster[readers]], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    made, start, count = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    into, only = np.arange(n), pairs[start, 1]
    can = (
        (count == 1)
        & short[made]
        & (unit[made] == unit[only])
        & (c.backward[made] == c.backward[only])
    )
    into[made[can]] = only[can]
    while (into[into] != into).any():
        into = into[into]
    cluster[:] = into[cluster]


@compiled
def _levels(unit: Ints, backward: Ints, heads: Ints, readers: Ints, level: Ints) -> None:
    """Fills the level of every node; edges go by rising heads."""
    for edge in range(len(heads)):
        a, b = heads[edge], readers[edge]
        change = 1 if unit[a] != unit[b] or backward[a] != backward[b] else 0
        level[b] = max(level[b], level[a] + change)


@compiled
def _connect(heads: Ints, readers: Ints, cluster: Ints) -> None:
    """Gives connected nodes the number of the first of them."""
    for edge in range(len(heads)):
        a, b = heads[edge], readers[edge]
        while cluster[a] != a:
            cluster[a] = cluster[cluster[a]]
            a = cluster[a]
        while cluster[b] != b:
            cluster[b] = cluster[cluster[b]]
            b = cluster[b]
        cluster[max(a, b)] = min(a, b)
    for node in range(len(cluster)):
        cluster[node] = cluster[cluster[node]]  # those before it have theirs already


def _order(cluster: Ints, heads: Ints, readers: Ints) -> Ints:
    """The place of each cluster in an order in which they can run, as near to that of their nodes
    as can be: whatever can run and begins first."""
    n = len(cluster)
    pairs = np.stack([cluster[heads], cluster[readers]], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    start = offsets(np.bincount(pairs[:, 0], minlength=n))
    pending = np.bincount(pairs[:, 1], minlength=n).tolist()
    after = pairs[:, 1].tolist()
    begins = start.tolist()
    ready = [k for k in np.unique(cluster).tolist() if not pending[k]]
    place = np.zeros(n, np.int64)
    for turn in range(n):
        if not ready:
            break
        at = heapq.heappop(ready)
        place[at] = turn
        for later in after[begins[at] : begins[at + 1]]:
            pending[later] -= 1
            if not pending[later]:
                heapq.heappush(ready, later)
    return place


def _merge_columns(
    problem: PlacementProblem,
    unit: Ints,
    cluster: Ints,
    outputs: Ints,
    readers: Ints,
    allowed: Bools,
) -> PlacementColumns:
    c, nodes = problem.columns, int(cluster.max(initial=-1)) + 1
    new_unit, backward = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    new_unit[cluster], backward[cluster] = unit, c.backward
    duration = np.zeros((nodes, c.duration.shape[1]))
    np.add.at(duration, cluster, c.duration.astype(float))
    resident = np.zeros(nodes, np.int64)
    np.add.at(resident, cluster, c.resident)
    issue = np.zeros((nodes if len(c.issue) else 0, c.issue.shape[1]), np.int64)
    if len(c.issue):
        np.add.at(issue, cluster, c.issue)
    rows = np.stack([outputs, cluster[readers]], axis=1)
    rows = np.unique(rows[cluster[c.source[outputs]] != rows[:, 1]], axis=0)
    into, made, read = _output_classes(c, new_unit, cluster, rows)
    inside = into < 0
    into, old = into[~inside], np.flatnonzero(~inside)
    busy, most = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if problem.links.live:
        busy, most = _most_inside(c, cluster, inside, nodes)
    source = np.concatenate([made, busy])
    nbytes = np.concatenate([np.bincount(into, c.nbytes[old], len(made)), most]).astype(np.int64)
    send = np.concatenate([np.bincount(into, c.send[old], len(made)), np.zeros(len(busy))])
    order = np.argsort(source, kind="stable")
    read += [[]] * len(busy)
    ordered = [read[k] for k in order.tolist()]
    return PlacementColumns(
        unit=new_unit,
        duration=np.minimum(duration, NEVER).astype(np.int64),
        backward=backward,
        resident=resident,
        source=source[order],
        nbytes=nbytes[order],
        send=send[order],
        output_start=offsets(np.bincount(source, minlength=nodes)),
        reader_start=offsets(np.array([len(r) for r in ordered], np.int64)),
        reader=np.array([r for some in ordered for r in some], np.int64),
        allowed=allowed,
        issue=issue,
    )


def _output_classes(
    c: PlacementColumns, unit: Ints, cluster: Ints, rows: Ints
) -> tuple[Ints, Ints, list[list[int]]]:
    """The new output of every output, -1 for those that stay within their node; and the node and
    the readers of each new one."""
    kept, start = np.unique(rows[:, 0], return_index=True)
    ends = np.append(start, len(rows))[1:]
    target = rows[:, 1].tolist()
    source = cluster[c.source]
    travels = np.zeros(len(c.source), bool)
    travels[rows[unit[source[rows[:, 0]]] != unit[rows[:, 1]], 0]] = True
    found: dict[tuple[int, ...], int] = {}
    made: list[int] = []
    read: list[list[int]] = []
    into = np.full(len(c.source), -1)
    for output, a, b in zip(kept.tolist(), start.tolist(), ends.tolist(), strict=True):
        own = output if travels[output] else -1
        key = (int(source[output]), own, *target[a:b])
        if key not in found:
            found[key] = len(made)
            made.append(key[0])
            read.append(target[a:b])
        into[output] = found[key]
    return into, np.array(made, np.int64), read


def _most_inside(
    c: PlacementColumns, cluster: Ints, inside: Bools, nodes: int
) -> tuple[Ints, Ints]:
    """Nodes whose outputs stay within them, and the most bytes that these take at a time."""
    last = np.array(c.source)
    np.maximum.at(last, np.repeat(np.arange(len(last)), np.diff(c.reader_start)), c.reader)
    which = np.flatnonzero(inside & (c.nbytes > 0))
    node = np.tile(cluster[c.source[which]], 2)
    time = np.concatenate([2 * c.source[which], 2 * last[which] + 1])
    change = np.concatenate([c.nbytes[which], -c.nbytes[which]])
    order = np.lexsort((time, node))
    most = np.zeros(nodes, np.int64)
    np.maximum.at(most, node[order], np.cumsum(change[order]))  # 0 where a node's stretch ends
    busy = np.flatnonzero(most)
    return busy, most[busy]


def _names(
    problem: PlacementProblem, cluster: Ints, nodes: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The first name in each node, with how many follow, and the kind that takes the longest."""
    count = np.bincount(cluster, minlength=nodes).tolist()
    weight = problem.columns.duration.min(axis=1)
    order = np.lexsort((np.arange(len(cluster)), -weight, cluster))
    longest = order[np.unique(cluster[order], return_index=True)[1]].tolist()
    first = np.unique(cluster, return_index=True)[1].tolist()
    names = tuple(
        problem.node_names[k] + (f" +{count[i] - 1}" if count[i] > 1 else "")
        for i, k in enumerate(first)
    )
    return names, tuple(problem.node_kinds[k] for k in longest)
