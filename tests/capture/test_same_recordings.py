"""What a module keeps from one step to the next: a cache is taken, state is refused.

The oracle is PyTorch: three steps on three batches. Each harmless program is beside a harmful one.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from helpers_capture import run
from torch import nn

import apportion as ap

SIZE = 4


class Keeping(nn.Module):
    """A layer that adds what it keeps; `kept(x)` says what that is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(SIZE, SIZE)
        self.prepare()

    def prepare(self) -> None:
        """What the module begins with."""

    def kept(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) + self.kept(x)


def table(length: int) -> torch.Tensor:
    return torch.arange(length)[:, None] * torch.linspace(0.0, 1.0, SIZE)


class MaskInAttribute(Keeping):
    def prepare(self) -> None:
        self.mask: Any = None

    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.triu(torch.ones(len(x), SIZE), diagonal=1)
        return self.mask


class MaskOfBatch(MaskInAttribute):
    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = (x > 0).float()
        return self.mask


class MaskOfParameter(MaskInAttribute):
    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = self.linear.weight.detach().clone().sum(0)
        return self.mask


class MaskByChance(MaskInAttribute):
    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.rand(SIZE)
        return self.mask


class TableInBuffer(Keeping):
    """As rotary_embedding_torch does: a large buffer, filled as far as needed."""

    def prepare(self) -> None:
        self.register_buffer("table", torch.zeros(32, SIZE))
        self.filled = 0

    def kept(self, x: torch.Tensor) -> Any:
        if self.filled >= len(x):
            return self.table[: len(x)]
        made = table(len(x))
        self.table[: len(x)] = made
        self.filled = len(x)
        return made


class TableInBufferReplaced(TableInBuffer):
    def kept(self, x: torch.Tensor) -> Any:
        if self.filled < len(x):
            self.table, self.filled = table(len(x)), len(x)
        return self.table[: len(x)]


class BatchInBuffer(TableInBuffer):
    """The first batch decides, as in a layer that is initialised by data."""

    def kept(self, x: torch.Tensor) -> Any:
        if self.filled >= len(x):
            return self.table[: len(x)]
        self.table[: len(x)] = x
        self.filled = len(x)
        return x


class OtherTableInBuffer(TableInBuffer):
    """What is found in the buffer is not what was computed the first time."""

    def kept(self, x: torch.Tensor) -> Any:
        if self.filled >= len(x):
            return self.table[: len(x)]
        made = table(len(x))
        self.table[: len(x)] = made + 1e-3
        self.filled = len(x)
        return made


class RegistersLate(Keeping):
    def kept(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "late"):
            self.register_buffer("late", table(len(x)), persistent=False)
        return self.late


class RegistersBatch(Keeping):
    def kept(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "late"):
            self.register_buffer("late", x.mean(0))
        return self.late


class EmptyBuffer(Keeping):
    """As snntorch does: a state that has no shape yet, and begins anew in every step."""

    resets = True

    def prepare(self) -> None:
        self.register_buffer("state", torch.zeros(0), persistent=False)

    def kept(self, x: torch.Tensor) -> Any:
        if self.resets:
            self.state = torch.zeros_like(self.state)
        for row in (x, 2 * x):
            if self.state.shape != row.shape:
                self.state = torch.zeros_like(row)
            self.state = 0.5 * self.state + row
        return self.state


class EmptyBufferGoesOn(EmptyBuffer):
    resets = False

    def kept(self, x: torch.Tensor) -> Any:
        super().kept(x)
        self.state = self.state.detach()
        return self.state


class ByKey(Keeping):
    def prepare(self) -> None:
        self.tables: dict[Any, torch.Tensor] = {}

    def kept(self, x: torch.Tensor) -> Any:
        key = (len(x), x.dtype)
        if key not in self.tables:
            self.tables[key] = table(len(x)).to(x.dtype)
        return self.tables[key]


class ByKeyAndCount(ByKey):
    def kept(self, x: torch.Tensor) -> Any:
        self.tables[len(self.tables)] = table(len(x))
        return len(self.tables) * self.tables[0]


@functools.lru_cache
def remembered(length: int) -> torch.Tensor:
    return table(length)


class Remembered(Keeping):
    def kept(self, x: torch.Tensor) -> Any:
        return remembered(len(x))


