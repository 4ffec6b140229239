"""Plans tried on real processes before one is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import apportion as ap
from apportion import zoo
from apportion.cli import main as cli
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run import trial
from apportion.run.pool import ProcessPool, SharedPool
from apportion.run.step_source import StepSource


def captured(spec: str = "mlp:tiny") -> ap.Program:
    it = zoo.load(spec)
    return ap.capture(it.step, it.model, it.optimizer, it.batch)


def check(measured: list[dict[str, Any]], least: int) -> None:
    """Each row has both figures, and the one that was kept is the fastest."""
    assert len(measured) >= least
    assert all(row["predicted_seconds"] > 0 and row["measured_seconds"] > 0 for row in measured)
    (kept,) = [row for row in measured if row["chosen"]]
    assert kept["measured_seconds"] == min(row["measured_seconds"] for row in measured)


def test_plan_keeps_the_really_fastest(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "p.json")
    command = ["plan", "mlp:tiny", "--cluster", "local:2", "--budget", "1", "--out", file]
    assert cli.status([*command, "--measure", "3", "--json"]) == 0
    out, err = capfd.readouterr()
    facts = json.loads(out)
    check(facts["measured"], 3)
    assert "running 3 plans for 7 steps each on 2 processes" in err
    kept = next(row for row in facts["measured"] if row["chosen"])
    assert (kept["method"], kept["predicted_seconds"]) == (facts["method"], facts["step_seconds"])
    assert len(Plan.load(file).measured) == 3
    assert cli.status(["report", file, "-o", str(tmp_path / "p.html")]) == 0


def test_run_measures_what_it_plans(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["run", "mlp:tiny", "--procs", "2", "--method", "data", "--measure", "2", "--steps"]
    assert cli.status([*command, "1"]) == 0
    out = capfd.readouterr().out
    assert "plans that were run" in out and "kept" in out


def test_a_program_is_measured_without_its_specification() -> None:
    told: list[str] = []
    plan = ap.plan(captured(), ap.cluster("local:2"), "data", measure=1, note=told.append)
    (one,) = plan.measured
    assert one.chosen and one.method == "data" and one.measured_seconds > 0
    assert "running 1 plan for 7 steps each on 2 processes" in told


def test_a_plan_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes refuse a strategy of another step; those of the next plan are new ones."""
    good, bad = (
        make_plan(captured(spec).graph, ap.cluster("local:2"), "data")
        for spec in ("mlp:tiny", "mlp:tiny,layers=5")
    )
    source = StepSource(good.graph, "mlp:tiny")
    with SharedPool(2) as processes:
        plan = trial.fastest_measured([bad, good], source, lambda text: None, processes)
    assert plan.strategy == good.strategy and len(plan.measured) == 1
    assert any(note.startswith("data was left out: rank ") for note in plan.notes)


def test_long_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, one step is warm and one is timed."""
    monkeypatch.setattr(trial, "MOST", 0.0)
    plan = make_plan(captured().graph, ap.cluster("local:2"), "data")
    job = trial.trial_request(plan, StepSource(plan.graph, "mlp:tiny"))
    with ProcessPool(2) as pool:
        assert [len(spans) for spans in pool.ask(job)] == [1, 1]
