"""Whether a machine is still the one that was measured."""

from __future__ import annotations

import pytest
import torch

from apportion.machine.cost_table import Condition, CostTable, ReferenceTime
from apportion.run.reference_kernels import (
    TOLERANCE,
    MachineSpeed,
    caveat,
    changed,
    machine_speed,
    reference_time,
)

AT = Condition("cpu", 1, 2)


def table(**seconds: float) -> CostTable:
    return CostTable(AT, measured="2026-01-31", references=times(seconds))


def times(seconds: dict[str, float]) -> dict[str, ReferenceTime]:
    return {name: ReferenceTime(each, 0.05) for name, each in seconds.items()}


def speed(taken: float | None = 0.0, **seconds: float) -> MachineSpeed:
    return MachineSpeed(times(seconds), taken)


def test_the_same_speed_is_no_change() -> None:
    assert not changed(table(matmul=1e-3, copy=1e-4), speed(matmul=1.1e-3, copy=0.8e-4))
    assert not changed(table(), speed(matmul=1.0))  # nothing is known of then
    assert not changed(table(matmul=1e-3), speed(copy=1.0))


@pytest.mark.parametrize("name", TOLERANCE)
def test_another_speed_is_a_change(name: str) -> None:
    then = table(**{name: 1e-3})
    beyond = 1.05 * TOLERANCE[name]
    assert "times as long" in changed(then, speed(**{name: 1e-3 * beyond}))
    assert "times as fast" in changed(then, speed(**{name: 1e-3 / beyond}))
    assert name in changed(then, speed(**{name: 1e-2}))
    assert not changed(then, speed(**{name: 1e-3 * 0.95 * TOLERANCE[name]}))


def test_while_others_run_only_what_is_faster_says_something() -> None:
    then = table(matmul=1e-3)
    assert not changed(then, speed(0.5, matmul=5e-3))
    assert changed(then, speed(None, matmul=5e-3))
    assert "5.0 times as fast" in changed(then, speed(0.5, matmul=2e-4))


def test_the_fastest_tenth_counts() -> None:
    found = reference_time([1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0])
    assert found == (1.0, 8.0)


def test_reference_kernels_run_with_the_threads_of_the_condition() -> None:
    before = torch.get_num_threads()
    found = machine_speed(AT)
    assert found.references.keys() == TOLERANCE.keys()
    assert all(time.seconds > 0 and time.spread >= 0 for time in found.references.values())
    assert torch.get_num_threads() == before


def test_several_threads_are_not_timed_beside_other_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("apportion.run.reference_kernels.taken", lambda *given: 0.6)
    assert machine_speed(Condition("cpu", 2, 1)) == MachineSpeed({}, 0.6)
    assert machine_speed(AT).references  # one thread is, by its own time on the processor


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (speed(matmul=1e-3), ""),
        (speed(matmul=2e-3), "as it was on 2026-01-31, plan again"),
        (speed(0.4, matmul=1e-3), "other programs have 40% of the cores"),
    ],
)
def test_a_prediction_of_before_is_taken_with_care(
    now: MachineSpeed, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apportion.run.reference_kernels.machine_speed", lambda condition: now)
    found = caveat(table(matmul=1e-3))
    assert text in found
    assert bool(found) == bool(text)
    assert caveat(None) == caveat(table()) == ""
