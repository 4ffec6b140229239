"""picking: the walk of flexflow over a finite list of options for every unit.

In: a Problem and Units, each with its options. Out: a Walk that metropolis.py drives.

For spaces small enough to be searched exhaustively (exhaustive.py), to see that walks find what is
proven to be best. Moves: a unit gets any option; its cut on other devices; another cut on its
devices; an option on the devices of a neighbour; a unit and some neighbours go to the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from apportion.search.problem import Problem
from apportion.search.walks.simulated_walk import SimulatedWalk
from apportion.search.walks.units import OpChoices, Unit
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy

KINDS = {"any": 1, "where": 1, "how": 1, "near": 2, "several": 2}
FARTHER = 0.5  # of moves of several units, that go on to the next neighbour

Option = tuple[Choice, ...]


class _OptionSampler:
    """Draws options; `choices` are the current ones."""

    swept = True

    def __init__(self, space: Space, units: Sequence[Unit], choices: Sequence[Choice]) -> None:
        self.units, self.choices = units, choices
        self.by_cut: list[dict[object, list[Option]]] = []
        self.by_devices: list[dict[object, list[Option]]] = []
        for unit in units:
            cuts: dict[object, list[Option]] = {}
            places: dict[object, list[Option]] = {}
            for option in unit.options:
                cuts.setdefault(_cut(option), []).append(option)
                places.setdefault(_devices(option), []).append(option)
            self.by_cut.append(cuts)
            self.by_devices.append(places)
        home = {op: k for k, unit in enumerate(units) for op in unit.ops}
        near: list[set[int]] = [set() for _ in units]
        for value, made in enumerate(space.graph.producer):
            for reader in space.graph.consumers[value] if made is not None else ():
                a, b = home[made[0]], home[reader]  # type: ignore[index]
                if a != b:
                    near[a].add(b)
                    near[b].add(a)
        self.near = [sorted(them) for them in near]

    def draw(self, kind: str, rng: Random) -> OpChoices:
        """New Choices, those that are no change left out."""
        unit = rng.randrange(len(self.units))
        options: Sequence[Option] = self.units[unit].options
        now = self._now(unit)
        if kind == "where":
            options = self.by_cut[unit].get(_cut(now), options)
        elif kind == "how":
            options = self.by_devices[unit].get(_devices(now), options)
        elif kind == "near" and self.near[unit]:
            there = _devices(self._now(rng.choice(self.near[unit])))
            options = self.by_devices[unit].get(there, options)
        picked = {unit: rng.choice(options)}
        while kind == "several" and self.near[unit]:
            there = _devices(next(iter(picked.values())))
            unit = rng.choice(self.near[unit])
            if unit in picked or there not in self.by_devices[unit]:
                break
            picked[unit] = rng.choice(self.by_devices[unit][there])
            if rng.random() > FARTHER:
                break
        return self.changed(picked)

    def changed(self, picked: dict[int, Option]) -> OpChoices:
        """The Choices of options that are others than the current ones."""
        return {
            op: choice
            for unit, option in picked.items()
            for op, choice in zip(self.units[unit].ops, option, strict=True)
            if choice != self.choices[op]
        }

    def _now(self, unit: int) -> Option:
        return tuple([self.choices[op] for op in self.units[unit].ops])


def _cut(option: Option) -> tuple[tuple[int, ...], ...]:
    return tuple([choice.parts for choice in option])


def _devices(option: Option) -> frozenset[int]:
    return frozenset(device for choice in option for device in choice.devices)


class OptionWalk(SimulatedWalk):
    """The Walk."""

    def __init__(
        self, problem: Problem, space: Space, strategy: Strategy, units: Sequence[Unit]
    ) -> None:
        super().__init__(problem, space, strategy, KINDS)
        self.picks = _OptionSampler(space, units, self.choices)
        self.moves = self.picks  # type: ignore[assignment]

    @property
    def units(self) -> int:
        """As many as there are."""
        return len(self.picks.units)

    def scatter(self, rng: Random) -> None:
        """Any options."""
        drawn = {k: rng.choice(unit.options) for k, unit in enumerate(self.picks.units)}
        self._pending = self.picks.changed(drawn), dict.fromkeys(self.layouts)
        self.delta.change(*self._pending)
        self._take()
