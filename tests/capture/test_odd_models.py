"""Models with names and numbers that few have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_capture import run
from torch import nn

from apportion.capture import Program, capture, eager_steps


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size, self.angle = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.exp(self.size + 1j * self.angle)).abs()


class NamedLikeAMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parameters = nn.ParameterList([nn.Parameter(torch.randn(3, 2))])  # type: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: Any = self._modules["parameters"]
        return x @ weights[0]


class MovedInTheStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner = self.inner.to(device=x.device, dtype=x.dtype)
        result: torch.Tensor = self.inner(x)
        return result


class MaskedByBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(torch.uint8)
        return torch.where(mask, self.linear(x), x)


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def assert_trains_as_plain_pytorch_does(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(nn.Module.parameters(model), lr=0.1)
    program: Program = capture(mean_square, model, optimizer, torch.randn(4, 3))
    losses, state = run(program, [program.batch, program.batch])
    plain, ends = eager_steps(program, [program.batch, program.batch], 0)
    torch.testing.assert_close(losses, plain)
    assert ends.keys() == state.keys()
    for value, end in ends.items():
        torch.testing.assert_close(state[value], end)


def test_a_number_is_conjugated_in_the_backward() -> None:
    assert_trains_as_plain_pytorch_does(Rotation())


def test_a_submodule_may_have_the_name_of_a_method() -> None:
    assert_trains_as_plain_pytorch_does(NamedLikeAMethod())


def test_a_module_may_be_moved_to_where_it_is() -> None:
    assert_trains_as_plain_pytorch_does(MovedInTheStep())


@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_a_mask_may_be_of_bytes() -> None:
    assert_trains_as_plain_pytorch_does(MaskedByBytes())
