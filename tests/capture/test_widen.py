"""widened: the same Ops and Values in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_capture import run
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import eager_steps
from apportion.capture.wide_mode import computing_wide
from apportion.capture.widen import widened
from apportion.graph import Graph, verify


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))


def mixed(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch), torch.arange(5) % 3)


def program(optimizer: Any = torch.optim.SGD) -> Program:
    model = net()
    return capture(mixed, model, optimizer(model.parameters(), lr=0.1), torch.randn(5, 4))


def assert_same_step(wide: Graph, graph: Graph) -> None:
    assert [op.name for op in wide.ops] == [op.name for op in graph.ops]
    assert [op.inputs for op in wide.ops] == [op.inputs for op in graph.ops]
    assert [v.shape for v in wide.values] == [v.shape for v in graph.values]


def test_autocast_is_widened() -> None:
    made = program()
    assert {"bfloat16", "float32"} <= {v.dtype for v in made.graph.values}
    wide = widened(made.graph)
    verify(wide)
    assert_same_step(wide, made.graph)
    assert {v.dtype for v in wide.values} <= {"float64", "int64", "bool"}
    double = replace(made, graph=wide, model=made.model.double(), batch=made.batch.double())
    losses, state = run(double, [double.batch] * 2)
    expected, ends = eager_steps(double, [double.batch] * 2, seed=0)
    assert losses == pytest.approx(expected, rel=1e-12)
    for value, tensor in ends.items():
        torch.testing.assert_close(state[value], tensor, rtol=1e-12, atol=1e-14)


def test_eager_steps_run_wide_and_leave_everything_as_it_was() -> None:
    made = program(torch.optim.AdamW)
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    narrow, _ = eager_steps(made, [made.batch] * 2, seed=0)
    losses, ends = eager_steps(made, [made.batch] * 2, seed=0, wide=True)
    assert losses == pytest.approx(narrow, rel=0.02) and losses != narrow
    assert {end.dtype for end in ends.values()} == {torch.float64}
    after = made.model.state_dict()
    assert all(torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items())
    assert not made.optimizer.state and torch.get_default_dtype() is torch.float32


def test_the_count_of_a_fused_update_stays() -> None:
    made = program(torch.optim.AdamW)
    counts = [v for v in widened(made.graph).values if v.name.rstrip("'").endswith(":step")]
    assert counts and {v.dtype for v in counts} == {"float32"}


@pytest.mark.slow
def test_a_constant_that_the_step_found_is_widened() -> None:
    scale = torch.tensor([0.1, 0.2, 0.3])

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = model(batch)
        return (y @ scale).square().mean()

    model = net()
    made = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
    losses, _ = eager_steps(made, [made.batch], seed=0, wide=True)
    assert losses == pytest.approx(eager_steps(made, [made.batch], seed=0)[0], rel=1e-5)


def test_a_look_at_bits_is_refused() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        y: Tensor = model(batch)
        return y.square().mean() + (y.detach().view(torch.int32) > 0).float().mean()

    model = net()
    made = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4))
    with pytest.raises(ValueError, match=r"looks at the bits of a tensor \(at .*test_widen"):
        widened(made.graph)


@pytest.mark.parametrize("written", [torch.float32, torch.bfloat16])
def test_a_norm_in_float64_has_the_epsilon_that_torch_takes(written: torch.dtype) -> None:
    """For half precision that is float32's, which it computes in."""
    x = (1e-4 * torch.arange(1, 9)).to(written)
    with computing_wide(written):
        wide = torch.nn.functional.rms_norm(x.double(), (8,))
    narrow = torch.nn.functional.rms_norm(x, (8,))
    torch.testing.assert_close(wide.to(written), narrow, rtol=2 * torch.finfo(written).eps, atol=0)
