"""auto: the order, the budget, and never worse than what it tried."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from made_lists import problem
from placement_scale import layered

from apportion.place.auto_place import auto, auto_rows
from apportion.place.objective import PlacementResult, PlacerProgress, StepObjective
from apportion.place.objectives.simple_bound import simple_bound
from apportion.place.placers import PLACERS, Placer


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Placer]]:
    """Only the rows that a test puts there."""
    mine: dict[str, Placer] = {}
    monkeypatch.setattr("apportion.place.auto_place.PLACERS", mine)
    yield mine


def fixed(place: np.ndarray, told: list[dict[str, object]], **result: object):  # type: ignore[no-untyped-def]
    def placer(objective, **given):  # type: ignore[no-untyped-def]
        told.append(given)
        return PlacementResult(place, **result)

    return placer


@pytest.mark.slow
def test_never_worse_than_any_that_it_tried(rows: dict[str, Placer]) -> None:
    rows.update({name: PLACERS[name] for name, row in PLACERS.items() if row.share < 0.5})
    it = layered(60, 3, width=6, tight=1.4, live=1)
    objective = StepObjective(it)
    seen: list[PlacerProgress] = []
    result = auto(objective, budget=1e6, report=seen.append)
    best = objective.score(result.placement)
    assert best == min(result.figures.values())
    assert {"single", "expert", "blocks", "m-topo", "list-schedule", "m-etf"} <= set(result.figures)
    for name in ("single", "expert", "list-schedule"):
        alone = PLACERS[name](StepObjective(it), budget=1e6).placement
        assert best <= objective.score(alone)
    told = [p.best for p in seen if p.best is not None]
    assert told[-1] == best
    assert told == sorted(told, reverse=True)


def test_rows_are_tried_by_number_with_what_was_found_and_what_time_is_left(
    rows: dict[str, Placer],
) -> None:
    it = layered(20, 2, width=4, tight=None)
    one, two = np.zeros(it.units, int), np.arange(it.units) % 2
    told: list[dict[str, object]] = []
    rows["late"] = Placer(fixed(two, told), "", auto=2, share=3.0)
    rows["early"] = Placer(fixed(one, told), "", auto=1, share=1.0)
    rows["never"] = Placer(fixed(one, told), "")
    rows["other"] = Placer(fixed(one, told), "", auto=0, objectives=("latency",))
    objective = StepObjective(it)
    result = auto(objective, budget=8.0, seed=5)
    assert [name for name, _ in auto_rows(objective, False)] == ["early", "late"]
    assert len(told) == 2
    assert told[0]["budget"] == pytest.approx(2.0, abs=0.2)
    assert told[1]["budget"] == pytest.approx(8.0, abs=0.5)
    assert told[0]["seed"] == 5
    assert [s.tolist() for s in told[1]["starts"]] == [one.tolist()]  # type: ignore[attr-defined]
    assert objective.score(result.placement) == min(map(objective.score, (one, two)))


def test_given_starts_count(rows: dict[str, Placer]) -> None:
    it = layered(20, 2, width=4, tight=None)
    objective, told = StepObjective(it), []
    good = PLACERS["list-schedule"](objective).placement
    rows["bad"] = Placer(fixed(np.zeros(it.units, int), told), "", auto=1)
    result = auto(objective, starts=[good])
    np.testing.assert_array_equal(result.placement, good)
    assert result.notes[0] == "the best is by what it was given"
    with pytest.raises(ValueError, match="does not give each"):
        auto(objective, starts=[good[:-1]])


def test_a_placer_that_does_not_suit_is_left_out(rows: dict[str, Placer]) -> None:
    def fails(objective, **given):  # type: ignore[no-untyped-def]
        raise ValueError("too large")

    objective, told = StepObjective(layered(20, 2, width=4, tight=None)), []
    rows["fails"] = Placer(fails, "", auto=1)
    with pytest.raises(ValueError, match="no placer could place this problem: fails was left out"):
        auto(objective)
    rows["works"] = Placer(fixed(np.zeros(10, int), told), "", auto=2)
    assert "fails was left out: too large" in auto(objective).notes


def test_an_interrupt_returns_the_best_so_far(rows: dict[str, Placer]) -> None:
    def stopped(objective, **given):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt

    objective, told = StepObjective(layered(20, 2, width=4, tight=None)), []
    rows["stopped"] = Placer(stopped, "", auto=2)
    with pytest.raises(KeyboardInterrupt):
        auto(objective)
    rows["works"] = Placer(fixed(np.zeros(10, int), told), "", auto=1)
    result = auto(objective)
    assert result.interrupted
    assert result.placement.tolist() == [0] * 10


def test_bounds_hold_among_what_was_asked_for(rows: dict[str, Placer]) -> None:
    objective, told = StepObjective(layered(20, 2, width=4, tight=None)), []
    place = np.zeros(10, int)
    proven = objective.score(place)
    simple = simple_bound(objective.problem, "step")
    rows["contiguous"] = Placer(
        fixed(place, told, lower_bound=proven), "", auto=1, contiguous=True, only_contiguous=True
    )
    rows["second"] = Placer(fixed(place, told, lower_bound=simple + 1), "", auto=2, contiguous=True)
    rows["third"] = Placer(fixed(place, told), "", auto=3)
    assert auto(objective).lower_bound == simple + 1 < proven
    assert len(told) == 3
    assert auto(objective, contiguous=True).lower_bound == proven  # and the second is not tried
    assert len(told) == 4


def test_nothing_is_tried_after_what_cannot_be_beaten(rows: dict[str, Placer]) -> None:
    it = problem([3, 4], [(0, 1)], [5, 0])  # one after the other: 7 at best
    objective, told = StepObjective(it), []
    rows["first"] = Placer(fixed(np.array([0, 1]), told), "", auto=1)
    rows["second"] = Placer(fixed(np.array([1, 1]), told), "", auto=2)
    rows["third"] = Placer(fixed(np.array([0, 0]), told), "", auto=3)
    result = auto(objective)
    assert result.lower_bound == objective.score(result.placement) == 7
    assert len(told) == 2
