"""Steps in all forms, divided: each rank in this process, compared with plain PyTorch."""

from __future__ import annotations

import pytest
from cases_loops import LOOPS, made
from compare_runs import compare

from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan

QUICK = ("clip_grad_norm_", "accumulated", "adversarial", "averaged", "method of a trainer")


@pytest.mark.parametrize("method", ["data", "tofu", "random"])
@pytest.mark.parametrize("name", QUICK)
def test_a_divided_loop_trains_what_pytorch_trains(name: str, method: str) -> None:
    program = capture(*made(name))
    plan = make_plan(program, cluster("local:2"), method)
    assert compare(program, plan.space, plan.strategy, 2).equal


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in QUICK])
def test_all_other_loops_too(name: str) -> None:
    for method in ("tofu", "random"):
        test_a_divided_loop_trains_what_pytorch_trains(name, method)
