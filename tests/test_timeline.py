"""Memory over time, and the trace file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import ACTIVATION, EXACT, SURVIVES, Maker, graph_of, ports, random_tasks

from apportion.simulate import simulate
from apportion.tasks import CATEGORIES, TRANSFER, TaskGraph
from apportion.timeline import MEASURED, Timeline, timeline, trace

PARAMETER, GRADIENT = CATEGORIES.index("parameter"), CATEGORIES.index("gradient")


def curve(line: Timeline, device: int) -> list[tuple[int, int]]:
    c = line.curves[device]
    return list(zip(c.time_ns.tolist(), c.nbytes.tolist(), strict=True))


def test_slots_live_from_their_maker_to_their_last_user() -> None:
    make = Maker(1)
    a = make.compute(0, flops=10)
    b = make.compute(0, flops=5, after=[a])
    make.compute(0, flops=1, after=[b])
    make.slot(0, 1000, -1, SURVIVES, PARAMETER)
    made = make.slot(0, 100, a, b)
    make.slot(0, 100, a, b, base=made)  # a view costs nothing
    make.slot(0, 30, b, b, GRADIENT)
    make.slot(0, 7, -1, -1, GRADIENT)  # there, and used by nobody
    line = simulate(make.done(), ports(1), EXACT)
    assert curve(line, 0) == [
        (0, 1000), (0, 1007), (0, 1000), (0, 1100), (10, 1130), (15, 1030), (15, 1000),
    ]  # fmt: skip
    assert line.peak_bytes == (1130,)
    held = {name: n for name, n in line.peak_categories[0].items() if n}
    assert held == {"parameter": 1000, "activation": 100, "gradient": 30}


def test_at_one_instant_the_order_of_tasks_decides() -> None:
    make = Maker(1)
    a = make.compute(0, flops=10)
    b = make.compute(0, flops=10, after=[a])
    make.slot(0, 100, a, a)
    make.slot(0, 60, b, b)  # made when the other has been freed
    assert simulate(make.done(), ports(1), EXACT).peak_bytes == (100,)


def test_messages_occupy_both_ends() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 40, after=[a])
    taken = make.assemble(1, 5, after=[message])
    make.compute(1, flops=7, after=[taken])
    source, target = make.slot(0, 100, a, message), make.slot(1, 50, taken, SURVIVES)
    make.copy(source, target, message, taken)
    line = simulate(make.done(), ports(2), EXACT)
    assert curve(line, 0) == [(0, 100), (10, 140), (50, 40), (50, 0)]
    assert curve(line, 1) == [(10, 40), (50, 90), (55, 50)]
    assert line.peak_categories[0]["communication"] == 40
    assert line.peak_categories[1]["communication"] == 40


def test_a_slot_waits_for_a_message_that_waits_for_its_link() -> None:
    make = Maker(3)
    first = make.transfer(0, 1, 50)
    second = make.transfer(0, 2, 5)  # the port is held till 50
    last = make.compute(0, flops=10)  # ends at 10
    one, two = make.assemble(1, 1, after=[first]), make.assemble(2, 1, after=[second])
    base = make.slot(0, 8, -1, last)
    view = make.slot(0, 8, -1, last, base=base)
    view = make.slot(0, 8, -1, last, base=view)
    make.copy(make.slot(0, 50, -1, first), make.slot(1, 50, one, one), first, one)
    make.copy(view, make.slot(2, 5, two, two), second, two)
    line = simulate(make.done(), ports(3), EXACT)
    assert curve(line, 0) == [
        (0, 8), (0, 58), (0, 108), (50, 58), (50, 8), (50, 13), (50, 5), (55, 0),
    ]  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), on_device=st.booleans())
def test_peaks_equal_a_slow_count(seed: int, on_device: bool) -> None:
    tasks = random_tasks(seed)
    line = simulate(tasks, ports(3, on_device=on_device), EXACT)
    for device, held in enumerate(line.curves):
        assert sum(held.peak_categories) == line.peak_bytes[device]
        assert (held.nbytes >= 0).all()
        assert (np.diff(held.time_ns) >= 0).all()
        # After all changes of an instant the order within it no longer matters.
        for time in set(held.time_ns.tolist()):
            settled = held.nbytes[held.time_ns <= time][-1]
            assert settled == slow_count(tasks, line, device, time)


def slow_count(tasks: TaskGraph, line: Timeline, device: int, time: int) -> int:
    start, end, n = line.start_ns, line.end_ns, len(tasks)
    total = 0
    for slot in np.flatnonzero(tasks.slot_device == device):
        first, last = int(tasks.slot_first[slot]), int(tasks.slot_last[slot])
        alive = (first < 0 or start[first] <= time) and (last == n or time < end[last])
        total += int(tasks.slot_nbytes[slot]) * alive
    for m in np.flatnonzero(tasks.kind == TRANSFER):
        if tasks.device[m] == device:
            total += int(tasks.nbytes[m]) * bool(start[m] <= time < end[m])
        if tasks.peer[m] == device:
            taker = tasks.copy_task[tasks.copy_message == m]
            total += int(tasks.nbytes[m]) * bool(start[m] <= time < end[taker].max())
    return total


def small() -> tuple[TaskGraph, Timeline]:
    make = Maker(2)
    a = make.compute(0, flops=1500)
    message = make.transfer(0, 1, 500, after=[a])
    taken = make.assemble(1, 200, after=[message])
    make.compute(1, flops=100, after=[taken])
    make.copy(
        make.slot(0, 500, a, message), make.slot(1, 500, taken, SURVIVES, ACTIVATION),
        message, taken,
    )  # fmt: skip
    tasks = make.done()
    return tasks, simulate(tasks, ports(2), EXACT)


def test_the_trace_shows_devices_lanes_and_memory(tmp_path: Path) -> None:
    tasks, line = small()
    path = tmp_path / "step.json"
    trace(line, tasks, graph_of(tasks), path)
    data = json.loads(path.read_text())
    events = data["traceEvents"]
    shown = {(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert shown == {
        ("op0", 0, 0, 0.0, 1.5),
        ("op1 to 1", 0, 1, 1.5, 0.5),
        ("op1 from 0", 1, 2, 1.5, 0.5),
        ("op2 (assemble)", 1, 0, 2.0, 0.2),
        ("end of step", 1, 0, 2.2, 0.1),
    }
    levels = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert max(levels) == line.peak_bytes[1] == 1000
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "send", "receive"}
    assert data["otherData"] == {"source": "simulated", "step_seconds": line.step_seconds}
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_a_trace_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    tasks, line = small()
    path = tmp_path / "step.json"
    path.write_text("old")
    broken = Timeline(
        line.source, line.start_ns[:1], line.end_ns, line.curves, line.busy, line.bytes_moved
    )
    with pytest.raises(ValueError, match="zip"):
        trace(broken, tasks, graph_of(tasks), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_a_trace_into_nowhere_is_refused(tmp_path: Path) -> None:
    tasks, line = small()
    with pytest.raises(ValueError, match=r"trace .*step\.json cannot be written: No such file"):
        trace(line, tasks, graph_of(tasks), tmp_path / "no" / "step.json")


def test_measured_times_give_the_same_type() -> None:
    tasks, line = small()
    measured = timeline(tasks, line.start_ns * 2, line.end_ns * 2, source=MEASURED)
    assert measured.step_seconds == 2 * line.step_seconds
    assert measured.peak_bytes == line.peak_bytes
    assert str(measured).startswith("measured: 4.6e-06 s a step, peak 1000 bytes")
