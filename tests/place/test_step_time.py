"""The time of a step, interpreted and compiled, against the rules read one by one."""

from __future__ import annotations

import numpy as np
import pytest
from made_problems import made_problem
from plain_step import plain_peaks, plain_step

from apportion.place.imports.imported import free_links
from apportion.place.objective import StepObjective
from apportion.place.objectives.step_time import (
    NO_LIMIT,
    find_peaks,
    simulate_step,
    step_scratch,
    step_tables,
    step_ticks,
    worst_ticks,
)
from apportion.place.placement_problem import PlacementProblem


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


def test_dopplers_rule_is_first_come_first_served_without_contention() -> None:
    """A node runs when its inputs have come and its device is free; an output takes its own time to
    wherever it goes, whatever else is sent."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = made_problem(rng, 20, 3, links=free_links(3))
        place = rng.integers(0, 3, 20)
        done, c = simulate_step(problem, place), problem.columns
        came = [0.0] * 20
        free, end, left = [0.0] * 3, [-1.0] * 20, set(range(20))
        while left:
            able = [v for v in left if all(end[c.source[o]] >= 0 for o in inputs(problem, v))]
            for v in able:
                came[v] = max(
                    [0.0]
                    + [
                        end[c.source[o]] + (place[c.source[o]] != place[v]) * c.send[o]
                        for o in inputs(problem, v)
                    ]
                )
            first = min(able, key=lambda v: (came[v], v))
            left.remove(first)
            begin = max(came[first], free[place[first]])
            end[first] = free[place[first]] = begin + c.duration[first, place[first]]
        assert done.end.tolist() == end


def inputs(problem: PlacementProblem, node: int) -> list[int]:
    c = problem.columns
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    return outputs[c.reader == node].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_compiled_and_interpreted_steps_are_equal() -> None:
    for seed in range(100):
        problem, place = drawn(seed)
        tables, scratch = step_tables(problem), step_scratch(problem)
        given = (problem.columns, problem.links, tables, scratch)
        plain = step_ticks.function(*given, place, NO_LIMIT)
        find_peaks.function(*given[:2], scratch)
        kept = [scratch.start.copy(), scratch.end.copy(), scratch.peaks.copy()]
        assert step_ticks.dispatcher(*given, place, NO_LIMIT) == plain
        find_peaks.dispatcher(*given[:2], scratch)
        for one, other in zip(kept, (scratch.start, scratch.end, scratch.peaks), strict=True):
            assert np.array_equal(one, other)


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
