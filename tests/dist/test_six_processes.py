"""Six processes on what six does not divide."""

from __future__ import annotations

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture, capture_as
from apportion.machine.cluster import cluster
from apportion.plan.plan import plan
from apportion.run.pool import ProcessPool
from apportion.run.run import compare_with_eager
from apportion.run.process import TrainingRequest

SPEC, DEVICES, STEPS, SEED = "mlp:layers=2,batch=64,width=1024", 6, 2, 0


@pytest.mark.parametrize("method", ["tofu"])
def test_uneven_parts_train_the_same_model(method: str) -> None:
    it = zoo.load(SPEC, SEED)
    program = capture_as(capture(it.step, it.model, it.optimizer, it.batch), torch.float64)
    made = plan(program, cluster(f"local:{DEVICES}"), method)
    job = TrainingRequest(SPEC, SEED, True, made.strategy, DEVICES, STEPS, SEED, state=True)
    with ProcessPool(DEVICES, 120.0) as pool:
        ranks = pool.train(job)
    found = compare_with_eager(program, made, ranks, STEPS, SEED)
    assert found.equal, found
    assert sum(rank.sent_bytes for rank in ranks) == STEPS * made.predicted.bytes_moved > 0
