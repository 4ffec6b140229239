"""Ranks compare their copies of the state after every step, and a difference is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.execute.backends import GLOO, NCCL, backend_between, join_backends
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.pool import ProcessPool
from apportion.run.process import PoolProcess
from apportion.run.runner import Runner
from apportion.run.step_source import StepSource, source_of_model
from apportion.run.training import TrainingRequest
from apportion.split.strategy import Strategy, space_of

DEVICES, SPEC = 2, "mlp:tiny"


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(DEVICES, 120.0) as made:
        yield made


def captured() -> Program:
    it = zoo.load(SPEC, 0)
    return capture(it.step, it.model, it.optimizer, it.batch)


@dataclass(frozen=True)
class PlantedRequest:
    """Steps with a Runner that checks its replicas; before the third, one rank's copy of a tensor
    is changed."""

    source: StepSource
    strategy: Strategy
    mode: str

    def __call__(self, process: PoolProcess) -> list[str]:
        program, _ = process.program(self.source)
        space = space_of(program.graph, self.strategy)
        tasks = lower(space, self.strategy, DEVICES)
        mine = worker(Executable(space, self.strategy, tasks), process.rank, "cpu", self.mode)
        mine.backends = join_backends("cpu")
        runner = Runner(program, mine, check_replicas=True)
        said = [str(runner.step(program.batch).dtype), str(float(runner.step(program.batch)))]
        if process.rank == 1:
            _, tensor = min(mine.rank.state().values(), key=lambda pair: pair[0])
            tensor.view(-1)[0] += 1e-3  # a last bit may be gone after the update
        try:
            runner.step(program.batch)
        except RuntimeError as error:
            said.append(str(error))
        return said


@pytest.mark.parametrize("mode", ["none", "generated"])
def test_a_planted_difference_is_named_by_all_ranks(pool: ProcessPool, mode: str) -> None:
    program = captured()
    plan = make_plan(program, cluster(f"local:{DEVICES}"), "data")
    request = PlantedRequest(source_of_model(program, SPEC, 0), plan.strategy, mode)
    first, second = pool.ask(request)
    assert first == second and len(first) == 3
    assert first[2].startswith(
        "replicas differ after step 3: parameter 'layers.0.weight' on rank 1"
    )


def test_training_compares_replicas_if_asked_to(pool: ProcessPool) -> None:
    program = captured()
    plan = make_plan(program, cluster(f"local:{DEVICES}"), "data")
    source = source_of_model(program, SPEC, 0)
    request = TrainingRequest(source, plan.strategy, DEVICES, 2, 0, replicas=True)
    ranks = pool.train(request)
    assert ranks[0].losses == ranks[1].losses


def test_the_backend_of_a_pair_of_places() -> None:
    assert backend_between("cpu", "cpu") == GLOO
    assert backend_between("cuda GPU-a", "cpu") == GLOO
    assert backend_between("cuda GPU-a", "cuda GPU-a") == GLOO
    assert backend_between("cuda GPU-a", "cuda GPU-b") == NCCL
