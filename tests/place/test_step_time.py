"""The time of a step, interpreted and compiled, against the rules read one by one."""

from __future__ import annotations

import numpy as np
import pytest
from made_problems import made_problem
from plain_step import plain_peaks, plain_step

from apportion.place.objective import StepObjective
from apportion.place.placement_problem import PlacementProblem
from apportion.place.step_time import (
    NO_LIMIT,
    simulate_step,
    step_scratch,
    step_tables,
    step_ticks,
    worst_ticks,
)


def drawn(seed: int) -> tuple[PlacementProblem, np.ndarray]:
    rng = np.random.default_rng(seed)
    nodes, devices = int(rng.integers(1, 25)), int(rng.integers(1, 5))
    problem = made_problem(rng, nodes, devices, units=int(rng.integers(1, nodes + 1)))
    return problem, rng.integers(0, devices, problem.units)


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_a_step_follows_the_rules(seed: int) -> None:
    for k in range(seed, seed + 50):
        problem, place = drawn(k)
        done, told = simulate_step(problem, place), plain_step(problem, place.tolist())
        assert done.ticks == told.finish, k
        assert done.start.tolist() == told.start
        assert done.end.tolist() == told.end
        assert done.peak_bytes.tolist() == plain_peaks(told)
        assert done.ticks < worst_ticks(problem)


def test_an_evaluation_that_ends_early_is_above_its_limit() -> None:
    early = 0
    for k in range(150):
        problem, place = drawn(k)
        tables, scratch = step_tables(problem), step_scratch(problem)
        c, links = problem.columns, problem.links
        ticks = step_ticks(c, links, tables, scratch, place, NO_LIMIT)
        for most in (0, ticks // 2, ticks - 1, ticks, ticks + 1):
            told = step_ticks(c, links, tables, scratch, place, most)
            assert (told == ticks) if ticks <= most else most < told <= ticks
            early += told > most and scratch.sizes[2] < len(c.unit)
    assert early > 100


def test_a_score_is_penalised_by_the_share_over_the_limit() -> None:
    rng = np.random.default_rng(5)
    problem = made_problem(rng, 12, 2, limit=60)
    objective = StepObjective(problem)
    scores, over = [], []
    for _ in range(60):
        place = rng.integers(0, 2, 12)
        told = objective.evaluate(place)
        scores.append(objective.score(place))
        over.append(max(0, int(told.memory.max()) - 60))
        assert told.feasible == (over[-1] == 0)
        assert (scores[-1] == told.value) == told.feasible
    fit = [s for s, o in zip(scores, over, strict=True) if o == 0]
    far = [(o, s) for s, o in zip(scores, over, strict=True) if o > 0]
    assert max(fit) < min(s for _, s in far)
    assert objective.evaluations == 120
    assert min(far)[1] < max(far)[1]


def test_what_is_no_placement_is_told() -> None:
    problem, place = drawn(3)
    with pytest.raises(ValueError, match="does not give each of"):
        simulate_step(problem, place[:-1])
    with pytest.raises(ValueError, match="does not give each of"):
        simulate_step(problem, place + 9)
