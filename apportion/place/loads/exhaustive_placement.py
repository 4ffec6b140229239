"""exhaustive: the best of all placements, for tiny graphs.

In: any objective. Out: the placement with the smallest score, and that nothing is below it. Of
devices that are interchangeable only the first that is still empty is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from apportion.columns import Ints
from apportion.place.lists.one_device import one_device
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.objectives.max_load import is_contiguous
from apportion.place.placement_problem import PlacementProblem
from apportion.work_clock import work_seconds


def exhaustive(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """Scores every placement while time lasts; the bound is proven if it lasted."""
    until = work_seconds() + budget
    best = one_device(objective).placement
    score = objective.score(best)
    ended = interrupted = False
    try:
        for placement in placements(objective.problem):
            if contiguous and not is_contiguous(objective.problem, placement):
                continue
            found = objective.score(placement)
            if found < score:
                best, score = placement.copy(), found
            if work_seconds() > until:
                break
        else:
            ended = True
    except KeyboardInterrupt:
        interrupted = True
    it = objective.evaluate(best)
    notes = () if ended else ("the time was over before all placements were tried",)
    if ended and not it.feasible:
        notes = ("no placement fits; this is the nearest",)
    bound = it.value if ended and it.feasible else None
    return PlacementResult(best, bound, notes, interrupted=interrupted)


def placements(problem: PlacementProblem) -> Iterator[Ints]:
    """Every placement, one of those that differ by the names of interchangeable devices. The array
    is used again for the next."""
    allowed, like = problem.columns.allowed, alike(problem)
    place = np.zeros(problem.units, np.int64)

    def rest(unit: int, used: frozenset[int]) -> Iterator[Ints]:
        if unit == problem.units:
            yield place
            return
        empty: set[int] = set()
        for device in np.flatnonzero(allowed[unit]).tolist():
            if device not in used:
                if like[device] in empty:
                    continue
                empty.add(like[device])
            place[unit] = device
            yield from rest(unit + 1, used | {device})

    yield from rest(0, frozenset())


def alike(problem: PlacementProblem) -> list[int]:
    """Of each device the first one that it can change places with: everything takes as long there,
    and every route from and to it is like that of the other."""
    found: list[int] = []
    for device in range(len(problem.devices)):
        same = (d for d in range(device) if found[d] == d and _exchangeable(problem, d, device))
        found.append(next(same, device))
    return found


def _exchangeable(problem: PlacementProblem, one: int, other: int) -> bool:
    c, links, k = problem.columns, problem.links, len(problem.devices)
    a, b = problem.devices[one], problem.devices[other]
    if (a.kind, a.memory_bytes) != (b.kind, b.memory_bytes):
        return False
    if (c.allowed[:, one] != c.allowed[:, other]).any():
        return False
    if (c.duration[:, one] != c.duration[:, other]).any():
        return False
    change = np.arange(k)
    change[[one, other]] = other, one
    renamed: dict[int, int] = {}
    for table in (links.lag, links.drag):
        if (table[np.ix_(change, change)] != table).any():
            return False
    for here in range(k):
        for there in range(k):
            old, new = here * k + there, change[here] * k + change[there]
            first = slice(links.hop_start[old], links.hop_start[old + 1])
            second = slice(links.hop_start[new], links.hop_start[new + 1])
            if links.hop_pace[first].tolist() != links.hop_pace[second].tolist():
                return False
            for link, twin in zip(links.hop_link[first], links.hop_link[second], strict=True):
                if renamed.setdefault(int(link), int(twin)) != twin:
                    return False
    return len(set(renamed.values())) == len(renamed)
