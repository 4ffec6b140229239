"""Exported programs of FSDP2 and DDP train with the losses of their plans, on gloo processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_launch import Launch

import apportion as ap
from apportion import zoo
from apportion.cli import main as cli
from apportion.mesh.mesh_layout import MeshLayout, load_layout
from apportion.mesh.plan_layout import plan_layout
from apportion.plan.plan import Plan, with_model
from apportion.run.one_process import train_in_one_process
from apportion.run.planned_program import planned_program

GPT2, LLAMA = "gpt2:tiny,dropout=0", "llama:tiny"
STEPS = 3


def losses_of_plan(plan: Plan) -> list[float]:
    it = zoo.load(plan.model)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    given = (planned_program(program, plan), plan.strategy, len(plan.cluster.devices))
    done = train_in_one_process(*given, [it.batch] * STEPS, 0, wide=True)
    return [float(loss or 0.0) for loss in done.ranks[0].losses]


def made(spec: str, layout: MeshLayout) -> Plan:
    it = zoo.load(spec, meta=True)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    return with_model(plan_layout(program, ap.cluster(f"local:{layout.devices}"), layout), spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (GPT2, MeshLayout(shard=2)),
        (GPT2, MeshLayout(replicate=2)),
        (LLAMA, MeshLayout(shard=2, checkpoint=("blocks.*",))),
        (LLAMA, MeshLayout(replicate=2, shard=2, reshard=False)),
    ],
    ids=["gpt2 fsdp", "gpt2 ddp", "llama fsdp checkpointed", "llama hsdp kept"],
)
def test_an_exported_program_trains_with_the_losses_of_its_plan(
    tmp_path: Path, spec: str, layout: MeshLayout, launch: Launch
) -> None:
    plan = made(spec, layout)
    plan.save(tmp_path / "p.json")
    paths = [str(tmp_path / name) for name in ("p.json", "train.py", "mesh.json")]
    assert cli.status(["export", paths[0], "-o", paths[1], "--layout", paths[2]]) == 0
    lines = launch(paths[1], "--steps", STEPS, "--double", ranks=layout.devices, folder=tmp_path)
    losses = [json.loads(line)["loss"] for line in lines.splitlines() if line.startswith("{")]
    assert losses == pytest.approx(losses_of_plan(plan), rel=1e-9)
    assert losses[-1] < losses[0]
    again = made(spec, load_layout(tmp_path / "mesh.json", layout.devices))
    assert again.predicted == plan.predicted
    assert again.strategy == plan.strategy
