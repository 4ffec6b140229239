"""Both gradients of a convolution in one call: where, and that they are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compare_runs import compare
from graphs import captured, problem

from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context, kernel
from apportion.lower.join_conv_backward import (
    BOTH,
    FOR_INPUT,
    FOR_WEIGHT,
    convolutions,
    join_conv_backward,
)
from apportion.lower.lower import lower
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import verify
from apportion.search.baselines.data import data
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy, unsplit_choice

SPEC = "wresnet:tiny"


def kernels(space: Space, strategy: Strategy, devices: int) -> list[str]:
    tasks = runnable(space, strategy, devices)
    verify(tasks)
    return [work.op.kind for work in Executable(space, strategy, tasks).computes.values()]


@pytest.mark.slow
def test_a_device_of_data_parallelism_calls_once() -> None:
    program, space = captured(SPEC)
    strategy = data(problem(2, SPEC)).strategy
    both = len(list(convolutions(space.graph)))
    called = kernels(space, strategy, 2)
    assert both > 10 and called.count(BOTH) == 2 * both
    assert FOR_INPUT not in called and called.count(FOR_WEIGHT) == 2  # of the images no gradient
    assert compare(program, space, strategy, 2).equal


@pytest.mark.slow
def test_gradients_that_are_cut_otherwise_stay_two_calls() -> None:
    program, space = captured(SPEC)
    alone = tuple(unsplit_choice(space, k, (0,)) for k in range(len(space.graph.ops)))
    one, other = next(iter(convolutions(space.graph)))
    names = [axis.name for axis in space.axes(other)]
    cut = [axis.extent >= 2 for axis in space.axes(other)].index(True)
    parts = tuple(2 if k == cut else 1 for k in range(len(names)))
    choices = list(alone)
    choices[other] = Choice(parts, (0, 1))
    strategy = Strategy(tuple(choices))
    tasks = runnable(space, strategy, 2)
    joined = [] if not len(tasks.call) else tasks.call[(tasks.op == one) | (tasks.op == other)]
    assert max(joined, default=-1) < 0
    assert compare(program, space, strategy, 2).equal


def test_a_gradient_that_is_read_too_early_stays() -> None:
    _, space = captured(SPEC)
    alone = tuple(unsplit_choice(space, k, (0,)) for k in range(len(space.graph.ops)))
    strategy = Strategy(alone)
    tasks = lower(space, strategy, 1)
    one, _ = next(iter(convolutions(space.graph)))
    (row,) = (tasks.op == one).nonzero()[0].tolist()
    early = tasks.in_slot.copy()
    early[tasks.in_start[row - 1]] = tasks.out_slot[tasks.out_start[row]]
    assert join_conv_backward(space, strategy, tasks).call[row] >= 0
    assert join_conv_backward(space, strategy, replace(tasks, in_slot=early)).call[row] < 0


@pytest.mark.parametrize(("size", "stride"), [(7, 2), (8, 2), (5, 1)])
def test_the_kernel_makes_both(size: int, stride: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    out = torch.conv2d(x, weight, None, stride, 1)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (x, weight), grad)
    context = Context(0, 0, lambda expression: 1.0)
    settings = ((stride, stride), (1, 1), (1, 1), 1)
    found = kernel(BOTH)(context, (grad, x.detach(), weight.detach(), *settings))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_parts_that_read_one_gradient_have_a_call_each() -> None:
    """Both parts of the input's gradient on one device, those of the weight's on two."""
    program, space = captured(SPEC)
    choices = [unsplit_choice(space, k, (1,)) for k in range(len(space.graph.ops))]
    one, other = next(iter(convolutions(space.graph)))
    for op, devices in ((one, (1, 1)), (other, (1, 0))):
        names = [axis.name for axis in space.axes(op)]
        parts = tuple(2 if name == "c" else 1 for name in names)  # channels of the input
        choices[op] = Choice(parts, devices)
    strategy = Strategy(tuple(choices))
    assert BOTH not in [
        work.op.kind
        for work in Executable(space, strategy, runnable(space, strategy, 2)).computes.values()
        if work.op.name in (space.graph.ops[one].name, space.graph.ops[other].name)
    ]
    assert compare(program, space, strategy, 2).equal
