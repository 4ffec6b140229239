"""FlexFlow's translator: LSTM encoder and decoder, attention over what the encoder showed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.rnn import Cell, unroll

ABOUT = "LSTM encoder, decoder and attention on random sentences, unrolled: cross-entropy, SGD"
SOURCE = "Jia, Zaharia and Aiken, MLSys 2019 (FlexFlow); Luong et al., EMNLP 2015"

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """FlexFlow's: `layers` in the encoder and as many in the decoder; `source` and `target` are
    the lengths of the sentences, `vocab` is the number of words of each language."""

    layers: int = 2
    hidden: int = 1024
    source: int = 40
    target: int = 40
    vocab: int = 20480
    batch: int = 64


TINY = Settings(layers=2, hidden=8, source=4, target=3, vocab=13, batch=6)


class Attention(nn.Module):
    """Luong's, of the general kind: a bilinear score, then tanh of context and query."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        scores = queries @ self.score(memory).transpose(1, 2)  # batch, target, source
        context = F.softmax(scores, dim=2) @ memory
        return torch.tanh(self.mix(torch.cat([context, queries], dim=2)))


class Translator(nn.Module):
    """Source (batch, source) and target tokens (batch, target) to logits (batch, target, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        hidden, layers = settings.hidden, settings.layers
        self.source = nn.Embedding(settings.vocab, hidden)
        self.target = nn.Embedding(settings.vocab, hidden)
        self.encoder = nn.ModuleList(Cell(hidden) for _ in range(layers))
        self.decoder = nn.ModuleList(Cell(hidden) for _ in range(layers))
        self.attention = Attention(hidden)
        self.head = nn.Linear(hidden, settings.vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        xs, ys = self.source(source).unbind(1), self.target(target).unbind(1)
        for encode, decode in zip(self.encoder, self.decoder, strict=True):
            assert isinstance(encode, Cell) and isinstance(decode, Cell)
            xs, state = unroll(encode, xs, encode.begin(xs[0]))
            ys, _ = unroll(decode, ys, state)
        mixed = self.attention(torch.stack(ys, dim=1), torch.stack(xs, dim=1))
        logits: Tensor = self.head(mixed)
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every target token predicts the next."""
    source, target, following = batch
    return F.cross_entropy(model(source, target).flatten(0, 1), following.flatten())


def sentences(vocab: int, batch: int, source: int, target: int) -> Batch:
    """Random source tokens, target tokens, and the targets' next ones."""
    text = torch.randint(vocab, (batch, target + 1))
    words = torch.randint(vocab, (batch, source))
    return words, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = Translator(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return (
        model,
        optimizer,
        sentences(settings.vocab, settings.batch, settings.source, settings.target),
    )
