"""Transformer whose feed-forward parts are experts, each of which takes a fixed number of tokens.

Routing is by products with one-hot tensors, so that no shape depends on data: a token has a place
in the list of its expert, and is left out where the list is full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "Transformer with experts on random tokens: fixed capacity, cross-entropy, Adam"
SOURCE = "Fedus et al., JMLR 2022 (Switch); Lepikhin et al., ICLR 2021 (GShard)"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """12 layers of 32 experts with 2 million parameters each. A token goes to `top` experts (1 as
    Switch, 2 as GShard); an expert takes `capacity` times its even share of a sample's tokens.

    Raises ValueError where they do not fit together.
    """

    layers: int = 12
    width: int = 512
    heads: int = 8
    hidden: int = 2048
    experts: int = 32
    top: int = 1
    capacity: float = 1.25
    vocab: int = 32000
    seq: int = 256
    batch: int = 32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")
        if self.top > self.experts:
            raise ValueError(f"top={self.top} is more than experts={self.experts}")
        if not self.capacity:
            raise ValueError("capacity=0 leaves no token to any expert")

    @property
    def places(self) -> int:
        """Tokens of a sample that an expert takes at most."""
        return math.ceil(self.capacity * self.top * self.seq / self.experts)


TINY = Settings(
    layers=2, width=12, heads=2, hidden=14, experts=4, top=2, vocab=18, seq=10, batch=6
)  # fmt: skip


class Router(nn.Module):
    """x (batch, seq, width) to one-hot places (batch, seq, experts, places), the same weighted by
    the gates, and the loss that evens out how much experts are used."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.experts, self.top, self.places = settings.experts, settings.top, settings.places
        self.gate = nn.Linear(settings.width, settings.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = F.softmax(self.gate(x), dim=-1)
        experts = torch.arange(self.experts, device=x.device)
        places = torch.arange(self.places, device=x.device)
        rest, chosen = gates, []
        for _ in range(self.top):
            best = (rest.argmax(dim=-1, keepdim=True) == experts).to(x.dtype)
            rest = rest * (1 - best)
            chosen.append(best)
        share = (chosen[0].mean(1) * gates.mean(1)).sum(-1).mean() * self.experts
        weights = [(gates * best).sum(-1, keepdim=True) for best in chosen]
        total = sum(weights[1:], weights[0]) if self.top > 1 else 1.0
        taken = torch.zeros_like(gates[:, :1])  # batch, 1, experts: places that are taken
        sent, weighted = [], []
        for best, weight in zip(chosen, weights, strict=True):
            place = taken + best.cumsum(1) - 1  # of each token, if it goes to the expert
            slots = (place.unsqueeze(-1) == places) * best.unsqueeze(-1)
            taken = taken + best.sum(1, keepdim=True)
            sent.append(slots)
            weighted.append(slots * (weight / total).unsqueeze(-1))
        return sum(sent[1:], sent[0]), sum(weighted[1:], weighted[0]), share


class Experts(nn.Module):
    """`experts` pairs of matrices around a ReLU, one for each list of tokens."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        experts, width, hidden = settings.experts, settings.width, settings.hidden
        self.router = Router(settings)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, _, width = x.shape
        sent, weighted, share = self.router(x)
        _, _, experts, places = sent.shape
        lists = sent.flatten(2, 3).transpose(1, 2) @ x  # batch, experts * places, width
        lists = lists.view(batch, experts, places, width).transpose(0, 1).flatten(1, 2)
        made = torch.bmm(F.relu(torch.bmm(lists, self.up)), self.proj)
        made = made.view(experts, batch, places, width).transpose(0, 1).flatten(1, 2)
        return weighted.flatten(2, 3) @ made, share


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.qkv = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.proj = nn.Linear(settings.width, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )  # each batch, heads, seq, width of a head
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.proj(y.transpose(1, 2).reshape(batch, seq, width))
        return projected


class Block(nn.Module):
    """Attention and experts, each normalised before and added to what came in."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(settings.width), nn.LayerNorm(settings.width)
        self.attn, self.experts = Attention(settings), Experts(settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm1(x))
        y, share = self.experts(self.norm2(x))
        return x + y, share


class TransformerMoE(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab) and the routers' loss."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocab, settings.width)
        self.positions = nn.Embedding(settings.seq, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(order)
        shares = []
        for block in self.blocks:
            x, share = block(x)
            shares.append(share)
        logits: Tensor = self.head(self.norm(x))
        return logits, torch.stack(shares).sum()


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every token predicts the next, and experts are used evenly."""
    tokens, targets = batch
    logits, share = model(tokens)
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * share
    return loss


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = TransformerMoE(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = torch.randint(settings.vocab, (settings.batch, settings.seq + 1))
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
