"""Updates that the next step does: which tasks are late, and that they change nothing else."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from compare_runs import compare
from graphs import captured, problem

from apportion.graph import UPDATE
from apportion.lower.late_tasks import crosses
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph, verify
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.split.communication import P3, Communication, read_communication
from apportion.split.strategy import Strategy, from_json, to_json


def overlapping(strategy: Strategy, early: float) -> Strategy:
    return replace(strategy, communication=Communication(P3, early))


def depends_on(tasks: TaskGraph, task: int) -> list[int]:
    """What a task waits for, makers of what it reads included."""
    read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
    makers = tasks.slot_first[read[read >= 0]]
    deps = tasks.dep[tasks.dep_start[task] : tasks.dep_start[task + 1]]
    return [*deps.tolist(), *makers[makers >= 0].tolist()]


def plain_dues(tasks: TaskGraph) -> list[int]:
    """The specification: before the first task of the next step that reads state which a task, or
    one after it, makes, or posts a message whose end is late."""
    m, n = tasks.late_start, len(tasks)
    posted = [t for t in range(m) if crosses(tasks, m)[t]]
    due = [m] * n
    for t in range(m, n):
        for end, begin in tasks.carry.tolist():
            if tasks.slot_first[end] == t:
                readers = [
                    r for r in range(m)
                    if begin in tasks.in_slot[tasks.in_start[r] : tasks.in_start[r + 1]]
                ]  # fmt: skip
                due[t] = min([due[t], *readers])
        due[t] = min([due[t], *posted[:1]])
        if due[t] < n and tasks.is_message[due[t]]:  # of an exchange the first
            due[t] = int(np.flatnonzero(tasks.position == tasks.position[due[t]])[0])
    return [min(due[t:]) for t in range(m, n)]


@pytest.mark.parametrize("early", [1.0, 0.6, 0.0])
def test_data_parallel_updates_are_late_and_nothing_else_is(early: float) -> None:
    _, space = captured("mlp:tiny")
    strategy = data(problem(2)).strategy
    within, tasks = (runnable(space, s, 2) for s in (strategy, overlapping(strategy, early)))
    ops, work = space.graph.ops, tasks.is_work & (tasks.kind == 0)
    update = np.array([op.phase == UPDATE for op in ops])
    assert ((np.flatnonzero(work) >= tasks.late_start) == update[tasks.op[work]]).all()
    assert not tasks.is_message[tasks.late_start :].any()  # all gradients travel in their own step
    assert tasks.bytes_moved == within.bytes_moved
    verify(tasks)


def test_held_gradients_are_sent_in_the_order_of_need() -> None:
    spec = "mlp:layers=6,width=1024,batch=8"
    _, space = captured(spec)
    strategy = data(problem(2, spec)).strategy
    for early, reverse in ((0.0, True), (1.0, False)):
        tasks = runnable(space, overlapping(strategy, early), 2)
        large = tasks.is_message & (tasks.nbytes > 1 << 20) & (tasks.device == 0)
        makers = [max(depends_on(tasks, t)) for t in np.flatnonzero(large).tolist()]
        assert len(makers) == 6
        assert makers == sorted(makers, reverse=reverse)  # the first layer's is made last


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", ["mlp:tiny", "rnn:tiny"])
def test_any_strategy_may_overlap(spec: str, devices: int) -> None:
    program, space = captured(spec)
    for seed in range(4):
        strategy = overlapping(draw(space, devices, Random(seed)), seed / 3)
        tasks = runnable(space, strategy, devices)
        verify(tasks)
        found = compare(program, space, strategy, devices, seed=seed % 2)
        assert found.equal, (devices, seed, found)
        if tasks.late_start < 0:
            continue
        for task in range(tasks.late_start):
            assert all(before < tasks.late_start for before in depends_on(tasks, task))
        assert tasks.due.tolist() == plain_dues(tasks)


def test_where_nothing_is_sent_nothing_is_late() -> None:
    _, space = captured("mlp:tiny")
    assert runnable(space, overlapping(data(problem(1)).strategy, 1.0), 1).late_start < 0


def test_a_returned_norm_is_not_late() -> None:
    """What clips by the norm of all gradients is late, what returns it is not."""
    _, space = captured("gpt2:tiny")
    tasks = runnable(space, overlapping(data(problem(2, "gpt2:tiny")).strategy, 1.0), 2)
    assert 0 < tasks.late_start < len(tasks)
    for end, begin in tasks.carry.tolist():
        if not (tasks.in_slot == begin).any() and tasks.slot_first[end] >= 0:
            assert tasks.slot_first[end] < tasks.late_start


def test_a_strategy_keeps_its_communication() -> None:
    strategy = overlapping(data(problem(2)).strategy, 0.375)
    assert from_json(to_json(strategy)) == strategy
    assert "communication" not in to_json(replace(strategy, communication=Communication()))


@pytest.mark.parametrize("given", [{"policy": "p4", "early": 1}, {"policy": "p3"}, {"early": 0}, 3])
def test_what_is_no_communication_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="communication"):
        read_communication(given)


def test_share_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        read_communication({"policy": "p3", "early": 1.5})
