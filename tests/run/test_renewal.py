"""What is measured again, and when: planted speeds on a machine that is quiet or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from graphs import captured
from test_calibrate import random_piece, rehearsed

from apportion.lower.task_graph import TaskGraph
from apportion.machine.cluster import cluster
from apportion.machine.cost_table import CostTable, ReferenceTime
from apportion.run.calibrate import Calibrator
from apportion.run.cost_cache import cached_costs, condition_of, keep_costs
from apportion.run.measured_table import with_rehearsal
from apportion.run.reference_kernels import MachineSpeed
from apportion.run.rehearse import RehearsalRequest
from apportion.run.renewal import count_lacking, drift, with_marks, without_provisional
from apportion.run.step_source import StepSource
from apportion.split.strategy import Strategy

SPEC, PLACE = "mlp:tiny", cluster("local:2")
PACE = 1e-5  # seconds of every task on the machine as it is


@dataclass
class Machine:
    """Processes that take `pace` seconds for every task, and what a look at the machine says."""

    tasks: TaskGraph
    pace: float = PACE
    taken: float = 0.0
    rehearsals: int = 0
    closed: bool = False
    children: list[Any] = field(default_factory=list)

    def ask(self, request: object, timeout: float) -> list[Any]:
        assert isinstance(request, RehearsalRequest), request
        self.rehearsals += 1
        slowed = self.pace / (1 - self.taken)
        return rehearsed(self.tasks, dict.fromkeys(range(len(self.tasks.works)), slowed))

    def speed(self, condition: object = None) -> MachineSpeed:
        return MachineSpeed({"matmul": ReferenceTime(100 * self.pace, 0.02)}, self.taken)


@pytest.fixture
def machine(calibrating: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(random_piece(SPEC))
    monkeypatch.setattr("apportion.run.calibrate.machine_speed", made.speed)
    monkeypatch.setattr("apportion.run.calibrate.taken", lambda *given: made.taken)
    monkeypatch.setattr("apportion.run.calibrate.exchange_on", lambda pool, table, budget: table)
    monkeypatch.setattr("apportion.run.pool.SharedPool.pool", lambda self: made)
    return made


def planned(machine: Machine) -> tuple[CostTable, list[str]]:
    """What a command finds and says that needs the costs of the tasks."""
    notes: list[str] = []
    source = StepSource(captured(SPEC)[0].graph)
    with Calibrator(source, PLACE, 20.0, notes.append) as calibrator:
        calibrator.cost(Strategy(()), machine.tasks)
        return calibrator.table, notes


def seconds_of(table: CostTable, tasks: TaskGraph) -> list[float]:
    return [table.works[work].seconds for work in tasks.works]


@pytest.mark.slow
def test_what_is_measured_has_references_and_is_used_again(machine: Machine) -> None:
    first, notes = planned(machine)
    assert first.references == machine.speed().references
    assert not first.provisional
    assert len(notes) == 1
    again, notes = planned(machine)
    assert machine.rehearsals == 1
    assert notes == []
    assert again.works == first.works


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_speed_is_noticed_said_and_measured(machine: Machine, factor: float) -> None:
    planned(machine)
    machine.pace *= factor
    table, notes = planned(machine)
    assert len([note for note in notes if "no longer holds" in note]) == 1
    assert seconds_of(table, machine.tasks) == pytest.approx(
        [machine.pace] * len(machine.tasks.works)
    )
    assert cached_costs().table(table.condition).references == machine.speed().references
    assert planned(machine)[1] == []


def test_what_was_measured_beside_other_programs_is_measured_again(machine: Machine) -> None:
    machine.taken = 0.5
    table, notes = planned(machine)
    assert "other programs had 50% of the cores" in notes[-1]
    assert {*machine.tasks.works} <= {*table.provisional}
    assert not table.references
    assert planned(machine)[1] == []  # they still run: no better can be had
    machine.taken = 0.0
    table, notes = planned(machine)
    assert [note for note in notes if note.startswith("measuring")] == notes
    assert not table.provisional
    assert seconds_of(table, machine.tasks) == pytest.approx([PACE] * len(machine.tasks.works))
    assert planned(machine)[1] == []


def test_a_slow_reference_beside_other_programs_renews_nothing(machine: Machine) -> None:
    first, _ = planned(machine)
    machine.taken, machine.pace = 0.6, 3 * PACE
    table, notes = planned(machine)
    assert notes == []
    assert table.works == first.works


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.15, True), (2.1, False)])
def test_a_file_without_references_is_compared(
    machine: Machine, factor: float, holds: bool
) -> None:
    """As files of before are: here with works that another model has left."""
    mine = dict.fromkeys(range(len(machine.tasks.works)), factor * PACE)
    old = with_rehearsal(
        CostTable(condition_of(PLACE)), machine.tasks, rehearsed(machine.tasks, mine)
    )
    other = random_piece("gpt2:tiny")
    theirs = dict.fromkeys(range(len(other.works)), factor * PACE)
    keep_costs(with_rehearsal(old, other, rehearsed(other, theirs)))
    table, notes = planned(machine)
    assert machine.rehearsals == 1
    assert any("no longer holds" in note for note in notes) != holds
    assert table.references
    assert seconds_of(table, machine.tasks) == pytest.approx([PACE] * len(machine.tasks.works))
    left = [work for work in other.works if work in {*table.works} - {*machine.tasks.works}]
    assert (len(left) > len(other.works) / 2) == holds


def test_without_a_budget_nothing_is_looked_at(
    calibrating: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(condition: object) -> None:
        raise AssertionError("looked")

    monkeypatch.setattr("apportion.run.calibrate.machine_speed", fails)
    source = StepSource(captured(SPEC)[0].graph)
    with Calibrator(source, PLACE, 0.0, pytest.fail) as calibrator:
        calibrator.cost(Strategy(()), random_piece(SPEC))


# Tables


def measured(tasks: TaskGraph, seconds: float, old: CostTable | None = None) -> CostTable:
    each = dict.fromkeys(range(len(tasks.works)), seconds)
    return with_rehearsal(old or CostTable(condition_of(PLACE)), tasks, rehearsed(tasks, each))


@pytest.mark.slow
def test_marks_are_at_what_was_just_measured() -> None:
    one, two = random_piece(SPEC), random_piece("gpt2:tiny")
    before = measured(one, 1e-5)
    after = measured(two, 1e-5, before)
    marked = with_marks(before, after, None)
    assert {*marked.provisional} >= {*two.works}
    assert not {*marked.provisional} & ({*one.works} - {*two.works})
    assert count_lacking(marked, two, quiet=False) == 0
    left = without_provisional(marked)
    assert {*left.works} >= {*one.works} - {*two.works}
    assert not {*left.works} & {*two.works}
    assert not left.provisional
    renewed = with_marks(marked, measured(two, 2e-5, marked), {"matmul": ReferenceTime(1e-3, 0.0)})
    assert not {*renewed.provisional} & {*two.works}


@pytest.mark.parametrize(
    ("factors", "found"),
    [((1.0,), None), ((3.0,), 3.0), ((0.25,), 0.25), ((0.5, 1.0, 1.0, 1.0, 2.0), None)],
)
def test_a_drift_is_of_most_works(factors: tuple[float, ...], found: float | None) -> None:
    tasks = random_piece(SPEC)
    before = measured(tasks, 1e-5)
    each = {k: 1e-5 * factors[k % len(factors)] for k in range(len(tasks.works))}
    after = with_rehearsal(before, tasks, rehearsed(tasks, each))
    assert drift(before, after) == (None if found is None else pytest.approx(found))
    assert drift(with_marks(CostTable(before.condition), before, None), after) is None
    assert drift(CostTable(before.condition), after) is None
