"""The benchmark of speed: that it runs, and what it makes of figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import speed

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def answer(**seconds: float) -> dict[str, object]:
    """A rank whose steps took so many seconds, on the processor half of that."""
    steps = {name.replace("_", " "): [[s / 2, s, 0.0, 1]] * 3 for name, s in seconds.items()}
    return {"losses": {name: [1.0] for name in steps}, "figures": steps}


def test_ratios_are_to_the_faster_rival() -> None:
    found = {
        row.contender: row
        for row in speed.rows(
            "m",
            [
                {**answer(ddp=4, tensor=1, data_none=3)},
                {**answer(ddp=2, tensor=1, data_none=5)},
            ],
        )
    }
    assert found["ddp"].wall == 4 and found["ddp"].cpu == 3
    assert found["ddp"].wall_ratio is None
    assert found["data none"].wall_ratio == 5 / 4
    assert found["data none"].cpu_ratio == 4 / 3
    assert found["data none"].rivals == ["ddp"]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, BENCHMARKS / "speed.py", "--quick", "--modes", "none", "--json", out]
    subprocess.run(command, env=dict(os.environ), check=True, capture_output=True)
    rows = {row["contender"]: row for row in json.loads(out.read_text())}
    assert {"ddp", "fsdp2", "tensor", "data none", "fsdp none", "megatron none"} <= set(rows)
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["ddp"]["losses"], rel=1e-5), row
        assert row["cpu"] > 0 and row["wall"] > 0
