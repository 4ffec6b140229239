"""Random strategies on real processes: the single device's result, and exactly the predicted bytes.

The benchmark `benchmarks/fuzz.py` runs many more of both kinds; this is the share for every day.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import Program, capture, capture_as
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.plan.plan import Plan, Prediction
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource
from apportion.run.training import TrainingRequest
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy

STEPS, SEED = 2, 7
MODELS = ("mlp:tiny", "gpt2:tiny", "wresnet:tiny", "rnn:tiny")


@pytest.fixture(scope="module", params=[2, 3, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    with ProcessPool(request.param, 120.0) as made:
        yield made


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    found = {}
    for spec in MODELS:
        it = zoo.load(spec, SEED)
        made = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
        found[spec] = capture_as(made, torch.float64)
    return found


def plan_of(program: Program, strategy: Strategy, devices: int) -> Plan:
    none = Prediction(0.0, (0,) * devices, 0, (0.0,) * devices)
    where = cluster(f"local:{devices}")
    cost, limits = default_cost(where), (0,) * devices
    return Plan(program.graph, where, strategy, "random", 0, 0.0, 0.0, none, limits, cost)


@pytest.mark.parametrize("spec", MODELS)
def test_random_strategies_train_the_same_model(
    pool: ProcessPool, programs: dict[str, Program], spec: str
) -> None:
    devices, program = len(pool.pipes), programs[spec]
    space = Space(program.graph)
    for seed in range(10 * devices, 10 * devices + (4 if spec == "mlp:tiny" else 1)):
        strategy = draw(space, devices, Random(seed))
        source = StepSource(program.graph, spec, SEED)
        job = TrainingRequest(source, strategy, devices, STEPS, SEED, double=True, state=True)
        ranks = pool.train(job)
        found = compare_with_eager(program, plan_of(program, strategy, devices), ranks, STEPS, SEED)
        assert found.equal, f"strategy {seed}: {found}"
        moved = lower(space, strategy, devices).bytes_moved
        assert sum(r.sent_bytes for r in ranks) == STEPS * moved
