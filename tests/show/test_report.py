"""The report: its columns agree with tasks and Timeline, and its page holds texts as texts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import captured
from make_tasks import EXACT, Maker, ports, random_tasks

import apportion as ap
from apportion.cli import main as cli
from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    COLLECTIVE,
    TRANSFER,
)
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import MethodFigures, Plan, PlanTrial
from apportion.show import report
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import MEASURED, Timeline, timeline

HOSTILE = "</script><script>alert('{{css}}')</script><!-- & \u2028 \u00e9 \\"


def made(method: str = "data", devices: int = 4, spec: str = "mlp:tiny") -> Plan:
    plan = make_plan(captured(spec)[0], ap.cluster(f"local:{devices}"), method, seed=7)
    return replace(plan, model=spec)


def measured(plan: Plan) -> Timeline:
    start, end = plan.timeline.start_ns * 2, plan.timeline.end_ns * 2
    return timeline(plan.tasks, start, end, source=MEASURED)


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


# Memory


def check_memory(plan: Plan, line: Timeline) -> None:
    """The page's bands are the Timeline's curves, and what is alive adds up to the peak."""
    for curve, shown in zip(
        line.curves, report._memory(plan.space.graph, plan.tasks, line), strict=True
    ):
        bands = [band or [0] * len(shown["time"]) for band in shown["bands"]]
        total = np.sum(bands, axis=0).tolist()
        assert set(zip(shown["time"], total, strict=True)) <= set(
            zip(curve.time_ns.tolist(), curve.nbytes.tolist(), strict=True)
        )
        assert max(total, default=0) == sum(shown["peak"]) == curve.peak_bytes
        assert shown["peak"] == list(curve.peak_categories) and shown["peak_ns"] == curve.peak_ns
        assert sum(row[3] for row in shown["alive"]) + shown["others"][1] == curve.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("method", ["single", "data", "random"])
def test_the_bands_of_a_plan_sum_to_the_curves(method: str) -> None:
    plan = made(method, spec="gpt2:tiny")
    check_memory(plan, plan.timeline)
    check_memory(plan, measured(plan))


@pytest.mark.slow
def test_a_thinned_curve_keeps_its_peak_and_its_end() -> None:
    plan = made("random", spec="gpt2:tiny")
    for curve in plan.timeline.curves:
        rows = report.thinned(curve, 50)
        assert len(rows) <= 50 < len(curve.time_ns)
        assert curve.peak in rows and rows[-1] == len(curve.time_ns) - 1
        assert (np.diff(rows) > 0).all()
        everything = report.thinned(curve, 10**6)
        assert everything.tolist() == list(range(len(curve.time_ns)))


def test_what_is_alive_at_the_peak_is_named() -> None:
    plan = made("data", devices=2)
    found = report.gather(plan, [plan.timeline])["lines"][0]["memory"]
    for device, curve in zip(plan.timeline.peak_bytes, found, strict=True):
        assert sum(row[3] for row in curve["alive"]) + curve["others"][1] == device
        assert sum(curve["peak"]) == device
        sizes = [row[3] for row in curve["alive"]]
        assert sizes == sorted(sizes, reverse=True)
    names = {row[0] for curve in found for row in curve["alive"]}
    assert names & {value.name for value in plan.graph.values}
    makers = {row[4] for curve in found for row in curve["alive"]} - {""}
    assert makers <= {op.name for op in plan.space.graph.ops}
    assert {curve["peak_op"] for curve in found} <= {op.name for op in plan.space.graph.ops}


# The timeline


def test_slices_are_the_tasks() -> None:
    plan = made("random")
    columns = report.slices(plan.tasks, plan.timeline, limit=10**6)
    start, tasks = np.cumsum(columns["start"]), plan.tasks
    assert columns["count"] is None
    keys = ("kind", "device", "peer", "op", "part", "nbytes")
    rows = zip(*(columns[key] for key in keys), strict=True)
    shown = zip(rows, start.tolist(), columns["length"], strict=True)
    expected = zip(
        ((t.kind, t.device, t.peer, t.op, t.part, t.nbytes) for t in tasks),
        plan.timeline.start_ns.tolist(),
        (plan.timeline.end_ns - plan.timeline.start_ns).tolist(),
        strict=True,
    )
    assert sorted(shown) == sorted(expected)


@pytest.mark.parametrize("limit", [40, 100, 300])
def test_short_neighbours_are_merged_when_there_are_many(limit: int) -> None:
    tasks = random_tasks(3, count=600)
    line = simulate(tasks, ports(3), EXACT)
    columns = report.slices(tasks, line, limit)
    count, start = np.array(columns["count"]), np.cumsum(columns["start"])
    assert len(count) <= limit and count.sum() == len(tasks)
    assert sum(columns["nbytes"]) == tasks.nbytes.sum()
    order = np.lexsort((line.start_ns, tasks.peer, tasks.device))
    owner = np.repeat(np.arange(len(count)), count)
    assert (np.array(columns["device"])[owner] == tasks.device[order]).all()
    assert (np.array(columns["peer"])[owner] == tasks.peer[order]).all()
    assert (start[owner] <= line.start_ns[order]).all()
    assert ((start + columns["length"])[owner] >= line.end_ns[order]).all()


# Traffic and operators


def test_traffic_is_what_the_messages_carry() -> None:
    plan = made("random")
    found = report.traffic(plan.tasks)
    assert found["block"] == 1 and np.trace(found["nbytes"]) == 0
    assert np.sum(found["nbytes"]) == plan.predicted.bytes_moved
    assert np.sum(found["messages"]) == messages_of(plan.tasks)


def messages_of(tasks: TaskGraph) -> int:
    """A collective is a message from each member to each other."""
    joint = np.flatnonzero(tasks.kind == COLLECTIVE)
    sizes = [len(tasks.groups[tasks.group[task]]) for task in joint]
    return int((tasks.kind == TRANSFER).sum()) + sum(k * (k - 1) for k in sizes)


def collective() -> TaskGraph:
    """Devices 1, 2 and 3 exchange 60 bytes in all, and device 0 sends 7 to device 2."""
    make = Maker(4)
    make.collective((1, 2, 3), 60)
    make.transfer(0, 2, 7)
    return make.done()


def test_a_collective_counts_for_every_pair() -> None:
    found, tasks = report.traffic(collective()), collective()
    assert found["nbytes"] == [[0, 0, 7, 0], [0, 0, 10, 10], [0, 10, 0, 10], [0, 10, 10, 0]]
    assert np.sum(found["messages"]) == messages_of(tasks) == 7
    assert [column.tolist() for column in report._fetched(tasks, 1)] == [[60, 7], [6, 1]]
    line = simulate(tasks, ports(4), EXACT)
    columns = report.slices(tasks, line, 100)
    rows = zip(*(columns[k] for k in ("kind", "device", "nbytes", "group")), strict=True)
    assert sorted(rows) == [(1, 0, 7, -1), (3, 1, 20, 0), (3, 2, 20, 0), (3, 3, 20, 0)]


def test_traffic_of_many_devices_is_shown_in_blocks() -> None:
    make = Maker(130)
    make.transfer(0, 129, 10)
    make.transfer(1, 2, 5)
    found = report.traffic(make.done())
    assert found["block"] == 3 and np.shape(found["nbytes"]) == (44, 44)
    assert found["nbytes"][0][43] == 10 and found["nbytes"][0][0] == 5


@pytest.mark.slow
def test_operators_show_their_choices() -> None:
    plan = made("data", devices=2, spec="gpt2:tiny")
    found = report.operators(plan, [plan.timeline, measured(plan)])
    ops, count = plan.graph.ops, len(plan.graph.ops)
    assert found["name"] == [*(op.name for op in ops), "end of step"]
    assert sum(found["fetched"]) == plan.predicted.bytes_moved
    assert sum(found["messages"]) == messages_of(plan.tasks)
    for key in ("kind", "phase", "line", "module", "cut", "devices"):
        assert len(found[key]["of"]) == count + 1
    for index, choice in enumerate(plan.strategy.choices):
        cut = found["cut"]["names"][found["cut"]["of"][index]]
        parts = [int(axis.rpartition(":")[2]) for axis in cut.split()]
        assert np.prod(parts, initial=1) == found["parts"][index] == choice.count
        assert found["replicas"][index] == choice.replicas
        sets = found["devices"]
        assert sets["names"][sets["of"][index]] == tuple(sorted(set(choice.devices)))
    once, twice = found["length"]
    assert [2 * length for length in once] == twice
    assert all(length > 0 for length in once[:count])


# The page


def test_the_page_is_offline_and_plain() -> None:
    page = report.page(made())
    assert page.isascii()
    assert "http://" not in page and "https://" not in page
    assert not re.search(r"\{\{\w+\}\}", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)
    assert data_of(page)["plan"]["model"] == "mlp:tiny"


def test_texts_of_a_plan_stay_texts() -> None:
    plain = made()
    graph = replace(
        plain.graph,
        ops=tuple(
            replace(op, name=f"{HOSTILE}{k}", module=HOSTILE, line=HOSTILE)
            for k, op in enumerate(plain.graph.ops)
        ),
    )
    hostile = replace(plain, graph=graph, model=HOSTILE)
    page, calm = report.page(hostile), report.page(plain)
    for sign in ("<script", "</script", "<!--"):
        assert page.count(sign) == calm.count(sign)
    assert page.isascii()
    data = data_of(page)
    assert data["plan"]["model"] == HOSTILE and data["ops"]["name"][0] == f"{HOSTILE}0"


def test_numbers_that_json_does_not_have_are_unknown() -> None:
    plan = replace(made(), lower_bound=float("inf"), search_seconds=float("nan"))
    facts = data_of(report.page(plan))["plan"]
    assert facts["lower_bound"] is None and facts["search_seconds"] is None


def test_a_measured_step_stands_beside_the_predicted() -> None:
    plan = made()
    data = data_of(report.page(plan, measured(plan)))
    assert [line["source"] for line in data["lines"]] == ["simulated", "measured"]
    assert data["lines"][1]["step_ns"] == 2 * data["lines"][0]["step_ns"]
    other = made("single")
    with pytest.raises(ValueError, match=r"measured timeline has \d+ tasks, the plan \d+; it is"):
        report.page(plan, measured(other))


def test_the_page_shows_how_the_plan_was_found() -> None:
    trials = (PlanTrial("data", 0.5, 0.75, False), PlanTrial("tofu", 0.625, 0.25, True))
    curve = ((0.5, 0.75), (1.5, 0.5))
    plan = replace(made(), curve=curve, figures={"proposals": 900.0}, measured=trials)
    found = data_of(report.page(replace(plan, search_seconds=2.0)))["search"]
    assert found["curve"] == [[0.5, 0.75], [1.5, 0.5]] and found["seconds"] == 2.0
    assert found["figures"] == {"proposals": 900.0}
    assert found["measured"][1] == {
        "method": "tofu",
        "predicted_seconds": 0.625,
        "measured_seconds": 0.25,
        "chosen": True,
    }


def test_the_page_says_when_its_simulation_differs_from_the_plan() -> None:
    plan = made()
    assert data_of(report.page(plan))["plan"]["renewed"] is False
    old = replace(plan, predicted=replace(plan.predicted, step_seconds=1.0))
    assert data_of(report.page(old))["plan"]["renewed"] is True


def test_provenance_names_every_source() -> None:
    plan = made()
    rows = data_of(report.page(plan))["provenance"]
    assert [row[1] for row in rows[:5]] == ["exact", "exact", "estimated", "measured", "none"]
    assert any(plan.cluster.devices[0].provenance == row[2] for row in rows)


def test_a_report_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, path = made(), tmp_path / "p.html"
    plan.report(path)
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]
    assert path.read_text() == report.page(plan)
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        plan.report(path)
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"] and path.read_text() == "old"
    with pytest.raises(ValueError, match="No such file or directory"):
        plan.report(tmp_path / "none" / "p.html")


def test_the_command_writes_the_page_and_the_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = made(devices=2)
    plan.save(tmp_path / "p.json")
    page, trace = tmp_path / "p.html", tmp_path / "p.trace.json"
    arguments = ["report", str(tmp_path / "p.json"), "-o", str(page), "--trace", str(trace)]
    assert cli.status(arguments) == 0
    assert capfd.readouterr().out == f"wrote {page}\nwrote {trace}\n"
    assert data_of(page.read_text())["plan"]["method"] == "data"
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "s", "t", "f"}
    assert all(event["dur"] > 0 and {"name", "pid", "tid", "ts"} <= event.keys() for event in spans)
    assert {event["args"]["task"] for event in spans} == set(range(len(plan.tasks)))


def test_a_peak_without_known_workspace_is_not_called_exact() -> None:
    here, there = made(), make_plan(captured("mlp:tiny")[0], ap.cluster("4xh100"), "data")
    assert report._peak_provenance(here)[1] == "exact"
    assert report._peak_provenance(there)[1] == "at least"


# What is shown besides


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "random", "op-placement"])
def test_shares_of_a_step_add_up_and_agree_with_the_mean(method: str) -> None:
    plan = made(method, spec="gpt2:tiny")
    (line,) = report.gather(plan, [plan.timeline])["lines"]
    for row in line["figures"]["shares"]:
        assert min(row) >= 0 and sum(row) == pytest.approx(1.0)


@pytest.mark.slow
def test_devices_that_do_the_same_are_one_group() -> None:
    plan = make_plan(captured("gpt2:tiny,batch=8")[0], ap.cluster("8xh100"), "data", 0.0)
    (group,) = report.gather(plan, [plan.timeline])["alike"]
    assert sorted(group) == list(range(8))
    assert group[0] == int(np.argmax(plan.timeline.peak_bytes))
    apart = made("op-placement", spec="gpt2:tiny")
    groups = report.gather(apart, [apart.timeline])["alike"]
    assert sorted(device for group in groups for device in group) == [0, 1, 2, 3]
    assert len(groups) == 4


@pytest.mark.slow
def test_the_graph_has_every_module_once_with_its_cuts() -> None:
    plan = made("data", spec="gpt2:tiny")
    graph = report.gather(plan, [plan.timeline])["graph"]
    names = dict(zip(graph["name"], graph["times"], strict=True))
    assert names["blocks.*.attn.qkv"] == 2 and names["tokens"] == 1
    forward = [op for op in plan.space.graph.ops if op.phase == "forward"]
    assert sum(graph["ops"]) == len(forward)
    assert set(graph["how"]) <= {"data parallel over 4", "whole on each of 4", "whole"}
    assert graph["name"].index("tokens") < graph["name"].index("head")
    count = len(graph["name"])
    assert all(0 <= a < count and 0 <= b < count and n > 0 for a, b, n in graph["edges"])
    begin = zip(plan.graph.values, plan.graph.producer, strict=True)
    parameters = sum(v.nbytes for v, made in begin if v.role == "parameter" and made is None)
    (tied,) = [v.nbytes for v in plan.graph.values if v.name == "tokens.weight"]
    assert sum(graph["parameters"]) == parameters + tied  # the head has the same


@pytest.mark.slow
def test_layers_that_differ_are_drawn_apart() -> None:
    plan = made("op-placement", spec="gpt2:tiny")
    graph = report.gather(plan, [plan.timeline])["graph"]
    rows = [k for k, name in enumerate(graph["name"]) if name.endswith("attn.qkv")]
    assert [graph["name"][k] for k in rows] == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]


def test_notes_and_other_methods_are_on_the_page() -> None:
    rows = (MethodFigures("data", 0.5, 10, 20, True), MethodFigures("tofu", 0.75, 10, 20, False))
    plan = replace(made(), notes=("look here",), tried=rows)
    shown = data_of(report.page(plan))
    assert shown["plan"]["notes"] == ["look here"]
    assert [row["method"] for row in shown["search"]["tried"]] == ["data", "tofu"]
    assert 0 < shown["plan"]["utilisation"] < 1
    assert shown["plan"]["decision"].startswith("Data parallel over 4")
