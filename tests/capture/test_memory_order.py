"""Steps that address the memory of a tensor: what is divided has it in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import apportion as ap
from apportion.capture import CaptureError, Program, capture


class Chunks(nn.Module):
    """Chunks of a sequence that overlap, of a tensor whose dimensions are not in memory's order."""

    def __init__(self, cut: Any) -> None:
        super().__init__()
        self.linear, self.cut = nn.Linear(6, 8), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunks = self.cut(self.linear(x))
        weights = torch.arange(float(chunks.numel())).sin()
        return (chunks * weights.reshape(chunks.shape)).square().mean()


def overlapping(y: torch.Tensor) -> torch.Tensor:  # of (4, 10, 8)
    return y.transpose(1, 2).as_strided((4, 3, 4, 8), (80, 24, 8, 1))


def contiguous(y: torch.Tensor) -> torch.Tensor:
    return (y * 2).as_strided((4, 9, 2, 8), (80, 8, 8, 1), 0)


def written(y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros(8, 4, 10).permute(1, 2, 0)
    return torch.as_strided_scatter(z, y[:, :5, :4].reshape(4, 5, 4), (4, 5, 4), (10, 2, 40), 1)


def captured(cut: Any) -> Program:
    torch.manual_seed(0)
    model = Chunks(cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(lambda m, x: m(x), model, optimizer, torch.randn(4, 10, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:aten.as_strided")  # which run unsplit
@pytest.mark.parametrize("cut", [overlapping, contiguous, written])
def test_a_divided_step_reads_the_same_elements(cut: Any) -> None:
    program = captured(cut)
    for seed in range(4):
        plan = ap.plan(program, ap.cluster("local:2"), method="random", seed=seed)
        found = ap.check(program, plan)
        assert found.equal, (seed, found)


def beyond(y: torch.Tensor) -> torch.Tensor:
    return y[:, :2].as_strided((4, 10, 8), (80, 8, 1))


def with_gaps(y: torch.Tensor) -> torch.Tensor:
    return y[:, ::2].as_strided((4, 5, 8), (80, 16, 1))


def before_it(y: torch.Tensor) -> torch.Tensor:
    return y[1:].as_strided((3, 10, 8), (80, 8, 1), 0)  # of y, and not of what begins later


@pytest.mark.parametrize("cut", [beyond, with_gaps, before_it])
def test_memory_that_is_not_the_tensors_is_refused(cut: Any) -> None:
    with pytest.raises(CaptureError, match=r"as_strided addresses.*test_memory_order\.py:\d+"):
        captured(cut)
