"""Batch norm as a chain of Ops with its statistics between them, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_capture import run as run_steps
from torch import Tensor, nn

from apportion.capture.capture import capture
from apportion.capture.optimizer import setting_value
from apportion.capture.program import Program, batch_leaves, state_tensor
from apportion.capture.reference import eager_steps
from apportion.execute.kernels.base import (
    Context,
    dtype,
    kernel,
)
from apportion.graph import INPUT
from apportion.run.vary_batch import vary
from apportion.split.space import Space
from apportion.verify.run_split import check_op, run_op

SHAPES = [(6, 3), (5, 3, 4), (4, 3, 5, 2), (2, 3, 2, 3, 2)]


def context(program: Program | None = None) -> Context:
    if program is None:
        return Context(0, 0, float)
    return Context(0, 0, lambda e: setting_value(program.optimizer, e), program.graph.bodies)


def run(kind: str, *args: Any) -> tuple[Tensor, ...]:
    return kernel(kind)(context(), args)


def random(*shape: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_batch_norm_and_its_gradients(shape: Any, affine: bool) -> None:
    x, grad = random(*shape).requires_grad_(), random(*shape, seed=4)
    weight, bias = (random(3, seed=s).requires_grad_() if affine else None for s in (5, 6))
    out = F.batch_norm(x, None, None, weight, bias, training=True, eps=1e-3)
    leaves = [t for t in (x, weight, bias) if t is not None]
    wanted = torch.autograd.grad(out, leaves, grad)

    x, weight, bias = (None if t is None else t.detach() for t in (x, weight, bias))  # type: ignore[assignment]
    count = x.numel() // 3
    (total,) = run("apportion.channel_sum", x)
    (squares,) = run("apportion.channel_squares", x, total, count)
    (made,) = run("apportion.batch_norm", x, total, squares, weight, bias, count, 1e-3)
    torch.testing.assert_close(made, out)
    sums = run("apportion.batch_norm_reduce", grad, x, total, squares, count, 1e-3)
    (for_x,) = run(
        "apportion.batch_norm_backward", grad, x, total, squares, weight, *sums, count, 1e-3
    )
    torch.testing.assert_close([for_x, *([sums[1], sums[0]] if affine else [])], list(wanted))


def test_the_variance_is_as_exact_as_torchs() -> None:
    """Two passes: a mean a thousand deviations away costs no digits of the variance."""
    x = (random(64, 3, 8, 8) + 1000).float()
    exact = F.batch_norm(x.double(), None, None, training=True)
    count = x.numel() // 3
    (total,) = run("apportion.channel_sum", x)
    (squares,) = run("apportion.channel_squares", x, total, count)
    (made,) = run("apportion.batch_norm", x, total, squares, None, None, count, 1e-5)
    theirs = F.batch_norm(x, None, None, training=True)
    assert (made - exact).abs().max() <= 4 * (theirs - exact).abs().max()


class Net(nn.Module):
    def __init__(self, norm: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.conv: nn.Module = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d][rank](2, 3, *[1][:rank])
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out.sigmoid()


def step(model: nn.Module, batch: Tensor) -> Tensor:
    weights = torch.arange(batch.numel() // 2 * 3, dtype=batch.dtype)
    out = model(batch).flatten()
    return (out * weights).mean()  # a mean of normalised numbers alone would have no gradient


def captured(norm: nn.Module, rank: int = 2, kind: torch.dtype = torch.float64) -> Program:
    torch.manual_seed(0)
    model = Net(norm, rank).to(kind)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(step, model, optimizer, random(5, 2, *[4, 3, 2][:rank]).to(kind))


def run_graph(program: Program) -> tuple[float, dict[int, Tensor]]:
    """One step of the Graph, op by op: the loss, and what each state ends with."""
    graph, known = program.graph, {}
    batch = batch_leaves(program, program.batch)
    for value, made in enumerate(graph.producer):
        if made is None and value in program.constants:
            known[value] = program.constants[value]
        elif made is None:
            role = graph.values[value].role
            known[value] = batch[value] if role == INPUT else state_tensor(program, value)
    for op in graph.ops:
        results = run_op(op, op.args, [known[v] for v in op.inputs], context(program))
        for value, result in zip(op.outputs, results, strict=False):
            expected = graph.values[value]
            assert result.shape == expected.shape and result.dtype == dtype(expected.dtype or "")
            known[value] = result
    assert graph.loss is not None
    return float(known[graph.loss]), {a: known[b] for a, b in graph.state}


NORMS = {
    "1d rows": (0, lambda: nn.BatchNorm1d(3)),
    "1d": (1, lambda: nn.BatchNorm1d(3, eps=1e-2)),
    "2d": (2, lambda: nn.BatchNorm2d(3)),
    "3d": (3, lambda: nn.BatchNorm3d(3, momentum=0.3)),
    "without parameters": (2, lambda: nn.BatchNorm2d(3, affine=False)),
    "without running statistics": (2, lambda: nn.BatchNorm2d(3, track_running_stats=False)),
    "with given statistics": (2, lambda: nn.BatchNorm2d(3).eval()),
    "with an average of all batches": (2, lambda: nn.BatchNorm2d(3, momentum=None)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    rank, make = NORMS[name]
    program = captured(make(), rank)
    losses, state = eager_steps(program, [program.batch], seed=0)
    loss, after = run_graph(program)
    assert loss == pytest.approx(losses[0], rel=1e-12)
    for value, tensor in after.items():
        torch.testing.assert_close(tensor, state[value], rtol=1e-11, atol=1e-13)
    assert len(after) >= 2 + 2 * (name == "2d")


@pytest.mark.parametrize("name", NORMS)
def test_every_split_of_the_step_is_right(name: str) -> None:
    rank, make = NORMS[name]
    program = captured(make(), rank)
    space = Space(program.graph)
    assert space.undescribed == {}
    for index, op in enumerate(program.graph.ops):
        if "norm" in op.kind or "channel" in op.kind:
            shapes = [program.graph.values[v].shape or () for v in op.inputs]
            tensors = [random(*shape, seed=k).abs() for k, shape in enumerate(shapes)]
            cut = [
                a.name
                for a, able in zip(space.axes(index), space.cuttable(index), strict=True)
                if able
            ]
            assert len(cut) == rank + 2, op.kind
            wrong = [str(f) for f in check_op(space, index, tensors, context()) if not f.right]
            assert not wrong, wrong


def test_every_part_normalises_by_the_whole_batch() -> None:
    program = captured(nn.BatchNorm2d(3))
    space = Space(program.graph)
    kinds = {op.kind: index for index, op in enumerate(program.graph.ops)}
    for kind, place in (
        ("channel_squares", 2), ("batch_norm", 5), ("batch_norm_reduce", 4),
        ("batch_norm_backward", 7),
    ):  # fmt: skip
        index = kinds[f"apportion.{kind}"]
        parts = [2 if a.name == "i0" else 1 for a in space.axes(index)]
        split = space.split(index, parts)
        assert [p.args[place] for p in split.parts] == [5 * 4 * 3] * 2
        assert all(p.scales == (1.0,) * len(p.outputs) for p in split.parts)
    assert split.reducers == (None,)
    index = kinds["apportion.batch_norm_reduce"]
    parts = [2 if a.name == "i0" else 1 for a in space.axes(index)]
    assert space.split(index, parts).reducers == ("sum", "sum")


def test_nobody_reads_what_torch_saves_for_the_backward() -> None:
    kinds = [op.kind for op in captured(nn.BatchNorm2d(3)).graph.ops]
    assert not any("native_batch_norm" in kind for kind in kinds)
    assert "aten.rsqrt.default" not in kinds


def test_halves_have_statistics_in_single() -> None:
    program = captured(nn.BatchNorm2d(3), kind=torch.bfloat16)
    losses, state = eager_steps(program, [program.batch], seed=0)
    loss, after = run_graph(program)
    assert loss == pytest.approx(losses[0], rel=0.02)
    for value, tensor in after.items():
        torch.testing.assert_close(tensor, state[value], rtol=0.1, atol=0.05)


def test_a_cumulative_average_weighs_all_batches_alike() -> None:
    """torch reads the number of batches as a Python number to compute it."""
    program = captured(nn.BatchNorm2d(3, momentum=None))
    batches = [vary(program.batch, 0, number) for number in range(3)]
    losses, state = eager_steps(program, batches, seed=0)
    found, after = run_steps(program, batches)
    assert found == pytest.approx(losses, rel=1e-12)
    for value, tensor in after.items():
        torch.testing.assert_close(tensor, state[value], rtol=1e-11, atol=1e-13)
    assert {program.graph.values[v].name for v in after} >= {
        "norm.running_mean",
        "norm.running_var",
    }
