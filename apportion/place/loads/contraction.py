"""Contraction: units that a contiguous placement keeps together anyway become one block.

In: LoadColumns and the pairs of units that contiguity is about (objectives/max_load.py). Out: the
block of every unit, LoadColumns of blocks, and the pairs between blocks, which form no cycle.

Units that read from each other in a cycle are one block. So is a unit that takes no time and has a
single neighbour with that neighbour: there it costs least, since nothing crosses. Only memory could
want it elsewhere; `safe` says that it cannot, because it needs none or all fit on one device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from apportion.columns import Ints, offsets
from apportion.place.objectives.max_load import LoadColumns


@dataclass(frozen=True, eq=False)
class Contraction:
    """Blocks of units."""

    block: Ints  # u: in an order in which they can run
    columns: LoadColumns  # of blocks
    edges: Ints  # pairs of blocks, each once, rising
    safe: bool  # whether no placement was lost that could be the best contiguous one


def contraction(c: LoadColumns, edges: Ints, merged: Ints | None = None) -> Contraction:
    """Blocks of the finest contiguous placements; `merged` numbers units, those that share a number
    being in one block in any case."""
    units = len(c.resident)
    block = np.arange(units) if merged is None else np.unique(merged, return_inverse=True)[1]
    block = acyclic_blocks(np.asarray(block, np.int64).ravel(), edges)
    safe = True
    most = c.limit.min(initial=np.iinfo(np.int64).max)
    binds = int(c.resident.sum()) > int(most)
    while (found := _absorbed(c, edges, block)) is not None:
        block, needs = found
        safe = safe and not (needs and binds)
    block = acyclic_blocks(block, edges)
    return Contraction(block, contracted(c, block), edges_between(edges, block), safe)


def contracted(c: LoadColumns, block: Ints) -> LoadColumns:
    """The columns of blocks of units."""
    count = int(block.max(initial=-1)) + 1
    k = c.allowed.shape[1]
    work = np.zeros((count, k, 2), np.int64)
    np.add.at(work, block, c.work)
    resident = np.zeros(count, np.int64)
    np.add.at(resident, block, c.resident)
    allowed = np.ones((count, k), np.bool_)
    np.logical_and.at(allowed, block, c.allowed)
    rows: dict[tuple[int, int, tuple[int, ...]], Ints] = {}
    reading, first = block[c.reader].tolist(), c.reader_start.tolist()
    for row, home in enumerate(block[c.source].tolist()):
        others = tuple(sorted(set(reading[first[row] : first[row + 1]]) - {home}))
        if others:
            key = (home, int(c.part[row]), others)
            rows[key] = rows.get(key, 0) + c.price[row]
    source = np.array([home for home, _, _ in rows], np.int64)
    start = offsets(np.array([len(others) for _, _, others in rows], np.int64))
    reader = np.array([unit for _, _, others in rows for unit in others], np.int64)
    by_reader = np.argsort(reader, kind="stable")
    return c._replace(
        work=work,
        resident=resident,
        allowed=allowed,
        source=source,
        part=np.array([part for _, part, _ in rows], np.int64),
        price=np.array(list(rows.values()), np.int64).reshape(len(rows), k),
        reader_start=start,
        reader=reader,
        made_start=offsets(np.bincount(source, minlength=count)),
        made=np.argsort(source, kind="stable").astype(np.int64),
        read_start=offsets(np.bincount(reader, minlength=count)),
        read=np.repeat(np.arange(len(rows)), np.diff(start))[by_reader].astype(np.int64),
    )


def edges_between(edges: Ints, block: Ints) -> Ints:
    """Pairs of blocks that edges between units make, each once."""
    pairs = block[edges]
    found: Ints = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).reshape(-1, 2)
    return found


def acyclic_blocks(block: Ints, edges: Ints) -> Ints:
    """Blocks in a cycle become one; all are numbered in an order in which they can run."""
    count = int(block.max(initial=-1)) + 1
    pairs = edges_between(edges, block)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    parts, label = connected_components(graph.tocsr(), directed=True, connection="strong")
    block = np.asarray(label, np.int64)[block]
    pairs = edges_between(edges, block)
    number = np.empty(parts, np.int64)
    number[first_in_order(parts, pairs)] = np.arange(parts)
    return number[block]


def first_in_order(count: int, edges: Ints, deep: bool = False) -> Ints:
    """Blocks in an order in which they can run: by number among those that can, or `deep`, what has
    become possible last, which is the order of a depth-first search."""
    waiting = np.bincount(edges[:, 1], minlength=count)
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges.tolist():
        after[source].append(target)
    ready = deque(b for b in range(count) if waiting[b] == 0)
    order: list[int] = []
    while ready:
        block = ready.pop() if deep else ready.popleft()
        order.append(block)
        for target in after[block]:
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    return np.array(order, np.int64)


def _absorbed(c: LoadColumns, edges: Ints, block: Ints) -> tuple[Ints, bool] | None:
    """One round of giving blocks that take no time to their only neighbour, or None if there are
    none; and whether one of them needs memory."""
    it = contracted(c, block)
    count = len(it.resident)
    pairs = [edges_between(edges, block)]
    home = np.repeat(it.source, np.diff(it.reader_start))
    pairs.append(np.stack([home, it.reader], axis=1))
    both = np.concatenate(pairs)
    both = np.unique(np.concatenate([both, both[:, ::-1]]), axis=0)
    degree = np.bincount(both[:, 0], minlength=count)
    first = offsets(degree)
    idle = np.where(it.allowed, it.work.sum(axis=2), 0).max(axis=1, initial=0) == 0
    into = np.arange(count)
    needs, taken = False, np.zeros(count, np.bool_)
    for number in np.flatnonzero(idle & (degree <= 1)).tolist():
        other = int(both[first[number], 1]) if degree[number] else (number + 1) % count
        if other == number or taken[number] or into[other] != other:
            continue
        if not (it.allowed[number] | ~it.allowed[other]).all():
            continue
        into[number] = other
        taken[other] = True  # what is given something stays where it is for this round
        needs = needs or bool(it.resident[number] > 0)
    if (into == np.arange(count)).all():
        return None
    return np.unique(into[block], return_inverse=True)[1].astype(np.int64), needs
