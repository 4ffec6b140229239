"""A GPU's step takes the time and the memory that are predicted from measured kernels."""

from __future__ import annotations

import statistics

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.dry_run import device_memory_facts, measure_storage
from apportion.execute.executable import Executable
from apportion.lower.task_graph import with_storage
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import CostModel
from apportion.plan.make_plan import make_plan
from apportion.run.calibrate_cuda import (
    calibrate,
    device_kind,
    on_device,
    peak_bytes,
    runner_on,
    step_seconds,
)
from apportion.simulate.simulate import simulate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = [
    "gpt2:layers=2,width=1024,heads=16,batch=16,seq=512,dropout=0,vocab=16384",
    "resnet50:batch=192",
    "rnn:batch=1024,steps=8",
]


@pytest.mark.parametrize("spec", STEPS)
def test_time_and_memory_are_as_predicted(spec: str) -> None:
    it = zoo.load(spec, 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    where = cluster(f"1x{device_kind()}")
    made = make_plan(program.graph, where, "single")
    table = calibrate([(program, made)], rounds=4)
    executable = Executable(made.space, made.strategy, made.tasks)
    storage = measure_storage(executable, None, device_memory_facts(table))
    cost = CostModel("calibrated", "measured by this test", 0.5, {device_kind(): table})
    predicted = simulate(with_storage(made.tasks, storage), where, cost)

    runner, batch = runner_on(program, executable), on_device(program.batch)
    step_seconds(runner, batch, 3)
    measured = statistics.median(step_seconds(runner, batch, 9))
    assert predicted.step_seconds == pytest.approx(measured, rel=0.15)
    del batch
    held = max(peak_bytes(runner, program.batch) for _ in range(2))
    assert 1 <= predicted.peak_bytes[0] / held <= 1.05
