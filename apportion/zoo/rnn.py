"""Tofu's recurrent language model: layers of LSTM cells, unrolled over the steps in plain
operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "multi-layer LSTM on random tokens, unrolled: cross-entropy, Adam"
SOURCE = "Wang, Huang and Li, EuroSys 2019 (Tofu); Jozefowicz et al., arXiv 1602.02410"

Batch = tuple[Tensor, Tensor]
State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """`layers` LSTM cells of `hidden` units, unrolled over `steps` tokens; `batch` samples."""

    layers: int = 4
    hidden: int = 1024
    steps: int = 20
    vocab: int = 10000
    batch: int = 64


TINY = Settings(layers=2, hidden=6, steps=3, vocab=11, batch=5)


class Cell(nn.Module):
    """An LSTM cell; the four gates are blocks of one Linear of the input and one of the state.
    The input has `inward` units, or `hidden`."""

    def __init__(self, hidden: int, inward: int | None = None) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(hidden if inward is None else inward, 4 * hidden)
        self.state = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> State:
        keep, write, new, show = (self.input(x) + self.state(h)).chunk(4, dim=1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(c), c

    def begin(self, x: Tensor) -> State:
        """A state of zeros for inputs like x."""
        return (x.new_zeros(x.shape[0], self.hidden),) * 2


def unroll(cell: nn.Module, xs: Sequence[Tensor], state: State) -> tuple[list[Tensor], State]:
    """What a cell shows for each input (batch, units) in turn, and the state it ends in."""
    ys = []
    for x in xs:
        state = cell(x, *state)
        ys.append(state[0])
    return ys, state


class RNN(nn.Module):
    """Tokens (batch, steps) to logits (batch, steps, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocab, settings.hidden)
        self.cells = nn.ModuleList(Cell(settings.hidden) for _ in range(settings.layers))
        self.head = nn.Linear(settings.hidden, settings.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        xs = self.tokens(tokens).unbind(1)  # each batch, hidden
        for cell in self.cells:
            zeros = torch.zeros_like(xs[0])
            xs, _ = unroll(cell, xs, (zeros, zeros))
        logits: Tensor = self.head(torch.stack(xs, dim=1))
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every token predicts the next."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = RNN(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = torch.randint(settings.vocab, (settings.batch, settings.steps + 1))
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
