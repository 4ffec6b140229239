"""What was measured beside a GPU becomes a table and a page anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import accuracy_gpu
import pytest
from accuracy_gpu import CaseMeasurement, compared, make_tables, page
from graphs import captured

from apportion.machine.cluster import cluster
from apportion.machine.cost_table import CostFile
from apportion.plan.make_plan import make_plan
from apportion.run.calibrate_cuda import CudaTimes

CASE = accuracy_gpu.Case("gpt2:tiny")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A step whose every kernel takes a device 10 and its host 2 microseconds."""
    plan = make_plan(captured(CASE.spec)[0], cluster("1xh200"), "single")
    plan.save(tmp_path / "0.plan.json")
    count = len(plan.tasks)
    device = [1e-5 if nbytes else 1e-9 for nbytes in plan.tasks.nbytes.tolist()]
    times = CudaTimes(device, [2e-6] * count, {}, 1 << 25, 1e-6, 0.0, 3e-4)
    whole = sum(device) + 3e-4
    (peak,) = plan.predicted.peak_bytes
    found = CaseMeasurement(
        CASE, "NVIDIA H200", "2.11.0", {"generated": [whole] * 5}, {"generated": peak}, times=times
    )
    (tmp_path / "0.json").write_text(json.dumps(asdict(found)))
    more = CaseMeasurement(
        CASE, "NVIDIA H200", "2.11.0", {"inductor": [whole * 0.8] * 5}, {"inductor": 1},
        {"inductor": peak},
    )  # fmt: skip
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "0.json").write_text(json.dumps(asdict(more)))
    return tmp_path


@pytest.mark.slow
def test_what_was_measured_is_predicted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_gpu, "CALIBRATED", (CASE,))
    tables = make_tables(folder, None)
    assert [t.condition.mode for t in tables] == ["generated", "inductor"]
    own = (CostFile("here", "2.11.0", tables),)
    ((found, plan),) = accuracy_gpu.load_all(folder)
    rows = [compared(found, plan, mode, own) for mode in ("generated", "inductor")]
    assert rows[0].error == pytest.approx(0.0, abs=0.02) and rows[0].known > 0.99
    assert rows[1].error == pytest.approx(0.0, abs=0.1)
    text = page(rows, found.gpu, found.torch)
    assert "generated, steps that the table was measured on: 1 steps" in text
