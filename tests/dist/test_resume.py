"""Saved on some processes and gone on with on others; bad checkpoints end in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import main as cli


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    capfd.readouterr()
    status = cli.status(["run", "mlp:tiny", "--no-calibrate", "--json", *arguments])
    out, err = capfd.readouterr()
    return status, json.loads(out) if out else {}, err


def test_other_processes_go_on(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The losses are those of an undisturbed run; the memory of saving is predicted to the byte."""
    run = str(tmp_path / "run")
    _, whole, _ = call(capfd, "--procs", "2", "--method", "data", "--steps", "5", "--seed", "4")
    status, facts, _ = call(
        capfd, "--procs", "3", "--method", "tofu", "--steps", "3", "--seed", "4",
        "--save", run, "--save-every", "2", "--metrics", str(tmp_path / "m.jsonl"),
    )  # fmt: skip
    assert status == 0 and facts["saved"] == f"{run}/step-3"
    assert sorted(os.listdir(run)) == ["step-2", "step-3"]
    held = [a + b for a, b in zip(facts["peak_bytes"], facts["save_bytes"], strict=True)]
    assert facts["measured_peak_bytes"] == held
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == facts["losses"]
    status, more, _ = call(
        capfd, "--procs", "2", "--method", "data", "--steps", "2", "--resume", run, "--save", run,
        "--check",
    )  # fmt: skip
    assert status == 0 and more["equal"] is True and more["first_step"] == 3
    losses = [*facts["losses"], *more["losses"]]
    assert losses == pytest.approx(whole["losses"], rel=1e-5)
    assert sorted(os.listdir(run)) == ["step-2", "step-3", "step-5"]

    _bad(capfd, tmp_path, run)


def _bad(capfd: pytest.CaptureFixture[str], tmp_path: Path, run: str) -> None:
    """One sentence, status 2, and nothing changed."""
    before = sorted(os.listdir(run))

    def refused(*arguments: str) -> str:
        status, facts, err = call(capfd, "--procs", "2", "--method", "data", *arguments)
        assert status == 2 and not facts
        (said,) = [line for line in err.splitlines() if line.startswith("apportion: ")]
        assert "Traceback" not in err
        return said

    assert "was trained with --seed 4, not 0" in refused("--resume", run, "--seed", "0")
    assert "another training run" in refused("--save", run)
    assert "there is no checkpoint" in refused("--resume", str(tmp_path / "none"))
    assert "Give --save DIR" in refused("--save-every", "2")
    broken = tmp_path / "broken"
    shutil.copytree(Path(run) / "step-5", broken)
    next(broken.glob("*.safetensors")).unlink()
    assert "a part of it; take another checkpoint" in refused("--resume", str(broken))
    assert sorted(os.listdir(run)) == before
