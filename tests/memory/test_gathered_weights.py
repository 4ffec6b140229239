"""fsdp in mixed precision: casts are gathered, freed after the forward and gathered again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import apportion as ap
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.graph import BACKWARD, FORWARD
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.plan.plan import Plan
from apportion.search.baselines.fsdp import CAST

WIDTH, LAYERS = 16, 6


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(LAYERS):
        model.append(nn.Linear(WIDTH, WIDTH, bias=False))
        model.append(nn.Tanh())

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: Tensor = model(batch).float().pow(2).mean()
        return found

    return capture(
        step, model, torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(8, WIDTH)
    )


def weight_casts(plan: Plan) -> list[int]:
    """Casts of parameters in the forward."""
    graph = plan.space.graph
    return [
        op
        for op, meant in enumerate(graph.ops)
        if meant.kind == CAST and meant.phase == FORWARD and graph.producer[meant.inputs[0]] is None
        and graph.values[meant.inputs[0]].role == "parameter"
    ]  # fmt: skip


def read_in_backward(plan: Plan, ops: list[int]) -> list[bool]:
    """For each Op whether what it makes is still on a device in the backward."""
    graph, tasks = plan.space.graph, plan.tasks
    first = next(t for t, op in enumerate(tasks.op.tolist()) if graph.ops[op].phase == BACKWARD)
    held = set(tasks.slot_value[tasks.slot_last > first].tolist())
    return [not held.isdisjoint(graph.ops[op].outputs) for op in ops]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "times"),
    [("fsdp", 2 * LAYERS - 1), ("fsdp-keep", LAYERS)],  # the batch needs no gradient
)
def test_casts_are_gathered_and_not_parameters(program: Program, method: str, times: int) -> None:
    plan = make_plan(program, cluster("2xh100"), method, 1.0)
    casts = weight_casts(plan)
    assert len(casts) == LAYERS
    assert all(plan.strategy.choices[op].count == 2 for op in casts)
    half = WIDTH * WIDTH * 2 // 2  # what each of two devices lacks of a cast
    data = make_plan(program, cluster("2xh100"), "data", 1.0)
    gathered = plan.predicted.bytes_moved - data.predicted.bytes_moved // 2
    assert abs(gathered - 2 * times * half) < half
    assert ap.check(program, plan).equal


@pytest.mark.slow
def test_recomputed_casts_do_not_outlive_the_forward(program: Program) -> None:
    kept = make_plan(program, cluster("2xh100"), "fsdp-keep", 1.0)
    assert all(read_in_backward(kept, weight_casts(kept)[1:]))  # the batch needs no gradient
    made = make_plan(program, cluster("2xh100"), "fsdp", 1.0, recompute="full")
    lives = read_in_backward(made, weight_casts(made))
    assert not any(lives[:-2])  # those of the last segment are still there when the backward begins
    assert made.predicted.bytes_moved > kept.predicted.bytes_moved
    assert ap.check(program, made).equal
