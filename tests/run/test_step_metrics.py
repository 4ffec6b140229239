"""Metrics of steps: one line each, JSON lines, TensorBoard; and what drifts from predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.run.drift import FIRST, drift_of, is_time_to_compare
from apportion.run.runner import Runner
from apportion.run.step_meter import DriftWarning, batch_counts
from apportion.run.step_metrics import StepMetrics, open_sink


def made(metrics: list[str] | None, spec: str = "gpt2:tiny") -> Runner:
    it = zoo.load(spec, 3)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    plan = make_plan(program, cluster("local:1"), "single")
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    mine = worker(executable, 0, timed=True)
    mine.rank.records = False
    return Runner(program, mine, plan=plan, metrics=metrics)


@pytest.mark.slow
def test_every_step_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.jsonl"
    runner = made(["print", str(path)])
    losses = [float(runner.step(runner.program.batch)) for _ in range(3)]
    runner.finish()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["loss"] for row in rows] == losses
    assert [row["step"] for row in rows] == [0, 1, 2]
    plan = runner.plan
    assert plan is not None
    for row in rows:
        assert row["predicted_step_seconds"] == plan.predicted.step_seconds
        assert row["samples_per_second"] == pytest.approx(6 / row["step_seconds"])
        assert row["tokens_per_second"] == pytest.approx(30 / row["step_seconds"])
        assert row["predicted_peak_bytes"] == plan.predicted.peak_bytes[0]
        assert row["utilisation"] > 0 and row["peak_bytes"] > 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in lines] == [["step", str(k), "loss"] for k in range(3)]
    assert "predicted)" in lines[0] and "samples/s" in lines[0]


def test_a_loss_that_is_not_a_number_is_null() -> None:
    metrics = StepMetrics(1, math.nan, 0.1, None, None, None, None, 5, None)
    assert json.loads(json.dumps(metrics.facts(), allow_nan=False))["loss"] is None


def test_tensorboard_gets_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_sink(f"tensorboard:{tmp_path}")
    for step in range(3):
        sink.write(StepMetrics(step, 2.0 - step, 0.1, 0.2, 10.0, None, 0.5, 5, 6))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [each.value for each in events.Scalars("train/loss")] == [2.0, 1.0, 0.0]
    assert "train/tokens_per_second" not in events.Tags()["scalars"]


def test_bad_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are neither 'print', nor 'tensorboard:DIR'"):
        open_sink("somewhere")
    with pytest.raises(ValueError, match="cannot write metrics to"):
        open_sink(tmp_path / "none" / "m.jsonl")


def test_batches_are_counted() -> None:
    assert batch_counts((torch.zeros(4, 7), torch.zeros(4))) == (4, None)
    assert batch_counts({"ids": torch.zeros(4, 7, dtype=torch.int64)}) == (4, 28)
    assert batch_counts((torch.zeros(7, 4), torch.zeros(4))) == (None, None)


def test_drift_is_said_from_a_fifth_on() -> None:
    assert drift_of(1.19, 1.0) is None and drift_of(0.81, 1.0) is None
    assert drift_of(1.3, 1.0) == pytest.approx(0.3)
    assert drift_of(0.5, 1.0) == pytest.approx(-0.5)
    assert [n for n in range(600) if is_time_to_compare(n)] == [16, 64, 256, 512]


@pytest.fixture
def slow() -> Iterator[Runner]:
    """A Runner whose plan predicts a tenth of a microsecond a step, and a task that takes long."""
    runner = made(["print"], "mlp:tiny")
    plan = runner.plan
    assert isinstance(plan, Plan) and runner._meter is not None
    yield runner


@pytest.mark.slow
def test_a_drift_names_its_tasks(slow: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    assert slow._meter is not None and slow._meter._expected is not None
    monkeypatch.setattr(slow._meter, "_expected", replace(slow._meter._expected, seconds=1e-7))
    with pytest.warns(DriftWarning, match=r"longer than the 100 ns predicted; most of it in .*l"):
        for _ in range(FIRST + 3):
            slow.step(slow.program.batch)
        slow.finish()
    assert not slow.worker.rank.records  # one step was recorded, and no more are


@pytest.mark.slow
def test_the_timeline_of_a_recorded_step(tmp_path: Path) -> None:
    runner = made(None, "mlp:tiny")
    with pytest.raises(ValueError, match="no step was recorded"):
        runner.timeline()
    runner.step(runner.program.batch)
    runner.record_next_step()
    runner.step(runner.program.batch)
    line = runner.timeline()
    runner.step(runner.program.batch)
    assert 0 < line.step_seconds < 5 and line.source == "measured"
    assert runner.plan is not None
    runner.plan.trace(tmp_path / "t.json", line)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
