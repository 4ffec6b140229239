"""Numbers that a step reads and computes with are computed in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_capture import run
from torch import nn

from apportion.capture import CaptureError, Program, capture, eager_steps


def batch_of(kept: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(kept)
    mask = torch.arange(7) < kept
    return {"x": torch.randn(7, 4, generator=drawn), "mask": mask, "n": torch.tensor([kept, 2])}


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean(1) * batch["mask"]


def by_tokens(model: nn.Module, batch: Any) -> Any:
    return losses_of(model, batch).sum() / batch["mask"].sum().item()


def by_one_at_least(model: nn.Module, batch: Any) -> Any:
    return losses_of(model, batch).sum() / max(batch["mask"].sum().item(), 1)


def by_a_float(model: nn.Module, batch: Any) -> Any:
    loss = losses_of(model, batch).sum()
    loss /= float(batch["mask"].sum())
    return loss


def by_arithmetic(model: nn.Module, batch: Any) -> Any:
    count = min(2 * batch["n"].sum().item() - 1, 9)
    return losses_of(model, batch).sum().div(count) + count**2 * model.bias.sum()


def by_one_like_it(model: nn.Module, batch: Any) -> Any:
    loss = losses_of(model, batch).sum()
    return loss / torch.full_like(loss, 3.0).item()


def by_itself(model: nn.Module, batch: Any) -> Any:
    losses = losses_of(model, batch)
    return (losses / losses.max().item()).mean()


def mixed(model: nn.Module, batch: Any) -> Any:
    share = torch.rand(1).item()
    x = share * batch["x"] + (1 - share) * batch["x"].flip(0)
    return model(x).square().mean()


def in_half_precision(model: nn.Module, batch: Any) -> Any:
    half = losses_of(model, batch).to(torch.bfloat16) * batch["n"].sum().item()
    assert half.dtype == torch.bfloat16
    whole = batch["n"] * batch["n"].sum().item()
    assert whole.dtype == torch.int64
    return half.float().mean() + whole.sum() * model.bias.sum()


def by_who_is_fake(model: nn.Module, batch: Any) -> Any:
    """As packages do that leave out checks of values where a step is recorded."""

    def is_fake(tensor: torch.Tensor) -> bool:
        return isinstance(tensor, torch._subclasses.FakeTensor)

    order, mask = torch.arange(7), batch["mask"]
    loss = losses_of(model, batch).sum()
    if not is_fake(mask) and mask.all():  # which cannot be recorded: it may be another one
        loss = model(batch["x"]).square().mean(1).sum()
    return loss if not is_fake(order) and (order.diff() == 1).all() else 2 * loss


def captured(step: Any) -> Program:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(step, model, optimizer, batch_of(5))


@pytest.mark.parametrize(
    "step",
    [
        by_tokens,
        by_one_at_least,
        by_a_float,
        by_who_is_fake,
        by_one_like_it,
        by_arithmetic,
        by_itself,
        mixed,
        in_half_precision,
    ],
)
def test_a_number_that_is_computed_with_is_computed_in_every_step(step: Any) -> None:
    program = captured(step)
    assert program.notes == ()
    batches = [batch_of(5), batch_of(3), batch_of(1)]
    expected, ends = eager_steps(program, batches, seed=0)
    losses, state = run(program, batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    for value, tensor in ends.items():
        torch.testing.assert_close(state[value], tensor)


@pytest.mark.slow
def test_a_number_that_decides_as_well_is_refused() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        count = batch["mask"].sum().item()
        loss = losses_of(model, batch).sum()
        return loss / count if count > 4 else loss

    with pytest.raises(CaptureError, match=r"branches on a value that depends on batch\.mask"):
        captured(step)


@pytest.mark.slow
def test_a_number_that_is_a_size_is_refused() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        count = batch["n"][0].item()
        return losses_of(model, batch)[:count].sum() / count

    with pytest.raises(CaptureError, match=r"fixed=\[\"batch\.n\"\]"):
        captured(step)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [lambda n: min(n, 3), lambda n: n // 8, lambda n: int(n / 8)])
def test_a_size_is_refused_though_small_changes_do_not_show(hidden: Any) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return losses_of(model, batch)[: hidden(batch["n"].sum().item()) + 1].sum()

    with pytest.raises(CaptureError, match="reads a tensor's value as a Python number"):
        captured(step)


def test_a_number_of_constants_stays_a_number() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        return losses_of(model, batch).sum() / torch.arange(4).sum().item()

    kinds = [op.kind for op in captured(step).graph.ops]
    assert "aten.div.Scalar" in kinds
