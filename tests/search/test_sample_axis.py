"""Which dimension of the batch `data` cuts, and what it says of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.capture import capture
from apportion.machine import cluster, default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.sample_axis import sample_axis
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
    assert (axis.dim, axis.extent, axis.note) == (0, 4, "")
    assert data(it).notes == ()


def test_says_so_where_nothing_can_be_cut() -> None:
    it = problem(lambda m, b: m(b).square().mean(), nn.Linear(8, 8), torch.randn(1, 8))
    found = data(it)
    assert cut_ops(it, found) == 0
    assert found.notes and "data cuts nothing" in found.notes[0]
