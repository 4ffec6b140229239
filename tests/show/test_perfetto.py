"""The trace file: every task on its tracks, arrows with both ends, memory by category, links."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from graphs import captured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_tasks import EXACT, SURVIVES, Maker, graph_of, ports, random_tasks, small
from soak import cases

import apportion as ap
from apportion.lower.task_graph import (
    CATEGORIES,
    TaskGraph,
)
from apportion.lower.task_kinds import (
    TRANSFER,
)
from apportion.machine.collective import ALL_GATHER
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.show.perfetto import LinkUsage, trace
from apportion.simulate.network import network
from apportion.simulate.schedule import link_spans
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import MEASURED, Timeline, timeline

Event = dict[str, Any]


def links_of(tasks: TaskGraph, line: Timeline, devices: int) -> LinkUsage:
    net = network(tasks, ports(devices), EXACT)
    names = tuple(link.name for link in ports(devices).links)
    return LinkUsage(names, link_spans(net, (line.start_ns, line.end_ns)))


def events_of(path: Path) -> list[Event]:
    return json.loads(path.read_text())["traceEvents"]


def of(events: list[Event], *phases: str) -> list[Event]:
    return [event for event in events if event["ph"] in phases]


def check_structure(events: list[Event]) -> None:
    """What a viewer relies on: tracks have names, spans on one do not overlap, arrows go forward
    from a span to a span, counters are not negative and time does not fall."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in of(events, "X"):
        start = round(1e3 * e["ts"])
        tracks[e["pid"], e["tid"]].append((start, start + round(1e3 * e["dur"])))
    assert tracks.keys() <= named
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    arrows: dict[int, list[Event]] = defaultdict(list)
    for e in of(events, "s", "t", "f"):
        arrows[e["id"]].append(e)
        when = round(1e3 * e["ts"])
        assert any(a <= when < b for a, b in tracks[e["pid"], e["tid"]])
    for stops in arrows.values():
        phases = "".join(e["ph"] for e in stops)
        assert phases in ("sf", "stf")
        assert [e["ts"] for e in stops] == sorted(e["ts"] for e in stops)
    last: dict[int, float] = {}
    for e in of(events, "C"):
        assert e["args"] and min(e["args"].values()) >= 0 and e["args"].keys() <= set(CATEGORIES)
        assert e["ts"] >= last.get(e["pid"], 0.0)
        last[e["pid"]] = e["ts"]


