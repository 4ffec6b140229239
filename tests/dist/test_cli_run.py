"""`apportion run` on real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import apportion.run
from apportion import cli


def call_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    status = cli.status([*arguments, "--json"])
    out, err = capfd.readouterr()
    assert out.count("\n") == 1, err
    return status, json.loads(out)


def test_run_measures_what_was_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    status, facts = call_json(
        capfd, "run", "gpt2:tiny", "--procs", "2", "--method", "data", "--check"
    )
    assert status == 0 and facts["equal"] is True
    assert len(facts["losses"]) == 3 and len(facts["measured_peak_bytes"]) == 2
    assert facts["measured_bytes_moved"] == facts["bytes_moved"]
    assert facts["measured_step_seconds"] > 0
    assert facts["max_abs_loss_diff"] >= 0 and facts["max_rel_param_diff"] >= 0


def test_a_saved_plan_runs_only_its_own_model(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "p.json")
    assert cli.status(["plan", "mlp:tiny", "--cluster", "local:2", "--out", file]) == 0
    status, facts = call_json(capfd, "run", "mlp:tiny", "--plan", file, "--steps", "2")
    assert status == 0 and len(facts["losses"]) == 2 and "equal" not in facts
    assert cli.status(["run", "mlp:tiny,layers=4", "--plan", file]) == 2
    err = capfd.readouterr().err
    assert err.splitlines()[-1].startswith("apportion: ")


def test_the_table_ends_with_the_verdict(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = apportion.run.run
    command = ["run", "mlp:tiny", "--procs", "2", "--method", "data", "--check"]
    assert cli.status(command) == 0
    out = capfd.readouterr().out
    assert "measured" in out and out.splitlines()[-1] == "equal: yes"
    monkeypatch.setattr(
        apportion.run, "run", lambda *given, **named: replace(real(*given, **named), equal=False)
    )
    assert cli.status(command) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "equal: no"
