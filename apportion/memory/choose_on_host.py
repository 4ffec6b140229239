"""choose_on_host: what lies on the host so that a step fits, in the least time.

Part of the room memory. A ChunkModel, a limit of the device and one of the host come in, a
HostChoice goes out: an option for each unit.

Copies that are spread evenly over a step are hidden by what it computes; many in a row are not. And
what a step costs depends on how many units take which option much more than on which do. So first
mixtures are tried: as many units as fit stay on the device, the first ones, which the next step
needs before their update could be back, or evenly spread; of the others a share is updated on the
host and the rest on the device, evenly spread; of activations a share is offloaded. Then single
units are changed, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from apportion.memory.chunk_model import OFFLOADED, ChunkModel, ChunkOutcome, HostUnit
from apportion.work_clock import work_seconds

SHARES = tuple(k / 8 for k in range(9))
FINER = (-0.0625, 0.0625, -0.03125, 0.03125)
OFFLOADS = (0.0, 0.25, 0.5, 0.75, 1.0)
FLIPS = 300  # single changes that are tried


@dataclass(frozen=True)
class HostChoice:
    """The number of an option for each unit, and what a step with them is modelled to take."""

    choice: tuple[int, ...]
    outcome: ChunkOutcome
    tried: int


@dataclass(frozen=True)
class _Mixture:
    """`host`: the share of units that are not on the device whose state is updated on the host;
    `away`: the share of activations that are offloaded; `first`: whether the first units stay on
    the device."""

    host: float
    away: float
    first: bool


_RankedChoice = tuple[tuple[int, float], tuple[int, ...], _Mixture]
"""The rank of what was chosen, the choice and the mixture that it is."""


def choose_on_host(
    model: ChunkModel,
    limit: int,
    host_limit: int,
    lookahead: int,
    budget: float = 4.0,
    flips: int = FLIPS,
) -> HostChoice | None:
    """The quickest choice that was found within both limits in so many seconds; None if none is.
    `flips` single changes are tried after the mixtures."""
    return _MixtureSearch(model, limit, host_limit, lookahead, budget).best(flips)


def lowest_on_host(model: ChunkModel, lookahead: int) -> HostChoice:
    """The choice with the lowest peak of those in which all units do the same."""
    several: dict[tuple[int, ...], None] = {}
    for away in (False, True):
        for option in (1, 2):
            several[tuple(_option_of(unit, option, away) for unit in model.units)] = None
    outcomes = {choice: model.of(choice, lookahead) for choice in several}
    choice = min(outcomes, key=lambda one: (outcomes[one].peak, outcomes[one].seconds))
    return HostChoice(choice, outcomes[choice], len(outcomes))


def _option_of(unit: HostUnit, option: int, away: bool) -> int:
    """What a unit does if all activations are offloaded or none, and all state has this option."""
    last = len(unit.options) - 1
    return (last if away else 0) if unit.options[-1].name == OFFLOADED else min(option, last)


class _MixtureSearch:
    def __init__(
        self, model: ChunkModel, limit: int, host_limit: int, lookahead: int, budget: float
    ) -> None:
        self.model, self.limit, self.host_limit = model, limit, host_limit
        self.lookahead, self.ends = lookahead, work_seconds() + budget
        self.known: dict[tuple[int, ...], ChunkOutcome] = {}
        self.fitting: dict[tuple[int, ...], bool] = {}
        order = sorted(range(len(model.units)), key=lambda k: model.units[k].place)
        away = [k for k in order if model.units[k].options[-1].name == OFFLOADED]
        self.activations = away
        self.states = [k for k in order if k not in set(away)]

    def best(self, flips: int) -> HostChoice | None:
        nothing = (0,) * len(self.model.units)
        if self._fits(nothing):
            return self._found(nothing)
        mixed = self._mixtures()
        if mixed is None:
            return None
        return self._found(self._flipped(mixed, flips))

    def _found(self, choice: tuple[int, ...]) -> HostChoice:
        return HostChoice(choice, self._tried(choice), len(self.known))

    def _tried(self, choice: tuple[int, ...]) -> ChunkOutcome:
        if choice not in self.known:
            self.known[choice] = self.model.of(choice, self.lookahead)
        return self.known[choice]

    def _fits(self, choice: tuple[int, ...]) -> bool:
        if choice not in self.fitting:
            peak, host = self.model.bytes_of(choice, self.lookahead)
            self.fitting[choice] = peak <= self.limit and host <= self.host_limit
        return self.fitting[choice]

    def _over(self) -> bool:
        return work_seconds() > self.ends

    # Mixtures

    def _mixtures(self) -> tuple[int, ...] | None:
        best: _RankedChoice | None = None
        for mixture in self._coarse():
            if best is not None and self._over():
                break
            best = self._better(best, mixture)
        for change in FINER if best is not None else ():
            assert best is not None
            middle = best[2]
            share = min(max(middle.host + change, 0.0), 1.0)
            best = self._better(best, _Mixture(share, middle.away, middle.first))
        return None if best is None else best[1]

    def _coarse(self) -> Iterator[_Mixture]:
        for away in OFFLOADS if self.activations else (0.0,):
            for host in self._shares():
                for first in (False, True):
                    yield _Mixture(host, away, first)

    def _shares(self) -> Sequence[float]:
        """Shares of units that are updated on the host: all or none where there is no choice."""
        several = any(len(self.model.units[k].options) > 2 for k in self.states)
        return SHARES if several else (0.0,)

    def _better(self, best: _RankedChoice | None, mixture: _Mixture) -> _RankedChoice | None:
        choice = self._mixed(mixture)
        if choice is None:
            return best
        rank = self._tried(choice).rank
        return (rank, choice, mixture) if best is None or rank < best[0] else best

    def _mixed(self, mixture: _Mixture) -> tuple[int, ...] | None:
        """The choice of a mixture with as many units on the device as fit; None if none does."""
        low, high = -1, len(self.states)  # so many fit, so many do not; all do not
        while high - low > 1:
            middle = (low + high) // 2
            choice = self._with_residents(mixture, middle)
            low, high = (middle, high) if self._fits(choice) else (low, middle)
        return None if low < 0 else self._with_residents(mixture, low)

    def _with_residents(self, mixture: _Mixture, residents: int) -> tuple[int, ...]:
        choice = [0] * len(self.model.units)
        count = len(self.states)
        stays = [k < residents for k in range(count)]
        if not mixture.first:
            stays = _spread(count, residents / count if count else 0.0)
        others = [unit for unit, here in zip(self.states, stays, strict=True) if not here]
        on_host = _spread(len(others), mixture.host)
        for unit, host in zip(others, on_host, strict=True):
            last = len(self.model.units[unit].options) - 1
            choice[unit] = 1 if host else last
        gone = _spread(len(self.activations), mixture.away)
        for unit, away in zip(self.activations, gone, strict=True):
            choice[unit] = int(away)
        return tuple(choice)

    # Single changes

    def _flipped(self, choice: tuple[int, ...], flips: int) -> tuple[int, ...]:
        rng, best = Random(0), self._tried(choice)
        for _ in range(flips):
            if self._over():
                break
            change = self._changed(choice, rng)
            if not self._fits(change):
                continue
            found = self._tried(change)
            if found.rank < best.rank:
                choice, best = change, found
        return choice

    def _changed(self, choice: tuple[int, ...], rng: Random) -> tuple[int, ...]:
        """Another option for one unit, or those of two units exchanged."""
        units, changed = self.model.units, list(choice)
        unit, other = rng.randrange(len(units)), rng.randrange(len(units))
        if rng.random() < 0.5 and len(units[unit].options) == len(units[other].options):
            changed[unit], changed[other] = changed[other], changed[unit]
        else:
            changed[unit] = rng.randrange(len(units[unit].options))
        return tuple(changed)


def _spread(count: int, share: float) -> list[bool]:
    """Which of so many, evenly spread, are this share of them."""
    return [int((k + 1) * share + 1e-9) > int(k * share + 1e-9) for k in range(count)]
