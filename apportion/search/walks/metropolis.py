"""Metropolis-Hastings: a random walk over states that stays longer where they cost less.

A state of cost c is visited in proportion to exp(-c / T). A proposal that costs less than the
current state is taken, one that costs d more with probability exp(-d / T). Drawing the random
number first turns this into a limit on the cost of the proposal: whoever works the cost out may
stop as soon as it is certain to be above.

The temperature is a share of what one unit of a state costs on average when a run begins, so that
neither scale nor size matter. A run ends when its best has not improved for the second half of its
proposals (the rule of FlexFlow's paper). The next begins at the best state known, at the next of
several temperatures, and after those at a random state. The whole walk depends on nothing but its
start, its seed and the number of proposals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

TEMPERATURES = (0.1, 0.02)  # of runs in turn, as shares of what a unit costs
SHORTEST = 300  # proposals of a run before it may end
FRUITLESS = 12  # runs without an improvement after which a walk is over


class Walk(Protocol):
    """A state that can be changed at random."""

    @property
    def cost(self) -> float:
        """What the current state costs."""

    @property
    def units(self) -> int:
        """Of how many a state is made."""

    def change(self, rng: Random, limit: float) -> float | None:
        """Changes the state; what it costs now, exactly if that is at most `limit`, else any number
        above. None if the change drawn is none."""

    def keep(self) -> None:
        """The change stays."""

    def undo(self) -> None:
        """The state is as it was before the change."""

    def note(self) -> None:
        """The current state is the best so far."""

    def back(self) -> float:
        """Returns to the state that was noted last; what it costs."""

    def scatter(self, rng: Random) -> None:
        """Goes to a random state."""


@dataclass
class Chain:
    """A walk, and how far it is."""

    walk: Walk
    rng: Random
    temperatures: tuple[float, ...] = TEMPERATURES
    proposals: int = 0
    accepted: int = 0
    best: float = field(init=False)
    runs: int = 0
    fruitless: int = 0
    over: bool = False
    _scale: float = field(init=False)  # the temperature of this run, in units of cost
    _low: float = field(init=False)  # the best of this run
    _began: int = 0  # the proposals when this run began
    _improved: int = 0  # and when its best did

    def __post_init__(self) -> None:
        self.best = self.walk.cost
        self.walk.note()
        self._enter(0)

    def step(self) -> bool:
        """One proposal; whether it is better than everything before."""
        walk, drawn = self.walk, self.rng.random()
        limit = walk.cost - self._scale * math.log(1.0 - drawn)
        self.proposals += 1
        cost = walk.change(self.rng, limit)
        improved = False
        if cost is not None and cost <= limit:
            walk.keep()
            self.accepted += 1
            if cost < self._low:
                self._low, self._improved = cost, self.proposals
            if cost < self.best:
                self.best, improved, self.fruitless = cost, True, -1
                walk.note()
        elif cost is not None:
            walk.undo()
        since, length = self.proposals - self._improved, self.proposals - self._began
        if length >= SHORTEST and 2 * since >= length:
            self._begin_again()
        return improved

    def judge_again(self) -> None:
        """What states cost has changed; the best is the one noted last, at what it costs now."""
        self.best = self._low = self.walk.back()

    def _begin_again(self) -> None:
        self.runs += 1
        self.fruitless += 1
        self.over = self.fruitless >= FRUITLESS
        turn = self.runs % (len(self.temperatures) + 1)
        if turn == len(self.temperatures):
            self.walk.scatter(self.rng)
        else:
            self.best = self.walk.back()
        self._enter(turn % len(self.temperatures))

    def _enter(self, turn: int) -> None:
        """A run begins."""
        self._low = self.walk.cost
        self._scale = self.temperatures[turn] * self._low / self.walk.units
        self._began = self._improved = self.proposals
