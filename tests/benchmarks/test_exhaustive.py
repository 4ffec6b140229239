"""Exhaustive search against enumeration: no floor is above what a completion takes, and what is
proven to be best is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import numpy as np
import pytest
from proof.exhaustive import images, prove_optimum, renamings
from proof.floor import anneal, floor, floors
from proof.loops import find_loops, no_loops
from proof.needs import find_needs
from soak import kept

from apportion import zoo
from apportion.capture.capture import capture
from apportion.lower.lower import lower
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.problem import Problem
from apportion.search.walks.units import Unit, cell_units, layer_units
from apportion.simulate.delta.delta import Delta
from apportion.simulate.durations import (
    issue_nanoseconds,
    nanoseconds,
)
from apportion.split.space import Space
from apportion.split.strategy import Strategy

NEVER = 1 << 60


@cache
def space_of(spec: str) -> Space:
    it = zoo.load(spec, 0)
    return Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)


def problem_of(spec: str, machine: str) -> Problem:
    them = cluster(machine)
    return Problem(space_of(spec), them, default_cost(them))


@cache
def units_of(spec: str, devices: int, cells: bool) -> tuple[Unit, ...]:
    return tuple((cell_units if cells else layer_units)(space_of(spec), devices))


def few(units: tuple[Unit, ...], rng: Random, most: int) -> list[Unit]:
    """The units with few of their options, fewer of them where there are many units."""
    each = [2] * len(units)
    while np.prod(each) > most:
        each[max(k for k, n in enumerate(each) if n > 1)] = 1
    while np.prod(each) * 3 / 2 <= most:
        each[rng.randrange(len(each))] += 1
    return [
        replace(unit, options=tuple(rng.sample(unit.options, min(n, len(unit.options)))))
        for unit, n in zip(units, each, strict=True)
    ]


def strategy_of(units: list[Unit], picks: tuple[int, ...]) -> Strategy:
    choices = {}
    for unit, pick in zip(units, picks, strict=True):
        choices.update(zip(unit.ops, unit.options[pick], strict=True))
    return Strategy(tuple(choices[op] for op in range(len(choices))))


def all_steps(problem: Problem, units: list[Unit]) -> dict[tuple[int, ...], int]:
    """The simulated step of every combination."""
    found = {}
    live = Delta(
        problem.space, strategy_of(units, (0,) * len(units)), problem.cluster, problem.cost
    )
    for picks in product(*(range(len(unit.options)) for unit in units)):
        changed = {}
        for unit, pick in zip(units, picks, strict=True):
            changed.update(zip(unit.ops, unit.options[pick], strict=True))
        found[picks] = live.change(changed)
        live.undo()
    return found


MACHINES = ["flexflow-p100:4", "flexflow-k80:4", "local:4", "2x2xh100"]


@pytest.mark.slow
@pytest.mark.parametrize("machine", kept(MACHINES, "flexflow-k80:4", "local:4"))
@pytest.mark.parametrize(
    "spec, cells",
    [("mlp:tiny", False), ("lenet:tiny", False), ("lenet", False), ("rnnlm:tiny,steps=2", True)],
)
def test_no_floor_is_above_a_completion(spec: str, cells: bool, machine: str) -> None:
    problem = problem_of(spec, machine)
    for seed in range(2):
        rng = Random(seed)
        units = few(units_of(spec, 4, cells), rng, 40)
        rng.shuffle(units)
        steps = all_steps(problem, units)
        known = find_needs(problem, units)
        loops = find_loops(known)
        ops, _, copies = known.where.shape
        room = np.zeros((ops, copies), np.int64), np.zeros((len(known.maker), 2 * copies), np.int64)
        for depth in range(1, len(units) + 1):
            for prefix in {picks[:depth] for picks in steps}:
                chosen = np.array([*prefix, *[0] * (len(units) - depth)])
                least = min(step for picks, step in steps.items() if picks[:depth] == prefix)
                found = floor(known, loops, chosen, depth, NEVER, *room)
                plain = floor(known, no_loops(known), chosen, depth, NEVER, *room)
                assert plain <= found <= least, (seed, prefix)


@pytest.mark.slow
def test_floors_are_of_use() -> None:
    """With everything decided a floor is near what is simulated; with little, far above nothing."""
    problem, rng = problem_of("lenet", "flexflow-p100:4"), Random(0)
    units = few(units_of("lenet", 4, False), rng, 40)
    steps = all_steps(problem, units)
    known = find_needs(problem, units)
    loops = find_loops(known)
    ops, _, copies = known.where.shape
    room = np.zeros((ops, copies), np.int64), np.zeros((len(known.maker), 2 * copies), np.int64)
    shares = [
        floor(known, loops, np.array(p), len(units), NEVER, *room) / s for p, s in steps.items()
    ]
    assert np.mean(shares) > 0.9
    root = floors(known, loops, np.zeros(len(units), np.int64), 1, NEVER, *room).min()
    assert root > 0.55 * min(steps.values())  # 0.59 by the costs that are shipped now


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_durations_are_those_of_lowered_tasks(machine: str) -> None:
    problem, rng = problem_of("lenet:tiny", machine), Random(1)
    units = list(units_of("lenet:tiny", 4, False))
    known = find_needs(problem, units)
    for _ in range(5):
        picks = tuple(rng.randrange(len(unit.options)) for unit in units)
        tasks = lower(problem.space, strategy_of(units, picks), 4)
        took = nanoseconds(tasks, problem.cluster, problem.cost)
        issued = issue_nanoseconds(tasks, problem.cluster, problem.cost)
        for task in np.flatnonzero(tasks.kind == COMPUTE).tolist():
            op, device = int(tasks.op[task]), int(tasks.device[task])
            grid = known.grid[op, picks[known.unit[op]]]
            part = int(tasks.part[task]) % known.parts[op, grid]
            assert known.duration[op, grid, part, device] == took[task]
            assert known.issue[op, device] == issued[task]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["flexflow-p100:4", "flexflow-k80:4"])
@pytest.mark.parametrize("seed", range(3))
def test_the_proven_optimum_is_the_least_of_all(machine: str, seed: int) -> None:
    problem, rng = problem_of("lenet:tiny", machine), Random(seed)
    units = few(units_of("lenet:tiny", 4, False), rng, 150)
    steps = all_steps(problem, units)
    proof = prove_optimum(problem, units, seed=seed)
    assert proof.proven
    assert proof.step_ns == proof.bound_ns == min(steps.values()) == steps[proof.picks]
    assert proof.combinations == len(steps)
    assert proof.strategy == strategy_of(units, proof.picks)


@pytest.mark.slow
def test_images_need_not_be_searched() -> None:
    """Layers whole, on one device or on all: the same optimum, and less is looked at."""
    problem = problem_of("mlp:tiny", "flexflow-p100:4")
    units = [
        replace(unit, options=(*(o for o in unit.options if len(o[0].devices) == 1),
                               unit.options[-1]))
        for unit in units_of("mlp:tiny", 4, False)
    ]  # fmt: skip
    steps = all_steps(problem, units)
    proof = prove_optimum(problem, units)
    assert proof.proven and proof.symmetries == 24
    assert proof.step_ns == min(steps.values())
    assert proof.visited[0] == 2 and proof.images[0] == 3


def test_renamings_leave_links_as_they_are() -> None:
    assert len(renamings(cluster("flexflow-p100:4"))) == 24
    found = renamings(cluster("flexflow-k80:4"))  # pairs on a switch
    assert len(found) == 8
    assert all({names[0], names[1]} in ({0, 1}, {2, 3}) for names in found)
    unit = units_of("mlp:tiny", 4, False)[0]
    for names in found:
        table = images(unit, names)
        assert table is not None and sorted(table) == list(range(len(unit.options)))


@pytest.mark.slow
def test_a_deadline_gives_the_best_and_a_bound() -> None:
    problem = problem_of("lenet:tiny", "flexflow-p100:4")
    units = few(units_of("lenet:tiny", 4, False), Random(5), 100)
    steps = all_steps(problem, units)
    proof = prove_optimum(problem, units, budget=0.0)
    assert not proof.proven
    assert proof.bound_ns <= min(steps.values()) <= proof.step_ns == steps[proof.picks]


@pytest.mark.slow
def test_annealing_by_floors_goes_down_and_is_reproducible() -> None:
    problem = problem_of("lenet:tiny", "flexflow-p100:4")
    known = find_needs(problem, list(units_of("lenet:tiny", 4, False)))
    ops, _, copies = known.where.shape
    room = np.zeros((ops, copies), np.int64), np.zeros((len(known.maker), 2 * copies), np.int64)
    loops, begin = no_loops(known), known.options - 1
    found = [anneal(known, loops, begin, 2000, 0.02, 0.001, 3) for _ in range(2)]
    assert np.array_equal(*found)
    count = len(known.options)
    before, after = (floor(known, loops, x, count, NEVER, *room) for x in (begin, found[0]))
    assert after < before


def test_units_that_leave_out_an_operator_are_refused() -> None:
    problem = problem_of("mlp:tiny", "flexflow-p100:4")
    units = units_of("mlp:tiny", 4, False)
    with pytest.raises(ValueError, match="is in no unit"):
        find_needs(problem, units[1:])
    with pytest.raises(ValueError, match="is in two units"):
        find_needs(problem, [*units, units[0]])
