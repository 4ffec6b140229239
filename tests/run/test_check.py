"""ap.check: a right plan is equal, whatever its precision, and a wrong one is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import apportion as ap
from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import disturbed_changes
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.plan.plan import Plan, Prediction
from apportion.run.check_run import Tolerance
from apportion.run.one_process import train_in_one_process
from apportion.run.step_source import source_of_model
from apportion.run.training import default_dtype
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy, unsplit_choice

DEVICES = 2


def plan_of(program: Program, strategy: Strategy | None = None, seed: int = 0) -> Plan:
    none = Prediction(0.0, (0,) * DEVICES, 0, (0.0,) * DEVICES)
    where = cluster(f"local:{DEVICES}")
    strategy = strategy or draw(Space(program.graph), DEVICES, Random(seed))
    cost, limits = default_cost(where), (0,) * DEVICES
    return Plan(program.graph, where, strategy, "random", 0, 0.0, 0.0, none, limits, cost)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(F.dropout(F.gelu(self.norm(self.inner(x))), 0.2, self.training))
        return y


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def autocast(kind: torch.dtype) -> Callable[..., Tensor]:
    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=kind):
            return F.cross_entropy(model(batch["x"]), batch["labels"])

    return step


def captured(
    step: Callable[..., Tensor] = plain,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> Program:
    torch.manual_seed(0)
    model = Net().to(dtype)
    batch = {
        "x": torch.randn(8, 6).to(dtype),
        "y": torch.randn(8, 6).to(dtype),
        "labels": torch.randint(6, (8,)),
    }
    return capture(step, model, optimizer(model.parameters(), lr=0.01), batch)


@pytest.mark.parametrize("seed", range(3))
def test_a_float32_step_is_equal(seed: int) -> None:
    program = captured()
    before = {k: v.clone() for k, v in program.model.state_dict().items()}
    found = ap.check(program, plan_of(program, seed=seed))
    assert found.equal and not found.reason, found
    assert found.max_rel_param_diff < 1e-9 < found.noise < 1e-2
    assert found.worst
    after = program.model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert not program.optimizer.state
    assert all(p.grad is None for p in program.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_an_autocast_step_is_equal(kind: torch.dtype) -> None:
    """Casts vanish where a step is captured in float64; the widened Graph still has them."""
    program = captured(autocast(kind))
    name = str(kind).removeprefix("torch.")
    assert name in {v.dtype for v in program.graph.values}
    found = ap.check(program, plan_of(program))
    assert found.equal and not found.notes, found
    assert found.max_rel_param_diff < 1e-9


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_bfloat16_model_is_equal(optimizer: Any) -> None:
    program = captured(plain, torch.bfloat16, optimizer)
    found = ap.check(program, plan_of(program))
    assert found.equal, found
    assert found.noise > 1e-4


@pytest.mark.slow
def test_a_wrong_division_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured()
    plan = plan_of(program)

    def wrong(*given: Any, **named: Any) -> Any:
        run = train_in_one_process(*given, **named)
        if given[1] is not None:
            for rank in run.ranks:
                for place, (slot, array) in enumerate(rank.state):
                    value = program.graph.values[int(run.tasks.slot_value[slot])]
                    if value.name == "outer.weight":
                        rank.state[place] = (slot, array * (1 + 1e-6))
        return run

    checking = import_module("apportion.run.check")
    monkeypatch.setattr(checking, "train_in_one_process", wrong)
    found = ap.check(program, plan)
    assert not found.equal
    assert found.worst == "outer.weight"
    assert "divided step and the whole" in found.reason


@pytest.mark.slow
def test_a_dropped_hook_is_found() -> None:
    """Whatever capture makes of hooks: a Graph that lacks one is not the program."""
    program = captured(optimizer=torch.optim.SGD)
    assert ap.check(program, plan_of(program)).equal
    program.model.get_parameter("inner.weight").register_hook(lambda grad: grad * 2)
    found = ap.check(program, plan_of(program))
    assert not found.equal
    assert found.worst == "inner.weight" and "not captured" in found.reason


@pytest.mark.slow
def test_a_dropped_optimizer_hook_is_found() -> None:
    program = captured(optimizer=torch.optim.SGD)

    def halve(optimizer: Any, *_: Any) -> None:
        for p in program.model.parameters():
            p.data.mul_(0.5)

    program.optimizer.register_step_post_hook(halve)
    assert not ap.check(program, plan_of(program)).equal


@pytest.mark.slow
def test_randomness_of_python_is_found() -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, batch) * random.random()

    program = captured()
    noisy_program = replace(program, step=noisy)
    state = random.getstate()
    found = ap.check(noisy_program, plan_of(program))
    assert not found.equal and "not captured" in found.reason
    assert random.getstate() == state


@pytest.mark.slow
def test_a_batch_that_was_baked_in_is_found() -> None:
    program = captured()
    given = program.batch["x"].clone()

    def baked(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, {**batch, "x": given})

    made = capture(baked, program.model, program.optimizer, program.batch)
    assert not ap.check(replace(made, step=plain), plan_of(made)).equal


@pytest.mark.slow
def test_an_ill_conditioned_model_is_judged_by_its_noise() -> None:
    """The difference of two nearly equal numbers, enlarged: rounding is all that is left of it."""

    def cancelled(model: nn.Module, batch: Any) -> Tensor:
        y: Tensor = model(batch["x"])
        return (((y + 1e4) - 1e4) - y).mul(1e3).square().mean() + y.square().mean()

    program = captured(cancelled)
    found = ap.check(program, plan_of(program))
    assert found.equal, found


def test_columns_with_tables_of_their_own_get_no_index_of_another() -> None:
    """Elements in another order would be indices that the smaller table does not have."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(1000, 4), nn.Embedding(3, 4)

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.large(ids[:, 0]) * self.small(ids[:, 1])
            return y

    torch.manual_seed(0)
    model = Tables()
    batch = torch.stack([torch.randint(500, 1000, (12,)), torch.randint(3, (12,))], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(lambda m, b: m(b).square().sum(), model, optimizer, batch)
    assert ap.check(program, plan_of(program)).equal


@pytest.mark.slow
def test_numbers_that_depend_on_the_precision_are_no_difference() -> None:
    """The epsilon is that of the default dtype, and another one in float64."""

    class Normed(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y / (y.std() + torch.finfo(torch.get_default_dtype()).eps)

    torch.manual_seed(0)
    model, batch = Normed(), captured().batch
    program = capture(plain, model, torch.optim.SGD(model.parameters(), lr=1e-6), batch)
    found = ap.check(program, plan_of(program))
    assert found.equal and "depend on its precision" in found.notes[0], found
    model.inner.weight.register_hook(lambda grad: grad * 1.01)
    assert not ap.check(program, plan_of(program)).equal


@pytest.mark.slow
def test_a_step_that_asks_for_its_dtype_is_told_its_own() -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y / (y.std() + (1e-5 if y.dtype == torch.float32 else 1e-1))

    torch.manual_seed(0)
    model, batch = Asking(), captured().batch
    program = capture(plain, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    found = ap.check(program, plan_of(program))
    assert found.equal and not found.notes, found
    model.inner.weight.register_hook(lambda grad: grad * 1.01)
    assert not ap.check(program, plan_of(program)).equal


@pytest.mark.slow
def test_a_norm_whose_epsilon_is_that_of_its_dtype() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)  # type: ignore[assignment]

    torch.manual_seed(0)
    model, batch = Normed(), captured().batch
    program = capture(plain, model, torch.optim.SGD(model.parameters(), lr=1e-6), batch)
    found = ap.check(program, plan_of(program))
    assert found.equal and not found.notes, found


@pytest.mark.slow
def test_numbers_of_settings_are_rounded_as_the_step_is_written() -> None:
    """What is captured was computed in float32, and the difference that it makes is enlarged."""

    class Bounded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.tensor([1.0]))
            self.other = nn.Parameter(torch.tensor([1.28155]))

    def bounded(model: Any, batch: Any) -> Tensor:
        share = torch.tensor(0.9, dtype=model.one.dtype)
        bound = torch.distributions.Normal(0, 1).icdf(share)  # 1.28155
        return plain(model, batch) + (bound * model.one - model.other).mul(1e3).square().sum()

    torch.manual_seed(0)
    model, batch = Bounded(), captured().batch
    program = capture(bounded, model, torch.optim.SGD(model.parameters(), lr=1e-6), batch)
    found = ap.check(program, plan_of(program))
    assert found.equal and "a rounding of that precision" in found.notes[0], found
    model.inner.weight.register_hook(lambda grad: grad * 1.01)
    assert not ap.check(program, plan_of(program)).equal


def test_what_cannot_run_in_float64_is_compared_with_the_captured_step() -> None:
    def narrow(model: nn.Module, batch: Any) -> Tensor:
        if torch.get_default_dtype() is torch.float64:
            raise RuntimeError("only float32 here")
        return plain(model, batch)

    program = captured(narrow)
    found = ap.check(program, plan_of(program))
    assert found.equal and "only float32 here" in found.notes[0]


def test_a_plan_of_another_step_is_refused() -> None:
    program, other = captured(), captured(optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="another step"):
        ap.check(program, plan_of(other))
    with pytest.raises(ValueError, match="at least 1"):
        ap.check(program, plan_of(program), steps=0)


def test_one_device_is_equal() -> None:
    program = captured()
    space = Space(program.graph)
    whole = tuple(unsplit_choice(space, op, (0,)) for op in range(len(program.graph.ops)))
    assert ap.check(program, plan_of(program, Strategy(whole))).equal


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_capture_holds_wherever_it_runs(kind: torch.dtype) -> None:
    """A whole number times a fraction is of the default dtype."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]) * (torch.arange(6) * 0.3 + 1), batch["y"])

    with default_dtype(kind):
        program = captured(step, kind)
        assert {v.dtype for v in program.graph.values if v.dtype and "float" in v.dtype} >= {
            str(kind).removeprefix("torch.")
        }
        assert source_of_model(program, "", 0).default_dtype is kind
        found = ap.check(program, plan_of(program))
    assert found.equal, found
    assert torch.get_default_dtype() is torch.float32


def bag_step(model: nn.ModuleDict, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model["out"](model["bag"](batch[0])), batch[1])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_what_a_kernel_leaves_out_in_one_precision_only(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(20, 8, mode=mode), "out": nn.Linear(8, 3)})
    batch = (torch.randint(20, (4, 3)), torch.randint(3, (4,)))
    program = capture(bag_step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    assert ap.check(program, plan_of(program)).equal


def number_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    loss = plain(model, batch) / 2
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() * 2


@pytest.mark.slow
def test_a_loop_that_returns_a_number_is_equal() -> None:
    program = captured(number_step)  # type: ignore[arg-type]
    found = ap.check(program, plan_of(program))
    assert found.equal, found


def test_a_label_is_exact_whatever_the_noise() -> None:
    """A target above 1 would be an error of binary_cross_entropy."""

    def clicks(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy(model(batch["x"]).sigmoid(), batch["clicked"])

    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(4, 6), "clicked": torch.ones(4, 6)}
    program = capture(clicks, model, torch.optim.SGD(model.parameters(), 0.1), batch)
    losses, state = disturbed_changes(program, [batch], 0, 0.01, 1)
    assert losses[0] > 0 and any(change.any() for change in state.values())


def test_a_rounding_of_float64_disturbs_a_step_in_float64() -> None:
    """Else an ill-conditioned model would be judged in float64 as if it had no noise."""
    program = captured(plain)
    still, _ = disturbed_changes(program, [program.batch], 0, 0.0, 1, wide=True)
    moved, _ = disturbed_changes(program, [program.batch], 0, 64 * EPS, 1, wide=True)
    assert 0 < abs(moved[0] - still[0]) < 1e-12


EPS = torch.finfo(torch.float64).eps


def test_a_running_variance_has_the_roundings_of_what_it_was() -> None:
    """torch subtracts the momentum in float32: 1 - 0.99 has an error of a hundred roundings."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, momentum=0.99)
    model = nn.Sequential(nn.Linear(3, 4), norm)
    batch = torch.randn(8, 3) * 1e-12  # what is left of the variance is what it began with
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(lambda m, b: m(b).square().mean(), model, optimizer, batch)
    found = ap.check(program, plan_of(program), steps=2)
    assert found.equal, found


def test_what_vanishes_in_float32_is_no_difference() -> None:
    """Of a gradient of 1e-36 nothing is known but that it is one; float64 has its digits."""
    program = captured()
    value = next(v for v, each in enumerate(program.graph.values) if each.name == "inner.weight")
    assert Tolerance(own=True).of_value(program, value, 1e-36) >= 1e-19
    assert Tolerance().of_value(program, value, 1e-36) < 1e-40
