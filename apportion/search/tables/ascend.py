"""ascend: the minimum of a large sum of tables by bounds, without a linear program.

In: an Energy. Out: a BoundedSolution, the best choice found with a proven lower bound; and what of
the sum is still undecided. Over and over, on what is left of the sum:

    shrink     values and variables that cannot matter are dropped (shrink.py)
    ascend     passes raise a proven lower bound (reweight.py) and make choices on the way
    fuse       exact elimination over the few most promising values of each variable, those of the
               best choice among them: every mixture of these is tried
    narrow     values that cost more than the best choice, whatever the others do, are dropped

until nothing is left, which proves the best choice optimal, or nothing moves any more. A choice is
optimal here if none is better by more than a billionth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apportion.columns import Bools, Floats
from apportion.search.tables.eliminate import Energy, TooWide, eliminate
from apportion.search.tables.reweight import (
    FlatEnergy,
    ProvenBound,
    flatten,
    moved_energy,
    prove_bound,
    run_passes,
)
from apportion.search.tables.shrink import ReducedEnergy, shrink, unreduced
from apportion.work_clock import work_seconds

PATIENCE = 10  # rounds between looks at bound, choice and clock
STALLED = 5e-3  # of the gap: what a look must close, or nothing more is expected of passes
SHARE = 0.95  # of the values: what narrowing must leave at most to be worth going on
FUSED = (12, 8, 5, 3)  # values per variable that fusing tries, the first that elimination can do
FUSED_CAP = 3_000_000
EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class BoundedSolution:
    """The best choice found, its value, and a proven lower bound on all choices.

    finished  whether the method ended by itself, not by its deadline
    """

    choice: list[int]
    value: float
    bound: float
    finished: bool

    @property
    def optimal(self) -> bool:
        return self.bound >= goal(self.value)


def goal(value: float) -> float:
    """What a choice must be below to count as better than one of this value."""
    return value - EQUAL * abs(value)


def pass_messages(
    energy: Energy,
    deadline: float | None = None,
    rounds: int = 1000,
    start: Sequence[int] | None = None,
    report: Callable[[float, float], None] | None = None,
) -> BoundedSolution:
    """The best choice met and a bound, after at most `rounds` passes there and back.

    `deadline` is a moment of `work_seconds`. With a `start`, never worse than it. `report` is
    called with the best value and the bound as they change.
    """
    return narrow_by_messages(energy, deadline, rounds, start, report)[0]


def narrow_by_messages(
    energy: Energy,
    deadline: float | None = None,
    rounds: int = 1000,
    start: Sequence[int] | None = None,
    report: Callable[[float, float], None] | None = None,
) -> tuple[BoundedSolution, ReducedEnergy | None]:
    """As `messages`, and what is left undecided: no choice outside of it is better than the best
    found."""
    work = _MessagePassing(energy, deadline, rounds, start, report)
    left: ReducedEnergy | None = unreduced(energy)
    while left is not None and work.goes_on:
        left = work.stage(left)
    return work.solved(), left


def best_mixture(left: ReducedEnergy, keep: Sequence[Bools]) -> list[int] | None:
    """The best choice of the values marked; None if elimination is too wide even for these."""
    small = shrink(left.energy, keep)
    try:
        picks, _ = eliminate(small.energy, FUSED_CAP)
    except TooWide:
        return None
    return left.reduced_to(small).lift(picks)


class _MessagePassing:
    def __init__(
        self,
        energy: Energy,
        deadline: float | None,
        rounds: int,
        start: Sequence[int] | None,
        report: Callable[[float, float], None] | None,
    ) -> None:
        self.energy = energy
        self.deadline = math.inf if deadline is None else deadline
        self.rounds = rounds
        self.report = report
        self.choice = [0] * len(energy.sizes) if start is None else list(start)
        self.value = energy.value(self.choice)
        self.bound = -math.inf
        self.finished = True
        self.stuck = False

    @property
    def goes_on(self) -> bool:
        return not self.stuck and self.finished and self.rounds > 0 and not self.closed

    @property
    def closed(self) -> bool:
        return self.bound >= goal(self.value)

    def solved(self) -> BoundedSolution:
        return BoundedSolution(self.choice, self.value, min(self.bound, self.value), self.finished)

    def stage(self, left: ReducedEnergy) -> ReducedEnergy | None:
        """Shrinks, ascends and narrows once; None if nothing is left."""
        left = left.reduced_to(shrink(left.energy))
        if not left.variables:
            self._try(left.lift([]))
            self._raise(left, 0.0)
            return None
        flat = flatten(left.energy)
        proof = self._ascend(left, flat)
        self._fuse(left, proof)
        return left if self.closed else self._narrow(left, flat, proof)

    def _ascend(self, left: ReducedEnergy, flat: FlatEnergy) -> ProvenBound:
        while True:
            picks = run_passes(flat, min(PATIENCE, self.rounds))
            self.rounds -= PATIENCE
            self._try(left.lift(picks))
            proof = prove_bound(left.energy, flat)
            before = self.bound
            self._raise(left, proof.bound)
            self.finished = work_seconds() <= self.deadline
            enough = self.bound - before <= STALLED * (self.value - self.bound)
            if self.closed or enough or self.rounds <= 0 or not self.finished:
                return proof

    def _fuse(self, left: ReducedEnergy, proof: ProvenBound) -> None:
        """Tries every mixture of the most promising values of each variable."""
        if self.closed or not self.finished:
            return
        own = left.picks(self.choice)
        for count in FUSED:
            keep = [_mark_least(slack, count) for slack in proof.slack]
            for marks, pick in zip(keep, own, strict=True):
                if pick >= 0:
                    marks[pick] = True
            choice = best_mixture(left, keep)
            if choice is not None:
                self._try(choice)
                return

    def _narrow(
        self, left: ReducedEnergy, flat: FlatEnergy, proof: ProvenBound
    ) -> ReducedEnergy | None:
        """Drops the values that no better choice has."""
        room = goal(self.value) - (left.constant + proof.bound - left.margin)
        keep: list[Bools] = [slack < room for slack in proof.slack]
        if not all(marks.any() for marks in keep):
            self._raise(left, math.inf)
            return None
        if sum(int(m.sum()) for m in keep) > SHARE * sum(left.energy.sizes):
            self.stuck = True
            return left
        small = replace(
            unreduced(moved_energy(left.energy, flat, keep)),
            margin=4 * proof.margin,
            values=tuple(np.flatnonzero(marks) for marks in keep),
        )
        return left.reduced_to(small)

    def _try(self, choice: list[int]) -> None:
        value = self.energy.value(choice)
        if value < self.value:
            self.choice, self.value = choice, value
            self._report()

    def _raise(self, left: ReducedEnergy, bound: float) -> None:
        """A bound on what is left is one on all: the rest is no better than the best found."""
        bound = min(left.constant + bound - left.margin, goal(self.value))
        if bound > self.bound:
            self.bound = bound
            self._report()

    def _report(self) -> None:
        if self.report is not None:
            self.report(self.value, self.bound)


def _mark_least(slack: Floats, count: int) -> Bools:
    """Bools the values of least slack, `count` of them if there are."""
    marks = np.zeros(len(slack), np.bool_)
    marks[np.argsort(slack, kind="stable")[:count]] = True
    return marks
