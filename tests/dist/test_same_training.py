"""Strategies on real processes: the single device's result, and exactly the predicted bytes.

That random strategies, uneven parts and placements on some of the devices train the same model is
proven for many more models and numbers of devices in one process, in tests/execute; `gloo` and the
processes are what is new here. The benchmark `benchmarks/fuzz.py` runs many more of both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import (
    capture,
)
from apportion.capture.program import (
    Program,
)
from apportion.capture.reference import (
    capture_as,
)
from apportion.capture.widen import widened
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan, Prediction
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy

DEVICES, STEPS, SEED = 3, 2, 7


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(DEVICES, 120.0) as made:
        yield made


def captured(spec: str) -> Program:
    it = zoo.load(spec, SEED)
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def plan_of(program: Program, strategy: Strategy) -> Plan:
    none = Prediction(0.0, (0,) * DEVICES, 0, (0.0,) * DEVICES)
    where = cluster(f"local:{DEVICES}")
    cost, limits = default_cost(where), (0,) * DEVICES
    return Plan(program.graph, where, strategy, "random", 0, 0.0, 0.0, none, limits, cost)


def check(pool: ProcessPool, spec: str, program: Program, plan: Plan) -> None:
    """`program` and `plan` are in the model's own precision; the steps run in float64."""
    source = source_of_model(program, spec, SEED)
    request = TrainingRequest(source, plan.strategy, DEVICES, STEPS, SEED, double=True, state=True)
    ranks = pool.train(request)
    exact = capture_as(program, torch.float64)
    found = compare_with_eager(exact, plan, ranks, STEPS, SEED)
    assert found.equal, found
    wide = replace(program, graph=widened(program.graph))
    moved = plan_of(wide, plan.strategy).tasks.bytes_moved
    assert sum(rank.sent_bytes for rank in ranks) == STEPS * moved > 0


@pytest.mark.parametrize(("spec", "count"), [("mlp:tiny", 4), ("gpt2:tiny", 1)])
def test_random_strategies_train_the_same_model(pool: ProcessPool, spec: str, count: int) -> None:
    """Some of their operators are on some of the devices only."""
    program = captured(spec)
    space = Space(program.graph)
    for seed in range(count):
        strategy = draw(space, DEVICES, Random(seed))
        assert len({frozenset(choice.devices) for choice in strategy.choices}) > 3
        check(pool, spec, program, plan_of(program, strategy))


def test_uneven_parts_train_the_same_model(pool: ProcessPool) -> None:
    """Three divide neither 64 samples nor 1,024 features."""
    spec = "mlp:layers=2,batch=64,width=1024"
    program = captured(spec)
    check(pool, spec, program, make_plan(program, cluster(f"local:{DEVICES}"), "tofu"))
