"""unit_moves: random changes of a placement: whole units go to other devices.

In: which unit each Op belongs to, and what exchanges outputs. Out: new Choices for the Ops of some
units, nothing cut, for simulated_walk.py. The kinds are:

  unit    one unit to another device, mostly to one where a neighbour of it is
  run     the same with its neighbours on the device it is on, and theirs, up to a few
  swap    two units change places

What takes longer is drawn more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random

import numpy as np

from apportion.columns import Bools, Floats, Ints
from apportion.search.walks.units import OpChoices
from apportion.split import Choice, Space, unsplit_choice

UNIT_KINDS = {"unit": 4, "run": 3, "swap": 1}
"""Kinds of moves, and how often each is drawn; never changed."""

NEAR = 0.7  # share of moves to where a neighbour is
LONGEST = 12  # units of a run


class UnitMoves:
    """Draws changes of a Strategy in which every Op is whole; `choices` are the current ones."""

    swept = False

    def __init__(
        self,
        space: Space,
        choices: Sequence[Choice],
        unit: Ints,
        edges: Ints,
        seconds: Floats,
        allowed: Bools,
    ) -> None:
        self.space, self.choices = space, choices
        self.ops: list[list[int]] = [[] for _ in range(len(allowed))]
        for op, number in enumerate(unit.tolist()):
            self.ops[number].append(op)
        self.near: list[list[int]] = [[] for _ in self.ops]
        for a, b in edges.tolist():
            self.near[a].append(b)
            self.near[b].append(a)
        self.allowed = [np.flatnonzero(row).tolist() for row in allowed]
        self.movable = [k for k, ops in enumerate(self.ops) if ops and len(self.allowed[k]) > 1]
        weight = seconds + seconds.mean()
        self.sums = list(accumulate(float(weight[k]) for k in self.movable))
        self._whole: dict[tuple[int, int], Choice] = {}  # by number of axes and device

    @property
    def parts(self) -> int:
        """Units."""
        return len(self.movable)

    def scatter(self, rng: Random) -> OpChoices:
        """Every unit anywhere."""
        found: OpChoices = {}
        for unit in self.movable:
            found |= self._moved([unit], rng.choice(self.allowed[unit]))
        return found

    def draw(self, kind: str, rng: Random) -> OpChoices:
        """New Choices; none if there is nowhere to go."""
        if not self.movable:
            return {}
        unit = rng.choices(self.movable, cum_weights=self.sums)[0]
        if kind == "swap":
            other = rng.choices(self.movable, cum_weights=self.sums)[0]
            here, there = self._device(unit), self._device(other)
            if here == there or there not in self.allowed[unit] or here not in self.allowed[other]:
                return {}
            return self._moved([unit], there) | self._moved([other], here)
        there = self._where(unit, rng)
        several = self._run(unit, rng) if kind == "run" else [unit]
        return self._moved([k for k in several if there in self.allowed[k]], there)

    def _device(self, unit: int) -> int:
        return self.choices[self.ops[unit][0]].devices[0]

    def _where(self, unit: int, rng: Random) -> int:
        here = self._device(unit)
        if self.near[unit] and rng.random() < NEAR:
            near = self._device(rng.choice(self.near[unit]))
            if near != here and near in self.allowed[unit]:
                return near
        return rng.choice([d for d in self.allowed[unit] if d != here])

    def _run(self, unit: int, rng: Random) -> list[int]:
        """Units on one device, each a neighbour of one before it."""
        here, length = self._device(unit), rng.randint(2, LONGEST)
        found, edge = {unit: None}, [unit]
        while edge and len(found) < length:
            at = edge.pop(rng.randrange(len(edge)))
            for other in self.near[at]:
                if other not in found and len(found) < length and self._device(other) == here:
                    found[other] = None
                    edge.append(other)
        return list(found)

    def _moved(self, units: Sequence[int], there: int) -> OpChoices:
        return {
            op: self._choice(op, there)
            for unit in units
            for op in self.ops[unit]
            if self.choices[op].devices != (there,)
        }

    def _choice(self, op: int, device: int) -> Choice:
        key = len(self.space.axes(op)), device
        if key not in self._whole:
            self._whole[key] = unsplit_choice(self.space, op, (device,))
        return self._whole[key]
