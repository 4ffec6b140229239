"""Any optimizer: its captured update is what its class computes, or it is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases_capture import mlp, mse_step, vectors
from cases_optimizer import (
    Averaging,
    Buffered,
    ByRate,
    ClipsAll,
    Converts,
    CountingAdam,
    CountsOnItself,
    GroupCounting,
    Lamb,
    Lion,
    Listed,
    Noisy,
    PhaseInGroup,
    PhaseInState,
    Rectified,
    Several,
    SignedAdam,
    Stable,
    Tabled,
)
from helpers_capture import begin, run, run_graph
from torch import nn

from apportion import graph as g
from apportion.capture.capture import capture
from apportion.capture.program import Program, check_settings
from apportion.capture.reference import eager_steps
from apportion.capture.trace import CaptureError

Make = Callable[[nn.Module], torch.optim.Optimizer]


def of(cls: Any, **settings: Any) -> Make:
    return lambda model: cls(model.parameters(), **settings)


def matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
    return torch.optim.NAdam(groups, lr=1e-2)


def clipped_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return ClipsAll([{"params": [first], "lr": 0.3}, {"params": others}], lr=0.1)


ELEMENTWISE: dict[str, Make] = {
    "sgd with dampening": of(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "adamax": of(torch.optim.Adamax, weight_decay=0.1, maximize=True),
    "nadam": of(torch.optim.NAdam),
    "nadam, two groups": two_groups,
    "radam": of(torch.optim.RAdam, lr=1e-2, weight_decay=0.1),
    "rmsprop": of(torch.optim.RMSprop),
    "rmsprop, centered": of(torch.optim.RMSprop, centered=True, momentum=0.9, weight_decay=0.1),
    "adagrad": of(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    "adadelta": of(torch.optim.Adadelta, weight_decay=0.1),
    "asgd": of(torch.optim.ASGD, t0=2, lambd=0.01),
    "rprop": of(torch.optim.Rprop),
    "foreach": of(torch.optim.RMSprop, foreach=True),
    "a tensor as rate": of(torch.optim.Adamax, lr=torch.tensor(0.01, dtype=torch.float64)),
    "lion": of(Lion),
    "a count that is an int": of(CountingAdam),
    "no weight decay": of(CountingAdam, weight_decay=0),
    "a branch on the count": of(Rectified),
    "a count in the group": of(GroupCounting),
    "a division by zero that is caught": of(Averaging, lr=0.1),
    "a table of what was computed": of(Tabled, lr=0.1),
    "a count that is its own": of(CountsOnItself, lr=0.1),
    "a subclass": of(SignedAdam, lr=1e-2),
    "momenta by their rates": of(Several, lr=0.1),
    "a momentum under its setting": of(ByRate, lr=0.1, momentum=0.9),
}
REDUCING: dict[str, Make] = {
    "adafactor": of(torch.optim.Adafactor, lr=0.1, weight_decay=0.1),
    "muon": matrices,
    "lamb": of(Lamb),
    "numbers read by item": of(Stable),
    "a number made by float": of(Converts, lr=0.1),
    "state in lists": of(Listed, lr=0.1),
    "a phase in the state": of(PhaseInState, lr=0.1),
    "a limit on the norm of all gradients": of(ClipsAll, lr=0.1),
    "that limit, over two groups": clipped_groups,
}
OPTIMIZERS = ELEMENTWISE | REDUCING


def captured(make: Make, dtype: torch.dtype = torch.float64) -> tuple[Program, list[Any]]:
    torch.manual_seed(0)
    model = mlp().to(dtype)
    data = [tuple(x.to(dtype) for x in vectors()) for _ in range(7)]
    return capture(mse_step, model, make(model), data[0]), data


def assert_equal(program: Program, state: dict[int, Any], ends: dict[int, Any]) -> None:
    assert state.keys() == ends.keys()
    for value, end in ends.items():
        torch.testing.assert_close(
            state[value], end, rtol=1e-9, atol=1e-11, msg=lambda m, v=value: f"{v}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_update_is_what_the_class_computes(name: str) -> None:
    program, data = captured(OPTIMIZERS[name])
    losses, state = run(program, data)
    expected, ends = eager_steps(program, data, seed=0)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_equal(program, state, ends)
    assert g.from_json(g.to_json(program.graph)) == program.graph
    composite = any(op.body is not None for op in program.graph.ops)
    assert composite == (name in ELEMENTWISE)


@pytest.mark.slow
def test_transformers_adafactor() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    program, data = captured(of(optimization.Adafactor))
    losses, state = run(program, data)
    expected, ends = eager_steps(program, data, seed=0)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert_equal(program, state, ends)


RESUMED = ["rmsprop", "a count that is an int", "a count in the group", "adafactor", "lamb"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_existing_state_is_used(name: str) -> None:
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = OPTIMIZERS[name](model)
    data = [tuple(x.double() for x in vectors()) for _ in range(4)]
    for batch in data:
        optimizer.zero_grad()
        mse_step(model, batch).backward()
        optimizer.step()
    program = capture(mse_step, model, optimizer, data[0])
    _, state = run(program, data)
    _, ends = eager_steps(program, data, seed=0)
    assert_equal(program, state, ends)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["radam", "adafactor", "a count that is an int"])
def test_the_learning_rate_may_change(name: str) -> None:
    program, data = captured(OPTIMIZERS[name])
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    state = begin(program)
    for number, batch in enumerate(data):
        for each in (program.optimizer, optimizer):
            each.param_groups[0]["lr"] = 0.02 * (3 - number) if number < 3 else 0.0
        optimizer.zero_grad()
        loss = mse_step(model, batch)
        loss.backward()
        optimizer.step()
        assert run_graph(program, batch, state, 0, number) == pytest.approx(float(loss.detach()))


def test_a_setting_that_chose_a_branch_must_stay() -> None:
    program, _ = captured(of(torch.optim.RMSprop, momentum=0.9))
    program.optimizer.param_groups[0]["momentum"] = 0.8
    check_settings(program)
    program.optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match=r"momentum of group 0 changed .* capture again"):
        check_settings(program)


def test_a_setting_that_state_is_kept_under_must_stay() -> None:
    program, _ = captured(of(ByRate, lr=0.1, momentum=0.9))
    program.optimizer.param_groups[0]["lr"] = 0.05
    check_settings(program)
    program.optimizer.param_groups[0]["momentum"] = 0.8
    with pytest.raises(ValueError, match=r"momentum of group 0 .*0\.9"):
        check_settings(program)


@pytest.mark.slow
def test_an_attribute_of_the_optimizer_must_stay() -> None:
    program, _ = captured(of(Lamb))
    program.optimizer.limit = 3.0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"limit of the optimizer was 10.0 .* is 3.0 now"):
        check_settings(program)


def test_bodies_of_equal_updates_are_shared() -> None:
    program, _ = captured(of(torch.optim.RMSprop))
    assert len(program.graph.bodies) == 1


@pytest.mark.slow
def test_how_torch_runs_an_update_does_not_change_it() -> None:
    program, _ = captured(of(torch.optim.Adadelta, capturable=True, foreach=True))
    plain, _ = captured(of(torch.optim.Adadelta))
    assert program.graph == plain.graph


@pytest.mark.slow
def test_half_precision_parameters_have_the_state_of_their_class() -> None:
    program, _ = captured(of(torch.optim.RMSprop), torch.bfloat16)
    kinds = {b.state: program.graph.values[v].dtype for v, b in program.bindings.items()}
    assert kinds["square_avg"] == "bfloat16" and kinds["step"] == "float32"


@pytest.mark.slow
def test_the_live_optimizer_is_not_touched() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = Lamb(model.parameters())
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    capture(mse_step, model, optimizer, vectors_of_a_seed())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-2
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def vectors_of_a_seed() -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of(torch.optim.LBFGS), "LBFGS cannot be captured: its step wants closure"),
        (of(torch.optim.SparseAdam), "SparseAdam cannot take a step .* consider Adam instead"),
        (of(Buffered, lr=0.1), "Buffered keeps buffer of a group from step to step"),
        (of(PhaseInGroup, lr=0.1), r"keeps phase .* use another .* a number .* in self\.state\["),
        (of(Noisy, lr=0.1), "the update of Noisy draws random numbers"),
    ],
)
def test_refusals(make: Make, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        captured(make)
