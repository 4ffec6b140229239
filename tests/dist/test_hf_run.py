"""Models of the transformers package on real processes: plans train what a single device trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import apportion as ap
from apportion import zoo
from apportion.capture.capture import capture, capture_as
from apportion.plan.plan import PlanWarning
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, PROCESSES = 2, 4


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(PROCESSES, 200.0) as made:
        yield made


@pytest.mark.parametrize(
    ("family", "method", "seed"),
    [
        ("llama", "tofu", 0),
        ("mixtral", "random", 4),
        ("bert", "random", 5),
        ("convnext", "random", 7),
    ],
)
def test_plans_train_the_same_model(pool: ProcessPool, family: str, method: str, seed: int) -> None:
    spec = f"{EXAMPLES / f'hf_{family}.py'}:make"
    it = zoo.load(spec, seed)
    program = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # some operators run unsplit
        plan = ap.plan(program, ap.cluster(f"local:{PROCESSES}"), method=method, seed=seed)
    source = source_of_model(program, spec, seed)
    job = TrainingRequest(source, plan.strategy, PROCESSES, STEPS, seed, double=True, state=True)
    ranks = pool.train(job)
    found = compare_with_eager(capture_as(program, torch.float64), plan, ranks, STEPS, seed)
    assert found.equal, found
    assert plan.predicted.bytes_moved > 0
