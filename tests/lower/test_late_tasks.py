"""Updates that the next step does: which tasks are late, and that they change nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from compare_runs import compare
from graphs import captured, problem
from soak import cases, kept

from apportion.capture.capture import capture
from apportion.graph import UPDATE
from apportion.lower.late_tasks import crosses
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph, verify
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.search.problem import Problem
from apportion.split.communication import NEED, NONE, P3, Communication, read_communication
from apportion.split.space import Space
from apportion.split.strategy import Strategy, from_json, to_json

OVERLAPPING = Communication(P3, overlaps=True, order=NEED, slice_bytes=1 << 16)


def overlapping(strategy: Strategy) -> Strategy:
    return replace(strategy, communication=OVERLAPPING)


def depends_on(tasks: TaskGraph, task: int) -> list[int]:
    """What a task waits for, makers of what it reads included."""
    read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]
    makers = tasks.slot_first[read[read >= 0]]
    deps = tasks.dep[tasks.dep_start[task] : tasks.dep_start[task + 1]]
    return [*deps.tolist(), *makers[makers >= 0].tolist()]


def plain_exchanges(tasks: TaskGraph) -> dict[int, int]:
    """The specification: the last exchange that late work waits for, unless a late message leads
    to it or comes of it."""
    m, n = tasks.late_start, len(tasks)
    before: dict[int, set[int]] = {}
    for t in range(m, n):
        own = tasks.dep[tasks.dep_start[t] : tasks.dep_start[t + 1]].tolist()
        before[t] = {*own, *(b for each in own if each >= m for b in before[each])}
    linked = {
        t for t in range(m, n)
        if tasks.is_message[t]
        or any(b >= m and tasks.is_message[b] for b in before[t])
        or any(tasks.is_message[later] and t in before[later] for later in range(t + 1, n))
    }  # fmt: skip
    awaited = {
        t: [int(tasks.position[b]) for b in before[t] if b < m and tasks.is_message[b]]
        for t in range(m, n)
        if t not in linked
    }
    return {t: max(exchanges) for t, exchanges in awaited.items() if exchanges}


def plain_dues(tasks: TaskGraph) -> list[int]:
    """The specification: before the first task of the next step that reads state which a task, or
    one after it, makes, or posts a message whose end is late; and not after other late work that
    waits for the same exchange."""
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
    exchange = plain_exchanges(tasks)
    due = [
        min([due[t], *(due[o] for o in exchange if exchange[o] == exchange.get(t))])
        for t in range(n)
    ]
    return [min(due[t:]) for t in range(m, n)]


def plain_needs(tasks: TaskGraph) -> dict[int, int]:
    """The specification: for every message the first task that reads what comes of it, n further on
    for one of the next step."""
    n, m = len(tasks), tasks.late_start
    readers: dict[int, set[int]] = {t: set() for t in range(n)}
    for t in range(n):
        for before in depends_on(tasks, t):
            readers[before].add(t)
    first = {
        begin: min((t for t in range(m) if begin in read_by(tasks, t)), default=m)
        for begin in tasks.carry[:, 1].tolist()
    }
    made: dict[int, list[int]] = {}
    for end, begin in tasks.carry.tolist():
        made.setdefault(int(tasks.slot_first[end]), []).append(begin)

    @cache
    def need(task: int) -> int:
        if task < m and not tasks.is_message[task]:
            return task
        several = [task]
        if tasks.is_message[task]:
            several = np.flatnonzero(tasks.position == tasks.position[task]).tolist()
        own = [n + first[begin] for t in several if t >= m for begin in made.get(t, ())]
        return min([2 * n, *own, *(need(r) for t in several for r in readers[t])])

    return {t: need(t) for t in np.flatnonzero(tasks.is_message).tolist()}


def read_by(tasks: TaskGraph, task: int) -> list[int]:
    found: list[int] = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist()
    return found


def test_data_parallel_updates_are_late_and_nothing_else_is() -> None:
    _, space = captured("mlp:tiny")
    strategy = data(problem(2)).strategy
    within, tasks = (runnable(space, s, 2) for s in (strategy, overlapping(strategy)))
    ops, work = space.graph.ops, tasks.is_work & (tasks.kind == 0)
    update = np.array([op.phase == UPDATE for op in ops])
    assert ((np.flatnonzero(work) >= tasks.late_start) == update[tasks.op[work]]).all()
    assert not tasks.is_message[tasks.late_start :].any()  # all gradients travel in their own step
    assert tasks.bytes_moved == within.bytes_moved
    verify(tasks)


@pytest.mark.slow
def test_what_is_read_first_is_sent_first() -> None:
    spec = "mlp:layers=6,width=1024,batch=8"
    _, space = captured(spec)
    tasks = runnable(space, overlapping(data(problem(2, spec)).strategy), 2)
    large = np.flatnonzero(tasks.is_message & (tasks.nbytes > 1 << 20) & (tasks.device == 0))
    makers = [max(depends_on(tasks, t)) for t in large.tolist()]
    assert len(makers) == 6
    assert makers == sorted(makers)  # posted as they are made,
    assert (np.diff(tasks.priority[large]) < 0).all()  # and the last one overtakes the others


def test_held_gradients_travel_when_the_backward_is_over() -> None:
    spec = "mlp:layers=6,width=1024,batch=8"
    _, space = captured(spec)
    strategy = replace(
        data(problem(2, spec)).strategy, communication=Communication(NONE, held=True)
    )
    tasks = runnable(space, strategy, 2)
    assert tasks.late_start < 0
    verify(tasks)
    phase = np.array([op.phase == UPDATE for op in space.graph.ops] + [True])
    work = tasks.is_work & (tasks.kind == 0)
    large = tasks.is_message & (tasks.nbytes > 1 << 16)
    assert large.any()
    assert np.flatnonzero(large).min() > np.flatnonzero(work & ~phase[tasks.op]).max()


@pytest.mark.slow
@pytest.mark.parametrize("devices", kept([2, 3, 4], 3))
@pytest.mark.parametrize("spec", ["mlp:tiny", "rnn:tiny"])
def test_any_strategy_may_overlap(spec: str, devices: int) -> None:
    program, space = captured(spec)
    for seed in range(cases(4, 3)):
        strategy = overlapping(draw(space, devices, Random(seed)))
        tasks = runnable(space, strategy, devices)
        verify(tasks)
        found = compare(program, space, strategy, devices, seed=seed % 2)
        assert found.equal, (devices, seed, found)
        if tasks.late_start < 0:
            continue
        for task in range(tasks.late_start):
            assert all(before < tasks.late_start for before in depends_on(tasks, task))
        assert tasks.due.tolist() == plain_dues(tasks)
        found_needs = plain_needs(tasks)
        assert {t: int(tasks.priority[t]) for t in found_needs} == found_needs


def test_where_nothing_is_sent_nothing_is_late() -> None:
    _, space = captured("mlp:tiny")
    assert runnable(space, overlapping(data(problem(1)).strategy), 1).late_start < 0


@pytest.mark.parametrize("clips", [True, False])
def test_what_clips_by_the_norm_of_all_gradients_keeps_the_step_whole(clips: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    space = Space(capture(step, model, optimizer, torch.ones(8, 6)).graph)
    machine = cluster("local:2")
    strategy = data(Problem(space, machine, default_cost(machine))).strategy
    assert (runnable(space, overlapping(strategy), 2).late_start < 0) == clips


def test_a_strategy_keeps_its_communication() -> None:
    strategy = overlapping(data(problem(2)).strategy)
    assert from_json(to_json(strategy)) == strategy
    assert "communication" not in to_json(replace(strategy, communication=Communication()))


def test_plans_of_before_slices_are_read() -> None:
    assert read_communication({"policy": "wfbp", "early": 1.0}) == Communication()
    assert read_communication({"policy": "p3", "early": 0.5}).overlaps


@pytest.mark.parametrize(
    "given",
    [{"policy": "p4"}, {"order": "late"}, {"slice_bytes": -1}, {"held": 1}, {"ranking": [-1]}],
)
def test_what_is_no_communication_is_refused(given: dict[str, object]) -> None:
    whole = Communication().to_json()
    assert read_communication(whole) == Communication()
    with pytest.raises(ValueError, match="communication"):
        read_communication(whole | given)
    for strange in (given, 3, {"polcy": "p3"}):
        with pytest.raises(ValueError, match="communication"):
            read_communication(strange)
