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
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan, with_model
from apportion.run.one_process import train_in_one_process
from apportion.run.planned_program import planned_program

GPT2, LLAMA = "gpt2:tiny,dropout=0", "llama:tiny"
STEPS = 3
# Llama 3's proportions, but for few layers, and 2048 tokens on each rank: most of what a step holds
# is activations, and without recomputation the layers' are more than those of the loss.
RECOMPUTED = "llama:layers=4,width=32,heads=4,kv_heads=2,hidden=112,vocab=1024,seq=128"
PEAKS = Path(__file__).with_name("step_peaks.py")


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
        (LLAMA, MeshLayout(replicate=2, shard=2, reshard=False)),
    ],
    ids=["gpt2 fsdp", "gpt2 ddp", "llama hsdp kept"],
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


def losses_of_one_device(spec: str) -> list[float]:
    it, found = zoo.load(spec, meta=False), list[float]()
    for _ in range(STEPS):
        it.optimizer.zero_grad()
        loss = it.step(it.model, it.batch)
        loss.backward()
        it.optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_that_recomputes_layers_holds_what_its_plan_says(
    tmp_path: Path, launch: Launch, ranks: int
) -> None:
    """Losses differ from one device's in the order of float32 sums. Peaks differ by what is sent:
    the plan holds buffers of its own messages, FSDP2 the gathered parameters of a layer."""
    spec = f"{RECOMPUTED},batch={16 * ranks}"
    it = zoo.load(spec, meta=True)
    program = ap.capture(it.step, it.model, it.optimizer, it.batch, clip_norm=it.clip_norm)
    place = ap.cluster(f"local:{ranks}")
    kept = max(make_plan(program, place, "fsdp", 1.0).predicted.peak_bytes)
    plan = make_plan(program, place, "fsdp", 1.0, 0.7 * kept, recompute="modules")
    assert plan.feasible and plan.recomputed
    with_model(plan, spec).save(tmp_path / "p.json")
    assert cli.status(["export", str(tmp_path / "p.json"), "-o", str(tmp_path / "train.py")]) == 0
    words = [PEAKS, tmp_path / "train.py", "--steps", STEPS]
    lines = launch(*words, ranks=ranks, folder=tmp_path).splitlines()
    said = [json.loads(line) for line in lines if line.startswith("{")]
    losses = [row["loss"] for row in said if "loss" in row]
    assert losses == pytest.approx(losses_of_one_device(spec), rel=1e-5)
    peaks = [row["peak"] for row in said if "peak" in row]
    assert len(peaks) == ranks * (STEPS - 1)
    later = peaks[1 :: STEPS - 1]  # libraries are loaded in the first step
    predicted = max(plan.predicted.peak_bytes)
    assert later == pytest.approx([predicted] * ranks, rel=0.05)
    assert predicted < 0.7 * kept
