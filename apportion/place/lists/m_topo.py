"""m-topo: fill one device after the other in topological order, each with its share of the memory.

In: an objective. Out: Baechi's m-TOPO (papers: SoCC 2020, arXiv 2301.08695): a device is full when
it holds total memory / number of devices, plus the largest unit. Where devices may hold different
amounts the shares are in proportion, and none is above what the device may hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled
from apportion.place.lists.unit_memory import excess_note, unit_bytes, within_limits
from apportion.place.objective import PlacementObjective, PlacementResult, Report


def m_topo(
    objective: PlacementObjective,
    *,
    budget: float = 0.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """Units in the order of their first nodes, one device after the other."""
    problem = objective.problem
    need = unit_bytes(problem)
    if not need.any():  # nothing is known of memory: the same by time
        need = np.rint(problem.unit_seconds.min(axis=1) * problem.tick).astype(np.int64)
    order = np.argsort(np.unique(problem.columns.unit, return_index=True)[1]).astype(np.int64)
    fastest = _fastest_kind(problem.unit_seconds, problem.columns.allowed)

    def fill(room: Floats) -> Ints:
        finite = np.where(np.isfinite(room), room, 0.0)
        weight = np.where(np.isfinite(room), room, finite.max(initial=0.0) or 1.0) * fastest
        share = need.sum() * weight / max(weight.sum(), 1e-300) + need.max(initial=0)
        placed: Ints = _fill(order, need, problem.columns.allowed, np.minimum(share, room), room)
        return placed

    place, _ = within_limits(objective, fill)
    return PlacementResult(place, notes=excess_note(objective, place))


def _fastest_kind(seconds: Floats, allowed: Bools) -> Bools:
    """Devices that are worth filling: not those that take several times longer than the fastest."""
    total = np.where(allowed, seconds, 0.0).sum(axis=0) / np.maximum(allowed.sum(axis=0), 1)
    usable = allowed.any(axis=0)
    found: Bools = usable & (total <= 4.0 * total[usable].min(initial=np.inf))
    return found


@compiled
def _fill(order: Ints, need: Ints, allowed: Bools, share: Floats, room: Floats) -> Ints:
    devices = len(share)
    used = np.zeros(devices, np.int64)
    place = np.zeros(len(need), np.int64)
    current = 0
    for unit in order:
        while current < devices - 1 and used[current] + need[unit] > share[current]:
            current += 1
        device = current
        if not allowed[unit, device] or used[device] + need[unit] > room[device]:
            device, least = -1, np.inf
            for other in range(devices):
                if allowed[unit, other]:
                    over = (used[other] + need[unit] - room[other]) / max(room[other], 1.0)
                    over = max(over, 0.0) if room[other] < np.inf else 0.0
                    if device < 0 or over < least:
                        device, least = other, over
        place[unit] = device
        used[device] += need[unit]
    return place
