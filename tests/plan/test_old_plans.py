"""Plan files that earlier versions of the package wrote are read, and mean what they meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import apportion as ap

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_an_old_file_is_read_and_simulates_to_what_it_predicts(path: Path) -> None:
    plan = ap.Plan.load(path)
    line = plan.timeline
    assert line.step_seconds == plan.predicted.step_seconds == 0.000238292
    assert plan.predicted.peak_bytes == (11776,) * 4
    assert line.peak_bytes == (12800,) * 4  # buffers of messages are there for the whole step now
    assert line.bytes_moved == plan.predicted.bytes_moved == 2336


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_an_old_file_is_written_as_it_was_read(path: Path, tmp_path: Path) -> None:
    ap.Plan.load(path).save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())
