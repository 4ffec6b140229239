"""The peak of a compiled step by a dry run is the allocator's."""

from __future__ import annotations

import time

import pytest
import torch

from apportion import zoo
from apportion.capture.capture import capture
from apportion.execute.allocations import allocated_peak
from apportion.execute.executable import Executable
from apportion.execute.inductor import inductor
from apportion.execute.inductor_peak import inductor_peak
from apportion.execute.rank_steps import Segment
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.runner import Runner


@pytest.mark.slow
def test_a_dry_run_knows_the_peak() -> None:
    it = zoo.load("mlp:tiny,width=256,batch=64", 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    made = make_plan(program.graph, cluster("local:1"), "single")
    executable = Executable(made.space, made.strategy, made.tasks)
    predicted = inductor_peak(executable, 0, "cpu")
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        runner = Runner(program, worker(executable, 0))
        (segment,) = (s for s in runner.worker.steps if isinstance(s, Segment))
        function = inductor(executable, segment, "cpu")
        began = time.time_ns()
        function(runner.worker.rank, runner.begin(program.batch))
    assert allocated_peak(profile, began) == predicted


@pytest.mark.slow
def test_workspaces_of_library_kernels_are_added() -> None:
    it = zoo.load("mlp:tiny,width=256,batch=64", 0)
    program = capture(it.step, it.model, it.optimizer, it.batch)
    made = make_plan(program.graph, cluster("local:1"), "single")
    executable = Executable(made.space, made.strategy, made.tasks)
    plain = inductor_peak(executable, 0, "cpu")
    assert inductor_peak(executable, 0, "cpu", lambda task: 1000) == plain + 1000
