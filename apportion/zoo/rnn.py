"""Tofu's recurrent language model: layers of LSTM cells, unrolled over the steps in plain
operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "multi-layer LSTM on random tokens, unrolled: cross-entropy, Adam"

Batch = tuple[Tensor, Tensor]


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
    """An LSTM cell; the four gates are blocks of one Linear of the input and one of the state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(hidden, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        keep, write, new, show = (self.input(x) + self.state(h)).chunk(4, dim=1)
        c = torch.sigmoid(keep) * c + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(c), c


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
            h = c = torch.zeros_like(xs[0])
            ys = []
            for x in xs:
                h, c = cell(x, h, c)
                ys.append(h)
            xs = tuple(ys)
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
