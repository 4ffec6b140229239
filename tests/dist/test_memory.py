"""Memory on real processes: the peak of every rank, by the allocator's events, is the predicted
one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from soak import cases

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.dry_run import measure_storage
from apportion.execute.executable import Executable, threads
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import with_storage
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource
from apportion.run.training import TrainingRequest
from apportion.search import METHODS, Problem
from apportion.search.baselines.random_strategy import draw
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Strategy

SEED = 7


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    with ProcessPool(request.param, 120.0) as made:
        yield made


@pytest.fixture(scope="module")
def spaces() -> dict[str, Space]:
    found = {}
    for spec in ("mlp:tiny", "gpt2:tiny"):
        it = zoo.load(spec, SEED)
        found[spec] = Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)
    return found


def strategies(space: Space, devices: int, randomly: int) -> dict[str, Strategy]:
    machine = cluster(f"local:{devices}")
    problem = Problem(space, machine, default_cost(machine))
    names = ["data", "tofu"] if devices == 2 else ["data"]  # tofu needs a power of two
    found = {name: METHODS[name](problem).strategy for name in names}
    return found | {f"random {n}": draw(space, devices, Random(n)) for n in range(randomly)}


@pytest.mark.parametrize(("spec", "randomly"), [("mlp:tiny", 2), ("gpt2:tiny", cases(2, 0))])
def test_peaks_and_bytes_are_as_predicted(
    pool: ProcessPool, spaces: dict[str, Space], spec: str, randomly: int
) -> None:
    devices = len(pool.pipes)
    machine = cluster(f"local:{devices}")
    for name, strategy in strategies(spaces[spec], devices, randomly).items():
        space = Space(spaces[spec].graph, strategy.digits)
        tasks = runnable(space, strategy, devices)
        storage = measure_storage(Executable(space, strategy, tasks), threads(devices))
        line = simulate(with_storage(tasks, storage), machine, default_cost(machine))
        source = StepSource(spaces[spec].graph, spec, SEED)
        ranks = pool.train(TrainingRequest(source, strategy, devices, 1, SEED, profile=True))
        assert [rank.peak_bytes for rank in ranks] == list(line.peak_bytes), name
        assert sum(rank.sent_bytes for rank in ranks) == tasks.bytes_moved, name
