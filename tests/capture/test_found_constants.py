"""Tensors that a step finds elsewhere stay as they are, with a note, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import apportion as ap

X = torch.ones(5, 4)


def capture(step: Any, model: nn.Module, batch: Any = X) -> ap.Program:
    return ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def test_a_tensor_of_the_batch_taken_from_elsewhere_is_refused() -> None:
    hidden = {"x": X}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(hidden["x"]).square().mean() + batch.sum()

    with pytest.raises(ap.CaptureError, match=r"reads batch at .*test_found_constants.py:\d+ from"):
        capture(step, nn.Linear(4, 4))


def test_a_view_of_a_parameter_made_before_is_refused() -> None:
    model = nn.Linear(4, 4)
    view = model.weight.data.view(-1)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().mean() + view.square().sum()

    with pytest.raises(ap.CaptureError, match=r"reads the parameter weight at"):
        capture(step, model)


@pytest.mark.slow
def test_other_tensors_are_noted_and_numbers_written_down_are_not() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch) * weights).square().mean()

    def literal(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch) * torch.tensor([1.0, 2.0, 3.0, 4.0])).square().mean()

    (note,) = capture(step, nn.Linear(4, 4)).notes
    assert "stay as they are now: those of shape (4,) at" in note
    assert not capture(literal, nn.Linear(4, 4)).notes
