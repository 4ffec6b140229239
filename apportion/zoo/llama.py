"""Llama: RMSNorm, rotary positions, attention whose queries share keys and values, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "Llama on random tokens: cross-entropy, AdamW with decay on matrices only"
SOURCE = "Dubey et al., arXiv 2407.21783 (Llama 3); Touvron et al., arXiv 2302.13971"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are Llama 3's 8 billion. `heads / kv_heads` queries share a key; `hidden` is
    the width between the SwiGLU's matrices. Raises ValueError where they do not fit together."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocab: int = 128256
    seq: int = 2048
    batch: int = 8

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width={self.width} is not a multiple of twice heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


TINY = Settings(layers=2, width=24, heads=6, kv_heads=2, hidden=20, vocab=34, seq=10, batch=4)
THETA = 500000.0  # of the rotations, as Llama 3's


class RMSNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotations(seq: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (seq, width) of the angles by which the pairs of a head are turned."""
    pairs = torch.arange(0, width, 2, device=like.device, dtype=like.dtype) / width
    places = torch.arange(seq, device=like.device, dtype=like.dtype)
    angles = places.unsqueeze(1) * torch.pow(THETA, -pairs)
    both = torch.cat([angles, angles], dim=1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns element k together with element k + width / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class Attention(nn.Module):
    """Causal self-attention; `heads / kv_heads` queries share one key and value."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.shared = settings.width, settings.heads // settings.kv_heads
        self.width = width // settings.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, settings.kv_heads * self.width, bias=False)
        self.value = nn.Linear(width, settings.kv_heads * self.width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        y = F.scaled_dot_product_attention(q, self._repeated(k), self._repeated(v), is_causal=True)
        projected: Tensor = self.proj(y.transpose(1, 2).reshape(x.shape))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        return x.view(batch, seq, -1, self.width).transpose(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, self.shared, -1, -1).flatten(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: one product, gated by SiLU of another."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, hidden = settings.width, settings.hidden
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.proj(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to what came in."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(settings.width), RMSNorm(settings.width)
        self.attn, self.mlp = Attention(settings), FeedForward(settings)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cosines, sines)
        x = x + self.mlp(self.norm2(x))
        return x


class Llama(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.width = settings.width // settings.heads
        self.tokens = nn.Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = RMSNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cosines, sines = rotations(tokens.shape[1], self.width, x)
        for block in self.blocks:
            x = block(x, cosines, sines)
        logits: Tensor = self.head(self.norm(x))
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every token predicts the next."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = Llama(settings)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
    text = torch.randint(settings.vocab, (settings.batch, settings.seq + 1))
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
