"""Values that a step reads: shown or checked ones are left out, what depends on them is refused."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from cases_capture import mlp, mse_step
from helpers_capture import run
from torch import nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import eager_steps
from apportion.capture.trace import CaptureError


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 4), torch.randn(5, 3)


def captured(step: Any, model: nn.Module | None = None, batch: Any = None) -> Program:
    torch.manual_seed(0)
    model = mlp() if model is None else model
    return capture(step, model, sgd(model), vectors() if batch is None else batch)


def line_of(step: Any, offset: int) -> str:
    return f"test_read_probes.py:{step.__code__.co_firstlineno + offset}"


def assert_equals_eager(program: Program) -> None:
    losses, state = run(program, [program.batch] * 2)
    expected, ends = eager_steps(program, [program.batch] * 2, seed=0)
    assert losses == pytest.approx(expected, rel=1e-5)
    for value, tensor in ends.items():
        torch.testing.assert_close(state[value], tensor)


shown: list[Any] = []


def item_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    shown.append(loss.item())
    return loss


def progress_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    print(f"loss {loss:.4f} {float(loss.detach()):g} perplexity {math.exp(loss.item()):.2f}")
    return loss


def best_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    shown.append(max([x for x in shown if isinstance(x, float)] + [loss.item() * 2]))
    return loss


def numpy_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    shown.append(loss.detach().cpu().numpy().mean())
    return loss


@pytest.mark.parametrize("step", [item_step, progress_step, best_step, numpy_step])
def test_a_value_that_is_only_shown_is_left_out_with_a_note(step: Any) -> None:
    program = captured(step)
    assert [op.kind for op in program.graph.ops] == [op.kind for op in captured(mse_step).graph.ops]
    assert any("is only shown" in note and line_of(step, 2) in note for note in program.notes)
    assert_equals_eager(program)


def finite_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}")
    return loss


def exit_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    if not math.isfinite(loss.item()):
        sys.exit(1)
    return loss


def compare_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    assert loss.item() < 1e6 and not loss.isnan().any(), "the loss explodes"
    return loss


def range_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, _ = batch
    if x.abs().max() > 1000:
        raise ValueError("out of range")
    return mse_step(model, batch)


@pytest.mark.parametrize(
    ("step", "offset"), [(finite_step, 2), (exit_step, 2), (compare_step, 2), (range_step, 2)]
)
def test_a_check_is_left_out_with_a_note(step: Any, offset: int) -> None:
    program = captured(step)
    assert any("check" in note and line_of(step, offset) in note for note in program.notes)
    assert_equals_eager(program)


def test_a_check_is_left_out_where_there_is_no_data() -> None:
    with torch.device("meta"):
        model, batch = mlp(), tuple(torch.empty_like(x) for x in vectors())
    program = capture(finite_step, model, sgd(model), batch)
    assert any(line_of(finite_step, 2) in note for note in program.notes)
    assert len(program.graph.ops) == len(captured(mse_step).graph.ops)


def kl_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    normal = torch.distributions.Normal(model(x), torch.ones_like(y))
    other = torch.distributions.Normal(torch.zeros_like(y), torch.full_like(y, 2.0))
    return torch.distributions.kl_divergence(normal, other).mean() - normal.log_prob(y).mean()


def test_validation_of_distributions_is_left_out() -> None:
    program = captured(kl_step)
    assert any("inside torch/distributions" in note for note in program.notes)
    assert_equals_eager(program)


class Encoder(nn.Module):
    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        if keep:
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = getattr(self, "mask", None)
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(5)
        found: torch.Tensor = self.layers(x, mask=mask)
        return found


@pytest.mark.parametrize("keep", [False, True])
def test_a_mask_that_is_always_the_same_may_decide(keep: bool) -> None:
    torch.manual_seed(0)
    model = Encoder(keep=keep)
    program = capture(lambda m, b: m(b).pow(2).mean(), model, sgd(model), torch.randn(3, 5, 8))
    assert any("mask" in note for note in program.notes) is keep
    assert_equals_eager(program)


def test_numpy_of_a_tensor_with_data_is_its_own() -> None:
    table = torch.arange(4.0)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return mse_step(model, batch) * float(table.numpy().sum())

    program = captured(step)
    assert program.notes == ()
    assert_equals_eager(program)


@pytest.mark.slow
def test_a_write_elsewhere_does_not_hide_where_a_value_comes_from() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        x[:, 0] = 0.0
        mask = torch.zeros(3)
        mask[1:] = 1.0
        kept = mask if mask.sum() > 1 else 1 - mask
        return ((model(x) - y) * kept).pow(2).mean() + model(x)[:, mask.bool()].mean()

    program = captured(step)
    assert [note.partition(":")[0] for note in program.notes] == [
        "the step changes batch.0 in place"
    ]
    assert_equals_eager(program)


def test_numbers_that_are_returned_are_results_or_left_out() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = mse_step(model, batch)
        value = loss.item()
        return {"loss": loss, "half": value / 2, "exp": math.exp(value), "rate": 0.1}

    program = captured(step)
    assert program.results is not None and list(program.results.names) == ["loss", "half"]
    returned = program.results.filled(float)
    assert returned == {"loss": 0.0, "half": 1.0, "exp": None, "rate": 0.1}
    assert any("exp is left out" in note for note in program.notes)


# what depends on a value


def branch_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    print(loss.item())
    return loss if batch[0].sum() > 0 else -loss


def threshold_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    value = loss.item()
    if 100.0 < value < 200.0:
        loss = loss * 0.0
    return loss


def both_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    if loss.item() > 100 and batch[0].max().item() > 100:
        loss = loss * 0.0
    return loss


def flags_step(model: nn.Module, batch: Any) -> torch.Tensor:
    flags = [bool(x.max() > 100) for x in batch]
    return mse_step(model, batch) * (0.0 if all(flags) else 1.0)


def number_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    return loss * int(batch[0].abs().max())


def view_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    rows = int((x[:, 0] < 1e9).sum())
    return (model(x).view(rows, -1) - y).pow(2).mean()


def skip_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = mse_step(model, batch)
    if math.isnan(float(loss)):
        return torch.zeros((), requires_grad=True) + 0 * loss
    return loss


def from_numpy_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    limit = x.numpy().max()
    return (model(x.clamp(max=limit.item())) - y).pow(2).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "offset", "text"),
    [
        (branch_step, 3, "branches on a value that depends on batch.0"),
        (threshold_step, 3, "branches"),
        (both_step, 2, "branches"),
        (flags_step, 1, "branches"),
        (number_step, 2, "as a Python number"),
        (view_step, 2, "as a Python number"),
        (skip_step, 2, "as a Python number"),
        (from_numpy_step, 2, "converts a tensor to NumPy"),
    ],
)
def test_what_depends_on_a_value_is_refused_with_its_line(
    step: Any, offset: int, text: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        captured(step)
    assert text in str(caught.value)
    assert line_of(step, offset) in str(caught.value)


class Counting(nn.Module):
    """As torch.optim.swa_utils.AveragedModel: the first step is another than those after it."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.tensor(begin))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if self.count == 0 else 1.0
        self.count += 1
        return scale * self.layer(x)


