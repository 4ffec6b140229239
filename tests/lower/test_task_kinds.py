"""A kind of task is a row of the table and the functions that do it: nothing else is changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graphs import Maker as GraphMaker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_tasks import EXACT, SURVIVES, Maker, graph_of, ports, random_tasks
from soak import cases

from apportion.columns import Floats, Ints
from apportion.execute import rank as execute
from apportion.execute.executable import (
    Executable,
)
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.rank import (
    Rank,
    gather,
    run_together,
)
from apportion.graph import Value
from apportion.lower.lower import lower
from apportion.lower.task_graph import TaskGraph, counted, verify
from apportion.lower.task_kinds import (
    ASSEMBLE,
    ASSEMBLES,
    COLLECTIVE,
    COMPUTE,
    DEVICE,
    EXCHANGES,
    GROUP,
    PAIR,
    TASK_KINDS,
    TRANSFER,
    TaskKind,
)
from apportion.machine.cost_model import ESTIMATED, CostModel
from apportion.machine.topology import Cluster
from apportion.show import chakra, report
from apportion.show.perfetto import trace
from apportion.simulate import durations
from apportion.simulate.breakdown import breakdowns
from apportion.simulate.memory_curve import peaks
from apportion.simulate.simulate import simulate
from apportion.simulate.timeline import Timeline
from apportion.simulate.timeline import verify as verify_line
from apportion.split.strategy import Choice, Layout, Strategy

# A copy of a tensor to the host's memory, on an engine beside the compute lane.
OFFLOAD = len(TASK_KINDS)
BESIDE = TaskKind(
    "offload", DEVICE, "host copy", EXCHANGES, label="to the host", colour="#123456"
)  # fmt: skip
BETWEEN = replace(BESIDE, lane="compute", activity=ASSEMBLES)


def offload_price(
    tasks: TaskGraph, rows: Ints, cluster: Cluster, cost: CostModel
) -> tuple[Floats, Ints]:
    """Two nanoseconds a byte."""
    return 2e-9 * tasks.nbytes[rows], np.full(len(rows), ESTIMATED)


@pytest.fixture(autouse=True)
def _priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(durations.PRICES, OFFLOAD, offload_price)


def offloading(row: TaskKind) -> TaskGraph:
    """Device 0 computes, offloads, computes, offloads and sends; device 1 assembles."""
    make = Maker(2, task_kinds=TASK_KINDS.with_kind(row))
    first = make.compute(0, flops=100)
    moved = make.work(OFFLOAD, 0, 60, after=[first])
    second = make.compute(0, flops=30, after=[first])
    make.work(OFFLOAD, 0, 10, after=[second])
    message = make.transfer(0, 1, 50, after=[second])
    taken = make.assemble(1, 8, after=[message])
    made, kept = make.slot(0, 60, first, message), make.slot(1, 50, taken, SURVIVES)
    make.copy(made, kept, message, taken)
    make.compute(1, flops=5, after=[taken])
    workspace = np.zeros(7, np.int64)
    workspace[moved] = 200
    tasks = replace(make.done(), workspace=workspace)
    verify(tasks)
    return tasks


def spans(line: Timeline) -> list[tuple[int, int]]:
    return list(zip(line.start_ns.tolist(), line.end_ns.tolist(), strict=True))


def test_the_table_is_what_its_columns_say() -> None:
    assert [kind.name for kind in TASK_KINDS] == ["compute", "transfer", "assemble", "collective"]
    assert TASK_KINDS.lanes == ("compute", "send", "receive")
    assert TASK_KINDS.is_message.tolist() == [False, True, False, True]
    wider = TASK_KINDS.with_kind(BESIDE)
    assert len(TASK_KINDS) == OFFLOAD and wider[OFFLOAD] is BESIDE
    assert wider.lanes == (*TASK_KINDS.lanes, "host copy")
    for name in ("is_work", "is_message", "is_pairwise", "is_collective"):
        assert getattr(wider, name).tolist() == [getattr(row, name) for row in wider]


def test_work_beside_the_compute_lane_runs_while_the_device_computes() -> None:
    tasks = offloading(BESIDE)
    line = simulate(tasks, ports(2), EXACT)
    verify_line(line, tasks)
    assert spans(line)[:4] == [(0, 100), (100, 220), (100, 130), (220, 240)]
    assert line.busy[0] == pytest.approx(130 / 240)
    found = breakdowns(tasks, line)[0]
    assert found.computes == pytest.approx(130e-9) and found.assembles == 0
    assert found.exchanges == pytest.approx(110e-9) and found.waits == 0


def test_work_in_the_compute_lane_waits_its_turn() -> None:
    tasks = offloading(BETWEEN)
    line = simulate(tasks, ports(2), EXACT)
    assert spans(line)[:4] == [(0, 100), (100, 220), (220, 250), (250, 270)]
    found = breakdowns(tasks, line)[0]
    assert (found.computes, found.assembles) == pytest.approx((130e-9, 140e-9))


def test_messages_that_burn_the_device_leave_other_lanes_alone() -> None:
    tasks = offloading(BESIDE)
    line = simulate(tasks, ports(2, on_device=True), EXACT)
    assert spans(line)[3] == (220, 240)  # the message occupies the compute lane from 130 on
    assert spans(line)[4][0] == 130


def test_memory_is_held_while_it_runs_and_is_named() -> None:
    tasks = offloading(BESIDE)
    curves = simulate(tasks, ports(2), EXACT).curves
    assert curves[0].peak_bytes == 310 and curves[0].peak_ns == 100
    value = Value("x", "activation", (15,), "float32", 60)
    found = peaks(curves, tasks, replace(graph_of(tasks), values=(value,)))[0]
    assert (found.task, found.op) == (1, "op1")
    assert [(c.name, c.category, c.nbytes) for c in found.causes] == [
        ("workspace", "workspace", 200),
        ("x", "activation", 60),
        ("message to device 1", "communication", 50),  # a buffer that persists
    ]


def test_it_has_a_name_everywhere(tmp_path: Path) -> None:
    tasks = offloading(BESIDE)
    graph, line = graph_of(tasks), simulate(tasks, ports(2), EXACT)
    assert str(tasks.task(1)) == "1: offload op 1 part 0 on 0, 60 bytes"
    trace(line, tasks, graph, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (shown,) = [e for e in events if e["ph"] == "X" and e["args"]["task"] == 1]
    assert (shown["name"], shown["cat"]) == ("op1 (to the host)", "offload")
    assert thread_names(events)[shown["pid"], shown["tid"]] == "host copy"
    paths = chakra.export(line, tasks, graph, tmp_path)
    assert b"op1 (to the host)" in paths[0].read_bytes()


def thread_names(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    named = [e for e in events if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


def test_the_report_draws_it_in_its_lane_and_colour() -> None:
    tasks = offloading(BESIDE)
    line = simulate(tasks, ports(2), EXACT)
    kinds = report.task_kinds(tasks.task_kinds)
    columns = report.slices(tasks, line, limit=100)
    row = columns["kind"].index(OFFLOAD)
    assert columns["length"][row] == 120 and columns["nbytes"][row] == 60
    assert kinds["name"][OFFLOAD] == "offload" and kinds["colour"][OFFLOAD] == "#123456"
    assert tasks.task_kinds.lanes[kinds["lane"][OFFLOAD]] == "host copy"
    assert report.traffic(tasks)["nbytes"] == [[0, 50], [0, 0]]  # none of it is a message
    assert tasks.bytes_moved == 50


# Messages of other kinds


def renamed(tasks: TaskGraph) -> TaskGraph:
    """The tasks with new kinds in the places of all messages."""
    kinds = TASK_KINDS.with_kind(TaskKind("prefetch", PAIR, "send", EXCHANGES, "receive"))
    kinds = kinds.with_kind(TaskKind("reduction", GROUP, "send", EXCHANGES))
    number = np.array([COMPUTE, 4, ASSEMBLE, 5])
    return counted(replace(tasks, kind=number[tasks.kind], task_kinds=kinds))


@settings(max_examples=cases(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), on_device=st.booleans())
def test_new_kinds_of_message_travel_as_the_old_ones(
    seed: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = random_tasks(seed, count=40, collectives=True)
    new, place = renamed(old), ports(3, on_device=on_device, latency=7e-9)
    verify(new)
    with monkeypatch.context() as patch:
        patch.setitem(durations.PRICES, 4, durations.PRICES[TRANSFER])
        patch.setitem(durations.PRICES, 5, durations.PRICES[COLLECTIVE])
        line, ours = simulate(old, place, EXACT), simulate(new, place, EXACT)
    assert spans(line) == spans(ours) and line.busy == ours.busy
    assert line.peak_bytes == ours.peak_bytes and line.bytes_moved == ours.bytes_moved
    assert breakdowns(old, line) == breakdowns(new, ours)
    assert report.traffic(old) == report.traffic(new)


# Execution


def test_a_kernel_of_its_own_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def over_the_host(rank: Rank, task: int, context: Context) -> None:
        ran.append(task)
        rank.assemble(task, context)

    monkeypatch.setitem(execute.WORK_ON_DEVICE, OFFLOAD, over_the_host)
    make = GraphMaker()
    x, old = make.value(4, 2), make.value(2, role="buffer")
    make.survives(old, make.op("aten.sum.dim_IntList", x, (0,), False, None, out=(2,)))
    strategy = Strategy((Choice((1, 2), (0, 1)),), {old.index: Layout((2,), (0, 1))})
    space = make.space()
    plain = lower(space, strategy, 2)
    tasks = replace(
        plain, kind=np.where(plain.kind == ASSEMBLE, OFFLOAD, plain.kind),
        task_kinds=TASK_KINDS.with_kind(BESIDE),
    )  # fmt: skip
    program = Executable(space, strategy, tasks)
    given = {x.index: torch.arange(8.0).reshape(4, 2), old.index: torch.zeros(2)}
    ranks = [Rank(program, device) for device in range(2)]
    for rank in ranks:
        rank.load(given.__getitem__)
        rank.feed(given.__getitem__)
    run_together(ranks, Context(0, 0, float))
    assert ran == np.flatnonzero(plain.kind == ASSEMBLE).tolist() and ran
    assert torch.equal(gather(ranks)[old.index], torch.tensor([12.0, 16.0]))


# Rows that mean nothing


def test_a_kind_without_a_price_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(durations.PRICES, OFFLOAD)
    with pytest.raises(AssertionError, match="tasks of the kind 'offload' have no price"):
        simulate(offloading(BESIDE), ports(2), EXACT)


def test_a_task_of_no_kind_is_reported() -> None:
    tasks = replace(offloading(BESIDE), task_kinds=TASK_KINDS)
    with pytest.raises(AssertionError, match="an unknown kind"):
        verify(tasks)


def test_rows_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(AssertionError, match="two kinds of task are called 'compute'"):
        TASK_KINDS.with_kind(TASK_KINDS[COMPUTE])
    with pytest.raises(AssertionError, match="in its compute lane only"):
        TASK_KINDS.with_kind(replace(BESIDE, activity=ASSEMBLES))
    with pytest.raises(AssertionError, match="a message exchanges"):
        replace(TASK_KINDS[TRANSFER], activity=ASSEMBLES)
    with pytest.raises(AssertionError, match="of a pair one receives"):
        replace(TASK_KINDS[TRANSFER], receiver_lane="")
