"""Tensors in no module that a step writes to are its state: averages, tables, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_capture import run
from torch import nn

import apportion as ap
from apportion.capture.reference import eager_steps

Write = Callable[[nn.Linear, list[torch.Tensor], torch.Tensor], None]


def by_view(model: nn.Linear, kept: list[torch.Tensor], x: torch.Tensor) -> None:
    for average, parameter in zip(kept, model.parameters(), strict=True):
        average.detach().mul_(0.9).add_(parameter, alpha=0.1)


def in_one_call(model: nn.Linear, kept: list[torch.Tensor], x: torch.Tensor) -> None:
    torch._foreach_mul_(kept, 0.9)
    torch._foreach_add_(kept, [p.detach() for p in model.parameters()], alpha=0.1)


def by_data(model: nn.Linear, kept: list[torch.Tensor], x: torch.Tensor) -> None:
    for average, parameter in zip(kept, model.parameters(), strict=True):
        average.data.copy_(parameter.data)


def a_row(model: nn.Linear, kept: list[torch.Tensor], x: torch.Tensor) -> None:
    kept[0][1] = x.mean(0)


def into_out(model: nn.Linear, kept: list[torch.Tensor], x: torch.Tensor) -> None:
    torch.add(kept[1], model.bias, out=kept[1])


def statistics(model: nn.Linear, kept: list[torch.Tensor], x: torch.Tensor) -> None:
    F.batch_norm(x, kept[1], kept[0][0], training=True)


WRITES = [by_view, in_one_call, by_data, a_row, into_out, statistics]


def training(write: Write, kept: list[torch.Tensor]) -> tuple[Any, nn.Linear, Any]:
    torch.manual_seed(2)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Linear, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) + kept[1]).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            write(model, kept, batch)
        return loss

    return step, model, optimizer


def zeros() -> list[torch.Tensor]:
    return [torch.zeros(4, 4), torch.zeros(4)]


def batches() -> list[torch.Tensor]:
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(k)) for k in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITES)
def test_they_become_what_they_become_in_pytorch(write: Write) -> None:
    kept = zeros()
    step, model, optimizer = training(write, kept)
    program = ap.capture(step, model, optimizer, batches()[0])
    assert [(int(x.count_nonzero()), x._version) for x in kept] == [(0, 0), (0, 0)]
    losses, state = run(program, batches())
    reference, ends = eager_steps(program, batches(), seed=0)
    assert [(int(x.count_nonzero()), x._version) for x in kept] == [(0, 0), (0, 0)]
    expected = [float(step(model, optimizer, batch).detach()) for batch in batches()]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert reference == pytest.approx(expected, rel=1e-5)
    found = {b.name: v for v, b in program.bindings.items() if b.name.startswith("kept.")}
    assert found
    for name, value in found.items():
        end = kept[int(name.removeprefix("kept."))]
        assert end.count_nonzero()
        torch.testing.assert_close(state[value], end)
        torch.testing.assert_close(ends[value], end)


@pytest.mark.slow
def test_one_that_shares_its_memory_with_another_is_refused() -> None:
    table = torch.zeros(5, 4)
    step, model, optimizer = training(by_view, [table[:4], table[4]])
    with pytest.raises(ap.CaptureError, match=r"no parameter and no buffer at .*; register it"):
        ap.capture(step, model, optimizer, batches()[0])


def in_a_dict(model: nn.Linear, kept: Any, x: torch.Tensor) -> None:
    for name, parameter in model.named_parameters():
        kept[name] = (0.9 * kept[name] + 0.1 * parameter.data).clone()


def read_by_the_next(model: nn.Linear, kept: Any, x: torch.Tensor) -> None:
    kept["bias"] = 0.5 * kept["weight"].sum(0) + x.mean(0)
    kept["weight"] = kept["weight"] + 1.0


@pytest.mark.parametrize("write", [in_a_dict, read_by_the_next])
@pytest.mark.parametrize("uses", [True, False])
def test_those_that_are_replaced_by_others_too(write: Any, uses: bool) -> None:
    kept = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    before = dict(kept)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Linear, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) + (kept["bias"] if uses else 0.0)).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            write(model, kept, batch)
        return loss

    program = ap.capture(step, model, optimizer, batches()[0])
    losses, state = run(program, batches())
    reference, ends = eager_steps(program, batches(), seed=0)
    assert all(kept[name] is before[name] for name in kept)
    expected = [float(step(model, optimizer, batch).detach()) for batch in batches()]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert reference == pytest.approx(expected, rel=1e-5)
    found = {b.name: v for v, b in program.bindings.items() if b.name.startswith("kept.")}
    assert "kept.weight" in found
    for name, value in found.items():
        torch.testing.assert_close(state[value], kept[name.removeprefix("kept.")])
        torch.testing.assert_close(ends[value], kept[name.removeprefix("kept.")])
