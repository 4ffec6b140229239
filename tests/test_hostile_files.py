"""Files that are not what they should be are refused in one sentence, or else harmless: a share of
what benchmarks/hostile_files.py tries."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import hostile_files
import hostile_mutants
import pytest
import torch
from graphs import captured

import apportion as ap
from apportion import loops
from apportion.checkpoint.group_settings import plain_groups, put_all_settings
from apportion.cli import main as cli
from apportion.loops.session import threads
from apportion.machine.cost_table import load_cost_file
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.plan.stale import with_staleness

COUNTS = {
    "plan": 50, "graph": 60, "cluster": 40, "toml": 25, "costs": 40, "policy": 60,
    "checkpoint": 100, "record": 100, "book": 20, "loops": 100, "placement": 100,
}  # fmt: skip


@cache
def kinds() -> dict[str, hostile_files.FileKind]:
    return hostile_files.kinds()


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_mutants_are_refused_in_a_sentence_or_harmless(name: str, tmp_path: Path) -> None:
    kind, found = kinds()[name], []
    began = time.process_time()
    for seed in range(COUNTS[name]):
        found.append(hostile_files.judge(kind, 100_000 + seed, tmp_path))
    assert [row for row in found if row[0] == "defect"] == []
    assert {row[0] for row in found} == {"refused", "taken"}
    assert time.process_time() - began < hostile_files.SECONDS * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_good_files_are_taken(name: str, tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    kind = kinds()[name]
    for number, good in enumerate(kind.good):
        path = tmp_path / f"{number}.{kind.suffix}"
        path.write_bytes(good)
        kind.use(kind.read(path), tmp_path / "again", hostile_files.Random(0))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    make_plan(captured("mlp:tiny")[0], ap.cluster("2xk80"), "data", 0.0).save(path)
    return path


def edited(path: Path, *place: Any, item: Any) -> Path:
    data = json.loads(path.read_text())
    hostile_mutants.with_item(data, place, item)
    path.write_bytes(hostile_mutants.dumped(data))
    return path


@pytest.mark.parametrize(
    ("place", "item", "says"),
    [
        (("budget",), hostile_mutants.Raw("1e999"), "the number 1e999 is too large"),
        (("seed",), hostile_mutants.Raw("9" * 400), "its seed: 99999"),
        (("seed",), hostile_mutants.Raw("9" * 5000), "digits"),
        (("graph",), hostile_mutants.Raw("[" * 100_000 + "]" * 100_000), "nested too deeply"),
        (("graph", "ops", 0, 0), 7, "the name of an operator: 7 is not a text"),
        (("graph", "values", 0, 0), "\x1b[31mred", "characters that cannot be shown"),
        (("storage", 1), [[0, -1]], "number of bytes that is negative"),
        (("cost", "efficiency"), hostile_mutants.Raw("NaN"), "NaN is no number"),
        (("cluster", "links", 0, "latency"), 1e300, "is more than 1e+06"),
        (("method",), "x" * 400_000, "has 400,000 characters"),
        (("predicted", "step_seconds"), -1.0, "its step time: -1.0 is less than 0"),
        (("memory_limit",), [-1, 5], "its memory limits: -1 is less than 0"),
    ],
)
def test_what_was_accepted_or_ended_in_a_traceback(
    place: tuple[Any, ...], item: Any, says: str, plan_file: Path
) -> None:
    with pytest.raises(ValueError, match="is not a plan that can be read") as error:
        Plan.load(edited(plan_file, *place, item=item))
    assert says in str(error.value) and len(str(error.value)) < 600


def test_figures_of_a_file_are_not_trusted(
    plan_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    real = Plan.load(plan_file).predicted
    edited(plan_file, "predicted", "step_seconds", item=1e-9)
    edited(plan_file, "predicted", "peak_bytes", item=[1, 1])
    loaded = Plan.load(plan_file)
    assert loaded.predicted == real and "the file says 1e-09 s a step" in loaded.notes[-1]
    loaded.save(plan_file)
    assert Plan.load(plan_file).notes == loaded.notes[:-1]  # and what it said is forgotten


@pytest.mark.slow
def test_seconds_that_cannot_be_counted_do_not_make_a_step_faster(
    plan_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    (shipped, *_) = hostile_files.kinds()["costs"].good
    path.write_bytes(shipped)
    table = json.loads(shipped)
    name = next(iter(table["tables"][0]["works"]))
    with pytest.raises(ValueError, match="is more than 1e\\+06"):
        load_cost_file(edited(path, "tables", 0, "works", name, 0, item=1e300))
    path.write_bytes(shipped)
    with pytest.raises(ValueError, match="is less than 0"):
        load_cost_file(edited(path, "tables", 0, "works", name, 4, item=-5))
    cluster = ("cluster", "devices", 0, "launch_seconds")
    slow = Plan.load(edited(plan_file, *cluster, item=9e5))
    assert slow.predicted.step_seconds > 9e5


def test_a_plan_on_stale_parameters_is_read_as_it_was_saved(tmp_path: Path) -> None:
    made = make_plan(captured("mlp:tiny")[0], ap.cluster("2xk80"), "ssp", 0.0)
    plan = with_staleness(made, 2)
    assert plan.predicted != made.predicted
    plan.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json").predicted == plan.predicted
    edited(tmp_path / "p.json", "method", item="data")
    with pytest.raises(ValueError, match="only plans by ssp do"):
        Plan.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lr": -0.1}, "the setting lr is none"),
        ({"lr": 10**40}, "the setting lr is none"),
        ({"betas": {"$": "tuple", "of": [0.9, 0.9, 0.9]}}, "the setting betas is none"),
        ({"betas": {"$": "tuple", "of": [0.9, "x"]}}, "the setting betas is none"),
    ],
)
def test_settings_of_a_checkpoint_that_cannot_be_those_of_an_optimizer(
    change: dict[str, Any], says: str
) -> None:
    (group,) = torch.optim.Adam([torch.zeros(2, requires_grad=True)]).param_groups
    before = dict(group)
    (plain,) = plain_groups([group])
    with pytest.raises(ValueError, match=says):
        put_all_settings([group], [plain | change], "c")
    assert group == before
    put_all_settings([group], [plain | {"lr": 0.5, "fused": True, "capturable": True}], "c")
    assert group == before | {"lr": 0.5}  # how an update is computed stays this program's choice


def test_the_index_of_a_loop_must_name_all_of_an_array(tmp_path: Path) -> None:
    with threads(1):
        loops.save(tmp_path, W=loops.array.full((4, 3), 2.0))
        edited(tmp_path / "loops.json", "arrays", "W", "parts", item=[])
        with pytest.raises(ValueError, match="parts of it are missing"):
            loops.load(tmp_path, W=loops.array.zeros((4, 3)))


def test_a_command_does_not_echo_a_file(plan_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edited(plan_file, "graph", "ops", 0, 1, item=["x" * 400_000])
    assert cli.status(["simulate", str(plan_file)]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and len(said.err) < 700
