"""blocks: contiguous blocks of an order of the units, one on each device, the largest as small as
possible.

In: an objective. Out: the best placement over a few orders (topological, depth first) and over how
many devices are used. Each block is a stretch of the order, within the memory limit of its device;
the smallest largest block is found by halving the interval of possible loads. In an order that
respects the forward pass such blocks are contiguous in the sense of the objective throughput: no
path leaves a block and comes back.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial

import numpy as np

from apportion.columns import Floats, Ints, compiled
from apportion.place.best_of import best_of
from apportion.place.lists.chains import forward_edges
from apportion.place.lists.unit_memory import unit_bytes, within_limits
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.placement_problem import PlacementProblem

ORDERS = ("order", "depth")  # topological by first nodes, and depth first


def contiguous_blocks(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best balanced blocks over orders, and over how many of the devices are used."""
    problem = objective.problem
    orders = unit_orders(problem)

    def cut_up(order: Ints, block: Ints, used: Ints) -> tuple[Ints, float]:
        return within_limits(
            objective, lambda room: balanced(problem, order, block, used, room), moves=0
        )

    attempts = (
        (f"{name}-{len(used)}", partial(cut_up, order, block, used))
        for used in reversed(device_lists(problem))
        for name, (order, block) in zip(ORDERS, orders, strict=True)
    )
    return best_of(objective, attempts, budget, report)


def device_lists(problem: PlacementProblem) -> list[Ints]:
    """Devices in the order in which they get blocks: the fastest first, 1, 2, 4, ... and all."""
    total = np.where(problem.columns.allowed, problem.unit_seconds, 0.0).sum(axis=0)
    count = problem.columns.allowed.sum(axis=0)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.inf)
    order = np.argsort(mean, kind="stable")
    k = len(order)
    sizes = sorted({*(1 << bit for bit in range(k.bit_length()) if 1 << bit < k), k})
    return [np.ascontiguousarray(order[:size]) for size in sizes]


def balanced(
    problem: PlacementProblem, order: Ints, block: Ints, devices: Ints, room: Floats
) -> Ints:
    """Blocks of the order on these devices, with the smallest largest load that the memory admits;
    `block` numbers what must not be divided, rising along the order."""
    c = problem.columns
    took = np.where(c.allowed, problem.unit_seconds, np.inf)[order][:, devices]
    starts = np.flatnonzero(np.append(True, block[1:] != block[:-1])) if len(block) else block
    took = np.add.reduceat(took, starts) if len(starts) else took
    need = np.add.reduceat(unit_bytes(problem)[order], starts) if len(starts) else block
    high = float(np.where(np.isfinite(took), took, 0).max(axis=1, initial=0).sum()) + 1e-12
    low, found = 0.0, np.full(len(took), -1)
    cut(took, need, room[devices], high, found)
    if (found < 0).any():  # the memory does not suffice: by time alone
        room = np.full(len(room), np.inf)
        cut(took, need, room[devices], high, found)
    part = np.empty(len(took), np.int64)
    for _ in range(50):
        middle = 0.5 * (low + high)
        if cut(took, need, room[devices], middle, part):
            high, found = middle, part.copy()
        else:
            low = middle
    place = np.empty(problem.units, np.int64)
    place[order] = devices[
        np.maximum(found, 0)[np.cumsum(np.append(0, np.diff(block) != 0))[: len(order)]]
    ]
    can = c.allowed[np.arange(problem.units), place]
    return np.where(can, place, c.allowed.argmax(axis=1)).astype(np.int64)


@compiled
def cut(took: Floats, need: Ints, room: Floats, most: float, part: Ints) -> bool:
    """Fills one device after the other up to a load and its room; whether all found a place."""
    device, load, used = 0, 0.0, 0.0
    for at in range(len(took)):
        while device < len(room) and (
            load + took[at, device] > most or used + need[at] > room[device]
        ):
            device, load, used = device + 1, 0.0, 0.0
        if device == len(room):
            for rest in range(at, len(took)):
                part[rest] = -1
            return False
        load += took[at, device]
        used += need[at]
        part[at] = device
    return True


def unit_orders(problem: PlacementProblem) -> list[tuple[Ints, Ints]]:
    """Orders of the units that respect the forward pass, and for each position the number of what
    cannot be divided: units that depend on each other both ways."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    edges, count = forward_edges(problem), problem.units
    graph = csr_array(
        (np.ones(len(edges), np.int8), (edges[:, 0], edges[:, 1])), shape=(count, count)
    )
    parts, of = connected_components(graph, connection="strong")
    first = np.full(parts, len(problem.columns.unit))
    node_part = of[problem.columns.unit]
    np.minimum.at(first, node_part, np.arange(len(node_part)))
    between = of[edges]
    between = np.unique(between[between[:, 0] != between[:, 1]].reshape(-1, 2), axis=0)
    found = []
    for deep in (False, True):
        rank = np.empty(parts, np.int64)
        rank[_topological(parts, between, first, deep)] = np.arange(parts)
        order = np.argsort(rank[of], kind="stable").astype(np.int64)
        found.append((order, rank[of][order]))
    return found


def _topological(count: int, edges: Ints, first: Ints, deep: bool) -> Ints:
    """An order in which every edge leads forward: by first nodes, or depth first."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for one, two in edges:
        readers[one].append(int(two))
    pending = np.bincount(edges[:, 1], minlength=count) if len(edges) else np.zeros(count, int)
    order: list[int] = []
    ready = sorted((int(first[p]), p) for p in range(count) if pending[p] == 0)
    if deep:
        stack = [p for _, p in reversed(ready)]
        while stack:
            part = stack.pop()
            order.append(part)
            for later in sorted(readers[part], key=lambda p: -first[p]):
                pending[later] -= 1
                if pending[later] == 0:
                    stack.append(later)
        return np.array(order, np.int64)
    while ready:
        part = heapq.heappop(ready)[1]
        order.append(part)
        for later in readers[part]:
            pending[later] -= 1
            if pending[later] == 0:
                heapq.heappush(ready, (int(first[later]), later))
    return np.array(order, np.int64)
