"""Plans whose steps overlap: predicted by the simulator, chosen by it, saved and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import captured

import apportion as ap
from apportion.capture.program import Program, settings_now
from apportion.machine.topology import Cluster
from apportion.plan.plan import Plan
from apportion.plan.schedule_exchanges import ON_ONE_MACHINE
from apportion.simulate.repeat_steps import repeat_steps

SPEC = "mlp:layers=12,width=1024,batch=512"


@pytest.fixture(scope="module")
def program() -> Program:
    return captured(SPEC)[0]


@pytest.fixture(scope="module")
def within(program: Program) -> Plan:
    return ap.plan(program, cable(50e9), "data", calibrate=False)


def cable(bandwidth: float) -> Cluster:
    """Two hosts with a GPU each, and links of this rate between them."""
    made = ap.cluster("2x1xh100")
    links = (replace(k, bandwidth=bandwidth) if "nic" in k.name else k for k in made.links)
    return replace(made, links=tuple(links))


def test_a_period_is_shorter_and_no_shorter_than_compute_or_wire(within: Plan) -> None:
    across = within.with_communication("p3")
    assert across.tasks.late_start > 0
    assert across.predicted.bytes_moved == within.predicted.bytes_moved
    assert across.predicted.step_seconds < 0.95 * within.predicted.step_seconds
    line = across.timeline
    work = across.tasks.is_work & (across.tasks.device == 0)
    computes = int((line.end_ns - line.start_ns)[work].sum())
    wire = across.predicted.bytes_moved / 2 / 50e9
    assert across.predicted.step_seconds >= 0.999 * max(computes / 1e9, wire)
    assert min(across.predicted.peak_bytes) > max(within.predicted.peak_bytes)


def test_auto_overlaps_where_that_is_faster_only(program: Program, within: Plan) -> None:
    chosen = ap.plan(program, within.cluster, "data", calibrate=False, communication="auto")
    assert chosen.strategy.communication.across
    assert "steps overlap" in " ".join(chosen.notes)
    fast = ap.plan(program, cable(1e15), "data", calibrate=False, communication="auto")
    assert not fast.strategy.communication.across


def test_a_limit_is_kept(program: Program, within: Plan) -> None:
    limit = max(within.predicted.peak_bytes) + 1
    kept = ap.plan(
        program, within.cluster, "data", memory_limit=limit, calibrate=False, communication="auto"
    )
    assert kept.feasible
    assert not kept.strategy.communication.across


def test_a_saved_plan_still_overlaps(within: Plan, tmp_path: Path) -> None:
    across = within.with_communication("p3")
    across.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.strategy.communication == across.strategy.communication
    assert read.simulate().predicted == across.predicted
    read.trace(tmp_path / "trace.json")
    read.report(tmp_path / "page.html")


def test_on_one_machine_they_do_not(program: Program) -> None:
    made = ap.plan(program, "local:2", "data", calibrate=False, communication="p3")
    assert not made.strategy.communication.across
    assert ON_ONE_MACHINE in made.notes


def test_an_unknown_policy_is_refused(program: Program) -> None:
    with pytest.raises(ValueError, match="there is no communication 'p4'; choose wfbp, p3, auto"):
        ap.plan(program, "local:2", "data", calibrate=False, communication="p4")


def test_repeated_steps_do_the_same_in_another_order(within: Plan) -> None:
    tasks = within.with_communication("p3").tasks
    several = repeat_steps(tasks, 3)
    count, whole = len(tasks), several.tasks
    assert (np.bincount(several.source) == 3).all()
    owner = np.repeat(np.arange(len(whole)), np.diff(whole.dep_start))
    assert (whole.dep < owner).all()
    for k in range(3):
        for late in (several.at[k][: tasks.late_start], several.at[k][tasks.late_start :]):
            assert (np.diff(late) > 0).all()
    first, second = several.at[0][tasks.late_start :], several.at[1]
    assert (first < second[np.minimum(tasks.due, count - 1)]).all()
    for end, begin in tasks.carry.tolist():
        if tasks.slot_first[end] >= 0 and (tasks.in_slot == begin).any():
            reader = np.repeat(np.arange(count), np.diff(tasks.in_start))[tasks.in_slot == begin]
            assert (several.at[0][tasks.slot_first[end]] < several.at[1][reader]).all()


def test_settings_are_those_of_their_step(program: Program) -> None:
    group = program.optimizer.param_groups[0]
    before, now = group["lr"], settings_now(program)
    try:
        group["lr"] = 3 * before
        assert now(("get", 0, "lr")) == before
        assert settings_now(program)(("get", 0, "lr")) == 3 * before
    finally:
        group["lr"] = before
