"""FlexFlow's recurrent text classifier: layers of LSTM cells, and a class for what they show
last."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.rnn import Cell, unroll

ABOUT = "four-layer LSTM that classifies random texts, unrolled: cross-entropy, SGD"
SOURCE = "Jia, Zaharia and Aiken, MLSys 2019 (FlexFlow)"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """FlexFlow's; the classes are those of movie reviews, good and bad."""

    layers: int = 4
    hidden: int = 1024
    steps: int = 40
    vocab: int = 20480
    classes: int = 2
    batch: int = 64


TINY = Settings(layers=2, hidden=8, steps=4, vocab=13, classes=3, batch=6)


class Classifier(nn.Module):
    """Tokens (batch, steps) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocab, settings.hidden)
        self.cells = nn.ModuleList(Cell(settings.hidden) for _ in range(settings.layers))
        self.head = nn.Linear(settings.hidden, settings.classes)

    def forward(self, tokens: Tensor) -> Tensor:
        xs = self.tokens(tokens).unbind(1)  # each batch, hidden
        for cell in self.cells:
            assert isinstance(cell, Cell)
            xs, _ = unroll(cell, xs, cell.begin(xs[0]))
        logits: Tensor = self.head(xs[-1])
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch."""
    tokens, classes = batch
    return F.cross_entropy(model(tokens), classes)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = Classifier(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(settings.vocab, (settings.batch, settings.steps))
    return model, optimizer, (tokens, torch.randint(settings.classes, (settings.batch,)))
