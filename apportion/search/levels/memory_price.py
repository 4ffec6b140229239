"""memory_price: a memory limit inside a search: bytes get a price, and the price is bisected.

In: Sites, a limit, and a search for given prices. Out: the Levels of the least price that fit.

What a device holds is not a sum over decisions, but state, activations kept for the backward pass
and gathered parameters are most of it and are one. Their price times their bytes is added to the
objective (a Lagrange multiplier); the least price under which the sum is within the limit is
looked for. The simulator judges what comes of it: whoever asked may ask again with a lower limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from apportion.columns import Floats
from apportion.graph import BACKWARD, FORWARD, PARAMETER
from apportion.search.levels.levels import Levels
from apportion.search.levels.sites import COPY, OP, STORE, Sites

ROUNDS = 6  # of bisection, after the price is high enough


def bytes_held(sites: Sites) -> Floats:
    """Bytes that each site holds while it is whole: state, activations that the backward pass
    reads, gathered parameters."""
    graph = sites.space.graph
    found = np.zeros(len(sites))
    for value, meant in enumerate(graph.values):
        made = graph.producer[value]
        if value in sites.store and sites.kind[sites.store[value]] == STORE:
            found[sites.store[value]] += meant.nbytes
        if value in sites.copy and meant.role == PARAMETER:
            assert sites.kind[sites.copy[value]] == COPY
            found[sites.copy[value]] += meant.nbytes
        if made is not None and graph.ops[made[0]].phase == FORWARD:
            readers = graph.consumers[value]
            site = sites.op_site[made[0]]
            if sites.kind[site] == OP and any(graph.ops[r].phase == BACKWARD for r in readers):
                found[site] += meant.nbytes
    return found


def bytes_held_by_device(levels: Levels, whole: Floats) -> float:
    """Those bytes on one device, as far as the levels cut them."""
    left = whole.copy()
    for level in levels.decided():
        left *= levels.burden_left(level)
    return float(left.sum())


def search_within_limit(
    limit: float, whole: Floats, search: Callable[[Floats | None], Levels]
) -> tuple[Levels, bool]:
    """The levels that `search` finds with the least price of bytes that keeps them within the
    limit, and whether any did; `search` is given the burden to add to its objective."""
    free = search(None)
    if bytes_held_by_device(free, whole) <= limit:
        return free, True
    if float(whole.sum()) / math.prod(free.factors) > limit:  # were everything cut everywhere
        return free, False
    price = max(free.cost, 1e-12) / max(float(whole.sum()), 1.0)
    low, best = 0.0, None
    for _ in range(16):
        found = search(price * whole)
        if bytes_held_by_device(found, whole) <= limit:
            best = found
            break
        low, price = price, price * 4
    if best is None:
        return min((free, found), key=lambda levels: bytes_held_by_device(levels, whole)), False
    high = price
    for _ in range(ROUNDS):
        price = (low * high) ** 0.5 if low else high / 8
        found = search(price * whole)
        if bytes_held_by_device(found, whole) <= limit:
            best, high = found, price
        else:
            low = price
    return best, True
