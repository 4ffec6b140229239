"""Operators replaced at capture, and what that makes data parallelism move."""

from __future__ import annotations

import pytest
import torch
from graphs import captured, problem
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.lower.lower import lower
from apportion.search.baselines.data import data, sample_classes


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", ["wresnet:tiny", "rnn:tiny"])
def test_data_parallelism_moves_gradients_statistics_and_scalars_once(
    spec: str, devices: int
) -> None:
    _, space = captured(spec)
    graph = space.graph
    strategy = data(problem(devices, spec)).strategy
    samples = sample_classes(space)
    for index, choice in enumerate(strategy.choices):
        if any(axis.group in samples for axis in space.axes(index)):
            assert max(choice.parts) == devices, graph.ops[index].name
    gradients = sum(v.nbytes for v in graph.values if v.name.endswith(".grad"))
    statistics = sum(
        graph.values[op.outputs[0]].nbytes
        for op in graph.ops
        if op.kind in ("apportion.channel_sum", "apportion.channel_squares")
    )
    scalars = 2 * 8  # the loss as a sum, and the number of labels
    moved = lower(space, strategy, devices).bytes_moved
    assert moved == 2 * (devices - 1) * (gradients + statistics + scalars)


class Repeated(nn.Module):
    """One Linear, used `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


def of(model: nn.Module, clip_norm: float | None = None) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 4)
    return capture(lambda m, b: m(b).square().mean(), model, optimizer, batch, clip_norm)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_gradient_of_several_uses_is_one_op(clip_norm: float | None) -> None:
    graph = of(Repeated(3), clip_norm).graph
    totals = {op.kind: op for op in graph.ops if op.kind.endswith("_total")}
    assert set(totals) == {"apportion.mm_total", "apportion.sum_total"}
    products = totals["apportion.mm_total"]
    assert len(products.inputs) == 6 and products.module == "linear"
    assert graph.values[products.outputs[0]].name == "linear.weight.grad"
    assert graph.values[totals["apportion.sum_total"].outputs[0]].name == "linear.bias.grad"


def test_a_single_use_stays_as_it_is() -> None:
    assert not any(op.kind.endswith("_total") for op in of(Repeated(1)).graph.ops)


class Tied(nn.Module):
    """A matrix that is used in two different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table * self.table.sum(0)


def test_uses_that_are_not_alike_stay_as_they_are() -> None:
    assert not any(op.kind.endswith("_total") for op in of(Tied()).graph.ops)
