"""Plan files that earlier versions of the package wrote are read, and mean what they meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import apportion as ap

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_an_old_file_is_read_and_predicts_what_it_simulates_to(path: Path) -> None:
    plan = ap.Plan.load(path)
    line = plan.timeline
    assert line.step_seconds == plan.predicted.step_seconds == 0.000238292
    # Buffers of messages are there for the whole step now; the file says 11,776.
    assert line.peak_bytes == plan.predicted.peak_bytes == (12800,) * 4
    assert line.bytes_moved == plan.predicted.bytes_moved == 2336
    assert "the file says 0.0002383 s a step, 11,776 bytes at the peak" in plan.notes[-1]


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_an_old_file_is_written_as_it_was_read(path: Path, tmp_path: Path) -> None:
    """But for its figures, which are simulated anew."""
    ap.Plan.load(path).save(tmp_path / "again.json")
    first, again = (json.loads(p.read_text()) for p in (path, tmp_path / "again.json"))
    assert again.pop("notes")[:-1] == first.pop("notes")
    assert again.pop("predicted").keys() == first.pop("predicted").keys()
    assert again == first
