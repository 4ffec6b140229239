"""A new operator needs one description and nothing else: it is split, checked and run divided.

The description is three lines. There is no kernel here, because torch has one: the function that
`torch.library.custom_op` was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_runs import compare
from torch import Tensor

import apportion as ap
from apportion.capture import capture_as
from apportion.describe import descriptions

NAME = "one_description::gated_product"


@torch.library.custom_op(NAME, mutates_args=())
def gated_product(x: Tensor, w: Tensor) -> Tensor:
    return x.relu() @ w


@gated_product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return (grad @ w.t()) * (x > 0), x.relu().t() @ grad


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


gated_product.register_autograd(_backward, setup_context=_remember)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator with its description, which is gone after the test."""
    monkeypatch.setattr(descriptions, "DESCRIPTIONS", dict(descriptions.DESCRIPTIONS))

    @ap.describe(NAME)
    def _(x: Any, w: Any) -> Callable[..., Any]:
        return lambda n, j: ap.Sum(lambda k: ap.f("relu", x[n, k]) * w[k, j])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.weight = torch.nn.Parameter(torch.randn(8, 5) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return gated_product(self.first(x), self.weight)


def step(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def program() -> ap.Program:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": torch.randn(12, 6), "y": torch.randn(12, 5)}
    return capture_as(ap.capture(step, model, optimizer, batch), torch.float64)


def test_without_a_description_it_runs_whole() -> None:
    report = ap.check_splits(gated_product, torch.randn(4, 6), torch.randn(6, 5))
    assert report.splits == [] and report.wrong == []
    assert [str(item) for item in report.unsplittable] == [
        "one_description.gated_product.default: no description"
    ]


def test_every_axis_of_the_description_is_split_and_checked(described: None) -> None:
    report = ap.check_splits(gated_product, torch.randn(4, 6), torch.randn(6, 5))
    assert report.wrong == [] and report.missing == [] and report.unsplittable == []
    assert [str(split) for split in report.splits] == [
        "n: input 0 dim 0 cut; output 0 dim 0",
        "j: input 1 dim 1 cut; output 0 dim 1",
        "k: input 0 dim 1, input 1 dim 0 cut; output 0 sum",
    ]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_step_that_uses_it_trains_the_same_model_divided(described: None, devices: int) -> None:
    captured = program()
    kinds = [op.kind for op in captured.graph.ops]
    assert kinds.count("one_description.gated_product.default") == 1
    plan = ap.plan(captured, ap.cluster(f"local:{devices}"), method="data")
    choice = plan.strategy.choices[kinds.index("one_description.gated_product.default")]
    assert choice.count == devices
    found = compare(captured, plan.space, plan.strategy, devices)
    assert found.equal, found
