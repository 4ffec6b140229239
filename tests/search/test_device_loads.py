"""The compute that a Choice gives to devices, against the tasks that lowering makes of it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from graphs import captured
from rings import sampled

from apportion.lower.lower import lower
from apportion.lower.task_kinds import (
    COMPUTE,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.search.problem import Problem
from apportion.search.walks.device_loads import DeviceLoads
from apportion.simulate.durations import nanoseconds
from apportion.simulate.simulate import simulate
from apportion.split.strategy import Strategy

SAFE = 1 - 1e-6  # durations are rounded to nanoseconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    sampled(["mlp:tiny", "gpt2:tiny", "lenet", "wresnet:tiny", "rnnlm:tiny"], 2),
)
@pytest.mark.parametrize("on", ["4xh100", "mixed-a100-v100", "flexflow-k80:6"])
def test_a_floor_under_what_devices_compute(spec: str, on: str) -> None:
    them, space = cluster(on), captured(spec)[1]
    problem = Problem(space, them, default_cost(them))
    loads = DeviceLoads(problem, space)
    near = 0
    drawn = draw(space, problem.devices, Random(1))
    for strategy in (data(problem).strategy, Strategy(drawn.choices)):
        tasks = lower(space, strategy, problem.devices)
        spent = nanoseconds(tasks, them, problem.cost)
        computes = tasks.kind == COMPUTE
        for op, choice in enumerate(strategy.choices):
            mine = computes & (tasks.op == op)
            real = np.bincount(tasks.device[mine], spent[mine], problem.devices)
            floor = loads.of(op, choice)
            assert (floor * SAFE <= real).all(), space.graph.ops[op]
            near += bool(np.allclose(floor, real, rtol=1e-6))
        busy = np.sum([loads.of(op, c) for op, c in enumerate(strategy.choices)], axis=0)
        assert busy.max() * SAFE <= simulate(tasks, them, problem.cost).end_ns.max()
    assert near > 1.5 * len(space.graph.ops)  # most are exact