class WritesToViews(MaskInAttribute):
    """A cache in a step that writes to views, so that the trace is written anew."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone()
        x[:, 0] = 1.0
        return super().forward(x)


class WritesToViewsAndCounts(WritesToViews):
    calls = 0

    def kept(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().kept(x) * self.calls


class Filled(MaskInAttribute):
    """A cache that is written to in place when it is made."""

    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.zeros(len(x), SIZE)
            self.mask[1:, 0::2] = 1.0
        return self.mask


class FilledFurther(Filled):
    def kept(self, x: torch.Tensor) -> Any:
        super().kept(x)
        self.mask[:, 1] += 1.0
        return self.mask


class OfBuffer(MaskInAttribute):
    """A cache of a buffer; if that counts, the cache does not."""

    counts = False

    def prepare(self) -> None:
        super().prepare()
        self.register_buffer("scale", torch.ones(SIZE))

    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = self.scale * 3.0
        if self.counts:
            self.scale += 1.0
        return self.mask


class OfCountingBuffer(OfBuffer):
    counts = True


class SmoothedNumber(Keeping):
    """An average in a Python attribute."""

    def prepare(self) -> None:
        self.average: Any = 0.0

    def kept(self, x: torch.Tensor) -> Any:
        self.average = 0.9 * self.average + 0.1 * x.mean()
        return self.average


class ShownAverage(SmoothedNumber):
    def kept(self, x: torch.Tensor) -> Any:
        super().kept(x)
        return 0.0


class ThirdTime(MaskInAttribute):
    """Does as before when it is called again, and another thing the time after."""

    def kept(self, x: torch.Tensor) -> Any:
        if self.mask is None:
            self.mask = torch.ones(SIZE)
            self.more = False
            return self.mask
        made = self.mask + (1.0 if self.more else 0.0)
        self.more = True
        return made


HARMLESS = [
    MaskInAttribute, TableInBuffer, TableInBufferReplaced, RegistersLate, EmptyBuffer, ByKey,
    Remembered, WritesToViews, Filled, OfBuffer, ShownAverage,
]  # fmt: skip
HARMFUL = [
    MaskOfBatch, MaskOfParameter, MaskByChance, BatchInBuffer, OtherTableInBuffer, RegistersBatch,
    EmptyBufferGoesOn, ByKeyAndCount, WritesToViewsAndCounts, FilledFurther, OfCountingBuffer,
    SmoothedNumber, ThirdTime,
]  # fmt: skip
SETTLES = [BatchInBuffer, EmptyBufferGoesOn, OtherTableInBuffer, MaskOfBatch, MaskByChance]


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def batches() -> list[torch.Tensor]:
    return [torch.randn(5, SIZE, generator=torch.Generator().manual_seed(k)) for k in range(3)]


def made(cls: type[Keeping]) -> tuple[Keeping, torch.optim.Optimizer]:
    model = cls()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    optimizer.zero_grad()
    loss = step(model, batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def agrees(model: Keeping, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the captured step does what PyTorch does, which runs last."""
    before, buffers = kept_by(model), copy.deepcopy(dict(model.named_buffers()))
    program = ap.capture(step, model, optimizer, batches()[0])
    assert kept_by(model) == before
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)
    losses, _ = run(program, batches())
    expected = [plain_step(model, optimizer, batch) for batch in batches()]
    return losses == pytest.approx(expected, rel=1e-5)


def kept_by(model: Keeping) -> dict[str, Any]:
    return {k: repr(v) for k, v in vars(model).items() if not k.startswith("_")}


@pytest.mark.slow
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("cls", HARMLESS)
def test_a_cache_is_taken(cls: type[Keeping], filled: bool) -> None:
    remembered.cache_clear()
    model, optimizer = made(cls)
    if filled:
        plain_step(model, optimizer, batches()[2])
    assert agrees(model, optimizer)


@pytest.mark.parametrize("cls", HARMFUL)
def test_state_is_refused(cls: type[Keeping]) -> None:
    with pytest.raises(ap.CaptureError, match=r"keeps a tensor|does another thing"):
        ap.capture(step, *made(cls), batches()[0])


@pytest.mark.slow
@pytest.mark.parametrize("cls", SETTLES)
def test_what_the_first_step_makes_is_taken_after_it(cls: type[Keeping]) -> None:
    model, optimizer = made(cls)
    with pytest.raises(ap.CaptureError, match=r"take one step in plain PyTorch"):
        ap.capture(step, model, optimizer, batches()[0])
    plain_step(model, optimizer, batches()[2])
    assert agrees(model, optimizer)


@pytest.mark.parametrize(("cls", "taken"), [(OfBuffer, True), (OtherTableInBuffer, False)])
def test_a_cache_on_the_meta_device(cls: type[Keeping], taken: bool) -> None:
    model = cls().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if taken:
        ap.capture(step, model, optimizer, batches()[0])
        return
    with pytest.raises(ap.CaptureError, match=r"does another thing"):
        ap.capture(step, model, optimizer, batches()[0])


@pytest.mark.slow
def test_tensors_that_are_computed_alike_are_equal_whatever_the_data() -> None:
    known = batches()[0]

    def comparing(model: nn.Module, batch: Any) -> torch.Tensor:
        scale = model.linear.weight.sum()  # type: ignore[union-attr, operator]
        assert torch.equal(known, known[:5])  # one with data and one without
        doubled = batch * (2.0 if torch.equal(batch / scale, batch / scale) else 1.0)
        return step(model, doubled)

    model, optimizer = made(MaskInAttribute)
    program = ap.capture(comparing, model, optimizer, batches()[0])
    losses, _ = run(program, batches()[:1])
    assert losses == pytest.approx([float(comparing(model, batches()[0]).detach())])
