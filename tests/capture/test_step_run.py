"""What a step does to parameters beside updating them: captured as PyTorch does it, or refused."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from helpers_capture import run
from torch import nn

import apportion as ap


def sets_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)


def swaps_data(model: Any) -> None:
    one, two = model[0].weight, model[1].weight
    one.data, two.data = two.data, one.data


def by_a_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0.9 * vector, model.parameters())


def stops_and_goes_on(model: Any) -> None:
    for wanted in (False, True):
        model[0].requires_grad_(wanted)


def makes_another(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clamp(-0.1, 0.1))


def stops_for_good(model: Any) -> None:
    model[0].weight.requires_grad_(False)


def training(change: Any, by_itself: bool) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss_only(model: Any, batch: Any) -> torch.Tensor:
        loss = model(batch).square().mean()
        change(model)
        return loss

    def loop(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        change(model)
        return loss

    step = loop if by_itself else loss_only
    return step, model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches() -> list[torch.Tensor]:
    return [torch.randn(5, 4, generator=torch.Generator().manual_seed(k)) for k in range(3)]


@pytest.mark.parametrize("change", [sets_data, swaps_data, by_a_vector, stops_and_goes_on])
def test_it_is_captured(change: Any) -> None:
    step, model, optimizer = training(change, by_itself=True)
    before = [(p.data_ptr(), p.requires_grad) for p in model.parameters()]
    program = ap.capture(step, model, optimizer, batches()[0])
    assert [(p.data_ptr(), p.requires_grad) for p in model.parameters()] == before
    losses, _ = run(program, batches())
    expected = [float(step(model, optimizer, batch).detach()) for batch in batches()]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_parameter_that_gets_no_gradient_any_more() -> None:
    step, model, optimizer = training(stops_for_good, by_itself=False)
    program = ap.capture(step, model, optimizer, batches()[0])
    losses, _ = run(program, batches())
    expected = []
    for batch in batches():
        optimizer.zero_grad()
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_parameters_behind_weak_references() -> None:
    step, model, optimizer = training(lambda _: None, by_itself=True)
    references = [weakref.ref(p) for p in model.parameters()]

    def scaling(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = step(model, optimizer, batch)
        with torch.no_grad():
            for reference in references:
                parameter = reference()
                assert parameter is not None
                parameter.mul_(0.9)
        return loss

    program = ap.capture(scaling, model, optimizer, batches()[0])
    losses, _ = run(program, batches())
    expected = [float(scaling(model, optimizer, batch).detach()) for batch in batches()]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "by_itself", "said"),
    [
        (makes_another, False, r"puts another tensor in the place of the parameter 0.weight"),
        (makes_another, True, r"puts another tensor in the place of the parameter 0.weight"),
        (stops_for_good, True, r"does another thing the second time; take one step"),
    ],
)
def test_it_is_refused(change: Any, by_itself: bool, said: str) -> None:
    step, model, optimizer = training(change, by_itself)
    before = list(model.parameters())
    with pytest.raises(ap.CaptureError, match=said):
        ap.capture(step, model, optimizer, batches()[0])
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(p.requires_grad for p in model.parameters())
