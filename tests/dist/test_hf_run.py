"""Models of the transformers package: plans train what a single device trains.

Llama on real processes, the others on all ranks in one process.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from compare_runs import compare

import apportion as ap
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
from apportion.plan.plan import Plan, PlanWarning
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest
from apportion.split.strategy import space_of

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS = 2


def planned(family: str, devices: int, method: str, seed: int) -> tuple[str, Program, Plan]:
    spec = f"{EXAMPLES / f'hf_{family}.py'}:make"
    it = zoo.load(spec, seed)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # some operators run unsplit
        plan = ap.plan(program, ap.cluster(f"local:{devices}"), method=method, seed=seed)
    assert plan.predicted.bytes_moved > 0
    return spec, program, plan


def test_processes_train_the_same_model() -> None:
    devices, seed = 2, 0
    spec, program, plan = planned("llama", devices, "tofu", seed)
    source = source_of_model(program, spec, seed)
    request = TrainingRequest(source, plan.strategy, devices, STEPS, seed, double=True, state=True)
    with ProcessPool(devices, 200.0) as pool:
        ranks = pool.train(request)
    found = compare_with_eager(capture_as(program, torch.float64), plan, ranks, STEPS, seed)
    assert found.equal, found


@pytest.mark.parametrize(("family", "seed"), [("mixtral", 4), ("bert", 5), ("convnext", 7)])
def test_random_plans_train_the_same_model(family: str, seed: int) -> None:
    devices = 4
    _, program, plan = planned(family, devices, "random", seed)
    exact = capture_as(program, torch.float64)
    space = space_of(exact.graph, plan.strategy)
    found = compare(exact, space, plan.strategy, devices, seed=seed, corrupt=_unchanged)
    assert found.equal, found


def _unchanged(number: int, message: torch.Tensor) -> torch.Tensor:
    """Replicas whose inputs lie differently in memory may differ in bits, within the tolerance."""
    return message
