"""Searches on the time of a step: the optimum of tiny problems, limits, seeds and starts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from made_problems import all_placements, best_score, made_problem
from rings import sampled

from apportion.place.objective import PlacementResult, StepObjective
from apportion.place.searches.annealing import annealing
from apportion.place.searches.brkga import brkga
from apportion.place.searches.local_search import SHARES, local_search
from apportion.place.searches.random_placement import random_placement
from apportion.place.searches.restarts import restarts
from apportion.place.searches.step_search import (
    EVALUATIONS,
    enter,
    neighbourhood,
    search_state,
    walk,
)

SEARCHES: dict[str, Callable[..., PlacementResult]] = {
    "local-search": local_search,
    "restarts": restarts,
    "annealing": annealing,
    "brkga": brkga,
    "random": random_placement,
}

every = pytest.mark.parametrize("name", SEARCHES)


@every
@pytest.mark.parametrize("seed", sampled(range(4), 4))
def test_the_optimum_of_tiny_problems_is_found(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = made_problem(rng, 8, 2, units=5, restricted=True)
    objective = StepObjective(problem)
    least = best_score(objective)
    found = SEARCHES[name](objective, seed=seed, evaluations=150)
    assert objective.score(found.placement) == least
    assert problem.columns.allowed[np.arange(5), found.placement].all()


@every
def test_a_memory_limit_is_kept_where_that_can_be(name: str) -> None:
    rng = np.random.default_rng(3)
    objective = StepObjective(made_problem(rng, 8, 2, units=6, limit=20))
    fits = [objective.evaluate(place).feasible for place in all_placements(objective.problem)]
    assert 0 < sum(fits) < len(fits) / 3
    assert not objective.evaluate(np.zeros(6, np.int64)).feasible
    found = SEARCHES[name](objective, seed=1, evaluations=600)
    assert objective.evaluate(found.placement).feasible


@every
def test_the_seed_decides(name: str) -> None:
    objective = StepObjective(made_problem(np.random.default_rng(4), 30, 3))
    one, same, other = (
        SEARCHES[name](objective, seed=seed, evaluations=60) for seed in (5, 5, 6)
    )  # fmt: skip
    assert one.placement.tolist() == same.placement.tolist()
    assert [row[1:] for row in one.curve] == [row[1:] for row in same.curve]
    assert one.placement.tolist() != other.placement.tolist()


@every
def test_it_is_never_worse_than_its_starts(name: str) -> None:
    rng = np.random.default_rng(6)
    objective = StepObjective(made_problem(rng, 30, 3))
    starts = [rng.integers(0, 3, 30) for _ in range(4)]
    least = min(objective.score(start) for start in starts)
    before = objective.evaluations
    few = SEARCHES[name](objective, starts=starts, evaluations=4)
    assert objective.score(few.placement) <= least
    assert objective.evaluations == before + 4 + 1
    more = SEARCHES[name](objective, starts=starts, evaluations=100)
    assert objective.score(more.placement) < least
    assert more.curve[-1][2] == objective.score(more.placement)
    assert [row[2] for row in more.curve] == sorted({row[2] for row in more.curve}, reverse=True)


@pytest.mark.slow
@every
def test_one_device_is_enough(name: str) -> None:
    objective = StepObjective(made_problem(np.random.default_rng(7), 5, 1))
    found = SEARCHES[name](objective, budget=0.2)
    assert found.placement.tolist() == [0] * 5


@every
def test_ctrl_c_keeps_the_best(name: str) -> None:
    objective = StepObjective(made_problem(np.random.default_rng(8), 12, 3))
    calls = []

    def stop(progress: object) -> None:
        calls.append(progress)
        if len(calls) == 3:
            raise KeyboardInterrupt

    found = SEARCHES[name](objective, evaluations=10**6, report=stop)
    assert found.interrupted
    assert objective.score(found.placement) == found.curve[-1][2]


@every
def test_a_start_that_is_no_placement_is_told(name: str) -> None:
    objective = StepObjective(made_problem(np.random.default_rng(9), 5, 2))
    with pytest.raises(ValueError, match="each of 5 units one of 2 devices"):
        SEARCHES[name](objective, starts=[np.full(5, 2)])


@pytest.mark.slow
def test_compiled_and_interpreted_walks_are_equal() -> None:
    for seed in range(6):
        problem = made_problem(np.random.default_rng(seed), 25, 3, units=12, restricted=True)
        objective = StepObjective(problem)
        g = neighbourhood(problem)
        kept = []
        for form in ("function", "dispatcher"):
            w = search_state(problem, seed)
            given = (problem.columns, problem.links, objective.tables, objective.scratch, g, w)
            getattr(enter, form)(*given, problem.columns.allowed.argmax(axis=1))
            getattr(walk, form)(*given, SHARES, 0.1, 400.0, 50, 300, 10_000)
            kept.append(w)
        for one, other in zip(*kept, strict=True):
            assert np.array_equal(one, other)
        assert kept[0].counts[EVALUATIONS] == 300
