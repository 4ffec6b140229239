"""Memory over time, and the trace file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tasks import ACTIVATION, EXACT, SURVIVES, Maker, graph_of, ports, random_tasks

from apportion.simulate import simulate
from apportion.tasks import CATEGORIES, TRANSFER, TaskGraph, verify
from apportion.timeline import MEASURED, Timeline, memory_changes, timeline, trace

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


def test_results_and_workspace_are_there_before_anything_is_freed() -> None:
    make = Maker(1)
    a = make.compute(0, flops=10)
    b = make.compute(0, flops=10, after=[a])
    make.slot(0, 100, a, b)
    make.slot(0, 60, b, SURVIVES)
    tasks = replace(make.done(), workspace=np.array([0, 7]))
    line = simulate(tasks, ports(1), EXACT)
    assert curve(line, 0) == [(0, 100), (10, 160), (10, 167), (20, 160), (20, 60)]
    assert line.peak_categories[0]["workspace"] == 7


def test_messages_occupy_both_ends() -> None:
    make = Maker(2)
    a = make.compute(0, flops=10)
    message = make.transfer(0, 1, 40, after=[a])
    taken = make.assemble(1, 5, after=[message])
    make.compute(1, flops=7, after=[taken])
    source, target = make.slot(0, 100, a, message), make.slot(1, 50, taken, SURVIVES)
    make.copy(source, target, message, taken)
    line = simulate(make.done(), ports(2), EXACT)
    assert curve(line, 0) == [(0, 100), (10, 140), (50, 100), (50, 0)]
    assert curve(line, 1) == [(10, 40), (50, 90), (55, 50)]
    assert line.peak_categories[0]["communication"] == 40
    assert line.peak_categories[1]["communication"] == 40


def test_memory_follows_the_order_of_tasks_and_not_their_times() -> None:
    make = Maker(3)
    first = make.transfer(0, 1, 50)
    second = make.transfer(0, 2, 5)  # the port is held till 50
    last = make.compute(0, flops=10)  # ends at 10, but a process runs it after the messages
    one, two = make.assemble(1, 1, after=[first]), make.assemble(2, 1, after=[second])
    base = make.slot(0, 8, -1, last)
    view = make.slot(0, 8, -1, last, base=base)
    view = make.slot(0, 8, -1, last, base=view)
    make.copy(make.slot(0, 50, -1, first), make.slot(1, 50, one, one), first, one)
    make.copy(view, make.slot(2, 5, two, two), second, two)
    line = simulate(make.done(), ports(3), EXACT)
    assert line.end_ns[last] == 10
    assert curve(line, 0) == [
        (0, 8), (0, 58), (0, 108), (50, 58), (50, 8), (50, 13), (55, 8), (55, 0),
    ]  # fmt: skip


def exchange(together: bool) -> Timeline:
    """Device 0 gets 40 bytes, sends 30 and 20 from slots of its own, and takes what it got."""
    make = Maker(2)
    there = make.transfer(0, 1, 30)
    more = make.transfer(0, 1, 20)
    back = make.transfer(1, 0, 40)
    taken = make.assemble(0, 1, after=[back])
    kept = make.assemble(1, 1, after=[there, more])
    make.copy(make.slot(0, 30, -1, there), make.slot(1, 30, kept, kept), there, kept)
    make.copy(make.slot(0, 20, -1, more), make.slot(1, 20, kept, kept), more, kept)
    make.copy(make.slot(1, 40, -1, back), make.slot(0, 40, taken, taken), back, taken)
    tasks = make.done()
    if together:
        tasks = replace(tasks, position=np.array([0, 0, 0, 1, 2]))
    return simulate(tasks, ports(2), EXACT)


def test_all_messages_of_one_exchange_are_there_at_once() -> None:
    assert curve(exchange(together=False), 0) == [
        (0, 30), (0, 50), (0, 80), (30, 50), (30, 20), (30, 40), (50, 20), (50, 0), (50, 40),
        (50, 80), (50, 40), (50, 0),
    ]  # fmt: skip
    line = exchange(together=True)
    assert [n for _, n in curve(line, 0)] == [30, 50, 90, 120, 140, 110, 90, 60, 40, 80, 40, 0]
    assert line.peak_bytes == (140, 40 + 50 + 40)
    assert line.peak_categories[0]["communication"] == 90


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), on_device=st.booleans())
def test_curves_equal_a_slow_walk(seed: int, on_device: bool) -> None:
    """After the allocations of every task, and after its frees, both hold the same bytes."""
    tasks = random_exchanges(seed) if seed % 2 else random_tasks(seed)
    verify(tasks)
    line = simulate(tasks, ports(tasks.devices, on_device=on_device), EXACT)
    changes = memory_changes(tasks, line.start_ns, line.end_ns)
    for device, held in enumerate(line.curves):
        walked = walk(tasks, line, device)
        assert sum(held.peak_categories) == line.peak_bytes[device]
        assert line.peak_bytes[device] == max((row.nbytes for row in walked), default=0)
        assert (held.nbytes >= 0).all()
        assert (np.diff(held.time_ns) >= 0).all()
        moment = changes.moment[changes.device == device]
        for row in walked:
            at = int(np.searchsorted(moment, row.until))  # changes up to here have happened
            assert row.nbytes == (held.nbytes[at - 1] if at else 0)
            assert row.time == (held.time_ns[at - 1] if at else 0)
        assert walked[-1].nbytes == (held.nbytes[-1] if len(held.nbytes) else 0)


@dataclass(frozen=True)
class Walked:
    """Bytes held once all changes before the moment `until` have happened, and when that is."""

    until: int
    nbytes: int
    time: int


def walk(tasks: TaskGraph, line: Timeline, device: int) -> list[Walked]:
    """What one process does, read literally: its tasks in order, the messages of one position
    together; all that is made comes before all that is freed."""
    held: dict[tuple[str, int], int] = {}
    start, end, time = line.start_ns, line.end_ns, 0
    found: list[Walked] = []

    def settle(last: int, half: int) -> None:
        found.append(Walked(4 * last + (2, 4)[half], sum(held.values()), time))

    def slots(column: Any, task: int) -> list[int]:
        mine = (column == task) & (tasks.slot_device == device) & (tasks.slot_base < 0)
        return np.flatnonzero(mine).tolist()

    for slot in slots(tasks.slot_first, -1):
        held["slot", slot] = int(tasks.slot_nbytes[slot])
    settle(-1, 0)
    for slot in slots(tasks.slot_last, -1):
        del held["slot", slot]
    settle(-1, 1)
    for group in together(tasks):
        for task in group:
            made = {("slot", s): int(tasks.slot_nbytes[s]) for s in slots(tasks.slot_first, task)}
            if tasks.kind[task] == TRANSFER:
                ends = {"sent": tasks.device[task], "received": tasks.peer[task]}
                made |= {(k, task): int(tasks.nbytes[task]) for k, d in ends.items() if d == device}
            elif tasks.device[task] == device and len(tasks.workspace):
                made["workspace", task] = int(tasks.workspace[task])
            time = max(time, int(start[task])) if any(made.values()) else time
            held |= made
        settle(group[-1], 0)
        for task in group:
            gone = {("slot", s): group[-1] for s in slots(tasks.slot_last, task)}
            gone |= {(name, task): task for name in ("sent", "workspace")}
            gone |= {("received", m): task for m in messages_taken_by(tasks, task)}
            for key in gone.keys() & held.keys():
                time = max(time, int(end[gone[key]])) if held[key] else time
                del held[key]
        settle(group[-1], 1)
    return found


def messages_taken_by(tasks: TaskGraph, task: int) -> list[int]:
    """Messages whose last copy goes into this assembly."""
    sent = np.unique(tasks.copy_message[tasks.copy_task == task])
    return [m for m in sent.tolist() if tasks.copy_task[tasks.copy_message == m].max() == task]


def together(tasks: TaskGraph) -> list[list[int]]:
    """Tasks in order, the transfers of one position as one."""

    def place(task: int) -> tuple[int, int]:
        return int(tasks.position[task]), -1 if tasks.kind[task] == TRANSFER else task

    return [list(group) for _, group in groupby(range(len(tasks)), place)]


def random_exchanges(seed: int, devices: int = 4) -> TaskGraph:
    """Rounds of some computation with workspace, an exchange of several messages, and their
    assemblies, perhaps of several messages each."""
    rng = Random(seed)
    make, position, workspace = Maker(devices), [], []
    for turn in range(6):
        before = len(make.tasks)
        made = [make.compute(d, flops=rng.randint(1, 9)) for d in range(devices)]
        slots = [make.slot(d, rng.randint(1, 50), made[d], made[d]) for d in range(devices)]
        pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
        messages = []
        for a, b in sorted(rng.sample(pairs, rng.randint(0, 6))):
            messages.append((make.transfer(a, b, rng.randint(1, 9), [made[a]]), a, b))
            make.slots[slots[a]] = (*make.slots[slots[a]][:5], messages[-1][0])
        for device in range(devices):
            mine = [(m, a) for m, a, b in messages if b == device]
            if mine:
                taker = make.assemble(device, 3, [m for m, _ in mine])
                target = make.slot(device, 5, taker, rng.choice([taker, SURVIVES]))
                for message, a in mine:
                    make.copy(slots[a], target, message, taker)
        position += [2 * turn + (kind == TRANSFER) for kind, *_ in make.tasks[before:]]
        workspace += [rng.choice([0, 0, 30]) * (k != TRANSFER) for k, *_ in make.tasks[before:]]
    tasks = make.done()
    return replace(
        tasks, position=np.maximum.accumulate(position), workspace=np.array(workspace, np.int64)
    )


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
