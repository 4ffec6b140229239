"""GNMT: a bidirectional layer below deep LSTMs with residuals; the bottom of the decoder looks at
the encoder, and all of its layers are told what it saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.nmt import Batch, sentences, step
from apportion.zoo.rnn import Cell, unroll

ABOUT = "Google's translator on random sentences, unrolled: residual LSTMs, cross-entropy, Adam"
SOURCE = "Wu et al., arXiv 1609.08144 (GNMT)"

__all__ = ["ABOUT", "SOURCE", "TINY", "Settings", "build", "step"]


@dataclass(frozen=True, slots=True)
class Settings:
    """GNMT's, of which GDP has 2, 4 and 8 `layers` (in the encoder, and as many in the decoder);
    `source` and `target` are the lengths of the sentences."""

    layers: int = 8
    hidden: int = 1024
    source: int = 40
    target: int = 40
    vocab: int = 32000
    batch: int = 128
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise ValueError(f"layers={self.layers} is below 2")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")


TINY = Settings(layers=3, hidden=8, source=3, target=2, vocab=14, batch=6)


class Encoder(nn.Module):
    """Words, each (batch, hidden), to what the top layer shows of each."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.dropout = settings.dropout
        self.ahead, self.back = Cell(hidden), Cell(hidden)
        self.second = Cell(hidden, 2 * hidden)
        self.deep = nn.ModuleList(Cell(hidden) for _ in range(settings.layers - 2))

    def forward(self, words: Sequence[Tensor]) -> Tensor:
        words = self._dropped(words)
        ahead, _ = unroll(self.ahead, words, self.ahead.begin(words[0]))
        back, _ = unroll(self.back, words[::-1], self.back.begin(words[0]))
        both = [torch.cat(pair, dim=1) for pair in zip(ahead, reversed(back), strict=True)]
        xs, _ = unroll(self.second, self._dropped(both), self.second.begin(both[0]))
        for cell in self.deep:
            assert isinstance(cell, Cell)
            ys, _ = unroll(cell, self._dropped(xs), cell.begin(xs[0]))
            xs = [x + y for x, y in zip(xs, ys, strict=True)]
        return torch.stack(xs, dim=1)  # batch, source, hidden

    def _dropped(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return [F.dropout(x, self.dropout, self.training) for x in xs]


class Attention(nn.Module):
    """A network with one hidden layer scores each source word for one query (batch, hidden)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.query(query).unsqueeze(1) + keys))
        weights = F.softmax(scores, dim=1)  # batch, source, 1
        return (weights * memory).sum(1)


class Decoder(nn.Module):
    """Words, each (batch, hidden), and the encoder's memory to what the top layer shows."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.dropout = settings.dropout
        self.attention = Attention(hidden)
        self.cells = nn.ModuleList(Cell(hidden, 2 * hidden) for _ in range(settings.layers))

    def forward(self, words: Sequence[Tensor], memory: Tensor) -> Tensor:
        bottom, *rest = self.cells
        assert isinstance(bottom, Cell)
        keys, state = self.attention.key(memory), bottom.begin(words[0])
        xs, contexts = [], []
        for word in words:
            contexts.append(self.attention(state[0], keys, memory))
            state = bottom(self._input(word, contexts[-1]), *state)
            xs.append(state[0])
        for depth, cell in enumerate(rest):
            assert isinstance(cell, Cell)
            inward = [self._input(x, seen) for x, seen in zip(xs, contexts, strict=True)]
            ys, _ = unroll(cell, inward, cell.begin(xs[0]))
            xs = [x + y for x, y in zip(xs, ys, strict=True)] if depth else ys
        return torch.stack(xs, dim=1)  # batch, target, hidden

    def _input(self, x: Tensor, context: Tensor) -> Tensor:
        return F.dropout(torch.cat([x, context], dim=1), self.dropout, self.training)


class GNMT(nn.Module):
    """Source (batch, source) and target tokens (batch, target) to logits (batch, target, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.source = nn.Embedding(settings.vocab, settings.hidden)
        self.target = nn.Embedding(settings.vocab, settings.hidden)
        self.encoder, self.decoder = Encoder(settings), Decoder(settings)
        self.head = nn.Linear(settings.hidden, settings.vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source(source).unbind(1))
        logits: Tensor = self.head(self.decoder(self.target(target).unbind(1), memory))
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = GNMT(settings)
    bound = 0.04 * math.sqrt(1024 / settings.hidden)  # the paper has 1024 units
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -bound, bound)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    return (
        model,
        optimizer,
        sentences(settings.vocab, settings.batch, settings.source, settings.target),
    )
