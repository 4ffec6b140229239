"""unit_memory: what a unit adds to the memory of its device, for placers that fill devices up.

In: a PlacementProblem. Out: bytes of each unit: what stays on the device, and those of its outputs
that live at the moment at which one device, running all nodes in their order, would hold most. In
a training step that is about the end of the forward pass, when backward waits for most outputs.

The exact peaks depend on when nodes run, which is known only afterwards. So placers fill up to a
limit, measure, and fill again up to less where that was too much (`within_limits`); what is still
too much is moved away, unit by unit (`relieved`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from apportion.columns import Floats, Ints
from apportion.place.objective import PlacementObjective
from apportion.place.placement_problem import PlacementProblem

ROUNDS = 6  # of filling devices up to less each time
MOVES = 40  # of units away from devices that are then still over their limits


def unit_bytes(problem: PlacementProblem) -> Ints:
    """u: bytes that each unit adds to its device at the fullest moment."""
    c = problem.columns
    found = np.bincount(c.unit, c.resident, problem.units)
    if problem.links.live and len(c.source):
        last = c.source.copy()
        outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
        np.maximum.at(last, outputs, c.reader)
        change = np.zeros(len(c.unit) + 1)
        np.add.at(change, c.source, c.nbytes)
        np.add.at(change, last + 1, -c.nbytes)
        fullest = int(np.cumsum(change).argmax())
        lives = (c.source <= fullest) & (last >= fullest)
        found += np.bincount(c.unit[c.source[lives]], c.nbytes[lives], problem.units)
    return found.astype(np.int64)


def within_limits(
    objective: PlacementObjective, fill: Callable[[Floats], Ints], moves: int = MOVES
) -> tuple[Ints, float]:
    """The best placement that `fill` makes, and its score. `fill` is told how many bytes of units
    each device may take: at first its limit, then less wherever the peak was over it. In the end
    so many units may be moved one by one."""
    limit = objective.problem.limit
    place = fill(limit)
    best, score = place, objective.score(place)
    room = limit
    for _ in range(ROUNDS - 1):
        if not np.isfinite(limit).any():
            break
        judged = objective.evaluate(place)
        over = np.maximum(judged.memory - limit, 0.0)
        if judged.feasible or not over.any():
            break
        room = np.maximum(room - 1.05 * over, 0.0)
        place = fill(room)
        found = objective.score(place)
        if found < score:
            best, score = place, found
    place = relieved(objective, best, moves)
    found = objective.score(place) if place is not best else score
    return (place, found) if found < score else (best, score)


def relieved(objective: PlacementObjective, placement: Ints, moves: int) -> Ints:
    """A placement that is over a memory limit, with units moved from the fullest device to the one
    with the most room, until it fits or that helps no more."""
    problem, place = objective.problem, placement
    if not np.isfinite(problem.limit).any():
        return place
    need = unit_bytes(problem)
    for _ in range(moves):
        judged = objective.evaluate(place)
        spare = problem.limit - judged.memory
        if judged.feasible or (spare >= 0).all():
            break
        over = np.where(spare < 0, -spare, 0.0)
        full = int(np.argmax(over / np.where(over > 0, np.maximum(problem.limit, 1.0), 1.0)))
        mine = np.flatnonzero((place == full) & (need > 0))
        target = int(np.argmax(spare))
        mine = mine[problem.columns.allowed[mine, target] & (need[mine] <= spare[target])]
        if not mine.size:
            break
        mine = mine[np.argsort(need[mine], kind="stable")]
        enough = int(np.searchsorted(need[mine], -spare[full]))  # the smallest that is enough
        place = place.copy()
        place[mine[min(enough, mine.size - 1)]] = target
    return place


def excess_note(objective: PlacementObjective, placement: Ints) -> tuple[str, ...]:
    """A sentence that says by how much a placement is over the memory limits, if it is."""
    judged, devices = objective.evaluate(placement), objective.problem.devices
    over = judged.memory - objective.problem.limit
    worst = int(np.argmax(over))
    if judged.feasible or over[worst] <= 0:
        return ()
    return (
        f"over the memory limit: {devices[worst].name} would hold {int(judged.memory[worst])} of "
        f"{devices[worst].memory_bytes} bytes",
    )
