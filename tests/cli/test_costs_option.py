"""`--costs`: what calibrate wrote on another machine is read by the commands that predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import main as cli
from apportion.cli.calibrate_models import gpu_place
from apportion.machine.cost_table import Condition, CostFile, CostTable, Fit, save_cost_file
from apportion.run.calibrate_cuda import kind_of_gpu
from apportion.run.cost_cache import keep_costs

PLAN = ["plan", "mlp:tiny", "--cluster", "1xh200", "--method", "single"]


def table(kind: str, seconds: float) -> CostTable:
    """A GPU on which every kernel takes so long."""
    fits = {f"family:{name}/4": Fit(seconds, 0.0, 0.0, 0.0, 4) for name in ("dense", "other")}
    own = {
        f"{name}/4": fits["family:other/4"] for name in ("aten.mm.default", "aten.addmm.default")
    }
    return CostTable(Condition(kind, mode="generated"), "2026-01-31", fits=fits | own)


def called(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    capfd.readouterr()
    status = cli.status([*arguments, "--json"])
    out, err = capfd.readouterr()
    return status, json.loads(out) if out else {}, err


@pytest.mark.slow
def test_costs_of_a_file_change_the_prediction(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, saved = str(tmp_path / "t.json"), str(tmp_path / "p.json")
    save_cost_file(CostFile("elsewhere", "2.11.0", (table("h200", 0.5),)), file)
    _, before, _ = called(capfd, *PLAN, "--out", saved)
    _, after, _ = called(capfd, *PLAN, "--costs", file)
    assert before["step_seconds"] < 0.1 and after["step_seconds"] > 0.5
    assert "elsewhere" in after["cost"]["provenance"]
    _, again, _ = called(capfd, "simulate", saved, "--costs", file)
    assert again["step_seconds"] == after["step_seconds"]
    _, rows, _ = called(capfd, "compare", *PLAN[1:4], "--methods", "single", "--costs", file)
    assert rows["results"][0]["step_seconds"] == after["step_seconds"]


def test_costs_that_were_measured_here_are_taken_from_the_cache(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path))
    keep_costs(table("h200", 0.25))
    _, facts, _ = called(capfd, *PLAN)
    assert facts["step_seconds"] > 0.25
    _, other, _ = called(capfd, "plan", "mlp:tiny", "--cluster", "1xh100", "--method", "single")
    assert other["step_seconds"] < 0.1


@pytest.mark.slow
def test_wrong_files_get_one_sentence(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    save_cost_file(CostFile("elsewhere", "2.11.0", (table("a100", 0.5),)), file)
    status, _, err = called(capfd, *PLAN, "--costs", str(file))
    assert status == 2 and "has costs of a100, and the devices of 1xh200 are h200" in err
    file.write_text("{")
    status, _, err = called(capfd, *PLAN, "--costs", str(file))
    assert status == 2 and "is not a cost table that can be read" in err
    status, _, err = called(capfd, *PLAN, "--costs", str(tmp_path / "none.json"))
    assert status == 2 and "cannot be read: No such file" in err
    status, _, err = called(capfd, "plan", "mlp:tiny", "--cluster", "local:2", "--costs", str(file))
    assert status == 2 and "costs of local:2 are measured here" in err
    status, _, err = called(capfd, *PLAN, "--compile", "fast")
    assert status == 2 and "no way to compile 'fast'" in err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090", "3090"),
        ("NVIDIA TITAN X", "gpu"),
    ],
)
def test_gpus_are_called_as_clusters_call_them(name: str, kind: str) -> None:
    assert kind_of_gpu(name) == kind


def test_a_gpu_without_a_preset_needs_a_cluster() -> None:
    assert [d.kind for d in gpu_place("NVIDIA A100-SXM4-80GB", None).devices] == ["a100"]
    assert [d.kind for d in gpu_place("NVIDIA GeForce RTX 3090", "4xv100").devices] == ["v100"]
    with pytest.raises(ValueError, match="no preset has the GPU 'NVIDIA GeForce RTX 3090'"):
        gpu_place("NVIDIA GeForce RTX 3090", None)
    with pytest.raises(ValueError, match="the devices of local:2 are not GPUs of one kind"):
        gpu_place("NVIDIA H200", "local:2")
