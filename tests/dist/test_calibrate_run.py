"""Measuring on real processes: the command, planning by itself, and what a saved plan keeps."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import apportion as ap
from apportion import zoo
from apportion.cli import main as cli
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import ASSUMED
from apportion.machine.cost_table import CostTable, load_cost_file
from apportion.plan.plan import PlanWarning
from apportion.run.calibrate import exchange_on, lower_strategy, rehearse_on
from apportion.run.cost_cache import cached_costs, condition_of
from apportion.run.pool import ProcessPool
from apportion.run.step_source import StepSource
from apportion.search import METHODS, Problem
from apportion.split.space import Space

SPEC = "mlp:layers=3,width=256,batch=64"


def captured() -> ap.Program:
    it = zoo.load(SPEC)
    return ap.capture(it.step, it.model, it.optimizer, it.batch)


def call(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, object], str]:
    capfd.readouterr()
    assert cli.status([*args, "--json"]) == 0
    out, err = capfd.readouterr()
    return json.loads(out), err


def test_planning_measures_what_is_missing_once(
    calibrating: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", SPEC, "--cluster", "local:2", "--method", "data"]
    first, told = call(capfd, *plan, "--out", str(tmp_path / "p.json"))
    assert "measuring" in told
    assert first["cost"]["model"] == "calibrated"  # type: ignore[index]
    assert first["cost"]["shares"]["estimated"] == 0  # type: ignore[index]
    second, told = call(capfd, *plan)
    assert "measuring" not in told
    assert second["step_seconds"] == first["step_seconds"]
    # Elsewhere, without this machine's measurements, the plan says the same.
    for path in calibrating.iterdir():
        path.unlink()
    again, _ = call(capfd, "simulate", str(tmp_path / "p.json"))
    assert again["step_seconds"] == first["step_seconds"]
    off, told = call(capfd, *plan, "--no-calibrate")
    assert "measuring" not in told
    assert off["cost"]["model"] == "assumed"  # type: ignore[index]


def test_the_command_measures_a_step_divided_in_several_ways(
    calibrating: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    found, told = call(capfd, "calibrate", "mlp:tiny", "--procs", "2", "--out", str(out))
    assert found["processes"] == 2
    assert all(f"mlp:tiny, {name}" in told for name in ("single", "data", "fsdp", "tofu", "random"))
    (table,) = load_cost_file(out).tables
    assert len(table.works) == found["works"]
    assert len(table.works) > 50
    assert {"assemble", "pack", "exchange"} <= table.lines.keys()
    assert "aten.mm.default/4" in table.fits or "aten.addmm.default/4" in table.fits
    assert cached_costs().table(table.condition).works == table.works


def test_a_script_without_a_guard_can_plan(calibrating: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import apportion as ap\n"
        "from apportion import zoo\n"
        "print('once')\n"
        "it = zoo.load('mlp:tiny')\n"
        "program = ap.capture(it.step, it.model, it.optimizer, it.batch)\n"
        "plan = ap.plan(program, ap.cluster('local:2'), 'data', note=print)\n"
        "print(plan.cost.name)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines.count("once") == 1
    assert lines.count("calibrated") == 1


def test_the_library_says_that_it_measures(calibrating: Path) -> None:
    with warnings.catch_warnings(record=True) as told:  # that the machine is busy may be one more
        warnings.simplefilter("always", PlanWarning)
        ap.plan(captured(), ap.cluster("local:2"), "data")
    assert any("measuring" in str(one.message) for one in told)


@pytest.mark.parametrize("spec", [SPEC, ""])
def test_large_kernels_are_measured_to_take_longer(spec: str) -> None:
    """By the model's specification, or by its Graph alone."""
    program, place = captured(), cluster("local:2")
    space = Space(program.graph)
    problem = Problem(space, place, ASSUMED)
    strategy = METHODS["data"](problem, budget=5.0, seed=0).strategy
    one = lower_strategy(program.graph, strategy, 2)
    with ProcessPool(2, timeout=120) as pool:
        table = exchange_on(pool, CostTable(condition_of(place)), 2.0)
        table = rehearse_on(pool, StepSource(program.graph, spec), one, table, 6, 5.0)
    matmuls = [w for s, w in table.works.items() if "mm.default" in s]
    views = [w for s, w in table.works.items() if s.startswith("aten.t.default")]
    assert max(w.seconds for w in matmuls) > 5 * min(w.seconds for w in views)
    exchange = table.lines["exchange"]
    assert 1e-6 < exchange.each + exchange.per_box < 0.1
    assert 1e-11 < exchange.per_byte < 1e-7
