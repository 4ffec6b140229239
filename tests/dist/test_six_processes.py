"""Six processes on what six does not divide."""

from __future__ import annotations

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture, capture_as
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest

SPEC, DEVICES, STEPS, SEED = "mlp:layers=2,batch=64,width=1024", 6, 2, 0


@pytest.mark.parametrize("method", ["tofu"])
def test_uneven_parts_train_the_same_model(method: str) -> None:
    it = zoo.load(SPEC, SEED)
    own = capture(it.step, it.model, it.optimizer, it.batch)
    program = capture_as(own, torch.float64)
    made = make_plan(program, cluster(f"local:{DEVICES}"), method)
    source = source_of_model(own, SPEC, SEED)
    job = TrainingRequest(source, made.strategy, DEVICES, STEPS, SEED, double=True, state=True)
    with ProcessPool(DEVICES, 120.0) as pool:
        ranks = pool.train(job)
    found = compare_with_eager(program, made, ranks, STEPS, SEED)
    assert found.equal, found
    assert sum(rank.sent_bytes for rank in ranks) == STEPS * made.predicted.bytes_moved > 0
