"""Placing by the name of a method: what is judged, which bound holds, what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from placement_graphs import DATA, FIDDLE_GRAPH

from apportion.columns import Ints
from apportion.place.imports.fiddle import read_fiddle
from apportion.place.imports.imported import imported_problem
from apportion.place.imports.read_graph import read_graph
from apportion.place.objective import Evaluation, PlacementObjective, PlacementResult, StepObjective
from apportion.place.objectives.max_load import is_contiguous
from apportion.place.placement_problem import PlacementProblem
from apportion.place.placers import PLACERS, Placer, placers_help
from apportion.place.run_placer import objective_of, place, with_memory_limit


@pytest.fixture
def small() -> PlacementProblem:
    return imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"))


def fixed(devices: list[int], bound: float | None, **row: Any) -> Placer:
    """A placer that knows its answer."""

    def answer(objective: PlacementObjective, **how: Any) -> PlacementResult:
        objective.evaluations += 7
        return PlacementResult(np.array(devices, np.int64), bound)

    return Placer(answer, "always the same", **row)


def test_what_a_placer_finds_is_judged_by_the_objective(
    small: PlacementProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACERS, "fixed", fixed([2, 2], 6.5))
    found = place(small, "step", "fixed")
    assert found.evaluation.value == StepObjective(small).score(np.array([2, 2])) == 42.0
    assert found.lower_bound == 6.5 and found.evaluations == 7
    assert found.single.value == 6.75  # an accelerator, and node 3 where alone it can run


def test_a_bound_among_contiguous_placements_holds_among_those(
    small: PlacementProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = fixed([0, 2], 5.0, contiguous=True, only_contiguous=True)
    monkeypatch.setitem(PLACERS, "fixed", row)
    assert place(small, "throughput", "fixed", contiguous=True).lower_bound == 5.0
    assert place(small, "throughput", "fixed").lower_bound == 4.0  # the class of 7 and 9


def test_a_judge_has_the_last_word_on_a_step(
    small: PlacementProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLACERS, "fixed", fixed([2, 2], 6.5))

    def judge(problem: PlacementProblem, placement: Ints) -> Evaluation:
        return Evaluation(100.0 + placement.sum(), np.zeros(3), np.zeros(3, np.int64), True)

    found = place(small, "step", "fixed", judge=judge)
    assert (found.evaluation.value, found.single.value) == (104.0, 102.0)
    assert found.lower_bound < 6.5  # the method's bound is of another simulator
    assert place(small, "throughput", "fixed", judge=judge).evaluation.value < 100


def test_a_method_is_asked_again_where_the_judge_finds_too_much(
    small: PlacementProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def answer(objective: PlacementObjective, **how: Any) -> PlacementResult:
        objective.evaluations += 1
        limit = objective.problem.devices[0].memory_bytes
        asked.append(limit)
        return PlacementResult(np.array([0 if limit == 100 else 2, 2], np.int64))

    def judge(problem: PlacementProblem, placement: Ints) -> Evaluation:
        held = np.array([130 if placement[0] == 0 else 0, 0, 9])
        return Evaluation(8.0, np.zeros(3), held, bool((held <= problem.limit).all()))

    monkeypatch.setitem(PLACERS, "fixed", Placer(answer, "by the limit"))
    found = place(small, "step", "fixed", judge=judge)
    assert asked == [100, 70] and found.evaluation.feasible and found.evaluations == 2
    assert found.result.placement.tolist() == [2, 2] and found.problem is small
    del asked[:]
    assert not place(small, "step", "fixed", budget=0.0, judge=judge).evaluation.feasible
    assert asked == [100]


def test_contiguous_placements_are_contiguous() -> None:
    path = DATA / "throughput-inputs/LayerGraphs/bert24_inference.json"
    problem = imported_problem(read_graph(path))
    found = place(problem, "throughput", "blocks", contiguous=True)
    assert found.evaluation.feasible and is_contiguous(problem, found.result.placement)
    shuffled = np.arange(problem.units) % 6
    assert not objective_of(problem, "throughput", contiguous=True).evaluate(shuffled).feasible
    assert objective_of(problem, "throughput").evaluate(shuffled).feasible


def test_a_memory_limit_is_for_devices_that_have_one(small: PlacementProblem) -> None:
    limited = with_memory_limit(small, 70)
    assert [device.memory_bytes for device in limited.devices] == [70, 70, None]
    free = with_memory_limit(small, float("inf"))
    assert [device.memory_bytes for device in free.devices] == [None, None, None]


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        (("step", "magic"), "unknown method 'magic'; known: .*single"),
        (("beauty", "single"), "unknown objective 'beauty'; known: step, throughput, latency"),
        (("throughput", "limited"), "limited is for the objective step or latency, not throughput"),
        (("step", "single", 1.0, 0, True), "contiguous placements are for .* throughput"),
        (
            ("throughput", "loose", 1.0, 0, True),
            "loose cannot keep .* contiguous; .*blocks",
        ),
        (("step", "expert"), "no expert's placement"),
        (("step", "wrong"), "does not give each of 2 units"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    how: tuple[Any, ...],
    complaint: str,
    small: PlacementProblem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = fixed([0, 2], None, objectives=("step", "latency"))
    monkeypatch.setitem(PLACERS, "limited", row)
    monkeypatch.setitem(PLACERS, "loose", fixed([0, 2], None))
    monkeypatch.setitem(PLACERS, "wrong", fixed([0, 9], None))
    with pytest.raises(ValueError, match=complaint):
        place(small, *how)


def test_the_help_has_every_placer() -> None:
    assert [line.split(":")[0] for line in placers_help().split("\n\n")] == list(PLACERS)
