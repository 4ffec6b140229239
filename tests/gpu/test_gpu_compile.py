"""Compiled segments and CUDA graphs on a GPU do what the interpreter does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.runner import Runner
from apportion.run.training import vary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = 5


def trained(program: Program, mode: str) -> tuple[list[float], dict[int, torch.Tensor], list[str]]:
    """Losses, state and notes of some steps, each with a learning rate of its own."""
    made = make_plan(program.graph, cluster("1xh200"), "single")
    executable = Executable(made.space, made.strategy, made.tasks)
    runner = Runner(program, worker(executable, 0, "cuda", mode))
    groups = program.optimizer.param_groups
    rates, losses = [group["lr"] for group in groups], []
    for step in range(STEPS):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * (1 + step / 4)
        losses.append(float(runner.step(vary(program.batch, 0, step))))
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return losses, dict(runner.worker.rank.tensors), runner.worker.notes


@pytest.mark.parametrize("mode", ["graph", "inductor"])
@pytest.mark.parametrize("spec", ["gpt2:tiny", "resnet50:tiny", "llama:tiny,layers=5"])
def test_recorded_steps_do_what_the_interpreter_does(spec: str, mode: str) -> None:
    it = zoo.load(spec, 0)
    single = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
    program = capture_as(single, torch.float64)
    losses, state, _ = trained(program, "none")
    found, mine, notes = trained(program, mode)
    assert notes == []
    assert found == pytest.approx(losses, rel=1e-10)
    assert mine.keys() == state.keys()
    for slot, tensor in state.items():
        torch.testing.assert_close(mine[slot], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", ["graph", "inductor"])
def test_a_schedule_does_not_record_again(mode: str) -> None:
    it = zoo.load("gpt2:tiny", 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    losses, _, _ = trained(program, "none")
    recordings = _recordings(program, mode)
    assert recordings == [1]
    assert trained(program, mode)[0] == pytest.approx(losses, rel=1e-3)


def _recordings(program: Program, mode: str) -> list[int]:
    made = make_plan(program.graph, cluster("1xh200"), "single")
    executable = Executable(made.space, made.strategy, made.tasks)
    runner = Runner(program, worker(executable, 0, "cuda", mode))
    for step in range(STEPS):
        program.optimizer.param_groups[0]["lr"] *= 1.1
        runner.step(vary(program.batch, 0, step))
    program.optimizer.param_groups[0]["lr"] /= 1.1**STEPS
    speakers: list[Any] = runner.worker.compiled().speakers
    return [it.recordings for it in speakers if hasattr(it, "recordings")]
