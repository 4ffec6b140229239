"""flexflow: never worse than its starts, reproducible, within memory, and its plans run."""

from __future__ import annotations

import math
import os
import signal
from random import Random

import pytest
from compare_runs import compare
from graphs import captured

from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search import METHODS, UnsuitableMethod
from apportion.search.baselines.random_strategy import draw
from apportion.search.problem import Problem, Progress, SearchResult
from apportion.search.walks.flexflow import SLICE, _WalkSearch, flexflow
from apportion.search.walks.metropolis import Chain
from apportion.search.walks.moves import KINDS
from apportion.search.walks.simulated_walk import SimulatedWalk
from apportion.simulate.delta.delta import Delta
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import Timeline
from apportion.split.strategy import Strategy, space_of, verify_strategy

MODELS = ["lenet", "rnnlm:tiny", "gpt2:tiny"]


def problem(spec: str, on: str = "flexflow-p100:4", limit: int | None = None) -> Problem:
    them = cluster(on)
    limits = None if limit is None else (limit,) * len(them.devices)
    return Problem(captured(spec)[1], them, default_cost(them), limits)


def simulated(it: Problem, strategy: Strategy) -> Timeline:
    space = space_of(it.space.source, strategy, it.space)
    return simulate(lower(space, strategy, it.devices), it.cluster, it.cost)


def found(it: Problem, proposals: int, seed: int = 0, workers: int = 1) -> SearchResult:
    return flexflow(it, seed=seed, proposals=proposals, workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS)
def test_never_worse_than_any_start(spec: str) -> None:
    it = problem(spec)
    best = simulated(it, found(it, 200).strategy).step_seconds
    for method in ("data", "expert", "tofu", "optcnn"):
        try:
            start = METHODS[method](it, budget=30.0, seed=0).strategy
        except UnsuitableMethod:
            continue
        assert best <= simulated(it, start).step_seconds
    given = METHODS["data"](it, budget=0.0, seed=0).strategy
    walked = flexflow(it, proposals=100, starts=((given, it.space),), workers=1)
    assert simulated(it, walked.strategy).step_seconds < simulated(it, given).step_seconds


@pytest.mark.slow
def test_the_same_seed_and_proposals_give_the_same_plan_on_any_number_of_processes() -> None:
    it = problem("lenet")
    one, again = found(it, 240), found(it, 240)
    two, many = (found(it, 240, workers=n) for n in (2, 9))  # more than there are starts
    assert one.strategy == again.strategy == two.strategy == many.strategy
    assert one.figures["proposals"] == two.figures["proposals"] == many.figures["proposals"] >= 240
    assert found(it, 240, seed=1).strategy != one.strategy


@pytest.mark.slow
def test_more_proposals_are_never_worse() -> None:
    it = problem("lenet")
    steps = [simulated(it, found(it, n).strategy).step_seconds for n in (0, 40, 160, 640)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


@pytest.mark.slow
def test_the_curve_and_the_progress_are_what_was_found() -> None:
    it, told = problem("lenet"), list[Progress]()
    result = flexflow(
        Problem(it.space, it.cluster, it.cost, report=told.append), proposals=300, workers=1
    )
    seconds = [best for _, best in result.curve]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == simulated(it, result.strategy).step_seconds
    last = told[-1]
    assert (last.best, last.proposals) == (seconds[-1], result.figures["proposals"])
    assert last.accepted is not None and 0 < last.accepted < 1
    ranked = [simulated(it, other).step_seconds for other, _ in result.others]
    assert ranked == sorted(ranked)
    assert all(other != result.strategy for other, _ in result.others)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*MODELS, "mlp:tiny"])
def test_the_walk_is_judged_by_what_a_full_simulation_says(spec: str) -> None:
    it, rng = problem(spec), Random(0)
    walk = SimulatedWalk(it, it.space, METHODS["data"](it, budget=0.0, seed=0).strategy)
    chain = Chain(walk, rng)
    for _ in range(60):
        chain.step()
        assert walk.strategy == walk.delta.strategy
    verify_strategy(it.space, walk.strategy, it.devices)
    assert walk.cost == simulated(it, walk.strategy).step_seconds
    assert chain.best == simulated(it, walk.best).step_seconds
    assert walk.back() == chain.best
    walk.scatter(rng)
    assert walk.cost == simulated(it, walk.strategy).step_seconds


@pytest.mark.slow
def test_loops_are_compiled_in_moves_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apportion.search.walks.flexflow.SLOW", math.inf)  # not here
    it = problem("mlp:tiny")
    strategy = METHODS["data"](it, budget=0.0, seed=0).strategy
    walk = SimulatedWalk(it, it.space, strategy)
    before = walk.strategy, walk.cost, walk.delta.times()[1].tolist()
    _WalkSearch(it, 0.0, float("inf"), 0, None, KINDS)._compile_loops(walk)
    assert walk.delta.changes >= SLICE / 2
    assert (walk.strategy, walk.cost, walk.delta.times()[1].tolist()) == before
    assert not any(any(counts) for counts in walk.drawn.values())


@pytest.mark.slow
def test_layouts_that_a_start_gives_are_given_up_with_their_ops() -> None:
    it = problem("mlp:tiny", "4xh100")
    start = draw(it.space, it.devices, Random(0))
    assert start.layouts
    walk = SimulatedWalk(it, it.space, start)
    chain = Chain(walk, Random(0))
    for _ in range(200):
        chain.step()
    assert walk.layouts.keys() < start.layouts.keys()
    live = Delta(it.space, walk.strategy, it.cluster, it.cost)
    assert live.step_ns == walk.delta.step_ns


@pytest.mark.slow
def test_plans_are_within_the_memory_limit() -> None:
    free, limit = problem("gpt2:tiny", "4xh100"), 400_000
    assert max(simulated(free, found(free, 150).strategy).peak_bytes) > limit
    tight = problem("gpt2:tiny", "4xh100", limit)
    line = simulated(tight, found(tight, 600).strategy)
    assert max(line.peak_bytes) <= limit
    starts = ("fsdp", "tofu")
    steps = [simulated(tight, METHODS[m](tight, budget=9.0, seed=0).strategy) for m in starts]
    fitting = [s.step_seconds for s in steps if max(s.peak_bytes) <= limit]
    assert fitting and line.step_seconds < min(fitting)


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS)
def test_plans_run_as_the_whole_step_does(spec: str) -> None:
    program, _ = captured(spec)
    it = problem(spec)
    result = found(it, 300)
    assert len({choice.devices for choice in result.strategy.choices}) > 2  # several subsets
    assert compare(program, result.space or it.space, result.strategy, 4).equal


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_gives_the_best_so_far(workers: int) -> None:
    it, told = problem("lenet"), list[Progress]()

    def interrupt(progress: Progress) -> None:
        if progress.proposals and not told:
            told.append(progress)
            os.kill(os.getpid(), signal.SIGINT)

    asked = Problem(it.space, it.cluster, it.cost, report=interrupt)
    result = flexflow(asked, budget=600.0, workers=workers)
    assert result.interrupted
    assert result.curve[-1][1] == simulated(it, result.strategy).step_seconds
