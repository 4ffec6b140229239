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
from apportion.plan.schedule_exchanges import (
    GAIN,
    NOT_ON_GPUS,
    ON_ONE_MACHINE,
    ScheduledExchanges,
    _best,
)
from apportion.simulate.repeat_steps import repeat_steps
from apportion.split.communication import POLICIES

SPEC = "mlp:layers=12,width=1024,batch=512"


@pytest.fixture(scope="module")
def program() -> Program:
    return captured(SPEC)[0]


@pytest.fixture(scope="module")
def within(program: Program) -> Plan:
    return ap.plan(program, cable(50e9), "data", calibrate=False)


def cable(bandwidth: float, kind: str = "h100") -> Cluster:
    """Two hosts with a device each, as fast as a GPU, and links of this rate between them."""
    made = ap.cluster("2x1xh100")
    links = (replace(k, bandwidth=bandwidth) if "nic" in k.name else k for k in made.links)
    devices = (replace(device, kind=kind) for device in made.devices)
    return replace(made, links=tuple(links), devices=tuple(devices))


def at_once(cluster: Cluster) -> Cluster:
    """Devices a thousand times slower, between which a message takes next to no time."""
    links = (replace(link, bandwidth=1e15, latency=0.0) for link in cluster.links)
    devices = (
        replace(device, flops=tuple((size, rate / 1e3) for size, rate in device.flops))
        for device in cluster.devices
    )
    return replace(cluster, links=tuple(links), devices=tuple(devices))


@pytest.mark.slow
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


@pytest.mark.slow
def test_auto_overlaps_where_that_is_faster_and_fits(program: Program) -> None:
    how = {"calibrate": False, "communication": "auto"}
    where = cable(50e9, "cpu")
    chosen = ap.plan(program, where, "data", **how)
    assert chosen.strategy.communication.overlaps
    assert "steps overlap" in " ".join(chosen.notes)
    fast = ap.plan(program, at_once(where), "data", **how)
    assert not fast.strategy.communication.overlaps
    limit = min(chosen.predicted.peak_bytes) - 1
    kept = ap.plan(program, where, "data", memory_limit=limit, **how)
    assert kept.feasible
    assert not kept.strategy.communication.overlaps


def test_auto_overlaps_where_a_link_is_busy_though_nothing_is_gained(within: Plan) -> None:
    across = within.with_communication("p3")
    alike = replace(across.timeline, period_ns=within.timeline.step_ns)
    given = ScheduledExchanges(within.strategy, within.tasks, within.timeline)
    busy = ScheduledExchanges(across.strategy, across.tasks, alike)
    idle = replace(busy, timeline=replace(alike, link_spans=None))
    assert busy.seconds == idle.seconds == given.seconds
    assert _best(given, iter([busy]), lambda line: True) is busy
    assert _best(given, iter([idle]), lambda line: True) is given
    assert _best(given, iter([busy]), lambda line: line is not alike) is given


@pytest.mark.slow
def test_auto_is_predicted_no_slower_than_any_policy(program: Program) -> None:
    within = ap.plan(program, cable(50e9, "cpu"), "data", calibrate=False, communication="wfbp")
    made = {policy: within.with_communication(policy) for policy in POLICIES}
    seconds = {policy: plan.predicted.step_seconds for policy, plan in made.items()}
    assert {made[policy].strategy.communication.policy for policy in POLICIES} == set(POLICIES)
    assert seconds["none"] > seconds["wfbp"] > seconds["p3"]
    assert (1 - GAIN) * seconds["auto"] <= min(seconds.values())
    assert not made["none"].strategy.communication.overlaps
    assert made["tictac"].strategy.communication.ranking
    assert made["tictac"].strategy.communication.slice_bytes == 0
    assert made["bytescheduler"].strategy.communication.slice_bytes > 0


@pytest.mark.slow
def test_where_there_is_nothing_to_hide_every_policy_is_as_none(program: Program) -> None:
    """To send gradients meanwhile costs processors something, and gains nothing there."""
    where = at_once(cable(50e9, "cpu"))
    made = {
        policy: ap.plan(program, where, "data", calibrate=False, communication=policy)
        for policy in POLICIES
    }
    for policy, plan in made.items():
        how = plan.strategy.communication
        assert how.policy == policy
        assert replace(how, policy="none") == made["none"].strategy.communication
        assert plan.predicted == made["none"].predicted
        told = " ".join(plan.notes)
        assert ("too little to hide" in told) == (policy != "none")


def test_on_gpus_auto_does_not_and_p3_says_that_they_will_not(
    program: Program, within: Plan
) -> None:
    made = ap.plan(program, within.cluster, "data", calibrate=False, communication="auto")
    assert not made.strategy.communication.overlaps
    across = within.with_communication("p3")
    assert across.notes[-1].endswith(NOT_ON_GPUS)
    assert across.with_communication("wfbp") == within


@pytest.mark.slow
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
    assert not made.strategy.communication.overlaps
    assert ON_ONE_MACHINE in made.notes


def test_an_unknown_policy_is_refused(program: Program) -> None:
    with pytest.raises(ValueError, match="there is no communication 'p4'; choose none, wfbp, p3"):
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
