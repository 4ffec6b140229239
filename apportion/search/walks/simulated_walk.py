"""simulated_walk: a walk over Strategies of one Space, judged by the simulated step.

In: a Problem and the Strategy to begin with. Out: the Walk that metropolis.py drives. Every move is
lowered and simulated by what it changes (simulate/delta).

What a Strategy costs is its step time, and more where it holds more than the memory limit. The
bytes that it holds (state, activations for the backward pass) are followed from move to move; how
much higher the peak is than these is found by full simulations, now and then and of every Strategy
that is to be the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Protocol

import numpy as np

from apportion.columns import Ints
from apportion.lower import lower
from apportion.search.problem import Problem
from apportion.search.walks.device_loads import DeviceLoads
from apportion.search.walks.moves import KINDS, MoveSampler
from apportion.search.walks.units import LayerChoices, OpChoices
from apportion.simulate import Delta, simulate
from apportion.split import Choice, Layout, Space, Strategy, unsplit_choice

DEAR = 4.0  # how much longer a step counts that is over the limit by all of it
OVER = 0.05  # and by anything at all
REMEMBERED = 100  # Ops of a move whose cost is kept until another is accepted
UNTRIED: tuple[float, OpChoices] = (0.0, {})  # what is known of a move that was not tried


class Moves(Protocol):
    """Draws changes of the current Choices. `swept`: all that is tried in turn has been tried."""

    swept: bool

    @property
    def parts(self) -> int:
        """Of how many a state is made."""

    def draw(self, kind: str, rng: Random) -> OpChoices:
        """New Choices for some Ops."""

    def scatter(self, rng: Random) -> OpChoices:
        """Random Choices for all."""


class SimulatedWalk:
    """The Walk. `moves` makes what draws its changes, given the Choices, which are kept up to date.
    `best` is the Strategy that was noted last. Ops that are `pinned` keep their Choices."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        strategy: Strategy,
        kinds: Mapping[str, int] = KINDS,
        moves: Callable[[list[Choice]], Moves] | None = None,
        pinned: frozenset[int] = frozenset(),
    ) -> None:
        self.problem, self.space, self.pinned = problem, space, pinned
        self.delta = Delta(space, strategy, problem.cluster, problem.cost)
        self.choices: list[Choice] = list(strategy.choices)
        self.layouts: dict[int, Layout] = dict(strategy.layouts)
        self.moves = self._sampler() if moves is None else moves(self.choices)
        self.kinds, self.weights = list(kinds), list(kinds.values())
        self.drawn = {kind: [0, 0, 0] for kind in kinds}  # proposed, accepted, improved the best
        self.kind = self.kinds[0]
        self.best = strategy
        self.sound: Strategy | None = None  # the best that is known to be within the limit
        self.sound_seconds = float("inf")
        limit = problem.memory_limit
        self._limit = None if limit is None else np.asarray(limit, float)
        self._noted = self._bytes_and_time()  # of the best
        self._pending: tuple[OpChoices, dict[int, Layout | None]] = ({}, {})
        self._befores: dict[int, list[int]] = {}
        for before, after in space.graph.state:
            self._befores.setdefault(after, []).append(before)
        self._known = False  # the last move was not given to `delta`: it has been rejected before
        # Moves from here that were rejected, by Ops and the addresses of Choices, which are kept
        self._tried: dict[tuple[int, ...], tuple[float, OpChoices]] = {}
        self._more = np.ones(problem.devices)  # peaks, as multiples of what is held
        self.cost = self._cost(self.delta.step_ns)
        self.confirm()

    def _sampler(self) -> Moves:
        """Draws all changes there are; Ops that take longer more often."""
        loads, space = DeviceLoads(self.problem, self.space), self.space
        ops = range(len(space.graph.ops))
        alone = [float(loads.of(op, unsplit_choice(space, op, (0,))).max()) for op in ops]
        return MoveSampler(LayerChoices(space), self.problem.cluster, self.choices, alone)

    # What it costs

    def _cost(self, step_ns: int) -> float:
        return step_ns / 1e9 * self._memory()

    def _memory(self) -> float:
        """1, or more where more is held than the limit."""
        if self._limit is None:
            return 1.0
        over = float((self.delta.held * self._more / self._limit).max()) - 1.0
        return 1.0 if over <= 0 else 1.0 + OVER + DEAR * over

    def _bytes_and_time(self) -> tuple[Ints | None, int]:
        """The bytes that are held, if there is a limit, and the step time."""
        return None if self._limit is None else self.delta.held, self.delta.step_ns

    def confirm(self) -> bool:
        """Sees by a full simulation whether the best is within the limit; if not, how much a device
        holds is judged anew, and the walk has to go back to a Strategy that is, if there is one.
        Whether all is well."""
        limit, (held, step_ns) = self.problem.memory_limit, self._noted
        if limit is None or held is None:
            self.sound, self.sound_seconds = self.best, step_ns / 1e9
            return True
        if self.best is self.sound or (self.sound and step_ns / 1e9 >= self.sound_seconds):
            return True
        tasks = lower(self.space, self.best, self.problem.devices)
        line = simulate(tasks, self.problem.cluster, self.problem.cost)
        peaks = np.array(line.peak_bytes, float)
        self._more = np.maximum(peaks, 1.0) / np.maximum(held, 1)
        self._tried.clear()
        if (peaks <= np.asarray(limit)).all():
            self.sound, self.sound_seconds = self.best, line.step_seconds
            self.cost = self._cost(self.delta.step_ns)
            return True
        if self.sound is not None:
            self.best = self.sound
        self.cost = self._cost(self.delta.step_ns)
        return False

    # The walk

    def change(self, rng: Random, limit: float) -> float | None:
        """A move, of a kind drawn by weight."""
        self.kind = rng.choices(self.kinds, self.weights)[0]
        choices = self._unpinned(self.moves.draw(self.kind, rng))
        self.drawn[self.kind][0] += 1
        if self.kind == "sweep" and self.moves.swept:
            self.weights[self.kinds.index("sweep")] = 0
        if not choices:
            return None
        layouts: dict[int, Layout | None] = {}
        if self.layouts:
            layouts = dict.fromkeys(v for op in choices for v in self._laid_out(op))
        self._pending = choices, layouts
        move = (*choices, *map(id, choices.values())) if len(choices) <= REMEMBERED else ()
        cost, _ = self._tried.get(move, UNTRIED)
        self._known = cost > limit
        if not self._known:
            cost = self.delta.change(choices, layouts, limit=int(limit * 1e9)) / 1e9
            if cost <= limit:
                cost *= self._memory()
            if move:
                self._tried[move] = cost, choices
        return cost

    def _unpinned(self, choices: OpChoices) -> OpChoices:
        if not self.pinned:
            return choices
        return {op: choice for op, choice in choices.items() if op not in self.pinned}

    def _laid_out(self, op: int) -> list[int]:
        """The Values with layouts of their own that an Op leaves, and those of state before it."""
        found = []
        for value in self.space.graph.ops[op].outputs:
            found += [v for v in (value, *self._befores.get(value, ())) if v in self.layouts]
        return found

    def keep(self) -> None:
        """The last move stays."""
        self.drawn[self.kind][1] += 1
        self._take()

    def _take(self) -> None:
        self._tried.clear()
        choices, layouts = self._pending
        self.delta.keep()
        for op, choice in choices.items():
            self.choices[op] = choice
        for value, layout in layouts.items():
            if layout is None:
                self.layouts.pop(value, None)
            else:
                self.layouts[value] = layout
        self.cost = self._cost(self.delta.step_ns)

    def undo(self) -> None:
        """The last move is taken back."""
        if not self._known:
            self.delta.undo()

    def note(self) -> None:
        """The best so far."""
        self.drawn[self.kind][2] += 1
        self.best = self.strategy
        self._noted = self._bytes_and_time()

    def back(self) -> float:
        """To the best so far."""
        best = self.best
        differ = zip(self.choices, best.choices, strict=True)
        choices = {op: new for op, (old, new) in enumerate(differ) if old != new}
        values = self.layouts.keys() | best.layouts.keys()
        layouts = {
            v: best.layouts.get(v) for v in values if self.layouts.get(v) != best.layouts.get(v)
        }
        if choices or layouts:
            self._pending = choices, layouts
            self.delta.change(choices, layouts)
            self._take()
        return self.cost

    def scatter(self, rng: Random) -> None:
        """Everything cut and placed at random."""
        choices = self._unpinned(self.moves.scatter(rng))
        choices = {op: new for op, new in choices.items() if new != self.choices[op]}
        layouts: dict[int, Layout | None] = dict.fromkeys(self.layouts)
        self._pending = choices, layouts
        self.delta.change(choices, layouts)
        self._take()

    @property
    def units(self) -> int:
        """Of how many parts a state is made: cells, or units."""
        return self.moves.parts

    @property
    def strategy(self) -> Strategy:
        """The current one."""
        choices, layouts = tuple(self.choices), dict(self.layouts)
        return replace(self.best, choices=choices, layouts=layouts)
