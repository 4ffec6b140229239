"""Fused updates beside compiled pieces, and what changes from step to step as tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import context_of
from torch import nn

from apportion.capture.capture import capture
from apportion.capture.counter_random import word_table
from apportion.capture.program import state_tensor
from apportion.execute.executable import Executable
from apportion.execute.inductor import kernel_by_kernel
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment, rank_steps
from apportion.execute.segment_cut import UPDATES, cut
from apportion.execute.step_words import StepRates, StepWords
from apportion.execute.update_calls import update_calls
from apportion.graph import PARAMETER, UPDATE, Graph
from apportion.lower.lower import lower
from apportion.memory.reorder import reorder, updates_early
from apportion.split.space import Space
from apportion.split.strategy import Strategy, unsplit_choice


def updates_of(optimizer: str, **settings: Any) -> tuple[Segment, list[Rank], Context]:
    """The updates of a small step, and two ranks with equal tensors for what they read. Gradients
    lie transposed in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **settings)
    program = capture(lambda m, x: m(x).square().sum(), model, made, torch.randn(5, 3))
    space = Space(program.graph)
    strategy = Strategy(tuple(unsplit_choice(space, k, [0]) for k in range(len(space.graph.ops))))
    executable = Executable(space, strategy, lower(space, strategy, 1))
    (whole,) = (s for s in rank_steps(executable, 0) if isinstance(s, Segment))
    (own,) = (p.segment for p in cut(executable, whole, "cpu") if p.kind == UPDATES)
    ranks = [Rank(executable, 0), Rank(executable, 0)]
    for slot in own.ins:
        spec = executable.slots[slot]
        drawn = torch.rand(spec.shape, dtype=spec.dtype)
        for rank in ranks:
            own_copy = drawn.clone()
            rank.tensors[slot] = own_copy if slot in executable.begin else _transposed(own_copy)
    return own, ranks, context_of(program, 0, 0)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() if x.dim() == 2 else x


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"weight_decay": 0.01, "maximize": True}),
        ("AdamW", {"amsgrad": True}),
    ],
)
def test_updates_are_those_of_the_bodies(optimizer: str, settings: dict[str, Any]) -> None:
    own, (fused, plain), context = updates_of(optimizer, **settings)
    begun = {slot: fused.tensors[slot] for slot in own.ins}
    rates = StepRates("cpu")
    rates.fill(context.setting)
    update_calls(fused.executable, own)(fused, replace(context, rates=rates))
    for task in own.tasks:
        plain.run(task, context)
    assert fused.tensors.keys() == plain.tensors.keys()
    for slot, tensor in plain.tensors.items():
        torch.testing.assert_close(fused.tensors[slot], tensor, rtol=1e-5, atol=1e-7)
    for end, begin in fused.executable.carry:
        assert fused.tensors[end] is begun[begin]


def _updates_first(graph: Graph) -> list[int]:
    """An order in which updates come first, and what reads parameters last."""

    def when(op: int) -> tuple[bool, bool, int]:
        roles = [graph.values[value].role for value in graph.ops[op].inputs]
        return graph.ops[op].phase != UPDATE, PARAMETER in roles, op

    order: list[int] = []
    left = list(range(len(graph.ops)))
    while left:
        ready = [
            op
            for op in left
            if all(
                (made := graph.producer[value]) is None or made[0] in order
                for value in graph.ops[op].inputs
            )
        ]
        order.append(min(ready, key=when))
        left.remove(order[-1])
    return order


class Scales(nn.Module):
    """What each scale makes is scaled by the next: the gradient of its input reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x


def test_an_update_comes_before_the_last_reader_of_its_parameter() -> None:
    """It is not put off beyond that, since then the old parameter is gone."""
    torch.manual_seed(0)
    model = Scales()
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(5, 4, dtype=torch.float64)
    program = capture(lambda m, x: m(x).square().sum(), model, made, batch)
    graph = reorder(program.graph, _updates_first(program.graph)).graph
    space = Space(graph)
    strategy = Strategy(tuple(unsplit_choice(space, k, [0]) for k in range(len(graph.ops))))
    executable = Executable(space, strategy, lower(space, strategy, 1))
    (whole,) = (s for s in rank_steps(executable, 0) if isinstance(s, Segment))
    pieces = cut(executable, whole, "cpu")
    assert sum(piece.kind == UPDATES for piece in pieces) > 1
    context = context_of(program, 0, 0)
    ranks = [Rank(executable, 0), Rank(executable, 0)]
    for rank in ranks:
        rank.load(lambda value: state_tensor(program, value).clone())
        (region,) = rank.inputs
        rank.tensors[region.slot] = batch
    kernel_by_kernel(executable, whole, "cpu")(ranks[0], context)
    for task in whole.tasks:
        ranks[1].run(task, context)
    for end, _ in executable.carry:
        torch.testing.assert_close(ranks[0].tensors[end], ranks[1].tensors[end])


def test_updates_that_come_early_hold_the_gradients_of_one_layer_at_most() -> None:
    """Put off further, gradients of many layers would lie beside each other, which a plan that
    updates early has no room for."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    program = capture(lambda m, x: m(x).square().sum(), model, made, torch.randn(5, 4))
    graph = reorder(program.graph, updates_early(program.graph)).graph
    space = Space(graph)
    strategy = Strategy(tuple(unsplit_choice(space, k, [0]) for k in range(len(graph.ops))))
    executable = Executable(space, strategy, lower(space, strategy, 1))
    (whole,) = (s for s in rank_steps(executable, 0) if isinstance(s, Segment))
    pieces = [p for p in cut(executable, whole, "cpu") if p.kind == UPDATES]
    assert [len(piece.segment.tasks) for piece in pieces] == [2, 2, 2, 2]


def test_words_and_rates_keep_their_addresses() -> None:
    words = StepWords("cpu")
    words.fill(5, 0)
    tables = [words.table((1, 2, 3)), words.table((7,))]
    words.settle()
    tables = [words.table((1, 2, 3)), words.table((7,))]
    words.fill(5, 9)
    assert torch.equal(tables[0], torch.from_numpy(word_table(5, 9, [1, 2, 3])))
    assert words(7)[0].data_ptr() == tables[1].data_ptr()
    assert words(7)[1] == word_table(5, 9, [7])[0, 1]

    settings = {("get", 1, "lr"): 0.5}
    rates = StepRates("cpu")
    rates.fill(settings.__getitem__)
    rate = rates(1)
    settings["get", 1, "lr"] = 0.25
    rates.fill(settings.__getitem__)
    assert rates(1) is rate
    assert rate == 0.25
