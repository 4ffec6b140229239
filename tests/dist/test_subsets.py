"""Operators on different subsets of the devices, as walks place them: the same training."""

from __future__ import annotations

import pytest
import torch
from method_rows import row

from apportion import zoo
from apportion.capture.capture import capture, capture_as
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.plan.make_plan import make_plan
from apportion.run.check_run import compare_with_eager
from apportion.run.pool import ProcessPool
from apportion.run.step_source import source_of_model
from apportion.run.training import TrainingRequest
from apportion.search import METHODS
from apportion.search.problem import Problem
from apportion.search.walks.flexflow import flexflow
from apportion.split.space import Space

DEVICES, STEPS, SEED = 4, 2, 0


@pytest.mark.parametrize("spec", ["lenet:batch=8", "rnnlm:tiny"])
def test_a_walk_s_plan_trains_the_same_model(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = zoo.load(spec, SEED)
    own = capture(it.step, it.model, it.optimizer, it.batch)
    program = capture_as(own, torch.float64)
    there = cluster("flexflow-p100:4")  # where it pays to use several
    space = Space(program.graph)
    found = flexflow(Problem(space, there, default_cost(there)), proposals=300, workers=1)
    subsets = {frozenset(choice.devices) for choice in found.strategy.choices}
    assert len(subsets) > 3 and min(map(len, subsets)) < DEVICES
    monkeypatch.setitem(METHODS, "walked", row("walked", lambda *_, **__: found))
    made = make_plan(program, cluster(f"local:{DEVICES}"), "walked")
    source = source_of_model(own, spec, SEED)
    job = TrainingRequest(source, made.strategy, DEVICES, STEPS, SEED, double=True, state=True)
    with ProcessPool(DEVICES, 120.0) as pool:
        ranks = pool.train(job)
    compared = compare_with_eager(program, made, ranks, STEPS, SEED)
    assert compared.equal, compared
    assert sum(rank.sent_bytes for rank in ranks) == STEPS * made.predicted.bytes_moved > 0
