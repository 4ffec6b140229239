"""Where the time of a step goes, and what ranks noted as a Timeline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import EXACT, Maker, ports, random_tasks
from soak import cases

from apportion.lower.task_graph import (
    TaskGraph,
)
from apportion.lower.task_kinds import (
    ASSEMBLE,
    COMPUTE,
    TRANSFER,
)
from apportion.simulate.breakdown import ComparisonRow, breakdowns, comparison, measured_timeline
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import MEASURED, Timeline, verify


def seconds(tasks: TaskGraph, line: Timeline, device: int) -> list[float]:
    """Nanosecond by nanosecond what the device does, in the order of Breakdown's fields."""
    counts = [0, 0, 0, 0]
    for now in range(int(line.end_ns.max())):
        runs = (line.start_ns <= now) & (now < line.end_ns)
        mine = tasks.device == device
        if (runs & mine & (tasks.kind == COMPUTE)).any():
            counts[0] += 1
        elif (runs & mine & (tasks.kind == ASSEMBLE)).any():
            counts[1] += 1
        elif (runs & (mine | (tasks.peer == device)) & (tasks.kind == TRANSFER)).any():
            counts[2] += 1
        else:
            counts[3] += 1
    return [count / 1e9 for count in counts]


@settings(max_examples=cases(20))
@given(seed=st.integers(0, 10**6), on_device=st.booleans())
def test_every_nanosecond_of_a_device_is_counted_once(seed: int, on_device: bool) -> None:
    tasks = random_tasks(seed, count=30)
    line = simulate(tasks, ports(3, on_device=on_device, latency=7e-9), EXACT)
    for device, found in enumerate(breakdowns(tasks, line)):
        parts = [found.computes, found.assembles, found.exchanges, found.waits]
        assert parts == pytest.approx(seconds(tasks, line, device), abs=1e-12)


def small() -> TaskGraph:
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 5, after=[a])
    make.assemble(1, 3, after=[message])
    return make.done()


def test_a_message_begins_when_both_are_there_and_ends_when_it_has_arrived() -> None:
    tasks = small()
    ranks = [[(0, 1000, 1010), (1, 1010, 1090)], [(1, 1000, 1060), (2, 1060, 1063)]]
    line = measured_timeline(tasks, ranks)
    verify(line, tasks)
    assert line.source == MEASURED
    assert line.start_ns.tolist() == [0, 10, 60] and line.end_ns.tolist() == [10, 60, 63]
    late = [[(0, 1000, 1010), (1, 1010, 1090)], [(1, 1080, 1095), (2, 1095, 1096)]]
    line = measured_timeline(tasks, late)
    assert line.start_ns.tolist() == [0, 80, 95] and line.end_ns.tolist() == [10, 95, 96]
    waits = [found.waits for found in breakdowns(tasks, line)]
    assert waits == pytest.approx([71e-9, 80e-9])


def test_a_task_that_nobody_noted_is_missed() -> None:
    with pytest.raises(RuntimeError, match="no rank says when it ran task 2"):
        measured_timeline(small(), [[(0, 1, 2), (1, 2, 3)], [(1, 2, 3)]])


def test_predicted_stands_beside_measured() -> None:
    tasks = small()
    line = simulate(tasks, ports(2), EXACT)
    slow = measured_timeline(tasks, [[(0, 0, 20), (1, 20, 30)], [(1, 0, 30), (2, 30, 36)]])
    rows = {r.name: r for r in comparison(tasks, line, slow, 4e-8, (100, 50), 7)}
    assert rows["step"] == ComparisonRow("step", "s", 18e-9, 4e-8)
    assert rows["step"].error == pytest.approx(-0.55)
    assert rows["computes"].predicted == 5e-9 and rows["computes"].measured == 10e-9
    assert rows["assembles"].error == pytest.approx(-0.5)
    assert rows["bytes moved"] == ComparisonRow("bytes moved", "B", 5, 7)
    assert rows["peak memory"].measured == 100
    parts = [rows[name] for name in ("computes", "assembles", "exchanges", "waits")]
    assert sum(r.predicted for r in parts) == pytest.approx(line.step_seconds)
    assert sum(r.measured for r in parts) == pytest.approx(slow.step_seconds)
    assert ComparisonRow("nothing", "B", 3, 0).error is None


def test_an_empty_step_has_no_time() -> None:
    tasks = Maker(2).done()
    line = simulate(tasks, ports(2), EXACT)
    assert all(np.array([b.computes, b.waits]).sum() == 0 for b in breakdowns(tasks, line))
