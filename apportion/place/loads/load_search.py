"""load search: simulated annealing and local search on the largest load, over all devices.

In: a ThroughputObjective. Out: a placement, contiguous or not, that keeps to the memory limits.

The largest load alone is a poor guide: most moves do not change it. What is annealed is the 8-norm
of the loads, which is close to the largest and falls whenever one of the large ones does. Moves: a
unit to another device, to the device of a neighbour, together with some neighbours, or in exchange
for a unit there. Rounds start hot at a random placement or lukewarm at the best or a given one, in
turn, and end cold; then single moves and exchanges lower the largest load itself until none does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, compiled_part, offsets
from apportion.place.lists.one_device import one_device
from apportion.place.loads.contraction import contraction
from apportion.place.loads.linear_ideals import dp_linear
from apportion.place.objective import PlacementObjective, PlacementResult, PlacerProgress, Report
from apportion.place.objectives.max_load import (
    LoadColumns,
    LoadState,
    ThroughputObjective,
    fill_state,
    largest_load,
    load_state,
    move_unit,
    work_bound,
)
from apportion.work_clock import work_seconds

STEPS = 1 << 16  # moves between two looks at the clock; of the first rounds fewer
FIRST = 1 << 9
TURNS = (8, 32, 64)  # stretches of so many moves a round has, in turn
HOT = (0.003, 0.02)  # of rounds from random placements, in turn; shares of the energy
WARM, COLD = 0.001, 3e-5
CHANCES = 4096
BLOCK = 8  # units that go with one, at most
FEW = 1000  # units of which all pairs are exchanged at the end of a round
MOST_TRIES = 4_000_000
LINEAR_SHARE = 0.2  # of the budget, at most, goes to the linear program that starts it


@compiled_part
def _energy(loads: Ints, apart: int, scale: float) -> float:
    """8-norm of loads over scale, so that powers stay small."""
    first, second = 0.0, 0.0
    for at in range(len(loads)):
        if apart:
            a, b = loads[at, 0] / scale, loads[at, 1] / scale
            b = b * b
            b = b * b
            second += b * b
        else:
            a = (loads[at, 0] + loads[at, 1]) / scale
        a = a * a
        a = a * a
        first += a * a
    return float(np.sqrt(np.sqrt(np.sqrt(first))) + np.sqrt(np.sqrt(np.sqrt(second))))


@compiled_part
def _over(c: LoadColumns, memory: Ints) -> float:
    """By what share of their limits devices are over them, in all."""
    over = 0.0
    for at in range(len(memory)):
        if memory[at] > c.limit[at]:
            over += (memory[at] - c.limit[at]) / max(c.limit[at], 1)
    return over


@compiled
def anneal_loads(
    c: LoadColumns,
    state: LoadState,
    best: Ints,
    best_ticks: int,
    near_start: Ints,
    near: Ints,
    free: Ints,
    draws: Ints,
    chances: Floats,
    hot: float,
    cooling: float,
) -> int:
    """One move for each row of `draws`, at temperatures from `hot` on; the ticks of the best
    placement, which is kept in `best`."""
    devices = len(c.limit)
    scale = max(float(largest_load(c, state)), 1.0)
    over = _over(c, state.memory)
    energy = _energy(state.loads, c.apart, scale) * (1.0 + 3.0 * over)
    heat = hot
    group = np.empty(BLOCK + 1, np.int64)
    for step in range(len(draws)):
        heat *= cooling
        unit = free[draws[step, 0] % len(free)]
        here, there = state.place[unit], draws[step, 1] % devices
        kind, more = draws[step, 2] % 8, draws[step, 2] >> 3
        group[0], size, swapped = unit, 1, np.int64(-1)
        span = near_start[unit + 1] - near_start[unit]
        if kind >= 6:  # an exchange
            swapped = free[draws[step, 1] % len(free)]
            there = state.place[swapped]
        elif kind >= 3 and span > 0:
            friend = near[near_start[unit] + more % span]
            if state.place[friend] != here:  # to a neighbour
                there = state.place[friend]
            if kind >= 4:
                size = gather(state.place, near_start, near, group, more)
        fits = there != here
        for at in range(size):
            fits = fits and c.allowed[group[at], there]
        if not fits or (swapped >= 0 and not c.allowed[swapped, here]):
            continue
        for at in range(size):
            move_unit(c, state, group[at], there)
        if swapped >= 0:
            move_unit(c, state, swapped, here)
        over = _over(c, state.memory)
        after = _energy(state.loads, c.apart, scale) * (1.0 + 3.0 * over)
        if after <= energy + heat * chances[draws[step, 3] & (len(chances) - 1)]:
            energy = after
            if over == 0.0:
                ticks = largest_load(c, state)
                if ticks < best_ticks:
                    best_ticks = ticks
                    best[:] = state.place
        else:
            for at in range(size):
                move_unit(c, state, group[at], here)
            if swapped >= 0:
                move_unit(c, state, swapped, there)
    return best_ticks


@compiled_part
def gather(place: Ints, near_start: Ints, near: Ints, group: Ints, luck: int) -> int:
    """A walk over neighbours on the same device, whose units go with the first of `group`; how many
    there are then."""
    size, unit = 1, group[0]
    for _ in range(1 + luck % (len(group) - 1)):
        luck = (luck * 48271) % 2147483647
        span = near_start[unit + 1] - near_start[unit]
        if span == 0:
            break
        friend = near[near_start[unit] + luck % span]
        if place[friend] != place[group[0]]:
            continue
        unit = friend
        known = False
        for at in range(size):
            known = known or group[at] == friend
        if not known:
            group[size] = friend
            size += 1
    return size


@compiled
def descend_loads(c: LoadColumns, state: LoadState, free: Ints, pairs: int, most: int) -> int:
    """Single moves, and if `pairs` exchanges, while one lowers the largest load or, at equal
    largest load, the energy, and at most about so many are tried; how many were. Stays within
    memory if it is there."""
    devices = len(c.limit)
    scale = max(float(largest_load(c, state)), 1.0)
    energy = _energy(state.loads, c.apart, scale)
    now, over = largest_load(c, state), _over(c, state.memory)
    tried, better = 0, True
    while better and tried < most:
        better = False
        for unit in free:
            if tried >= most:
                break
            for option in range(devices + (len(free) if pairs else 0)):
                here, other = state.place[unit], np.int64(-1)
                there = np.int64(option)
                if option >= devices:
                    other = free[option - devices]
                    there = state.place[other]
                if there == here or not c.allowed[unit, there]:
                    continue
                if other >= 0:
                    if not c.allowed[other, here]:
                        continue
                    move_unit(c, state, other, here)
                move_unit(c, state, unit, there)
                tried += 1
                ticks, excess = largest_load(c, state), _over(c, state.memory)
                after = _energy(state.loads, c.apart, scale)
                if excess < over or (
                    excess == over
                    and (ticks < now or (ticks == now and after < energy * (1.0 - 1e-9)))
                ):
                    now, over, energy, better = ticks, excess, after, True
                else:
                    move_unit(c, state, unit, here)
                    if other >= 0:
                        move_unit(c, state, other, there)
    return tried


def neighbours(c: LoadColumns) -> tuple[Ints, Ints]:
    """The units that share a transfer with each, as offsets and units."""
    home = np.repeat(c.source, np.diff(c.reader_start))
    pairs = np.stack([home, c.reader], axis=1)
    pairs = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0).reshape(-1, 2)
    return offsets(np.bincount(pairs[:, 0], minlength=len(c.resident))), pairs[:, 1].copy()


class LoadSearch:
    """A search that can be asked for more. `placement` is the best of units so far."""

    def __init__(
        self,
        objective: ThroughputObjective,
        seed: int = 0,
        starts: Sequence[Ints] = (),
        budget: float = 10.0,
    ) -> None:
        self.objective = objective
        full = objective.columns
        self.full = full
        it = contraction(full, np.zeros((0, 2), np.int64))
        self.block, self.columns = it.block, it.columns
        self.near_start, self.near = neighbours(self.columns)
        self.free = np.flatnonzero(self.columns.allowed.sum(axis=1) > 1).astype(np.int64)
        self.rng = np.random.default_rng(seed)
        self.chances: Floats = -np.log((np.arange(CHANCES) + 0.5) / CHANCES)
        self.placement = one_device(objective).placement
        self.score = objective.score(self.placement)
        self.given = [np.asarray(start, np.int64) for start in starts]
        if not objective.apart:
            self.given.append(dp_linear(objective, budget=LINEAR_SHARE * budget).placement)
        for start in self.given:
            self.note(start)
        self.round = 0

    def note(self, placement: Ints) -> bool:
        """Keeps a placement of units if it is the best so far."""
        score = self.objective.score(placement)
        if score >= self.score:
            return False
        self.placement, self.score = np.array(placement, np.int64), score
        return True

    def bound(self) -> float:
        """What no placement is below."""
        tick = self.objective.problem.tick
        fits = self.score < self.objective.worst / tick
        return work_bound(self.full, self.score * tick if fits else np.inf) / tick

    def run_round(self, until: float) -> bool:
        """One descent from hot to cold; whether it found something better."""
        c, rng = self.columns, self.rng
        stretches = TURNS[self.round % len(TURNS)]
        fresh = self.round % 2 == 0
        if self.round < len(self.given):
            start, fresh = self._of_blocks(self.given[self.round]), False
        elif fresh:
            start = _random_place(c.allowed, rng)
        else:
            start = self._of_blocks(self.placement)
        steps = min(STEPS, FIRST << self.round)
        self.round += 1
        state = load_state(c, start)
        best, ticks = state.place.copy(), 1 << 60
        heat = HOT[self.round // 2 % len(HOT)] if fresh else WARM
        cooling = (COLD / heat) ** (1.0 / (stretches * steps))
        if len(self.free):
            for _ in range(stretches):
                draws = rng.integers(0, 1 << 31, (steps, 4))
                ticks = anneal_loads(
                    c, state, best, ticks, self.near_start, self.near, self.free, draws,
                    self.chances, heat, cooling,
                )  # fmt: skip
                heat *= cooling**steps
                self.objective.evaluations += steps
                if work_seconds() > until:
                    break
        state.place[:] = best
        fill_state(c, state)
        self._descend(c, state, self.free, until)
        better = self.note(state.place[self.block])
        if better and len(self.full.resident) > len(c.resident):
            whole = load_state(self.full, self.placement)
            free = np.flatnonzero(self.full.allowed.sum(axis=1) > 1).astype(np.int64)
            self._descend(self.full, whole, free, until)
            self.note(whole.place)
        return better

    def _descend(self, c: LoadColumns, state: LoadState, free: Ints, until: float) -> None:
        """A descent in more and more moves, so that it is soon compiled and ends in time."""
        most = FIRST
        while most <= MOST_TRIES:
            tried = int(descend_loads(c, state, free, int(len(free) <= FEW), most))
            self.objective.evaluations += tried
            if tried < most or work_seconds() > until:
                break
            most *= 8

    def _of_blocks(self, placement: Ints) -> Ints:
        """The device of each block, that of its last unit."""
        place = np.zeros(len(self.columns.resident), np.int64)
        place[self.block] = placement
        lost = ~self.columns.allowed[np.arange(len(place)), place]
        place[lost] = self.columns.allowed[lost].argmax(axis=1)
        return place


def _random_place(allowed: Bools, rng: np.random.Generator) -> Ints:
    weight = rng.random(allowed.shape) * allowed
    found: Ints = weight.argmax(axis=1).astype(np.int64)
    return found


def load_search(
    objective: PlacementObjective,
    *,
    budget: float = 10.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """Rounds of annealing until the time is over or the bound on work is reached."""
    if not isinstance(objective, ThroughputObjective) or contiguous or objective.contiguous:
        raise ValueError(
            "load-search minimises the largest load over all placements; take --objective "
            "throughput without --contiguous, or the method dp"
        )
    began = work_seconds()
    until = began + budget
    search = LoadSearch(objective, seed, starts, budget)
    bound = search.bound()
    curve = [(work_seconds() - began, objective.evaluations, search.score)]
    interrupted = False
    try:
        while work_seconds() < until and search.score > bound * (1 + 1e-12):
            if search.run_round(until):
                bound = search.bound()
                took = work_seconds() - began
                curve.append((took, objective.evaluations, search.score))
            if report is not None:
                report(PlacerProgress(search.score, bound, objective.evaluations))
    except KeyboardInterrupt:
        interrupted = True
    notes: tuple[str, ...] = ()
    if not objective.evaluate(search.placement).feasible:
        notes = ("no placement was found that fits; this is the nearest",)
    figures = {"rounds": float(search.round)}
    return PlacementResult(search.placement, bound, notes, tuple(curve), figures, interrupted)
