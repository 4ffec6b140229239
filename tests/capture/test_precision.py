"""capture_as: a step that names its model's precision is checked in another one all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers_capture import run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import capture_as, eager_steps


class Upcast(nn.Module):
    """Norm, softmax and sums that ask for float32, as models do that may be trained in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        wide = y.to(torch.float32)
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype)
        y = F.softmax(y, dim=-1, dtype=torch.float32).to(x.dtype) * torch.ones(6)
        return self.outer(y).float()


def step(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().sum(dtype=torch.float32)
    return loss + torch.zeros(3, dtype=torch.float32).sum()


def program(dtype: torch.dtype = torch.float32) -> Program:
    torch.manual_seed(0)
    model = Upcast().to(dtype)
    return capture(
        step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4).to(dtype)
    )


def test_a_named_precision_is_widened_with_the_model() -> None:
    single = program()
    double = capture_as(single, torch.float64)
    assert [op.name for op in double.graph.ops] == [op.name for op in single.graph.ops]
    assert {v.dtype for v in double.graph.values} == {"float64"}
    losses, state = run(double, [double.batch] * 2)
    expected, ends = eager_steps(double, [double.batch] * 2, seed=0)
    assert losses == pytest.approx(expected, rel=1e-12)
    for value, tensor in ends.items():
        torch.testing.assert_close(state[value], tensor, rtol=1e-12, atol=1e-14)


def test_the_reference_keeps_a_precision_that_is_the_models_own() -> None:
    single = program()
    again = capture_as(single, torch.float32)
    assert again.widened is None and again.graph == single.graph
    model = Upcast().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixed = capture(step, model, optimizer, torch.randn(5, 4).double())
    assert "float32" in {v.dtype for v in mixed.graph.values}


def test_a_checkpointed_step_is_widened_when_it_is_repeated() -> None:
    def repeated(model: nn.Module, batch: Tensor) -> Tensor:
        return checkpoint(model, batch, use_reentrant=False).sum()

    single = program()
    double = capture_as(
        capture(repeated, single.model, single.optimizer, single.batch), torch.float64
    )
    losses, _ = run(double, [double.batch] * 2)
    assert losses == pytest.approx(eager_steps(double, [double.batch] * 2, seed=0)[0], rel=1e-12)


def test_half_precision_with_attention_and_dropout() -> None:
    """Attention with dropout computes in float32 inside, and its backward casts back to that."""

    def attend(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = model(x).view(2, 4, 3, 2, 4).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), dropout_p=0.25)
        return F.dropout(y, 0.5).square().sum()

    torch.manual_seed(0)
    model = nn.Linear(8, 24)
    given = (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4, 8))
    half = capture_as(capture(attend, *given), torch.bfloat16)
    assert half.graph.values[half.graph.loss or 0].dtype == "bfloat16"
    assert "float32" in {v.dtype for v in half.graph.values}
    losses, state = run(half, [half.batch] * 2)
    expected, ends = eager_steps(half, [half.batch] * 2, seed=0)
    assert losses == pytest.approx(expected, rel=0.02)
    for value, tensor in ends.items():
        torch.testing.assert_close(state[value], tensor, rtol=0.05, atol=0.05)


def test_the_default_dtype_is_put_back() -> None:
    double = capture_as(program(), torch.float64)
    eager_steps(double, [double.batch], seed=0)
    assert torch.get_default_dtype() is torch.float32


def test_a_cat_with_empty_tensors_is_what_is_not_empty() -> None:
    def joined(model: nn.Module, batch: Tensor) -> Tensor:
        y = torch.cat([torch.zeros(0), model(batch)], dim=-1)
        return torch.cat([y, y.new_zeros(0, 3)]).square().sum()

    model = nn.Linear(4, 3)
    made = capture(joined, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
    plain = capture(lambda m, b: m(b).square().sum(), model, made.optimizer, made.batch)
    assert [op.kind for op in made.graph.ops] == [op.kind for op in plain.graph.ops]
    assert run(made, [made.batch])[0] == eager_steps(made, [made.batch], seed=0)[0]
