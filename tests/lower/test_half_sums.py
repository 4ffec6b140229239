"""half_sums: fewer bytes on the way of gradients' sums, the same sums on all devices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import apportion as ap
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.widen import widened
from apportion.execute.dry_run import converted_terms
from apportion.execute.executable import Executable
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph, verify
from apportion.machine.cluster import cluster
from apportion.plan.plan import Plan
from apportion.plan.plan_file import plan_from_json, plan_to_json
from apportion.run.check_run import gather_copies
from apportion.run.one_process import train_in_one_process
from apportion.split.space import Space
from apportion.split.strategy import check_wire
from apportion.zoo import load


@cache
def program() -> Program:
    it = load("mlp:tiny")
    return capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)


def planned(devices: int, method: str, wire: str = "bf16") -> Plan:
    place = cluster(f"local:{devices}")
    return ap.plan(program(), place, method, calibrate=False, wire=wire)


def carried(tasks: TaskGraph, sums: bool) -> int:
    """Bytes of messages that are for sums, or for other assemblies."""
    adds = np.zeros(len(tasks), np.bool_)
    adds[tasks.copy_task[tasks.copy_term > 0]] = True
    sent = (tasks.copy_message >= 0) & (adds[tasks.copy_task] == sums)
    return int(tasks.copy_nbytes[sent].sum())


@pytest.mark.parametrize("devices", [2, 4])
def test_sums_of_gradients_take_half_of_the_bytes(devices: int) -> None:
    plain, half = planned(devices, "data", "").tasks, planned(devices, "data").tasks
    verify(half)
    scalars = 4 * (devices - 1) * devices  # the loss, a sum of the forward pass, is as it was
    assert carried(plain, False) == carried(half, False)
    assert carried(plain, True) - carried(half, True) > 0
    assert carried(plain, True) <= 2 * carried(half, True) <= carried(plain, True) + scalars
    assert half.bytes_moved == carried(half, True) + carried(half, False)


@pytest.mark.parametrize(("devices", "method"), [(2, "data"), (4, "data"), (3, "random")])
def test_all_copies_of_the_state_stay_the_same(devices: int, method: str) -> None:
    strategy = planned(devices, method).strategy
    batches = [program().batch] * 2
    ends = []
    for each in (strategy, replace(strategy, wire="")):
        run = train_in_one_process(program(), each, devices, batches, 0)
        found = gather_copies(run.space, run.tasks, run.ranks)
        for copies in found.values():
            for copy in copies[1:]:
                assert torch.equal(copy.tensor[copy.filled], copies[0].tensor[copy.filled])
        ends.append({v: copies[0].tensor for v, copies in found.items()})
    differ = [v for v in ends[0] if not torch.equal(ends[0][v], ends[1][v])]
    assert differ
    for value in differ:
        size = float(ends[1][value].abs().max())
        torch.testing.assert_close(ends[0][value], ends[1][value], rtol=0, atol=0.02 * size)


def test_the_check_says_so_and_judges_within_the_rounding() -> None:
    plan = planned(2, "data")
    found = ap.check(program(), plan)
    assert found.equal and found.max_rel_param_diff < 1e-12
    assert 1e-5 < found.own.max_rel_param_diff < 0.05
    assert "travel in bfloat16" in found.notes[0]
    assert any("travel in bfloat16" in note for note in plan.notes)


def test_a_saved_plan_knows_it() -> None:
    plan = planned(2, "data")
    again = plan_from_json(plan_to_json(plan))
    assert again.strategy == plan.strategy and again.strategy.wire == "bfloat16"
    assert again.tasks.bytes_moved == plan.predicted.bytes_moved


def test_only_float32_travels_otherwise() -> None:
    strategy = planned(2, "data").strategy
    wide = Space(widened(program().graph))
    plain = runnable(wide, replace(strategy, wire=""), 2)
    assert runnable(wide, strategy, 2).bytes_moved == plain.bytes_moved
    tasks = runnable(Space(program().graph), strategy, 2)
    assert list(converted_terms(Executable(Space(program().graph), strategy, tasks)))


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot travel in 'fp8'; known are bf16 and bfloat16"):
        check_wire("fp8")
