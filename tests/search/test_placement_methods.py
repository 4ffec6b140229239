"""Placers as methods: whole operators, memory limits, refinement, and the expert's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from graphs import captured, problem

import apportion as ap
from apportion.cli import main as cli
from apportion.columns import Ints
from apportion.graph import FORWARD
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.place.objective import (
    PlacementObjective,
    PlacementResult,
    PlacerProgress,
    StepObjective,
)
from apportion.place.objective_names import STEP
from apportion.place.placers import PLACERS, Placer
from apportion.plan.make_plan import make_plan
from apportion.search import METHODS
from apportion.search.baselines.layer_placement import with_layers_as_expert
from apportion.search.placement import SETTLED, placement, placement_problem_of, strategy_of
from apportion.search.problem import Problem, SearchResult, UnsuitableMethod
from apportion.search.walks.unit_moves import UnitMoves
from apportion.simulate.simulate import simulate

ROWS = {name: row for name, row in METHODS.items() if row.search == "placement:placement"}
QUICK = [name for name in ROWS if name in ("blocks", "m-topo", "m-etf", "m-sct", "list-schedule")]


@contextmanager
def placer(name: str, place: Any, **row: Any) -> Iterator[None]:
    """A placer that exists only in a test."""
    kept = dict(PLACERS)
    PLACERS[name] = Placer(place, "a test's", **row)
    try:
        yield
    finally:
        PLACERS.clear()
        PLACERS.update(kept)


def _seconds(it: Problem, found: SearchResult) -> float:
    tasks = lower(it.space, found.strategy, it.devices)
    return simulate(tasks, it.cluster, it.cost).step_seconds


def _all_on(device: int) -> Any:
    def place(objective: PlacementObjective, **how: Any) -> PlacementResult:
        return PlacementResult(np.full(objective.problem.units, device))

    return place


def test_every_placer_for_steps_is_a_method() -> None:
    named = {row.options["placer"] for row in ROWS.values()}
    able = {name for name, row in PLACERS.items() if STEP in row.objectives}
    assert named <= able
    # The first three are methods without a placer; a step is too large to try everything.
    assert able - named <= {"single", "expert", "random", "exhaustive"}
    learns = {name for name, row in PLACERS.items() if row.learns}
    assert {row.options["placer"] for row in ROWS.values() if row.takes_policy} == learns


@pytest.mark.parametrize("method", QUICK)
def test_every_operator_is_whole_and_a_unit_is_in_one_place(method: str) -> None:
    it = problem(3, "mlp:tiny")
    found = METHODS[method](it, budget=1.0, seed=0)
    step = placement_problem_of(it)
    assert all(len(c.devices) == 1 and set(c.parts) <= {1} for c in found.strategy.choices)
    device = np.array([c.devices[0] for c in found.strategy.choices])
    unit = step.columns.unit[-len(device) :]
    for number in range(step.units):
        assert len(set(device[unit == number].tolist())) == 1
    assert _seconds(it, found) > 0


@pytest.mark.slow
def test_a_backward_operator_is_where_its_forward_operator_is() -> None:
    it = problem(2, "gnmt:tiny")
    step = placement_problem_of(it)
    place = np.arange(step.units) % 2
    choices = strategy_of(it, step, place).choices
    for op, choice in zip(it.space.graph.ops, choices, strict=True):
        if op.forward is not None:
            assert choice.devices == choices[op.forward].devices


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gnmt:tiny", "inception-v3:tiny"])
def test_the_fast_evaluator_is_near_the_simulator(spec: str) -> None:
    where = cluster("4xv100")
    it = Problem(captured(spec)[1], where, default_cost(where))
    step = placement_problem_of(it)
    for seed in range(3):
        place = np.random.default_rng(seed).integers(0, 4, step.units)
        tasks = lower(it.space, strategy_of(it, step, place), 4)
        line = simulate(tasks, it.cluster, it.cost)
        assert StepObjective(step).evaluate(place).value == pytest.approx(
            line.step_seconds, rel=0.1
        )


@pytest.mark.slow
def test_refining_is_never_worse_and_knows_what_it_did() -> None:
    where = cluster("placeto-k80:4")
    it = Problem(captured("inception-v3:tiny")[1], where, default_cost(where))

    def blocks(objective: PlacementObjective, **how: Any) -> PlacementResult:
        return PlacementResult(np.arange(objective.problem.units) * 4 // objective.problem.units)

    with placer("in-blocks", blocks):
        plain = placement(it, placer="in-blocks", budget=8.0)
        refined = placement(it, placer="in-blocks", refines=True, budget=8.0)
    assert _seconds(it, refined) < min(_seconds(it, plain), _seconds(it, METHODS["single"](it)))
    assert refined.figures["accepted"] > 0
    assert refined.figures["accepted"] <= refined.figures["proposals"]
    assert refined.curve[-1][1] == pytest.approx(_seconds(it, refined))
    assert [s for _, s in refined.curve] == sorted((s for _, s in refined.curve), reverse=True)


def test_a_placement_over_the_limit_is_asked_for_again_with_less() -> None:
    it = problem(2, "mlp:tiny")
    tasks = lower(it.space, METHODS["single"](it).strategy, 2)
    peak = max(simulate(tasks, it.cluster, it.cost).peak_bytes)
    limits: list[tuple[int | None, ...]] = []

    def place(objective: PlacementObjective, **how: Any) -> PlacementResult:
        limits.append(tuple(d.memory_bytes for d in objective.problem.devices))
        units = objective.problem.units
        halves = np.arange(units) * 2 // units  # few messages, whose buffers count too
        return PlacementResult(halves if len(limits) > 1 else 0 * halves)

    it = replace(it, memory_limit=(peak - 1, peak - 1))
    with placer("learner", place):
        found = placement(it, placer="learner", budget=10.0)
    assert limits == [(peak - 1, peak - 1), (peak - 2, peak - 1)]
    assert {c.devices for c in found.strategy.choices} == {(0,), (1,)}


def test_without_a_limit_devices_hold_anything() -> None:
    step = placement_problem_of(problem(2, "mlp:tiny"))
    assert all(device.memory_bytes is None for device in step.devices)


def test_a_placer_that_refuses_makes_the_method_unsuitable() -> None:
    def place(objective: PlacementObjective, **how: Any) -> PlacementResult:
        raise ValueError("there is no such library")

    with placer("broken", place), pytest.raises(UnsuitableMethod, match="no such library"):
        placement(problem(2), placer="broken", budget=1.0)


def test_a_search_that_has_settled_ends_before_its_budget() -> None:
    reports: list[int] = []

    def place(objective: PlacementObjective, *, report: Any, **how: Any) -> PlacementResult:
        zeros, interrupted = np.zeros(objective.problem.units, np.int64), False
        try:
            for count in range(0, 10**9, 100):
                reports.append(count)
                report(PlacerProgress(2.0 - min(count, 1000) / 1e6, None, count))
        except KeyboardInterrupt:
            interrupted = True
        return PlacementResult(zeros, interrupted=interrupted)

    it = problem(2)
    with placer("local-search", place, objectives=(STEP,)):
        found = placement(it, placer="local-search", budget=60.0)
    assert not found.interrupted
    moves = placement_problem_of(it).units * 2
    assert 1000 + SETTLED * moves < reports[-1] <= 1200 + SETTLED * moves


@pytest.mark.slow
def test_refining_begins_with_one_device_if_that_is_better() -> None:
    it = problem(3, "mlp:tiny")
    with placer("everywhere", lambda o, **how: PlacementResult(np.arange(o.problem.units) % 3)):
        refined = placement(it, placer="everywhere", refines=True, budget=5.0)
    single = METHODS["single"](it)
    assert _seconds(it, refined) <= _seconds(it, single)


def test_an_interrupted_placer_ends_the_search_with_what_it_has() -> None:
    def place(objective: PlacementObjective, **how: Any) -> PlacementResult:
        return PlacementResult(np.zeros(objective.problem.units, np.int64), interrupted=True)

    with placer("cut-short", place):
        found = placement(problem(2), placer="cut-short", refines=True, budget=5.0)
    assert found.interrupted and "proposals" not in found.figures


# Policies


def test_a_policy_reaches_the_placer_that_takes_one(tmp_path: Path) -> None:
    given: list[Any] = []

    def place(
        objective: PlacementObjective, *, policy: Path | None = None, **how: Any
    ) -> PlacementResult:
        given.append(policy)
        return PlacementResult(np.zeros(objective.problem.units, np.int64))

    program, _ = captured("mlp:tiny")
    file = tmp_path / "p.safetensors"
    with placer("policy", place, learns=True):
        ap.plan(program, ap.cluster("2xh100"), "policy", policy=file)
        ap.plan(program, ap.cluster("2xh100"), "policy")
        ap.compare(program, ap.cluster("2xh100"), ["policy", "data"], policy=file)
    assert given == [file, None, file]


def test_a_policy_for_methods_that_take_none_is_refused() -> None:
    program, _ = captured("mlp:tiny")
    with pytest.raises(
        ValueError, match=r"a policy is for the methods policy, placeto, gdp, .*only"
    ):
        ap.plan(program, ap.cluster("2xh100"), "m-etf", policy=Path("p.safetensors"))
    with pytest.raises(ValueError, match="only methods that learn take a policy"):
        PLACERS["single"](
            StepObjective(placement_problem_of(problem(2))), policy=Path("p.safetensors")
        )


# Memory and unequal devices


@pytest.mark.slow
def test_unequal_devices_are_placed_within_their_memory() -> None:
    program, _ = captured("gnmt:tiny")
    where = ap.cluster("mixed-a100-v100")
    plan = make_plan(program, where, "m-etf", budget=2.0)
    assert plan.feasible and plan.method == "m-etf"


def test_a_limit_that_one_device_cannot_keep_is_kept_by_several() -> None:
    program, _ = captured("mlp:tiny")
    where = ap.cluster("4xv100")
    alone = make_plan(program, where, "single").predicted.peak_bytes[0]
    plan = make_plan(program, where, "m-etf", memory_limit=0.8 * alone, budget=3.0)
    assert plan.feasible and max(plan.predicted.peak_bytes) <= 0.8 * alone


@pytest.mark.slow
def test_a_limit_that_nothing_keeps_shows_the_nearest_and_by_how_much() -> None:
    program, _ = captured("mlp:tiny")
    plan = make_plan(program, ap.cluster("2xv100"), "m-etf", memory_limit=200, budget=1.0)
    assert not plan.feasible
    assert any("200" in note or "limit" in note for note in plan.notes)


# The expert's layers


def _by_module(spec: str, devices: int) -> dict[str, set[int]]:
    it = problem(devices, spec)
    step = with_layers_as_expert(placement_problem_of(it), it.space.graph)
    assert step.expert is not None
    ops = it.space.graph.ops
    device = step.expert[step.columns.unit[-len(ops) :]]
    found: dict[str, set[int]] = {}
    for op, where in zip(ops, device.tolist(), strict=True):
        if op.phase == FORWARD and op.module:
            found.setdefault(op.module, set()).add(where)
    return found


@pytest.mark.slow
def test_all_steps_of_a_recurrent_layer_are_on_one_device() -> None:
    found = _by_module("rnnlm:tiny,layers=3", 2)
    cells = [found[f"cells.{k}.state"] for k in range(3)]
    assert all(len(where) == 1 for where in cells)
    assert cells[0] != cells[1] and cells[0] == cells[2]


@pytest.mark.slow
def test_layers_of_other_networks_are_in_runs_balanced_by_time() -> None:
    found = _by_module("mlp:tiny,layers=8", 2)
    order = [min(found[f"layers.{k}"]) for k in range(8)]
    assert order == sorted(order) and set(order) == {0, 1}
    assert 3 <= order.count(0) <= 5


# Moves


def _moves(devices: int, allowed: np.ndarray | None = None) -> tuple[UnitMoves, Ints, list[Any]]:
    it = problem(devices, "gnmt:tiny")
    step = placement_problem_of(it)
    place = np.arange(step.units) % 2
    choices = list(strategy_of(it, step, place).choices)
    unit = step.columns.unit[-len(choices) :]
    can = step.columns.allowed if allowed is None else allowed
    seconds = step.unit_seconds.min(axis=1)
    return UnitMoves(it.space, choices, unit, step.unit_edges[0], seconds, can), unit, choices


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unit", "run", "swap"])
def test_moves_take_whole_units_elsewhere(kind: str) -> None:
    moves, unit, choices = _moves(3)
    rng, drawn = Random(0), 0
    for _ in range(40):
        change = moves.draw(kind, rng)
        drawn += bool(change)
        moved = {int(unit[op]) for op in change}
        assert set(change) == {op for op, number in enumerate(unit.tolist()) if number in moved}
        assert all(change[op].devices != choices[op].devices for op in change)
        where = {change[op].devices for op in change}
        if kind == "unit":
            assert len(moved) <= 1
        elif kind == "run":
            assert len(where) <= 1 and len({choices[op].devices for op in change}) <= 1
        else:
            assert len(moved) in (0, 2)
    assert drawn > 20


def test_units_go_only_where_they_may() -> None:
    moves, unit, _ = _moves(3)
    allowed = np.ones((len(moves.ops), 3), bool)
    allowed[:, 2] = False
    allowed[0] = [True, False, False]
    moves, unit, _ = _moves(3, allowed)
    rng = Random(1)
    for _ in range(60):
        change = moves.draw(rng.choice(["unit", "run", "swap"]), rng)
        assert all(c.devices in ((0,), (1,)) for c in change.values())
        assert 0 not in {int(unit[op]) for op in change}
    assert 0 not in moves.movable


@pytest.mark.slow
def test_the_command_line_says_which_methods_take_a_policy(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "mlp:tiny", "--cluster", "2xh100", "--method", "data", "--policy", "p"]
    assert cli.status(words) == 2
    assert "a policy is for the methods policy, placeto, gdp" in capfd.readouterr().err
