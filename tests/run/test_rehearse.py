"""What a round of a rehearsal says of tasks, in every mode."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from graphs import captured

from apportion.capture.program import Program
from apportion.execute.backends import Backends
from apportion.execute.executable import Executable
from apportion.execute.fused_update import fused_updates
from apportion.execute.kernels.base import Context
from apportion.execute.transport import worker
from apportion.lower.lower import lower
from apportion.machine.cluster import cluster
from apportion.machine.compile_mode import GENERATED, INTERPRETER
from apportion.machine.cost_model import ASSUMED
from apportion.run.rehearse import (
    LEAST_ROUNDS,
    WARM,
    RehearsalTimes,
    TimedWorker,
    rehearse,
    shared_by_bytes,
)
from apportion.run.step_source import RunnableStep, source_of, tensors_of_graph
from apportion.search import METHODS, Problem

SPEC = "gpt2:tiny"


def whole_step() -> Executable:
    space = captured(SPEC)[1]
    problem = Problem(space, cluster("local:1"), ASSUMED)
    strategy = METHODS["single"](problem, budget=5.0, seed=0).strategy
    return Executable(space, strategy, lower(space, strategy, 1))


def step_of(program: Program) -> RunnableStep:
    source = source_of(program)
    return tensors_of_graph(source.graph, source.given, source.settings)


def rehearsed(executable: Executable, mode: str) -> RehearsalTimes:
    program = captured(SPEC)[0]
    step = step_of(program)
    return rehearse(executable, 0, step, 1, 1e-9, Backends(), mode)


@pytest.mark.slow
def test_a_rehearsal_times_the_same_tasks_in_every_mode() -> None:
    executable = whole_step()
    interpreted, generated = (rehearsed(executable, mode) for mode in (INTERPRETER, GENERATED))
    assert interpreted.task.tolist() == generated.task.tolist()
    for found in (interpreted, generated):
        assert found.seconds.shape == (LEAST_ROUNDS - WARM, len(found.task))
        assert (found.seconds > 0).all()
        assert len(found.ends) == LEAST_ROUNDS - WARM
    fused = np.isin(generated.task, [*fused_updates(executable)])
    assert fused.any()
    nbytes = executable.tasks.nbytes[generated.task[fused]]
    order = np.argsort(nbytes, kind="stable")
    assert (np.diff(generated.seconds[0][fused][order]) >= 0).all()  # by what they read and write


@pytest.mark.slow
def test_reading_the_clock_is_no_work() -> None:
    """With a clock by which nothing but reading it takes time."""
    ticks = count(0, 1000)

    def clock() -> int:
        return next(ticks)

    executable, program = whole_step(), captured(SPEC)[0]
    step = step_of(program)
    mine = worker(executable, 0, mode=GENERATED)
    mine.rank.clock = clock
    mine.rank.load(step.tensor)
    timed = TimedWorker(mine, clock)
    assert timed.reading == 1000
    for number in range(2):  # in the first one segments are compared with the interpreter
        mine.rank.feed(step.tensor)
        seconds = timed.round(Context(0, number, step.setting, program.graph.bodies), [])
        mine.rank.finish()
    assert timed.ladder.notes == []
    assert len(seconds) > 100
    assert seconds.sum() < 10 * 1000e-9


def test_what_one_call_computes_is_shared_by_bytes() -> None:
    shared = shared_by_bytes(np.array([1.0, 1.0, 1.0]), np.array([0, 1 << 14, 10 << 14]))
    assert shared.sum() == pytest.approx(3.0)
    assert (shared / shared[0]).tolist() == pytest.approx([1.0, 2.0, 11.0])