def test_the_trace_shows_devices_lanes_links_and_memory(tmp_path: Path) -> None:
    tasks, line = small()
    path = tmp_path / "step.json"
    trace(line, tasks, graph_of(tasks), path, links_of(tasks, line, 2))
    events = events_of(path)
    check_structure(events)
    shown = {(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in of(events, "X")}
    assert shown == {
        ("op0", 0, 0, 0.0, 1.5),
        ("op1 to 1", 0, 1, 1.5, 0.5),
        ("op1 from 0", 1, 2, 1.5, 0.5),
        ("op2 (assemble)", 1, 0, 2.0, 0.2),
        ("end of step", 1, 0, 2.2, 0.1),
        ("op1 0 to 1", 2, 0, 1.5, 0.5),
        ("op1 0 to 1", 2, 3, 1.5, 0.5),
    }
    levels = [e["args"] for e in of(events, "C") if e["pid"] == 1]
    assert levels == [
        {"activation": 0, "communication": 500},
        {"activation": 500, "communication": 500},  # buffers of messages persist
    ]
    assert max(sum(held.values()) for held in levels) == line.peak_bytes[1] == 1000
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert titles == {
        **{(d, t): n for d in (0, 1) for t, n in enumerate(("compute", "send", "receive"))},
        (2, 0): "out0",
        (2, 3): "in1",
    }
    stops = [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in of(events, "s", "t", "f")]
    assert stops == [("s", 0, 1, 1.5), ("t", 1, 2, 1.5), ("f", 1, 0, 2.0)]
    head = json.loads(path.read_text())["otherData"]
    assert head == {"source": "simulated", "step_seconds": line.step_seconds}
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_a_collective_is_on_all_its_members(tmp_path: Path) -> None:
    make = Maker(3)
    joint = make.collective((0, 1, 2), 60, pattern=ALL_GATHER)
    sources = [make.slot(d, 20, -1, joint) for d in range(3)]
    for d in range(3):
        taken = make.assemble(d, 20, [joint])
        target = make.slot(d, 20, taken, SURVIVES)
        make.copies += [(sources[o], target, joint, taken, 10) for o in range(3) if o != d]
    make.compute(0, flops=1)
    tasks = make.done()
    line = simulate(tasks, ports(3), EXACT)
    trace(line, tasks, graph_of(tasks), tmp_path / "t.json", links_of(tasks, line, 3))
    events = events_of(tmp_path / "t.json")
    check_structure(events)
    joints = [e for e in of(events, "X") if e["cat"] == "collective"]
    assert {(e["pid"], e["name"]) for e in joints if e["pid"] < 3} == {
        (d, "op0 (all-gather)") for d in range(3)
    }
    assert joints[0]["args"]["members"] == [0, 1, 2]
    assert len(of(events, "s")) == len(of(events, "f")) == 3
    assert {e["tid"] for e in joints if e["pid"] == 3} == set(range(6))  # every port
    for d in range(3):
        levels = [e["args"]["communication"] for e in of(events, "C") if e["pid"] == d]
        assert max(levels) == 40  # 20 sent and 20 received


@settings(max_examples=cases(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), latency=st.sampled_from([0.0, 30e-9]))
def test_the_trace_of_random_tasks_is_sound(seed: int, latency: float, tmp_path: Path) -> None:
    tasks = random_tasks(seed)
    place = ports(3, latency=latency)
    line, net = simulate(tasks, place, EXACT), network(tasks, place, EXACT)
    names = tuple(link.name for link in place.links)
    links = LinkUsage(names, link_spans(net, (line.start_ns, line.end_ns)))
    trace(line, tasks, graph_of(tasks), tmp_path / "t.json", links)
    events = events_of(tmp_path / "t.json")
    check_structure(events)
    moving = int((tasks.kind == TRANSFER).sum())
    on_devices = [e for e in of(events, "X") if e["pid"] < 3]
    assert len(on_devices) == len(tasks) + moving  # a message is on both its ends
    assert len(of(events, "X")) == len(on_devices) + 2 * moving  # and on two ports
    assert len(of(events, "s")) == len(of(events, "f")) == moving
    for device in range(3):
        tops = [sum(e["args"].values()) for e in of(events, "C") if e["pid"] == device]
        assert max(tops, default=0) == line.peak_bytes[device]
        assert not tops or tops[-1] == line.curves[device].nbytes[-1]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(captured("gpt2:tiny")[0], ap.cluster("4xh100"), "data")


@pytest.mark.slow
def test_a_plan_shows_its_links(plan: Plan, tmp_path: Path) -> None:
    plan.trace(tmp_path / "p.json")
    events = events_of(tmp_path / "p.json")
    check_structure(events)
    links = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 4}
    assert links and links <= {link.name for link in plan.cluster.links}
    lines = {e["args"].get("line", "") for e in of(events, "X")}
    assert any(".py:" in text for text in lines)


@pytest.mark.slow
def test_a_measured_step_has_the_same_tracks_without_links(plan: Plan, tmp_path: Path) -> None:
    start, end = plan.timeline.start_ns * 2, plan.timeline.end_ns * 2
    line = timeline(plan.tasks, start, end, source=MEASURED)
    trace(line, plan.tasks, plan.space.graph, tmp_path / "m.json")
    plan.trace(tmp_path / "p.json")
    ours, theirs = events_of(tmp_path / "m.json"), events_of(tmp_path / "p.json")
    check_structure(ours)

    def tracks(events: list[Event]) -> set[tuple[int, int]]:
        return {(e["pid"], e["tid"]) for e in of(events, "X") if e["pid"] < 4}

    assert tracks(ours) == tracks(theirs) and all(e["pid"] < 4 for e in ours)


def test_a_trace_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, line = small()
    path = tmp_path / "step.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trace(line, tasks, graph_of(tasks), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_wrong_traces_are_refused(tmp_path: Path) -> None:
    tasks, line = small()
    with pytest.raises(ValueError, match=r"cannot write .*step\.json: No such file"):
        trace(line, tasks, graph_of(tasks), tmp_path / "no" / "step.json")
    other = random_tasks(1)
    with pytest.raises(ValueError, match=r"timeline has 4 tasks, its plan \d+; it is of another"):
        trace(line, other, graph_of(other), tmp_path / "step.json")
    assert not list(tmp_path.iterdir())
