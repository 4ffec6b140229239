"""Metropolis-Hastings: where it stays, and what it depends on."""

from __future__ import annotations

import math
from random import Random

import pytest

from apportion.search.walks import metropolis
from apportion.search.walks.metropolis import Chain


class Ring:
    """States on a ring, of given costs; a proposal is a neighbour."""

    def __init__(self, costs: list[float], lazy: bool = False) -> None:
        self.costs, self.at, self.new, self.noted = costs, 0, 0, 0
        self.lazy = lazy  # costs above the limit are not worked out
        self.visits = [0] * len(costs)

    @property
    def cost(self) -> float:
        return self.costs[self.at]

    @property
    def units(self) -> int:
        return len(self.costs)

    def change(self, rng: Random, limit: float) -> float | None:
        self.visits[self.at] += 1
        self.new = (self.at + rng.choice((-1, 1))) % len(self.costs)
        cost = self.costs[self.new]
        return limit * 2 + 1 if self.lazy and cost > limit else cost

    def keep(self) -> None:
        self.at = self.new

    def undo(self) -> None:
        pass

    def note(self) -> None:
        self.noted = self.at

    def back(self) -> float:
        self.at = self.noted
        return self.cost

    def scatter(self, rng: Random) -> None:
        self.at = rng.randrange(len(self.costs))


COSTS = [1.0, 1.3, 1.1, 1.6, 1.2]


def test_states_are_visited_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metropolis, "SHORTEST", math.inf)
    ring = Ring(COSTS)
    chain = Chain(ring, Random(0), (1.0,))
    temperature = COSTS[0] / len(COSTS)
    for _ in range(200_000):
        chain.step()
    weights = [math.exp(-cost / temperature) for cost in COSTS]
    for visits, weight in zip(ring.visits, weights, strict=True):
        assert visits / 200_000 == pytest.approx(weight / sum(weights), rel=0.05)


def test_costs_above_the_limit_need_not_be_known() -> None:
    exact, lazy = (Chain(Ring(COSTS, way), Random(3)) for way in (False, True))
    for _ in range(5_000):
        assert exact.step() == lazy.step()
        assert exact.walk.cost == lazy.walk.cost
    assert exact.accepted == lazy.accepted > 0


def test_more_proposals_are_never_worse_and_begin_alike() -> None:
    costs = [Random(k).random() + 1 for k in range(200)]
    best: list[float] = []
    for many in (10, 100, 1_000, 10_000):
        chain = Chain(Ring(costs), Random(5))
        for _ in range(many):
            chain.step()
        best.append(chain.best)
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]


def test_a_run_ends_when_its_second_half_brought_nothing() -> None:
    ring = Ring([1.0, 2.0, 2.0, 2.0])
    chain = Chain(ring, Random(0))
    for _ in range(metropolis.SHORTEST):
        assert chain.runs == 0
        chain.step()
    assert (chain.runs, ring.at, chain.over) == (1, 0, False)
    while not chain.over:
        chain.step()
    assert chain.runs >= metropolis.FRUITLESS
    assert chain.best == 1.0
