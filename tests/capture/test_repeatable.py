"""A step that is another one every time is refused, with the cause and the line."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import apportion as ap
from apportion.plan.make_plan import make_plan

X = torch.ones(5, 4)


def capture(step: Any, model: nn.Module | None = None, batch: Any = X) -> ap.Program:
    model = nn.Linear(4, 4) if model is None else model
    return ap.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def plain(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def python_random(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain(model, batch) * random.random()


def numpy_random(model: nn.Module, batch: Any) -> torch.Tensor:
    noise = torch.from_numpy(np.random.randn(5, 4))
    return plain(model, batch + noise)


def own_numpy_random(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain(model, batch * float(np.random.default_rng().normal()))


def python_layer_drop(model: nn.Module, batch: Any) -> torch.Tensor:
    if random.random() < 0.01:
        return plain(model, batch)
    return plain(model, model(batch))


def permuted(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain(model, batch[:, list(np.random.permutation(4))])


def clock(model: nn.Module, batch: Any) -> torch.Tensor:
    return plain(model, batch) * (time.perf_counter() % 1.0)


@pytest.mark.parametrize(
    ("step", "offset", "cause"),
    [
        (python_random, 1, "random numbers from Python's random"),
        (numpy_random, 1, "random numbers from numpy.random"),
        (own_numpy_random, 1, "another one every time"),
        (python_layer_drop, 1, "random numbers from Python's random"),
        (permuted, 1, "random numbers from numpy.random"),
        (clock, 1, "such as the clock"),
    ],
)
def test_randomness_that_is_not_torchs_is_refused(step: Any, offset: int, cause: str) -> None:
    with pytest.raises(ap.CaptureError) as caught:
        capture(step)
    assert cause in str(caught.value)
    assert f"test_repeatable.py:{step.__code__.co_firstlineno + offset}" in str(caught.value)


class Counting(nn.Module):
    """Counts its calls, and computes with the count if `used`."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.used = nn.Linear(4, 4), 0, used

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x) * (self.calls if self.used else 1)


def test_a_counter_that_is_computed_with_is_refused() -> None:
    model = Counting(used=True)
    with pytest.raises(ap.CaptureError, match=r"changes model.calls \(0, then 1\)"):
        capture(plain, model)
    assert model.calls == 0


def test_a_counter_that_only_counts_is_noted() -> None:
    program = capture(plain, Counting(used=False))
    assert any("model.calls" in note and "leaves it as it is" in note for note in program.notes)


class EverySoOften(Counting):
    """Does another thing at some counts."""

    def __init__(self, at: Any) -> None:
        super().__init__(used=False)
        self.at = at

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x * 2 if self.at(self.calls) else x


class EverySoOftenByWhere(nn.Module):
    """The same with the count in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.linear(x)
        return torch.where(self.calls % 2 == 0, x * 2, x)


def test_what_is_done_at_some_counts_is_captured_by_where() -> None:
    program = capture(plain, EverySoOftenByWhere())
    plan = make_plan(program, ap.cluster("local:2"), "data", budget=0.5)
    assert ap.check(program, plan, steps=3).equal


@pytest.mark.parametrize("at", [lambda n: n % 10 == 0, lambda n: n > 100, lambda n: n % 64 == 0])
def test_what_is_done_at_some_counts_is_refused(at: Any) -> None:
    model = EverySoOften(at)
    with pytest.raises(
        ap.CaptureError, match=r"when model.calls has counted further.* choose by it with torch"
    ):
        capture(plain, model)
    assert model.calls == 0


class Remembering(nn.Module):
    """Keeps its state in an attribute; with `proper` in a buffer."""

    def __init__(self, proper: bool) -> None:
        super().__init__()
        self.linear, self.proper = nn.Linear(4, 4), proper
        self.hidden: torch.Tensor | None = None
        self.register_buffer("kept", torch.zeros(5, 4))

    def forward(self, x: torch.Tensor) -> Any:
        before = self.kept if self.proper else self.hidden
        x = self.linear(x if before is None else x + before)
        if self.proper:
            self.kept.copy_(x.detach())
        else:
            self.hidden = x.detach()
        return x


def test_state_in_an_attribute_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(ap.CaptureError, match=r"keeps a tensor in model.hidden .*copy_"):
        capture(plain, Remembering(proper=False))
    program = capture(plain, Remembering(proper=True))
    assert "kept" in {program.graph.values[before].name for before, _ in program.graph.state}


class FromBatch(nn.Module):
    """Takes a mask from its first batch and uses it for good."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = (x > 0).float()
        return self.linear(x) * self.mask


def test_what_the_first_batch_leaves_is_refused() -> None:
    with pytest.raises(ap.CaptureError, match=r"keeps a tensor in model.mask"):
        capture(plain, FromBatch())


class Cached(nn.Module):
    """Caches a table that depends on nothing, and keeps its last output for others to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.length = nn.Linear(4, 4), 0
        self.register_buffer("frequencies", torch.ones(4))
        self.table: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []
        self.smooth: Any = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        if self.length < x.shape[0]:
            self.length = x.shape[0]
            self.table = torch.arange(self.length)[:, None] * self.frequencies
        x = self.linear(x) + self.table
        self.outputs.append(x)
        self.smooth = 0.9 * self.smooth + 0.1 * x.detach().mean()
        return x


def test_a_cache_that_depends_on_nothing_is_no_state() -> None:
    program = capture(plain, Cached())
    assert "frequencies" in {value.name for value in program.graph.values}


@functools.cache
def remembered(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril()


def test_a_remembered_result_is_no_state() -> None:
    remembered.cache_clear()
    capture(lambda model, batch: plain(model, batch @ remembered(4)))


class Views(Cached):
    """A cache in a step that writes to views."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone()
        x[:, 0] = 1.0
        return super().forward(x)


@pytest.mark.slow
def test_a_cache_in_a_step_that_writes_to_views() -> None:
    capture(plain, Views())


def test_numbers_that_make_no_difference_are_noted() -> None:
    def dropping(model: nn.Module, batch: Any) -> torch.Tensor:
        if random.random() < 0.0:
            return plain(model, model(batch))
        return plain(model, batch)

    program = capture(dropping)
    assert any("made no difference" in note for note in program.notes)


def test_a_generator_of_the_users_own_is_named_and_left_as_it_was() -> None:
    own = random.Random(3)
    before = own.getstate()

    def drawing(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain(model, batch) * own.random()

    with pytest.raises(ap.CaptureError, match=r"because it changes own.state"):
        capture(drawing)
    assert own.getstate() == before


def test_torchs_own_randomness_is_captured() -> None:
    capture(plain, nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
