"""Clocks between the tasks of a step: which tasks ran in which interval."""

from __future__ import annotations

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.executable import Executable
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.calibrate_cuda import _shared, runner_on
from apportion.run.task_clock import SCALE, HostClock, QueueClock, intervals


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "generated"])
def test_every_task_runs_in_one_interval(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    rests: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: rests.append(1))
    it = zoo.load("gpt2:tiny", 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    made = make_plan(program.graph, cluster("1xh200"), "single")
    runner = runner_on(
        program, Executable(made.space, made.strategy, made.tasks), "cpu", mode, timed=True
    )
    runner.step(it.batch)
    rank, clock = runner.worker.rank, HostClock(rest=10)
    rank.spans.clear()
    rank.clock, rank.records = clock, True
    runner.step(it.batch)
    found = intervals(rank.spans)
    assert sorted(task for tasks in found.values() for task in tasks) == list(
        range(len(made.tasks))
    )
    updates = [
        k for k, op in enumerate(made.tasks.op) if made.tasks.kinds[op] == "apportion.update"
    ]
    alone = [tasks for tasks in found.values() if len(tasks) == 1]
    assert (len(alone) == len(made.tasks)) == (mode == "none")
    if mode == "generated":
        together = [tasks for tasks in found.values() if len(tasks) > 1]
        assert sum(map(len, together)) == len(updates), "fused updates are one interval"
        assert max(found) == len(clock.seconds) - 1
    assert rests
    device, host = [1.0] * len(clock.seconds), clock.seconds
    if mode == "generated":
        shared = _shared(rank.executable, found, device, host)
        assert sum(shared[0]) == pytest.approx(len(found))
        assert sum(shared[1]) == pytest.approx(sum(host[k] for k in found))


def test_a_full_queue_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 0.1, 0.1, 0.5, 0.5, 0.6, 0.6])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = QueueClock([0.25, 0.5, 0.125])
    assert [clock() for _ in range(4)] == [0, SCALE, 2 * SCALE, 3 * SCALE]
    assert clock.found == 0.25, "the second interval took as long as the device slept"
