"""Compiled segments and CUDA graphs on a GPU do what the interpreter does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
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
ROOT = Path(__file__).parents[2]


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


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
sys.path[:0] = ["tests/gpu"]
from test_gpu_compile import mlp_program, trained
if __name__ == "__main__":
    losses, _, _ = trained(mlp_program(), "none")
    found, _, notes = trained(mlp_program(), "inductor")
    assert all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(found, losses)), (found, losses)
    print("notes:", *notes)
"""


def mlp_program() -> Program:
    it = zoo.load("mlp:tiny", 0)
    return capture(it.step, it.model, it.optimizer, it.batch)


def test_without_triton_the_step_runs(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, text=True, capture_output=True,
        timeout=120, env=os.environ | settings, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("notes:")]
    assert "is generated: " in said[0]
