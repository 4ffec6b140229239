"""`make demo`, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apportion.cli import demo


def test_the_demonstration(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.main("gpt2:tiny", tmp_path)
    out = capfd.readouterr().out
    assert out.count("equal: yes") == 2
    head, *runs = out.split(" steps beside a single device:")
    assert "search time" in head and "data" in head and "tofu" in head
    assert all("predicted" in run and "measured" in run for run in runs)
    assert (tmp_path / "demo.html").read_text().startswith("<!")
    assert json.loads((tmp_path / "demo.trace.json").read_text())
