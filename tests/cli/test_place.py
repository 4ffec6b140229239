"""`apportion place`: what it prints, saves and refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from placement_graphs import DATA, DOPPLER_TEXT, FIDDLE_GRAPH, PIPEDREAM_TEXT

from apportion.cli import main as cli
from apportion.place.imports.imported import imported_problem
from apportion.place.imports.read_graph import read_graph
from apportion.plan import Plan
from apportion.simulate.simulate import simulate

STABLE = {
    *("input", "method", "objective", "value", "unit", "lower_bound", "feasible", "assignment"),
    *("loads", "memory", "search_seconds", "evaluations"),
}
BERT = str(DATA / "throughput-inputs/LayerGraphs/bert24_inference.json")
STEP = ("--method", "single", "--objective", "step")


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    capfd.readouterr()
    status = cli.status(["place", *arguments])
    out, err = capfd.readouterr()
    return status, out, err


def call_json(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status, out, err = call(capfd, *arguments, "--json")
    assert out.count("\n") == 1, err
    return status, json.loads(out)


def written(path: Path, content: str | dict[str, Any]) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_is_placed_and_every_key_is_there(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "placement.json"
    status, facts = call_json(capfd, BERT, *STEP, "--out", str(out))
    assert status == 0 and set(facts) >= STABLE
    assert (facts["input"], facts["method"], facts["objective"]) == (BERT, "single", "step")
    assert facts["value"] == pytest.approx(92.406) and facts["unit"] == "ms"
    assert facts["lower_bound"] <= facts["value"] and facts["feasible"] is True
    assert set(facts["assignment"].values()) == {"acc0"}
    assert len(facts["assignment"]) == 32 and "32" in facts["assignment"]
    assert list(facts["loads"]) == [*(f"acc{k}" for k in range(6)), "cpu0"]
    assert facts["loads"]["acc0"] == pytest.approx(92.406)
    assert facts["memory"]["acc0"] > 0 == facts["memory"]["acc1"]
    assert json.loads(out.read_text()) == facts


def test_people_see_a_row_for_each_device(capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capfd, BERT, *STEP, "--devices", "2")
    assert status == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["acc0"][1:4] == ["92.4", "ms", "100%"] and rows["acc0"][-1] == "32"
    assert "acc1" in rows and "acc2" not in rows
    assert "step: 92.406 ms" in out and "1.00 times as long" in out and "bound: " in out


def test_the_format_decides_the_objective(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for text, usual, unit in (
        (DOPPLER_TEXT, "step", "1e10"),
        (PIPEDREAM_TEXT, "throughput", "ms"),
        (json.dumps(FIDDLE_GRAPH), "throughput", "ms"),
    ):
        path = written(tmp_path / "graph", text)
        status, facts = call_json(capfd, path, "--method", "single", "--budget", "1")
        assert (status, facts["objective"], facts["unit"]) == (0, usual, unit)


@pytest.mark.parametrize("split", ["human-experts/bert24_inference_expert.json"])
def test_a_split_by_hand_is_judged(capfd: pytest.CaptureFixture[str], split: str) -> None:
    how = ("--method", "expert", "--expert", str(DATA / split))
    status, facts = call_json(capfd, BERT, *how)
    assert status == 0 and facts["value"] == pytest.approx(20.084, abs=1e-3)
    assert facts["assignment"]["1"] == "acc0" and facts["assignment"]["32"] == "acc5"


@pytest.mark.slow
def test_a_model_is_placed_and_exported(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    on = ("mlp:tiny", "--cluster", "2xv100")
    status, facts = call_json(capfd, *on, "--method", "single")
    assert status == 0 and (facts["objective"], facts["unit"]) == ("step", "s")
    assert len(set(facts["assignment"].values())) == 1
    path = tmp_path / "mlp.json"
    status, said = call_json(capfd, *on, "--export", str(path))
    assert status == 0 and said["export"] == str(path) and said["nodes"] > 10
    problem = imported_problem(read_graph(path))
    assert [d.kind for d in problem.devices] == ["acc", "acc"] and problem.columns.backward.any()
    status, again = call_json(capfd, str(path), *STEP)
    assert status == 0 and again["unit"] == "ms"
    loads = [1e3 * sum(facts["loads"].values()), sum(again["loads"].values())]
    assert loads[0] == pytest.approx(loads[1], rel=1e-6)


@pytest.mark.slow
def test_the_step_of_a_model_is_what_the_simulator_says(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on = ("mlp:tiny", "--cluster", "2xv100")
    plan = tmp_path / "plan.json"
    assert cli.status(["plan", *on, "--method", "m-etf", "--out", str(plan)]) == 0
    made = Plan.load(plan)
    predicted, lowered = made.predicted, made.tasks.before_storage
    assert lowered is not None
    status, facts = call_json(capfd, *on, "--method", "m-etf")
    assert status == 0 and facts["value"] == predicted.step_seconds
    peaks = simulate(lowered, made.cluster, made.cost).peak_bytes
    assert list(facts["memory"].values()) == list(peaks)
    assert sum(predicted.peak_bytes) > sum(peaks)  # a plan knows what is staged as well
    assert facts["lower_bound"] <= facts["value"]
    for device, busy in zip(facts["loads"].values(), predicted.busy, strict=True):
        assert device == pytest.approx(busy * facts["value"])


def test_the_nearest_is_shown_where_nothing_fits(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    graph = copy.deepcopy(FIDDLE_GRAPH)
    for node in graph["nodes"]:
        node["supportedOnFpga"], node["size"] = 1, 60.0
        node.pop("colorClass", None)
    graph["maxCPUs"], graph["maxFPGAs"] = 0, 1
    path = written(tmp_path / "graph.json", graph)
    status, out, _ = call(capfd, path, *STEP)
    assert status == 1 and "nothing fits; this is the nearest:" in out
    assert "acc0 is 80 B (80.0%) over its limit" in out
    status, facts = call_json(capfd, path, *STEP)
    assert status == 1 and facts["feasible"] is False and facts["memory"] == {"acc0": 180}
    assert call(capfd, path, *STEP, "--memory-limit", "none")[0] == 0


def bad_graph(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(FIDDLE_GRAPH) | changes


CYCLE = [{"sourceId": a, "destId": b, "cost": 1.0} for a, b in ((7, 3), (3, 9), (9, 7))]
MISSING = [{"sourceId": 7, "destId": 4, "cost": 1.0}]
NEGATIVE = [{**FIDDLE_GRAPH["nodes"][0], "cpuLatency": -1}]
NOWHERE = [{**FIDDLE_GRAPH["nodes"][0], "size": 1e9}]
BAD: list[tuple[str, str | dict[str, Any], tuple[str, ...], str]] = [
    ("cycle", bad_graph(edges=CYCLE), (), "cycle through node"),
    ("missing node", bad_graph(edges=MISSING), (), "names node 4, which is not there"),
    ("negative time", bad_graph(nodes=NEGATIVE, edges=[]), (), "the cpuLatency of node 7 is -1"),
    (
        "fits nowhere",
        bad_graph(nodes=NOWHERE, edges=[], maxCPUs=0),
        (),
        "the class of node '7' needs 1000000000 bytes, and the largest device",
    ),
    ("no format", "digraph {}", (), "none of the formats that are known"),
    ("unknown format", "", ("--format", "onnx"), "unknown format 'onnx'; known: fiddle"),
    ("other format", DOPPLER_TEXT, ("--format", "fiddle"), "this is not JSON (line 2)"),
    ("not JSON", "{", (), "this is not JSON (line 1)"),
    ("method", bad_graph(), ("--method", "magic"), "unknown method 'magic'; known: "),
    ("objective", bad_graph(), ("--objective", "beauty"), "unknown objective 'beauty'; known: "),
    ("both", bad_graph(), ("--devices", "2", "--cluster", "2xv100"), "not both"),
    ("no devices", bad_graph(), ("--devices", "0"), "greater than or equal to 1"),
    ("many devices", bad_graph(), ("--devices", "5000"), "5000 is not a number of accelerators"),
    ("cluster", bad_graph(), ("--cluster", "moon"), "unknown cluster 'moon'"),
    ("limit", bad_graph(), ("--memory-limit", "lots"), "lots"),
    ("no folder", bad_graph(), ("--out", "/nowhere/p.json"), "There is no folder"),
    (
        "contiguous",
        bad_graph(),
        ("--contiguous", "--objective", "step", "--method", "single"),
        "contiguous placements are for the objective throughput",
    ),
    ("policy", bad_graph(), ("--method", "single", "--policy", "p"), "methods that learn"),
    ("no expert", bad_graph(), ("--method", "expert"), "no expert's placement of this input"),
]


@pytest.mark.parametrize(
    ("content", "options", "complaint"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_a_bad_request_is_one_sentence(
    content: str | dict[str, Any],
    options: tuple[str, ...],
    complaint: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "graph.json", content)
    status, out, err = call(capfd, path, *options)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert complaint in err and err.startswith("apportion: ")


def test_inputs_that_are_not_there_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        (("nothere.json",), "nothere.json: No such file"),
        (("nothere",), "There is no file 'nothere'; a model needs --cluster C"),
        (("nothere", "--cluster", "2xv100"), "nothere"),
        ((str(DATA / "human-experts/bert24_inference_expert.json"),), "a split of a graph"),
        ((BERT, "--expert", BERT), "the file has no fpgas"),
    ):
        status, out, err = call(capfd, *arguments)
        assert (status, out) == (2, "") and complaint in err, arguments


def test_notes_of_a_file_go_to_stderr(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "graph.txt", DOPPLER_TEXT.replace("2, 2, 3", "2,2, 3"))
    status, _, err = call(capfd, path, "--method", "single")
    assert status == 0 and "note: the target of the edge from 1 to 2" in err
