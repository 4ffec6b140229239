"""What choosing keeps beside the best: the next best, the curve, and what later searches begin
with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from graphs import captured
from method_rows import Searches, only

import apportion as ap
from apportion.plan import auto
from apportion.plan.auto import Selection
from apportion.plan.candidate import Curve
from apportion.plan.candidates import DefaultCosts, PlanRequest, ranking_key
from apportion.plan.make_plan import make_plan
from apportion.search import METHODS, Problem, SearchResult, tried_by_auto
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.baselines.random_strategy import random
from apportion.search.baselines.single import single
from apportion.split.space import Space
from apportion.split.strategy import Strategy

Search = Callable[..., SearchResult]


@pytest.fixture
def searches() -> Iterator[Searches]:
    """METHODS with data and fsdp alone, to be added to."""
    with only("data", "fsdp") as found:
        yield found


@pytest.fixture
def without_flexflow() -> Iterator[None]:
    """Which takes all the time that there is. The order of METHODS is the same afterwards."""
    with only(*(name for name in METHODS if name != "flexflow")):
        yield


def request(limit: float = math.inf) -> PlanRequest:
    place = ap.cluster("2xa100")
    limits = None if math.isinf(limit) else (int(limit),) * 2
    return PlanRequest(Space(captured("mlp:tiny")[0].graph), place, DefaultCosts(place), limits)


def steps(chosen: Selection) -> list[float]:
    return [c.timeline.step_seconds for c in (chosen.best, *chosen.others)]


def several(problem: Problem, *, budget: float, seed: int) -> SearchResult:
    """Data parallelism; it has seen five others, one of which is the same."""
    drawn = [random(problem, seed=k).strategy for k in range(4)]
    others = tuple((strategy, None) for strategy in (data(problem).strategy, *drawn))
    return replace(data(problem), others=others)


# The next best


@pytest.mark.slow
@pytest.mark.usefixtures("without_flexflow")
def test_auto_keeps_the_best_that_differ() -> None:
    chosen = auto.choose(request(), "auto", 30.0, keep=3)
    found = (chosen.best, *chosen.others)
    assert len(found) == 3 and steps(chosen) == sorted(steps(chosen))
    assert chosen.best.found.strategy == auto.choose(request(), "auto", 30.0).best.found.strategy
    assert not any(auto._same(a.tasks, b.tasks) for a in found for b in found if a is not b)
    assert len({c.search_seconds for c in found}) == len({c.curve for c in found}) == 1
    assert all(f"auto took {c.method} of " in c.notes[-1] for c in found)


@pytest.mark.slow
def test_the_others_of_a_search_are_scored_and_ranked(searches: Searches) -> None:
    searches["several"] = several
    everything = auto.choose(request(), "several", 1.0, keep=9)
    assert len(everything.others) == 4 and steps(everything) == sorted(steps(everything))
    two = auto.choose(request(), "several", 1.0, keep=2)
    assert len(two.others) == 1 and two.others[0].method == "several"
    assert auto.choose(request(), "several", 1.0).others == ()


@pytest.mark.slow
def test_others_count_though_the_best_was_known(searches: Searches) -> None:
    """What tofu finds first data has found before it."""
    searches["tofu"] = several
    chosen = auto.choose(request(), "auto", 30.0, keep=9)
    assert sorted(c.method for c in chosen.others) == ["fsdp", "tofu", "tofu", "tofu", "tofu"]


@pytest.mark.slow
def test_others_that_do_not_fit_are_not_kept(searches: Searches) -> None:
    searches["several"] = several
    found = auto.choose(request(), "several", 1.0, keep=9)
    peaks = [max(c.timeline.peak_bytes) for c in (found.best, *found.others)]
    limit = sorted(peaks)[2]
    chosen = auto.choose(request(limit), "several", 0.0, keep=9)
    kept = [max(c.timeline.peak_bytes) for c in (chosen.best, *chosen.others)]
    assert kept and max(kept) <= limit and len(kept) == sum(p <= limit for p in peaks)


def test_equal_tasks_are_one_plan(searches: Searches) -> None:
    """Of a Space of another object, and so another Strategy object."""

    def twice(problem: Problem, **how: Any) -> SearchResult:
        found = data(problem)
        return replace(found, others=((replace(found.strategy), Space(problem.space.source)),))

    searches["twice"] = twice
    assert auto.choose(request(), "twice", 1.0, keep=2).others == ()
    one, two = (auto.choose(request(), name, 1.0).best.tasks for name in ("data", "fsdp"))
    assert auto._same(one, one) and not auto._same(one, two)


# The memory limit


def test_a_search_that_is_over_and_has_no_time_left_offers_its_others(
    searches: Searches,
) -> None:
    asked: list[float] = []

    def spent(problem: Problem, *, budget: float, seed: int) -> SearchResult:
        asked.append(budget)
        lean = (fsdp(problem).strategy, fsdp(problem).space)
        return replace(single(problem), others=(lean,))

    searches["spent"] = spent
    graph, place = captured("mlp:tiny")[0].graph, ap.cluster("2xa100")
    high, low = (max(make_plan(graph, place, m).predicted.peak_bytes) for m in ("spent", "fsdp"))
    asked.clear()
    plan = make_plan(graph, place, "spent", budget=0.0, memory_limit=(high + low) // 2)
    assert plan.feasible and max(plan.predicted.peak_bytes) == low and len(asked) == 1
    assert plan.method == "spent"


# What later searches begin with


def test_the_last_search_begins_with_the_best_so_far(searches: Searches) -> None:
    given: list[tuple[tuple[Strategy, Space], ...]] = []
    budgets: list[float] = []

    def begun(
        problem: Problem, *, budget: float, seed: int, starts: tuple[tuple[Strategy, Space], ...]
    ) -> SearchResult:
        given.append(starts)
        budgets.append(budget)
        strategy, space = starts[-1]
        return SearchResult(strategy, space=space, figures={"proposals": 7})

    searches["flexflow"] = begun
    assert tried_by_auto()[-1] == "flexflow"
    chosen = auto.choose(request(), "auto", 30.0)
    (starts,) = given
    alone = [auto.choose(request(), name, 1.0).best for name in ("data", "fsdp")]
    alone.sort(key=lambda c: ranking_key(request(), c))
    assert [strategy for strategy, _ in starts] == [c.found.strategy for c in alone]
    assert 0 < budgets[0] <= 30.0
    assert chosen.best.figures == {"proposals": 7}  # though it found nothing new
    assert chosen.best.notes[-1].endswith("of data, fsdp, flexflow")
    auto.choose(request(), "auto", 0.0)
    assert len(given) == 1


def test_a_search_that_was_interrupted_is_the_last(searches: Searches) -> None:
    def ended(problem: Problem, **how: Any) -> SearchResult:
        return replace(data(problem), interrupted=True)

    searches["data"] = ended
    chosen = auto.choose(request(), "auto", 30.0)
    assert chosen.interrupted and chosen.best.method == "data"
    assert "interrupted: this is the best so far" in chosen.best.notes


# The curve


def scored(began: float, seconds: float, curve: Curve, step: float | None) -> Any:
    return auto._SearchOutcome(began, seconds, curve, step)


def test_the_curve_has_what_improved() -> None:
    own = ((0.5, 4.0), (1.0, 2.0), (2.0, 1.0))
    assert auto.improvements([scored(0.0, 3.0, own, 1.0)]) == own
    several = [
        scored(0.0, 1.0, (), 3.0),
        scored(1.0, 1.0, (), 5.0),
        scored(2.0, 1.0, (), None),
        scored(3.0, 3.0, own, 1.0),
        scored(6.0, 1.0, (), 1.0),
    ]
    assert auto.improvements(several) == ((1.0, 3.0), (4.0, 2.0), (5.0, 1.0))


def test_a_curve_of_other_costs_ends_at_what_was_scored() -> None:
    found = auto.improvements([scored(10.0, 3.0, ((0.5, 4.0), (1.0, 2.0)), 3.0)])
    assert found == ((10.5, 6.0), (11.0, 3.0))


def test_a_plan_has_the_curve_of_its_search(searches: Searches) -> None:
    def curved(problem: Problem, **how: Any) -> SearchResult:
        return replace(data(problem), curve=((0.25, 2.0), (0.5, 1.0)), figures={"proposals": 3.0})

    graph, place = captured("mlp:tiny")[0].graph, ap.cluster("2xa100")
    searches["curved"] = curved
    plan = make_plan(graph, place, "curved")
    step = plan.predicted.step_seconds
    assert plan.curve == ((0.25, 2 * step), (0.5, step)) and plan.figures == {"proposals": 3.0}
    auto = make_plan(graph, place)
    seconds = [cost for _, cost in auto.curve]
    assert seconds == sorted(set(seconds), reverse=True)
    assert seconds[-1] == auto.predicted.step_seconds
    assert auto.curve[-1][0] <= auto.search_seconds
