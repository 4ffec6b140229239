"""Linear Ops on partial sums: those that read a piece of one are given the sum."""

from __future__ import annotations

from typing import Any

import torch

import apportion as ap
from apportion.capture import capture
from apportion.plan.make_plan import make_plan


class Halves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.cat([self.weight[:3], self.weight[3:].tanh()])


def test_slices_of_a_gradient_that_is_a_partial_sum() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Any:
        return model(batch).square().sum()

    torch.manual_seed(0)
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(step, model, optimizer, torch.randn(8, 6))
    plan = make_plan(program, ap.cluster("local:2"), "data", budget=0.5)
    assert plan.strategy.choices[0].count == 1  # the weight is whole on both devices
    assert ap.check(program, plan).equal
