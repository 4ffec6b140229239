"""Execution: all ranks in one process give the single device's losses, parameters and state."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from compare_runs import REFERENCE, Corrupt, compare
from graphs import Maker, captured, context_of, problem, start, step
from torch import nn

from apportion.capture.capture import (
    capture,
)
from apportion.capture.program import (
    batch_leaves,
)
from apportion.capture.reference import (
    capture_as,
)
from apportion.execute import run_part as parts
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.rank import Rank, combine, gather, run_together
from apportion.lower.runnable import runnable
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Choice, Layout, Strategy, unsplit_choice

# Any legal strategy


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_random_strategies_train_the_same_mlp(devices: int) -> None:
    program, space = captured("mlp:tiny")
    for seed in range(14):
        strategy = draw(space, devices, Random(100 * devices + seed))
        found = compare(program, space, strategy, devices, seed=seed % 3)
        assert found.equal, (devices, seed, found)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_random_strategies_train_the_same_gpt2(devices: int) -> None:
    program, space = captured("gpt2:tiny")
    for seed in range(4):
        strategy = draw(space, devices, Random(1000 * devices + seed))
        found = compare(program, space, strategy, devices, seed=seed % 2)
        assert found.equal, (devices, seed, found)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny"])
def test_data_parallelism_trains_the_same_model_for_several_steps(spec: str) -> None:
    program, space = captured(spec)
    found = compare(program, space, data(problem(3, spec)).strategy, 3, steps=4)
    assert found.equal, found


def test_a_strategy_can_leave_devices_without_work() -> None:
    program, space = captured("mlp:tiny")
    ops = range(len(space.graph.ops))
    assert compare(
        program, space, Strategy(tuple(unsplit_choice(space, o, (1,)) for o in ops)), 3
    ).equal


class Odd(nn.Module):
    """Frozen parameters, buffers that change and that do not, a constant, and views that
    disagree."""

    constant: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("constant", torch.randn(4))
        self.register_buffer("last", torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x.reshape(-1))
        y = self.frozen(self.linear(x)) * self.constant + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y.reshape(12) * self.last.reshape(4, 3).cos().reshape(12)


@pytest.mark.slow
def test_state_that_is_not_trained_survives_the_steps() -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    program = capture_as(capture(loss, model, optimizer, torch.randn(3, 4)), torch.float64)
    space = Space(program.graph)
    for seed in range(15):
        found = compare(program, space, draw(space, 3, Random(seed)), 3, steps=3)
        assert found.equal, (seed, found)


# A planted error


def one_element_off(executable: Executable, rng: Random) -> Corrupt:
    """Adds 1 to one element of one message, in every step."""
    chosen = rng.randrange(len(executable.messages))
    element = rng.randrange(executable.messages[chosen].nbytes // 8)
    assert {copy.dtype for copy in executable.packed[chosen]} == {torch.float64}

    def corrupt(number: int, message: torch.Tensor) -> torch.Tensor:
        if number == chosen:
            message = message.clone()
            message.view(torch.float64)[element] += 1.0
        return message

    return corrupt


@pytest.mark.slow
def test_a_planted_error_is_found() -> None:
    """Measured: 82 of 100. Every miss is an element that leaves no trace in what survives the step.

    Put NaN in its place and follow it: 10 lie where no consumer reads the copy (a random Layout or
    replica put it there), 6 are gradients that threshold_backward drops, since the ReLU was off,
    and 2 are factors that meet only the zeros of a ReLU.
    """
    program, space = captured("mlp:tiny")
    found = 0
    for seed in range(100):
        rng = Random(seed)
        strategy = draw(space, 3, rng)
        executable = Executable(space, strategy, runnable(space, strategy, 3))
        corrupt = one_element_off(executable, rng)
        found += not compare(program, space, strategy, 3, seed=1, corrupt=corrupt).equal
    assert found >= 75


# The interpreter


def run_once(make: Maker, strategy: Strategy, devices: int, **inputs: torch.Tensor) -> list[Rank]:
    """The tasks of a hand-made Graph, up to the end of the step."""
    space = make.space()
    executable = Executable(space, strategy, runnable(space, strategy, devices))
    ranks = [Rank(executable, device) for device in range(devices)]
    tensors = {int(name[1:]): tensor for name, tensor in inputs.items()}
    for rank in ranks:
        rank.load(lambda value: tensors[value])
        rank.feed(lambda value: tensors[value])
    run_together(ranks, Context(0, 0, float))
    return ranks


@pytest.mark.parametrize(
    ("kind", "args", "reference"),
    [
        ("aten.sum.dim_IntList", ((0,), False, None), lambda x: x.sum(0)),
        ("aten.amax.default", ((0,), False), lambda x: x.amax(0)),
        ("aten.amin.default", ((0,), False), lambda x: x.amin(0)),
        ("aten.prod.dim_int", (0, False, None), lambda x: x.prod(0)),
        ("aten.mean.dim", ((0,), False, None), lambda x: x.mean(0)),
    ],
)
@pytest.mark.parametrize("layout", [Layout((2,), (0, 1)), Layout((1,), (2,)), None])
def test_partial_values_are_combined_by_their_reducer(
    kind: str, args: Any, reference: Any, layout: Layout | None
) -> None:
    make = Maker()
    x, old = make.value(7, 4), make.value(4, role="buffer")
    new = make.op(kind, x, *args, out=(4,))
    make.survives(old, new)
    space = make.space()
    (place,) = [k for k, axis in enumerate(space.axes(0)) if axis.name == "k0"]
    parts = tuple(3 if k == place else 1 for k in range(2))
    strategy = Strategy((Choice(parts, (2, 0, 1)),), {} if layout is None else {old.index: layout})
    tensor = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    ranks = run_once(make, strategy, 3, v0=tensor, v1=torch.zeros(4))
    # elements are about 1 in float32, and their sums may cancel
    assert torch.allclose(gather(ranks)[old.index], reference(tensor), atol=1e-6)


def test_terms_are_added_in_rising_order_wherever_they_are_added() -> None:
    """So that replicas are bit-equal: (1e8 + 1) - 1e8 is 0 or 8 in float32, never something
    else."""
    make = Maker()
    x, old = make.value(3, 2), make.value(2, role="buffer")
    make.survives(old, make.op("aten.sum.dim_IntList", x, (0,), False, None, out=(2,)))
    strategy = Strategy((Choice((1, 3), (2, 1, 0)),), {old.index: Layout((1,), (0, 1, 2))})
    tensor = torch.tensor([[1e8, 1.0], [3.0, 1e8], [-1e8, -1e8]])
    ranks = run_once(make, strategy, 3, v0=tensor, v1=torch.zeros(2))
    expected = (tensor[0] + tensor[1]) + tensor[2]
    for rank in ranks:
        ((_, found),) = rank.state().values()
        assert torch.equal(found, expected)


def test_a_rank_holds_only_what_its_plan_gives_it() -> None:
    program, space = captured("mlp:tiny")
    strategy = draw(space, 3, Random(5))
    tasks, ranks = start(program, space, strategy, 3)
    for rank in ranks:
        for slot, tensor in rank.tensors.items():
            assert tasks.slot_device[slot] == rank.device
            assert tensor.untyped_storage().nbytes() == tasks.slot_nbytes[slot]
    step(program, ranks, program.batch, 0, 0)
    state = {int(s) for s in tasks.carry[:, 1]}
    for rank in ranks:
        assert rank.tensors.keys() == {s for s in state if tasks.slot_device[s] == rank.device}
        for slot, tensor in rank.tensors.items():
            assert tensor.untyped_storage().nbytes() == tasks.slot_nbytes[slot]


def test_a_batch_function_is_asked_for_regions_only() -> None:
    program, space = captured("mlp:tiny")
    _, ranks = start(program, space, data(problem(3)).strategy, 3)
    leaves = batch_leaves(program, program.batch)
    asked: list[tuple[int, tuple[int, ...]]] = []

    def ask(value: int, region: tuple[slice, ...]) -> torch.Tensor:
        tensor = leaves[value][region]
        asked.append((value, tuple(tensor.shape)))
        return tensor

    for rank in ranks:
        rank.feed_regions(ask)
    loss = run_together(ranks, context_of(program, 0, 0))
    assert sorted(rows for _, (rows, _) in asked) == [2, 2, 2, 2, 3, 3]
    assert float(loss or 0) == pytest.approx(REFERENCE.of(program, 0)[0][0], rel=1e-12)
    with pytest.raises(ValueError, match=r"returned \[1\] for 'batch\.0', asked for"):
        ranks[0].feed_regions(lambda value, region: torch.zeros(1))


def test_a_kernel_that_makes_another_shape_than_described_is_reported() -> None:
    make = Maker()
    x = make.value(4, 6)
    make.op("aten.as_strided.default", x, (4, 6), (6, 1), None, out=(6, 4))  # it makes (4, 6)
    space = make.space()
    strategy = Strategy((unsplit_choice(space, 0, (0,)),))
    with pytest.raises(RuntimeError, match=r"the kernel made \[4, 6\] where .* says \[6, 4\]"):
        run_once(make, strategy, 1, v0=torch.randn(4, 6))


def test_only_known_reducers_combine() -> None:
    with pytest.raises(AssertionError, match="no reducer"):
        combine(None, torch.zeros(1), torch.zeros(1))


def test_a_scale_never_touches_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may hand back its input; the part's scale must then make a new tensor."""
    space = captured("mlp:tiny")[1]
    index = next(i for i, op in enumerate(space.graph.ops) if op.kind == "aten.relu.default")
    op = space.graph.ops[index]
    part = space.split(index, [1] * len(space.axes(index))).parts[0]
    monkeypatch.setattr(parts, "kernel", lambda kind: lambda context, args: (args[0],))
    x = torch.ones(space.graph.values[op.inputs[0]].shape or ())
    context = Context(0, 0, lambda expression: 1.0)
    (made,) = parts.run_part(space, op, replace(part, scales=(0.5,)), [x], context)
    assert made.eq(0.5).all() and x.eq(1.0).all()
