"""Plans: files that are checked, replaced whole, and simulated without the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from graphs import Maker, captured
from method_rows import row

import apportion as ap
from apportion.capture.capture import capture
from apportion.checked import LONGEST_TEXT
from apportion.lower.task_graph import Storage
from apportion.plan import plan as plan_module
from apportion.plan import plan_file
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan, PlanTrial, PlanWarning
from apportion.search import METHODS, Problem, UnsuitableMethod, compared_by_default
from apportion.split.strategy import Choice, Strategy


def made(method: str = "random", spec: str = "mlp:tiny", devices: int = 3) -> Plan:
    return make_plan(captured(spec)[0], ap.cluster(f"local:{devices}"), method, budget=1.0, seed=7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    made().save(path)
    return path


def edited(path: Path, change: Any) -> Path:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", [*compared_by_default(), "auto"])
def test_a_plan_is_the_same_after_saving(method: str, tmp_path: Path) -> None:
    plan = replace(made(method, devices=4), model="mlp:tiny", lower_bound=7.0)
    plan = replace(plan, lower_bound_of="bytes moved, over all", notes=("one", "two"))
    trials = (PlanTrial("data", 0.5, 0.25, True), PlanTrial("tofu", 0.25, 0.5, False))
    plan = replace(plan, curve=((0.5, 2.0), (1.0, 1.5)), figures={"proposals": 9}, measured=trials)
    path = tmp_path / "p.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert loaded.graph.fingerprint == plan.graph.fingerprint
    assert loaded.strategy == plan.strategy
    assert loaded.predicted == plan.predicted
    assert loaded.simulate().predicted == plan.predicted


@pytest.mark.slow
def test_a_call_with_very_many_tensors_is_read_back(tmp_path: Path) -> None:
    class Recurrent(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(700):  # the gradient of its weight is one call
                x = super().forward(x)
            return x

    model = Recurrent(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(32, 64),)
    step = capture(lambda model, batch: model(*batch).square().mean(), model, optimizer, batch)
    plan, path = make_plan(step, ap.cluster("1xh200"), "single"), tmp_path / "p.json"
    assert max(map(len, plan.storage.works)) > LONGEST_TEXT
    plan.save(path)
    assert Plan.load(path).storage == plan.storage


def test_a_plan_of_a_graph_needs_no_model(file: Path) -> None:
    loaded = Plan.load(file)
    again = make_plan(loaded.graph, loaded.cluster, "data")
    assert again.predicted.bytes_moved == again.tasks.bytes_moved > 0


def test_predictions_are_those_of_the_tasks() -> None:
    plan = made()
    assert plan.predicted.bytes_moved == plan.tasks.bytes_moved
    assert plan.predicted.step_seconds > 0
    assert len(plan.predicted.peak_bytes) == len(plan.predicted.busy) == 3


def test_feasibility_is_decided_per_device() -> None:
    plan = made()
    worst = max(plan.predicted.peak_bytes)
    assert replace(plan, memory_limit=(worst,) * 3).feasible
    assert not replace(plan, memory_limit=(worst - 1,) * 3).feasible


def set_version(content: Any) -> None:
    content["version"] = 999


def change_graph(content: Any) -> None:
    content["graph"]["ops"][0][1] = "aten.exp.default"


def change_shape(content: Any) -> None:
    value = next(v for v in content["graph"]["values"] if v[1] == "activation" and v[2])
    value[2], value[4] = [2 * value[2][0], *value[2][1:]], 2 * value[4]


def drop_choice(content: Any) -> None:
    content["strategy"]["choices"].pop()


def zero_parts(content: Any) -> None:
    content["strategy"]["choices"][0][0] = [0] * len(content["strategy"]["choices"][0][0])


def other_device(content: Any) -> None:
    content["strategy"]["choices"][0][1][0] = 64


def drop_device(content: Any) -> None:
    content["memory_limit"].pop()


def drop(key: str) -> Any:
    return lambda content: content.pop(key)


def put(key: str, value: Any) -> Any:
    def change(content: Any) -> None:
        content[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_version, "version 999, this is version 4"),
        (drop("version"), "version None"),
        (put("format", "something else"), "does not say that it is one"),
        (change_graph, "was changed"),
        (change_shape, "was changed"),
        (put("fingerprint", "0" * 16), "was changed"),
        (drop_choice, "choices for"),
        (zero_parts, "the parts in the strategy: 0 is less than 1"),
        (other_device, "device 64"),
        (drop_device, "figures are not for the 3 devices"),
        (drop("strategy"), "field 'strategy' is missing"),
        (drop("graph"), "field 'graph' is missing"),
        (drop("seed"), "field 'seed' is missing"),
        (put("graph", 3), ""),
        (put("graph", None), ""),
        (put("graph", {"values": [[1]]}), ""),
        (put("cluster", []), ""),
        (put("cluster", {}), ""),
        (put("strategy", []), ""),
        (put("predicted", "fast"), ""),
        (put("predicted", {}), "field 'step_seconds' of its prediction is missing"),
        (put("seed", "x"), ""),
        (put("budget", "much"), ""),
        (put("memory_limit", 3), ""),
        (put("lower_bound", "3"), "its lower bound: '3' is not a number"),
        (put("lower_bound", True), "its lower bound: True is not a number"),
        (put("lower_bound", float("nan")), "NaN is no number"),
        (drop("lower_bound_of"), "field 'lower_bound_of' is missing"),
        (put("notes", "all is well"), "its notes: 'all is well' is not a list"),
        (put("notes", [3]), "its notes: 3 is not a text"),
        (drop("curve"), "field 'curve' is missing"),
        (put("curve", [[1.0]]), ""),
        (put("figures", [3]), "its figures of the search: [3] is not a mapping"),
        (put("figures", {"proposals": "many"}), ""),
        (put("measured", [{"method": "data"}]), "field 'predicted_seconds' of a plan that was run"),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused_by_name(
    change: Any, message: str, file: Path
) -> None:
    with pytest.raises(ValueError, match=r"p\.json is not a plan that can be read: ") as error:
        Plan.load(edited(file, change))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_the_version_before_is_read(file: Path) -> None:
    def older(content: Any) -> None:
        content["version"] = 3
        for key in ("curve", "figures", "measured"):
            del content[key]

    plan = Plan.load(file)
    assert plan.curve
    assert Plan.load(edited(file, older)) == replace(plan, curve=(), figures={}, measured=())


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"plan"', '{"a": 1}', "\x00", "}{"])
def test_other_text_is_refused(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match=r"p\.json is not a plan"):
        Plan.load(file)


def test_other_bytes_are_refused(file: Path) -> None:
    file.write_bytes(b"\x80\x04\x95pickle\xff")
    with pytest.raises(ValueError, match=r"p\.json is not a plan"):
        Plan.load(file)


def test_a_truncated_file_is_refused_wherever_it_ends(file: Path) -> None:
    whole = file.read_bytes()
    for share in (0.01, 0.3, 0.6, 0.99):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match=r"p\.json is not a plan"):
            Plan.load(file)
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"p\.json is not a plan"):
        Plan.load(file)


def test_a_directory_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot write .*p\.json: No such file or directory"):
        made().save(tmp_path / "missing" / "p.json")


def test_nothing_is_left_behind_when_writing_fails(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ValueError, match="No space left"):
        made("data").save(file)
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


def test_reading_a_plan_lowers_it_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (plan_module, plan_file):
        real = module.runnable

        def counted(*given: Any, real: Any = real) -> Any:
            calls.append("lower")
            return real(*given)

        monkeypatch.setattr(module, "runnable", counted)
    loaded = Plan.load(file)
    assert len(loaded.tasks) and loaded.timeline.step_seconds > 0
    assert calls == ["lower"]


def test_saving_replaces_an_existing_file(file: Path) -> None:
    plan = made("data")
    plan.save(file)
    assert Plan.load(file) == plan
    assert list(file.parent.iterdir()) == [file]


def test_unknown_methods_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown method 'magic'; known: auto, single, data"):
        made("magic")
    with pytest.raises(ValueError, match="unknown method 'magic'"):
        ap.compare(captured("mlp:tiny")[0], ap.cluster("local:2"), methods=["data", "magic"])


def test_a_method_that_is_not_for_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(problem: Problem, **how: Any) -> NoReturn:
        raise UnsuitableMethod(f"it is not for {problem.devices} devices")

    monkeypatch.setitem(METHODS, "never", row("never", never))
    graph, cluster = captured("mlp:tiny")[0], ap.cluster("local:3")
    with pytest.raises(ValueError, match="it is not for 3 devices"):
        make_plan(graph, cluster, "never")
    with pytest.warns(PlanWarning, match="never is left out: it is not for 3 devices") as told:
        (only,) = ap.compare(graph, cluster, ["data", "never"])
    assert only.method == "data" and len(told) == 1
    with pytest.raises(ValueError, match="not for 3"):
        ap.compare(graph, cluster, ["never"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::apportion.plan.plan.PlanWarning")
def test_equal_calls_of_one_line_need_not_be_cut_alike() -> None:
    """The pieces of a cumulative product are on one line, on both sides of undescribed ones."""

    def step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.cumprod(model(batch).cos(), 1).mean()

    model = torch.nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = ap.capture(step, model, optimizer, torch.randn(8, 4))
    plan = make_plan(program, ap.cluster("local:4"), "tofu")
    assert plan.predicted.bytes_moved == plan.tasks.bytes_moved


def test_operators_that_run_unsplit_are_warned_of_once_each() -> None:
    make = Maker()
    x = make.value(4, 6)
    for _ in range(2):
        x = make.op("test.unknown.default", x, out=(4, 6))
    make.op("test.scalar.default", x, out=())  # nothing to split, nothing to say
    with pytest.warns(PlanWarning) as told:
        make_plan(make.graph(), ap.cluster("local:2"), "single")
    (text,) = [str(warning.message) for warning in told]
    assert text.startswith("test.unknown.default runs unsplit (2 operators, first at ")
    assert told[0].filename == __file__


@pytest.mark.slow
def test_compare_plans_by_every_method_under_one_simulator() -> None:
    plans = ap.compare(captured("mlp:tiny")[0], ap.cluster("local:2"), budget=1.0)
    assert [p.method for p in plans] == compared_by_default()
    assert plans[0].predicted.bytes_moved == 0
    for plan in plans:
        assert plan.simulate().predicted == plan.predicted


def test_a_plan_with_not_finite_numbers_is_the_same_after_saving(tmp_path: Path) -> None:
    make = Maker()
    x = make.value(4, 6)
    make.op("aten.masked_fill.Scalar", x, make.value(4, 6, dtype="bool"), float("-inf"), out=(4, 6))
    graph = make.graph()
    plan = make_plan(graph, ap.cluster("local:2"), "single")
    strategy = Strategy((Choice((2, 1), (0, 1)),))
    plan = replace(plan, strategy=strategy, storage=Storage())
    plan.save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert Plan.load(tmp_path / "p.json").graph == graph
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.slow
def test_a_saved_plan_is_simulated_without_torch(file: Path) -> None:
    code = (
        "import sys, apportion as ap\n"
        f"plan = ap.Plan.load({str(file)!r})\n"
        "again = plan.simulate()\n"
        "assert again.predicted == plan.predicted\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
