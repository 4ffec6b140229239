"""Transformer-XL: attention that also sees the segment before, by the distance between tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "Transformer-XL on random characters: memory, relative positions, cross-entropy, Adam"
SOURCE = "Dai et al., ACL 2019 (Transformer-XL)"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are the 12-layer model for enwik8; GDP has `layers` 2, 4 and 8. `memory` is how
    many tokens of the past a layer keeps."""

    layers: int = 12
    width: int = 512
    heads: int = 8
    hidden: int = 2048
    vocab: int = 204
    seq: int = 512
    memory: int = 512
    batch: int = 32
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} is not a multiple of twice heads={self.heads}")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")


TINY = Settings(layers=2, width=24, heads=3, hidden=20, vocab=14, seq=4, memory=6, batch=6)


def distances(count: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines of the distances count - 1 to 0: (count, width)."""
    places = torch.arange(count - 1, -1, -1, device=like.device, dtype=like.dtype)
    steps = torch.arange(0, width, 2, device=like.device, dtype=like.dtype)
    angles = places.unsqueeze(1) * torch.exp(steps * (-math.log(10000) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def shifted(scores: Tensor) -> Tensor:
    """Scores by distance (batch, heads, queries, keys), the farthest first, put at their keys.

    Keys after a query have no distance; they are masked later.
    """
    queries, keys = scores.shape[2:]
    rows = torch.arange(queries - 1, -1, -1, device=scores.device).unsqueeze(1)
    columns = torch.arange(keys, device=scores.device)
    return scores.gather(3, (rows + columns).clamp(max=keys - 1).expand_as(scores))


class Attention(nn.Module):
    """Each token attends to those before it and to the memory."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.heads, self.dropout = settings.width, settings.heads, settings.dropout
        self.query = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, 2 * width, bias=False)
        self.places = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, seen: Tensor, r: Tensor, biases: tuple[Tensor, Tensor]) -> Tensor:
        batch, queries, width = x.shape
        keys = seen.shape[1]
        q = self._heads(self.query(x))
        k, v = (self._heads(part) for part in self.keys(seen).split(width, dim=2))
        p = self.places(r).view(keys, self.heads, -1).transpose(0, 1)  # heads, keys, width
        content = (q + biases[0].unsqueeze(1)) @ k.transpose(2, 3)
        position = shifted((q + biases[1].unsqueeze(1)) @ p.transpose(1, 2))
        future = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
        future = future.triu(1 + keys - queries)
        scores = (content + position) / math.sqrt(width // self.heads)
        weights = F.softmax(scores.masked_fill(future, -math.inf), dim=3)
        y = F.dropout(weights, self.dropout, self.training) @ v
        return F.dropout(
            self.proj(y.transpose(1, 2).reshape(batch, queries, width)),
            self.dropout,
            self.training,
        )

    def _heads(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        return x.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)


class Block(nn.Module):
    """Attention and feed-forward, each normalised after; keeps its last inputs as `memory`."""

    memory: Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.dropout = settings.width, settings.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(settings)
        self.up, self.proj = nn.Linear(width, settings.hidden), nn.Linear(settings.hidden, width)
        self.register_buffer("memory", torch.zeros(settings.batch, settings.memory, width))

    def forward(self, x: Tensor, r: Tensor, biases: tuple[Tensor, Tensor]) -> Tensor:
        seen = torch.cat([self.memory, x], dim=1)
        y = self.norm1(x + self.attn(x, seen, r, biases))
        with torch.no_grad():
            self.memory.copy_(seen[:, x.shape[1] :])
        z = F.dropout(F.relu(self.up(y)), self.dropout, self.training)
        z = F.dropout(self.proj(z), self.dropout, self.training)
        x = self.norm2(y + z)
        return x


class TransformerXL(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        self.width, self.dropout, self.kept = width, settings.dropout, settings.memory
        self.tokens = nn.Embedding(settings.vocab, width)
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.place_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.head = nn.Linear(width, settings.vocab)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * math.sqrt(self.width)
        x = F.dropout(x, self.dropout, self.training)
        r = distances(self.kept + tokens.shape[1], self.width, x)
        r = F.dropout(r, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, r, (self.content_bias, self.place_bias))
        logits: Tensor = self.head(F.dropout(x, self.dropout, self.training))
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every token predicts the next."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = TransformerXL(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    text = torch.randint(settings.vocab, (settings.batch, settings.seq + 1))
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
