"""Steps in all forms, divided: each rank in this process, compared with plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from cases_loops import LOOPS, made
from compare_runs import compare
from generated_runs import RanksInMode

from apportion.capture.capture import capture
from apportion.capture.reference import eager_steps
from apportion.execute.rank import gather
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan

QUICK = ("clip_grad_norm_", "accumulated", "adversarial", "averaged", "method of a trainer")


@pytest.mark.parametrize("method", ["data", "tofu", "random"])
@pytest.mark.parametrize("name", QUICK)
def test_a_divided_loop_trains_what_pytorch_trains(name: str, method: str) -> None:
    program = capture(*made(name))
    plan = make_plan(program, cluster("local:2"), method)
    assert compare(program, plan.space, plan.strategy, 2).equal


def test_layers_are_found_though_averages_are_no_updates() -> None:
    program = capture(*made("averaged"))
    plan = make_plan(program, cluster("local:2"), "optcnn")
    assert compare(program, plan.space, plan.strategy, 2).equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adversarial", "updated twice"])
def test_updates_in_the_middle_of_a_step_in_generated_code(name: str) -> None:
    program = capture(*made(name))
    plan = make_plan(program, cluster("local:2"), "random")
    ranks = RanksInMode(program, plan.space, plan.strategy, 2, "generated")
    losses = [ranks.step(program.batch, 0, number)[0] for number in range(3)]
    assert not ranks.notes
    expected, ends = eager_steps(program, [program.batch] * 3, 0)
    assert losses == pytest.approx(expected, rel=1e-9)
    found = gather(ranks.ranks)
    for value, end in ends.items():
        torch.testing.assert_close(found[value].reshape(end.shape), end, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in QUICK])
def test_all_other_loops_too(name: str) -> None:
    for method in ("tofu", "random"):
        test_a_divided_loop_trains_what_pytorch_trains(name, method)
