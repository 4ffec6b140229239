"""GPT-2: learned positions, pre-norm blocks, fused query-key-value, tied output weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "GPT-2 on random tokens: cross-entropy, AdamW with decay on matrices only"
SOURCE = "Radford et al., 2019 (Language models are unsupervised multitask learners)"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are GPT-2 small. `loss_parts`: logits are computed for so many parts of the
    tokens one after the other, so that all of them need not be there at once. Raises ValueError
    where they do not fit together."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    seq: int = 1024
    batch: int = 8
    dropout: float = 0.1
    loss_parts: int = 1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")
        if self.loss_parts < 1 or self.batch * self.seq % self.loss_parts:
            raise ValueError(f"loss_parts={self.loss_parts} does not divide batch * seq")


TINY = Settings(layers=2, width=24, heads=3, vocab=41, seq=5, batch=6)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.heads, self.dropout = settings.heads, settings.dropout
        self.qkv = nn.Linear(settings.width, 3 * settings.width)
        self.proj = nn.Linear(settings.width, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )  # each batch, heads, seq, width of a head
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(
            self.proj(y.transpose(1, 2).reshape(batch, seq, width)), self.dropout, self.training
        )


class FeedForward(nn.Module):
    """Two Linear modules around a GELU."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.dropout = settings.dropout
        self.up = nn.Linear(settings.width, 4 * settings.width)
        self.proj = nn.Linear(4 * settings.width, settings.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(F.gelu(self.up(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to what came in."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(settings.width), nn.LayerNorm(settings.width)
        self.attn, self.mlp = Attention(settings), FeedForward(settings)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT2(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.dropout, self.loss_parts = settings.dropout, settings.loss_parts
        self.tokens = nn.Embedding(settings.vocab, settings.width)
        self.positions = nn.Embedding(settings.seq, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise(settings)

    def _initialise(self, settings: Settings) -> None:
        """As GPT-2: deviation 0.02, and less for what is added to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                residual = name.endswith("proj.weight")
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * settings.layers) if residual else 0.02
                )

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the logits are computed from."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x)
        return normed


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every token predicts the next."""
    tokens, targets = batch
    if not isinstance(model, GPT2) or model.loss_parts == 1:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    hidden = model.hidden(tokens).flatten(0, 1).chunk(model.loss_parts)
    wanted = targets.flatten().chunk(model.loss_parts)
    parts = [F.cross_entropy(model.head(x), y) for x, y in zip(hidden, wanted, strict=True)]
    return torch.stack(parts).mean()


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = GPT2(settings)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    text = torch.randint(settings.vocab, (settings.batch, settings.seq + 1))
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
