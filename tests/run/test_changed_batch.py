"""Steps that change the batch they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_runs import compare
from torch import nn

from apportion.capture.capture import capture
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan

Batch = dict[str, torch.Tensor]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch["x"].mul_(2).add_(1)
    batch["y"].clamp_(max=1)
    return loss_of(model, batch)


def through_a_view(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch["x"][:, 1:3] = 0.5
    batch["y"].view(2, 4)[0].fill_(1)
    return loss_of(model, batch)


def other_entries(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch["x"] = 2 * batch["x"] + 1
    batch["seen"] = batch.pop("x")
    batch["x"] = batch["seen"].flip(0)
    return loss_of(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("step", [in_place, through_a_view, other_entries])
def test_it_trains_what_pytorch_trains_and_the_batch_stays(step: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = {"x": torch.randn(8, 4, dtype=torch.float64), "y": torch.arange(8) % 3}
    before = {name: tensor.clone() for name, tensor in batch.items()}
    program = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    for method in ("data", "tofu", "random"):
        plan = make_plan(program, cluster("local:2"), method)
        assert compare(program, plan.space, plan.strategy, 2).equal
    assert list(batch) == list(before)
    assert all(torch.equal(batch[name], before[name]) for name in before)
    said = [note for note in program.notes if "changes batch.x, batch.y in place" in note]
    assert len(said) == (step is not other_entries)
