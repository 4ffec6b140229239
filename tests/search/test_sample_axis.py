"""Which dimension of the batch `data` cuts, and what it says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare_runs import compare
from torch import Tensor, nn

from apportion.capture import capture
from apportion.graph import INPUT
from apportion.machine import cluster, default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.baselines.sample_axis import micro_batches, sample_axis
from apportion.search.problem import Problem, SearchResult
from apportion.split import Space


class Words(nn.Module):
    """A language model by a recurrent layer that takes the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0])


def next_word(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:-1]).flatten(0, 1), batch[1:].flatten())


def encoded(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0])[-1], batch[1])


def problem(step: Any, model: nn.Module, batch: Any) -> Problem:
    program = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    where = cluster("local:2")
    return Problem(Space(program.graph), where, default_cost(where))


def cut_ops(it: Problem, found: SearchResult) -> int:
    return sum(max(choice.parts, default=1) > 1 for choice in found.strategy.choices)


@pytest.mark.slow
def test_samples_are_the_second_dimension_of_a_sequence_first_batch() -> None:
    it = problem(next_word, Words(), torch.randint(20, (7, 4)))
    found = data(it)
    assert cut_ops(it, found) > len(it.space.graph.ops) / 2
    assert sample_axis(it.space).extent == 4
    (note,) = found.notes
    assert "dimension 1 of the batch, of extent 4" in note


def test_samples_of_tensors_that_have_them_in_different_dimensions() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    it = problem(encoded, layer, (torch.randn(7, 4, 8), torch.randint(8, (4,))))
    axis = sample_axis(it.space)
    assert (axis.dim, axis.extent) in ((0, 4), (1, 4))
    assert cut_ops(it, data(it)) > len(it.space.graph.ops) / 2


def test_a_batch_with_its_samples_first_is_cut_as_ever_and_without_a_word() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    it = problem(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model,
                 (torch.randn(4, 8), torch.randint(8, (4,))))  # fmt: skip
    axis = sample_axis(it.space)
    assert (axis.dim, axis.extent, axis.note(2)) == (0, 4, "")
    assert data(it).notes == ()


def test_says_so_where_nothing_can_be_cut() -> None:
    it = problem(lambda m, b: m(b).square().mean(), nn.Linear(8, 8), torch.randn(1, 8))
    found = data(it)
    assert cut_ops(it, found) == 0
    assert found.notes and "data cuts nothing" in found.notes[0]
    assert "the batch has one sample; give a larger one" in found.notes[0]
    assert "fsdp cuts nothing" in fsdp(it).notes[0]


def test_says_so_where_devices_are_left_without_samples() -> None:
    it = problem(lambda m, b: m(b).square().mean(), nn.Linear(8, 8), torch.randn(3, 8))
    many = replace(it, cluster=cluster("local:4"))
    assert data(it).notes == () and fsdp(it).notes == ()
    (note,) = data(many).notes
    assert note.startswith("there are 3 samples for 4 devices: 1 of them compute nothing")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def by_chunks(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    return accumulated(model, optimizer, batch.chunk(2))


def by_slices(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    return accumulated(model, optimizer, [batch.clone()[k : k + 4] for k in (0, 4)])


def by_view(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    return accumulated(model, optimizer, batch.view(2, 4, 6))


def by_selection(model: nn.Module, optimizer: Any, batch: Tensor) -> Tensor:
    return accumulated(model, optimizer, [batch[k] for k in range(len(batch))])


def accumulated(model: nn.Module, optimizer: Any, parts: Any) -> Tensor:
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in parts:
        loss = F.mse_loss(model(part), part) / len(parts)
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


@pytest.mark.parametrize(
    ("step", "shape"),
    [(by_chunks, (8, 6)), (by_slices, (8, 6)), (by_view, (8, 6)), (by_selection, (2, 4, 6))],
)
def test_samples_of_micro_batches_are_cut(step: Any, shape: tuple[int, ...]) -> None:
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(step, model, optimizer, torch.randn(shape, dtype=torch.float64))
    where, space = cluster("local:2"), Space(program.graph)
    found = data(Problem(space, where, default_cost(where)))
    cuts = [
        max(choice.parts)
        for op, choice in zip(program.graph.ops, found.strategy.choices, strict=True)
        if op.kind == "aten.tanh.default"
    ]
    assert cuts == [2, 2]
    assert sample_axis(space).share > 0.4
    assert compare(program, space, found.strategy, 2).equal


def test_a_shifted_batch_is_not_taken_apart() -> None:
    it = problem(next_word, Words(), torch.randint(20, (7, 4)))
    classes = frozenset(it.space.atoms.value_classes[_input(it)][:1])
    assert micro_batches(it.space, classes) == classes


def _input(it: Any) -> int:
    return next(k for k, v in enumerate(it.space.graph.values) if v.role == INPUT)
