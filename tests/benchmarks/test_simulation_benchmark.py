"""The benchmark of the simulator, on small steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from make_tasks import schedule_as_compiled

from apportion.lower.task_kinds import (
    TRANSFER,
)
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import PUBLISHED
from apportion.simulate.network import network
from apportion.simulate.schedule import schedule
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import verify

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import made_up

    return made_up.made_up


def test_a_made_up_step_is_one(made_up: Any) -> None:
    tasks = made_up(1000, devices=5)
    assert 1000 <= len(tasks) < 1000 + 5 * 9
    assert (tasks.kind == TRANSFER).mean() == pytest.approx(2 / 9)
    net = network(tasks, cluster("5xh100"), PUBLISHED)
    for one, other in zip(schedule(net), schedule_as_compiled(net), strict=True):
        assert np.array_equal(one, other)
    line = simulate(tasks, cluster("5xh100"), PUBLISHED)
    verify(line, tasks)
    assert min(line.peak_bytes) > max(tasks.nbytes)


@pytest.mark.soak
@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "simulation.py", "--largest", "3000", "--without-models",
         "--json", "--plot", plot],
        env=dict(os.environ), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert [row["tasks"] for row in found["made up"]] == [1152, 3456]
    assert all(row["seconds"] > row["schedule_seconds"] > 0 for row in found["made up"])
    assert found["compilation"]["first"] > found["compilation"]["cached"]
    drawn = ElementTree.fromstring(plot.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == 2
