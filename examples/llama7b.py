"""A 7-billion-parameter Llama-shaped training step on the meta device: nothing is allocated.

python examples/llama7b.py            captures it and prints what it took
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, length, head width)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5)
        self.ffn = FeedForward(width, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Llama(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, vocab: int, length: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Next-token cross-entropy."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def build(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    hidden: int = 11008,
    vocab: int = 32000,
    batch: int = 4,
    length: int = 2048,
    device: str = "meta",
) -> tuple[Any, nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """(step, model, optimizer, batch), as `apportion plan examples/llama7b.py:build` wants it."""
    with torch.device(device):
        model = Llama(layers, width, heads, hidden, vocab, length)
        tokens = torch.randint(vocab, (batch, length + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    inputs = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return step, model, optimizer, inputs


def main() -> None:
    from apportion.capture.capture import capture

    start = time.perf_counter()
    parts = build()
    built = time.perf_counter()
    program = capture(*parts, clip_norm=1.0)
    seconds = time.perf_counter() - built
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    count = sum(p.numel() for p in parts[1].parameters())
    print(f"{count / 1e9:.2f} billion parameters, built in {built - start:.1f} s")
    size = f"{len(program.graph.ops)} ops, {len(program.graph.values)} values"
    print(f"{size}, captured in {seconds:.1f} s, peak {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
