"""Fused updates in the prediction of memory: against the allocator's events, and how it is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from soak import kept
from torch import nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.execute import fused_update
from apportion.execute.dry_run import measure_storage
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph, verify, with_storage
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.run.runner import Runner
from apportion.run.training import _HostPeak
from apportion.simulate.simulate import simulate
from apportion.split.space import Space
from apportion.split.strategy import Strategy, unsplit_choice

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def executable(optimizer: str) -> tuple[Program, Executable]:
    """A model whose peak is in its update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 50))
    given = (model, OPTIMIZERS[optimizer](model.parameters()), torch.randn(2, 40))
    program = capture(lambda m, b: m(b).square().sum(), *given)
    space = Space(program.graph)
    choices = tuple(unsplit_choice(space, k, (0,)) for k in range(len(space.graph.ops)))
    strategy = Strategy(choices)
    return program, Executable(space, strategy, runnable(space, strategy, 1))


def predicted(it: Executable, fused: bool) -> tuple[TaskGraph, int]:
    tasks = with_storage(it.tasks, measure_storage(it, 1, fused=fused))
    verify(tasks)
    machine = cluster("local:1")
    (peak,) = simulate(tasks, machine, default_cost(machine)).peak_bytes
    return tasks, peak


def measured(program: Program, it: Executable, mode: str) -> int | None:
    """Of the second step: in the first, compiled code is compared with the interpreter."""
    mine = worker(it, 0, mode=mode)
    with _HostPeak(True) as memory:
        runner = Runner(program, mine)
        runner.local_step(program.batch)
        memory.mark()
        runner.local_step(program.batch)
    assert mine.notes == []
    return memory.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("held", kept([0, 1 << 26], 1 << 26))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_peak_is_predicted_to_the_byte_in_both_modes(
    optimizer: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_update, "HELD_BYTES", held)
    program, it = executable(optimizer)
    assert measured(program, it, "generated") == predicted(it, fused=True)[1]
    assert measured(program, it, "none") == predicted(it, fused=False)[1]
    assert predicted(it, fused=True)[1] < predicted(it, fused=False)[1]


@pytest.mark.slow
def test_gradients_are_not_held_back_beyond_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_the_peak_is_predicted_to_the_byte_in_both_modes("adamw", 0, monkeypatch)


def test_new_state_lies_where_the_old_was_and_gradients_wait() -> None:
    _, it = executable("adamw")
    storage = measure_storage(it, 1)
    shared = {slot: base for slot, base, _ in storage.slots if base >= 0}
    assert all(shared[new] == old for new, old in fused_update.overwritten_slots(it).items())
    updates = fused_update.fused_updates(it)
    gradients = {update.gradient for update in updates.values()}
    last = max(updates)
    assert gradients & {slot for slot, _ in storage.kept}
    assert {task for _, task in storage.kept} == {last}
    assert not {task for task, _ in storage.workspace} & set(updates)


def test_what_runs_is_not_what_was_corrected() -> None:
    """A state that is overwritten would seem to be needed later."""
    _, it = executable("adamw")
    corrected = with_storage(it.tasks, measure_storage(it, 1))
    again = Executable(it.space, it.strategy, with_storage(corrected, measure_storage(it, 1)))
    assert again.tasks is it.tasks
    assert fused_update.in_place_updates(again) == set(fused_update.fused_updates(again))
    assert (np.asarray(corrected.slot_last) >= it.tasks.slot_last).all()
