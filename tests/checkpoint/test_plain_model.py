"""Plain PyTorch and divided runs go on from each other's checkpoints, whatever the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from apportion.capture.capture import capture
from apportion.checkpoint.plain_model import load_checkpoint, save_checkpoint
from apportion.execute.executable import Executable
from apportion.execute.transport import worker
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.run.runner import Runner

Parameters = Any


class Net(nn.Module):
    """With a buffer that steps change, one that they do not, and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.one(x)))
        found: torch.Tensor = self.two(hidden) * self.scale * self.passing
        return found


class Counting(torch.optim.Optimizer):
    """Keeps numbers of Python, and state in a list and in its group."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["sums"] = 0, [torch.zeros_like(p), torch.zeros_like(p)]
                state["count"] += 1
                state["sums"][0].add_(p.grad)
                state["sums"][1].mul_(0.5).add_(p.grad, alpha=0.5)
                change = state["sums"][1] + state["sums"][0] / state["count"]
                p.sub_(change * group["lr"] / (1 + 0.1 * group["k"]))


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "counting": Counting,
}


def made(name: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net().double()
    return model, OPTIMIZERS[name](model.parameters())


def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (6, 3))  # type: ignore[return-value]


def step(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def eager(model: Net, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        loss = step(model, data(number))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def divided(model: Net, optimizer: torch.optim.Optimizer) -> Runner:
    program = capture(step, model, optimizer, data(0))
    plan = make_plan(program, cluster("local:1"), "single")
    return Runner(program, worker(Executable(plan.space, plan.strategy, plan.tasks), 0))


def same(one: Any, other: Any) -> bool:
    """Whether two states are alike, their numbers to nine digits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_and_divided_go_on_from_each_other(name: str, tmp_path: Path) -> None:
    expected = eager(*made(name, 0), range(4))
    model, optimizer = made(name, 0)
    runner = divided(model, optimizer)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    losses = [float(runner.step(data(number))) for number in range(2)]
    assert losses == pytest.approx(expected[:2], rel=1e-9)

    runner.save(tmp_path / "run", wait=True)  # divided, then plain
    plain = made(name, 1)
    resumed = load_checkpoint(tmp_path / "run", *plain)
    assert eager(*plain, range(resumed.step, 4)) == pytest.approx(expected[2:], rel=1e-9)

    found = runner.state_dict()  # the same by torch's own functions; the live model is as it was
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert not optimizer.state
    other, again = made(name, 1)
    assert list(found["model"]) == list(other.state_dict())
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    assert eager(other, again, range(2, 4)) == pytest.approx(expected[2:], rel=1e-9)

    plain = made(name, 0)  # plain, then divided
    eager(*plain, range(2))
    for where in ("folder", "file.safetensors"):
        path = save_checkpoint(tmp_path / where, *plain, step=2)
        assert runner.load(path).notes == ()
        assert runner.steps_done == 2
        losses = [float(runner.step(data(number))) for number in range(2, 4)]
        assert losses == pytest.approx(expected[2:], rel=1e-9)
    runner.update_model()
    eager(*plain, range(2, 4))
    assert same(optimizer.state_dict(), plain[1].state_dict())


@pytest.mark.slow
def test_one_file_out_and_in(tmp_path: Path) -> None:
    runner = divided(*made("adamw", 0))
    expected = eager(*made("adamw", 0), range(4))
    for number in range(2):
        runner.step(data(number))
    path = runner.export(tmp_path / "all.safetensors")
    other = divided(*made("adamw", 1))
    assert other.load(path).step == 2
    losses = [float(other.step(data(number))) for number in range(2, 4)]
    assert losses == pytest.approx(expected[2:], rel=1e-12)


@pytest.mark.slow
def test_weights_alone_out_and_in(tmp_path: Path) -> None:
    """Under the model's own names, as others write and read them; the optimizer begins anew."""
    runner = divided(*made("adamw", 0))
    runner.step(data(0))
    path = runner.export(tmp_path / "model.safetensors", optimizer=False)
    weights = load_file(path)
    assert weights.keys() == Net().state_dict().keys()
    save_file(weights, tmp_path / "theirs.safetensors")
    model, optimizer = made("adamw", 1)
    model.load_state_dict(weights)
    expected = eager(model, optimizer, range(1, 3))
    other = divided(*made("adamw", 2))
    (note,) = other.load(tmp_path / "theirs.safetensors").notes
    assert "no optimizer state, which begins anew" in note
    losses = [float(other.step(data(number))) for number in range(1, 3)]
    assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_torchs_own_reader_reads_them(tmp_path: Path) -> None:
    runner = divided(*made("adamw", 0))
    runner.step(data(0))
    runner.save(tmp_path, wait=True)
    wanted = runner.state_dict()["model"]
    found = {f"model.{key}": torch.zeros_like(tensor) for key, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step-1")))
    assert all(torch.equal(found[f"model.{key}"], tensor) for key, tensor in wanted.items())


@pytest.mark.slow
def test_settings_and_schedulers_go_on(tmp_path: Path) -> None:
    runner = divided(*made("adamw", 0))
    schedule = torch.optim.lr_scheduler.StepLR(runner.program.optimizer, 1, gamma=0.5)
    for number in range(2):
        runner.step(data(number))
        schedule.step()
    runner.save(tmp_path, wait=True, schedule=schedule, note={"seen": (1, 2)})
    expected = [float(runner.step(data(2)))]
    other = divided(*made("adamw", 1))
    again = torch.optim.lr_scheduler.StepLR(other.program.optimizer, 1, gamma=0.5)
    resumed = other.load(tmp_path, schedule=again)
    assert resumed.others["note"] == {"seen": (1, 2)}
    assert other.program.optimizer.param_groups[0]["lr"] == 0.0025
    assert [float(other.step(data(2)))] == expected
    with pytest.raises(ValueError, match="keeps no 'loader' beside the model; it keeps n"):
        other.load(tmp_path, loader=again)


@pytest.mark.slow
def test_another_optimizer_is_refused_and_may_begin_anew(tmp_path: Path) -> None:
    runner = divided(*made("sgd", 0))
    runner.step(data(0))
    runner.save(tmp_path, wait=True)
    other = divided(*made("adamw", 1))
    before = other.state_dict()
    with pytest.raises(ValueError, match="is of another optimizer: it keeps momentum_buffer of"):
        other.load(tmp_path)
    assert str(other.state_dict()) == str(before)
    with pytest.raises(ValueError, match="is of another optimizer: it has no setting"):
        load_checkpoint(tmp_path, *made("adamw", 1))
    other.load(tmp_path, optimizer=False)
    assert torch.equal(
        other.state_dict()["model"]["one.weight"], runner.state_dict()["model"]["one.weight"]
    )
