"""Layouts on a device mesh at the command line: what one would cost, and the layout of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apportion.cli import main as cli


def told(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    capfd.readouterr()
    assert cli.status([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capfd.readouterr().out)
    return found


@pytest.mark.slow
def test_a_layout_is_planned_and_comes_back(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    layout, plan, again = (tmp_path / name for name in ("l.json", "p.json", "again.json"))
    text = {"format": "apportion mesh layout", "version": 1, "mesh": {"shard": 2}}
    layout.write_text(json.dumps(text))
    words = ["gpt2:tiny,dropout=0", str(layout), "--cluster", "2xh100", "--batch", "4"]
    made = told(capfd, "import", *words, "--out", str(plan))
    assert made["model"] == "gpt2:tiny,dropout=0,batch=4" and made["feasible"]
    found = told(capfd, "export", str(plan), "--layout", str(again))
    assert found["mesh"] == {"replicate": 1, "shard": 2, "tensor": 1}
    assert (found["program"], found["layout"]) == ("", str(again))
    assert json.loads(again.read_text())["mesh"]["shard"] == 2
