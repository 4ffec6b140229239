"""BERT: post-norm encoder that fills in masked tokens and tells whether two sentences follow each
other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "BERT on random pairs of sentences: masked tokens and next sentence, AdamW"
SOURCE = "Devlin et al., NAACL 2019 (BERT)"

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are BERT-large; BERT-base is layers=12,width=768,heads=12. `masked` tokens of
    each sample are to be filled in. Raises ValueError where they do not fit together."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocab: int = 30522
    seq: int = 512
    masked: int = 76
    batch: int = 32
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")
        if self.masked > self.seq:
            raise ValueError(f"masked={self.masked} is more than seq={self.seq}")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")


TINY = Settings(layers=2, width=16, heads=2, vocab=22, seq=10, masked=4, batch=6)


class Attention(nn.Module):
    """Self-attention to all tokens."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.heads, self.dropout = settings.width, settings.heads, settings.dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)

    def _heads(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        return x.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)


class Block(nn.Module):
    """Attention and feed-forward, each added to what came in and normalised after."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.dropout = settings.width, settings.dropout
        self.attn = Attention(settings)
        self.up, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        y = self.proj(F.gelu(self.up(x)))
        x = self.norm2(x + F.dropout(y, self.dropout, self.training))
        return x


class BERT(nn.Module):
    """Tokens, sentence numbers and masked places to logits of the masked tokens
    (batch, masked, vocab) and of whether the second sentence follows (batch, 2)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.dropout = settings.width, settings.dropout
        self.tokens = nn.Embedding(settings.vocab, width)
        self.positions = nn.Embedding(settings.seq, width)
        self.sentences = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.pool, self.follows = nn.Linear(width, width), nn.Linear(width, 2)
        self.turn, self.turn_norm = nn.Linear(width, width), nn.LayerNorm(width, 1e-12)
        self.head = nn.Linear(width, settings.vocab)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, sentences: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(order) + self.sentences(sentences)
        x = F.dropout(self.norm(x), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        follows = self.follows(torch.tanh(self.pool(x[:, 0])))
        hidden = x.gather(1, places.unsqueeze(2).expand(-1, -1, x.shape[2]))
        words = self.head(self.turn_norm(F.gelu(self.turn(hidden))))
        return words, follows


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: of the masked tokens, and of whether the sentences follow."""
    tokens, sentences, places, missing, follows = batch
    words, answers = model(tokens, sentences, places)
    filled = F.cross_entropy(words.flatten(0, 1), missing.flatten())
    return filled + F.cross_entropy(answers, follows)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = BERT(settings)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    return model, optimizer, _batch(settings)


def _batch(settings: Settings) -> Batch:
    """Pairs of sentences of random lengths, of which random places are masked."""
    samples, seq = settings.batch, settings.seq
    tokens = torch.randint(settings.vocab, (samples, seq))
    sentences = (torch.arange(seq) >= torch.randint(1, seq + 1, (samples, 1))).long()
    places = torch.rand(samples, seq).argsort(1)[:, : settings.masked].sort(1).values
    missing = torch.randint(settings.vocab, (samples, settings.masked))
    return tokens, sentences, places.contiguous(), missing, torch.randint(2, (samples,))