def test_a_counter_that_is_past_a_bound_may_decide() -> None:
    batch = torch.randn(5, 4)
    program = captured(lambda m, b: m(b).pow(2).mean(), Counting(3), batch)
    assert any("count, which only grows" in note for note in program.notes)
    assert_equals_eager(program)
    with pytest.raises(CaptureError, match=r"take steps in plain PyTorch until it is past 0"):
        captured(lambda m, b: m(b).pow(2).mean(), Counting(0), batch)


# random choices


class Dropped(nn.Module):
    def __init__(self, layerdrop: float, *, as_number: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.layerdrop, self.as_number = layerdrop, as_number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            draw: Any = torch.rand([])
            draw = draw.item() if self.as_number else draw
            if self.training and draw < self.layerdrop:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("as_number", [False, True])
def test_layerdrop_of_probability_zero_drops_nothing(as_number: bool) -> None:
    model = Dropped(0.0, as_number=as_number)
    program = captured(lambda m, b: m(b).pow(2).mean(), model, torch.randn(4, 3))
    assert program.notes == ()
    assert_equals_eager(program)


@pytest.mark.parametrize("as_number", [False, True])
def test_layerdrop_is_refused_by_name(as_number: bool) -> None:
    model = Dropped(0.25, as_number=as_number)
    with pytest.raises(
        CaptureError, match=r"random number .*probability 0\.25; .*set layerdrop to 0"
    ):
        captured(lambda m, b: m(b).pow(2).mean(), model, torch.randn(4, 3))


def test_a_default_dtype_is_resolved_before_a_worker_runs_the_graph() -> None:
    """Whole numbers times a float have torch's default dtype, which a worker need not have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        counts = torch.arange(5)
        program = captured(
            lambda m, b: (m(b[0]) * (b[1] * 0.5).unsqueeze(1)).mean() + (b[1] / 3).mean(),
            batch=(torch.randn(5, 4), counts),
        )
        expected, _ = eager_steps(program, [program.batch], seed=0)
    finally:
        torch.set_default_dtype(before)
    assert run(program, [program.batch])[0] == pytest.approx(expected, rel=1e-12)


def test_what_is_read_for_its_shape_only_decides_nothing() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model(batch[0])
        mask = hidden.new_ones(5, dtype=torch.bool) & torch.zeros_like(hidden[:, 0]).eq(0)
        if mask.all():
            hidden = hidden * 2
        return hidden.square().mean()

    program = captured(step)
    assert not program.notes
    assert_equals_eager(program)


@pytest.mark.slow
def test_a_mask_like_the_model_is_blamed_on_the_batch_alone() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model(batch[0])
        mask = torch.zeros_like(hidden) + (batch[1] > 0)
        return hidden.mean() * 2 if (mask > 0).any() else hidden.mean()

    with pytest.raises(CaptureError, match=r"depends on batch\.1 at .*fixed=\[\"batch\.1\"\]"):
        captured(step)


class Redrawn(nn.Module):
    """A layer that draws its projection anew every so many steps, as Performer's."""

    def __init__(self, interval: int | None) -> None:
        super().__init__()
        self.inner, self.interval = nn.Linear(4, 3), interval
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interval is not None and self.calls >= self.interval:
            self.calls.zero_()
            return self.inner(x) * 2
        self.calls += 1
        return self.inner(x)


def test_what_a_count_of_steps_is_compared_with_is_named() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    with pytest.raises(CaptureError, match=r"counts steps at .*so set interval to None or"):
        captured(step, Redrawn(1000))
    assert_equals_eager(captured(step, Redrawn(None)))


class DroppedLayers(nn.Module):
    """Layers that are left out at random, as CaiT's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = torch.zeros(3).uniform_(0.0, 1.0) < self.dropout
        for layer, drop in zip(self.layers, dropped, strict=True):
            x = x if drop else layer(x)
        return x


def test_layers_dropped_at_random_are_blamed_on_the_draw() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    with pytest.raises(CaptureError, match=r"chooses by (a )?random number.* to 0"):
        captured(step, DroppedLayers(0.2))
    assert_equals_eager(captured(step, DroppedLayers(0.0)))
