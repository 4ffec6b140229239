"""`apportion run` on real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import main as cli
from apportion.run.run import Run


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
    assert facts["measured_step_seconds"] > 0 and len(facts["measured_steps"]) == 3
    rows = {row["name"]: row for row in facts["comparison"]}
    assert rows["bytes moved"]["error"] == rows["peak memory"]["error"] == 0
    assert rows["step"]["predicted"] == facts["step_seconds"]
    assert rows["step"]["measured"] == facts["measured_step_seconds"]
    assert all(rows[name]["measured"] > 0 for name in ("computes", "assembles", "exchanges"))
    assert facts["max_abs_loss_diff"] >= 0 and facts["max_rel_param_diff"] >= 0


def test_a_saved_plan_runs_only_its_own_model(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "p.json")
    command = ["plan", "mlp:tiny", "--cluster", "local:2", "--budget", "0", "--out", file]
    assert cli.status(command) == 0
    status, facts = call_json(capfd, "run", "mlp:tiny", "--plan", file, "--steps", "2")
    assert status == 0 and len(facts["losses"]) == 2 and "equal" not in facts
    assert cli.status(["run", "mlp:tiny,layers=4", "--plan", file]) == 2
    err = capfd.readouterr().err
    assert err.splitlines()[-1].startswith("apportion: ")


def test_the_measured_step_is_traced(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "m.json"
    status, facts = call_json(
        capfd, "run", "mlp:tiny", "--procs", "2", "--method", "data", "--trace", str(trace)
    )
    data = json.loads(trace.read_text())
    assert status == 0 and data["otherData"]["source"] == "measured"
    spans = [event for event in data["traceEvents"] if event["ph"] == "X"]
    tasks = {event["args"]["task"] for event in spans}
    assert tasks == set(range(len(tasks))) and {event["pid"] for event in spans} == {0, 1}
    longest = max(event["ts"] + event["dur"] for event in spans)
    assert 0 < longest / 1e6 < 100 * max(facts["measured_steps"])  # in the same unit
    status = cli.status(["run", "mlp:tiny", "--trace", str(tmp_path / "none" / "m.json")])
    assert status == 2 and "There is no folder" in capfd.readouterr().err


def test_the_table_ends_with_the_verdict(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("apportion.run.run")
    done: list[Run] = []

    def noted(*given: Any) -> Run:
        done.append(real(*given))
        return done[-1]

    real = module.run
    monkeypatch.setattr(module, "run", noted)
    command = ["run", "mlp:tiny", "--procs", "2", "--method", "data", "--check"]
    assert cli.status(command) == 0
    out = capfd.readouterr().out
    assert "measured" in out and out.splitlines()[-1] == "equal: yes"
    monkeypatch.setattr(module, "run", lambda *given: replace(done[0], equal=False))
    assert cli.status(command) == 1
    assert capfd.readouterr().out.splitlines()[-1] == "equal: no"
