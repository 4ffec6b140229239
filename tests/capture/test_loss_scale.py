"""loss_scale: an enabled GradScaler is captured as it is; eager PyTorch is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import apportion as ap
from apportion.capture.capture import capture
from apportion.capture.discover import discover
from apportion.capture.loss_scale import LossScale, plain_scaling
from apportion.capture.program import Program
from apportion.capture.reference import eager_steps
from apportion.capture.trace import CaptureError
from apportion.machine.cluster import cluster
from apportion.run import vary_batch
from apportion.run.check_run import gather_copies
from apportion.run.one_process import SharedRun, train_in_one_process

HUGE = 2.0**26
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def training(scaler: Any, optimizer: str = "adam", clips: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    own = OPTIMIZERS[optimizer](model.parameters())

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step, model, own, (torch.randn(8, 8), torch.randint(0, 4, (8,)))


def scaler_of(init: float, interval: int = 2) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)


def ends_of(program: Program, run: SharedRun) -> dict[str, torch.Tensor]:
    copies = gather_copies(run.space, run.tasks, run.ranks)
    values = program.graph.values
    for value, found in copies.items():
        for copy in found[1:]:
            torch.testing.assert_close(copy.tensor, found[0].tensor, msg=values[value].name)
    return {values[v].name: found[0].tensor for v, found in copies.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "clips"),
    [("adam", True), ("fused", False), ("fused", True), ("sgd", False), ("adafactor", False)],
)
def test_steps_that_overflow_are_skipped_as_pytorch_does(optimizer: str, clips: bool) -> None:
    scaler = scaler_of(HUGE)
    step, model, own, batch = training(scaler, optimizer, clips)
    program = capture(step, model, own, batch)
    steps = 14
    run = train_in_one_process(program, None, 1, [batch] * steps, 0)
    found = ends_of(program, run)
    begin = [p.detach().clone() for p in model.parameters()]
    skipped = 0
    for _ in range(steps):
        before = scaler.get_scale()
        step(model, own, batch)
        skipped += scaler.get_scale() < before
    assert 3 <= skipped <= steps - 3
    assert found["scaler.scale"].item() == scaler.get_scale()
    assert found["scaler.growth_tracker"].item() == scaler.state_dict()["_growth_tracker"]
    for (name, parameter), old in zip(model.named_parameters(), begin, strict=True):
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(parameter, old)
        for key, state in own.state[parameter].items():
            if f"{name}:{key}" in found:
                ours = found[f"{name}:{key}"].reshape(state.shape)
                torch.testing.assert_close(ours, state, rtol=1e-4, atol=1e-6)
            if key == "step":
                assert found[f"{name}:step"].item() == steps - skipped


@pytest.mark.slow
@pytest.mark.parametrize("method", ["data", "tofu"])
def test_a_divided_step_sees_an_overflow_of_any_part(method: str) -> None:
    scaler = scaler_of(1.0, 100)
    step, model, own, batch = training(scaler)
    program = capture(step, model, own, batch)
    plan = ap.plan(program, cluster("local:4"), method, calibrate=False)
    wrong = batch[0].clone()
    wrong[5, 3] = torch.inf  # in the part of one device
    batches = [batch, (wrong, batch[1]), batch]
    run = train_in_one_process(program, plan.strategy, 4, batches, 0)
    found = ends_of(program, run)
    assert found["scaler.scale"].item() == 0.5
    assert found["scaler.growth_tracker"].item() == 1
    assert found["0.weight:step"].item() == 2
    assert all(torch.isfinite(x.double()).all() for x in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, True])
def test_a_plan_is_checked_and_the_scaler_left_alone(made: bool) -> None:
    scaler = scaler_of(16.0)
    training_ = training(scaler)
    if made:
        for _ in range(3):
            training_[0](*training_[1:])
    before = (scaler.state_dict(), vars(scaler)["_scale"], vars(scaler)["_growth_tracker"])
    program = capture(*training_)
    plan = ap.plan(program, cluster("local:2"), "data", calibrate=False)
    found = ap.check(program, plan, steps=3)
    assert found.equal, found
    after = (scaler.state_dict(), vars(scaler)["_scale"], vars(scaler)["_growth_tracker"])
    assert before[0] == after[0] and before[1] is after[1] and before[2] is after[2]


def test_state_is_what_the_scaler_has_when_it_is_read() -> None:
    scaler = scaler_of(16.0)
    step, model, own, batch = training(scaler)
    program = capture(step, model, own, batch)
    value = next(v for v, b in program.bindings.items() if b.name == "scaler.scale")
    assert eager_steps(program, [batch], 0)[1][value].item() == 16
    for _ in range(4):
        step(model, own, batch)
    assert eager_steps(program, [], 0)[1][value].item() == scaler.get_scale() == 64
    scaler.update(8.0)
    assert eager_steps(program, [batch], 0)[1][value].item() == 8


def test_plain_operators_do_what_the_kernels_do() -> None:
    for bad in (None, torch.inf, torch.nan):
        seen = []
        for context in (plain_scaling(), torch.enable_grad()):
            scaler = scaler_of(4.0, 1)
            layer = nn.Linear(3, 2)
            own = torch.optim.SGD(layer.parameters(), lr=0.1)
            with context:
                scaler.scale(torch.ones(()))
                for k, p in enumerate(layer.parameters()):
                    p.grad = torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape)
                    if bad is not None and k:
                        p.grad[1] = bad
                scaler.unscale_(own)
                scaler.update()
            seen.append([scaler.get_scale(), *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*seen, rtol=0, atol=0, equal_nan=True)
        assert seen[0][0] == (8.0 if bad is None else 2.0)


def test_only_enabled_scalers_are_state() -> None:
    on, off = scaler_of(2.0), torch.amp.GradScaler("cpu", enabled=False)
    found = discover(lambda: (on, off))
    assert [name for name, _ in found.modules] == ["on"]
    assert isinstance(found.modules[0][1], LossScale)


def test_what_cannot_be_skipped_is_refused() -> None:
    step, model, own, batch = training(scaler_of(2.0))
    own.register_step_post_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"may skip the step of Adam at .*bfloat16"):
        capture(step, model, own, batch)


@pytest.mark.slow
def test_parts_may_overflow_in_other_steps() -> None:
    """Rows that cancel each other overflow where the devices have them apart."""
    scaler = scaler_of(2.0**14, 100)
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    own = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(batch[0]) * batch[1]).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    signs = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])[:, None]
    program = capture(step, model, own, (torch.full((8, 2), 3.0), signs))
    plan = ap.plan(program, cluster("local:2"), "data", calibrate=False)
    given = [program.batch] * 2
    split = ends_of(program, train_in_one_process(program, plan.strategy, 2, given, 0))
    whole = ends_of(program, train_in_one_process(program, None, 1, given, 0))
    assert whole["scaler.scale"].item() != split["scaler.scale"].item()
    assert vary_batch.vary(program.batch, 0, 0)[0].equal(program.batch[0])
    found = ap.check(program, plan, steps=1)
    assert found.equal and "overflow in other steps" in found.notes[0], found
