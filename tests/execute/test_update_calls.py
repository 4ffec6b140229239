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
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment, rank_steps
from apportion.execute.segment_cut import UPDATES, cut
from apportion.execute.step_words import StepRates, StepWords
from apportion.execute.update_calls import update_calls
from apportion.lower.lower import lower
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
