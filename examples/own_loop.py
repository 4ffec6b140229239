"""The body of a training loop as people write it, divided: no part of it is rewritten.

A small GPT with autocast, gradients accumulated over micro-batches and clipped, weight decay only
for matrices, and a learning rate that warms up and falls along a cosine outside of the body.

    python examples/own_loop.py                             # plain PyTorch
    apportion plan examples/own_loop.py:build --cluster local:4 --out plan.json
    apportion run examples/own_loop.py:build --plan plan.json --check
    torchrun --nproc-per-node 4 examples/own_loop.py plan.json

Against the plain program only the two lines that are marked below differ.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import apportion as ap

VOCAB, LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 64, 4, 2
BATCH, MICRO_BATCHES, STEPS = 8, 2, 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


scaler = torch.amp.GradScaler("cpu", enabled=False)  # bfloat16 needs none


def body(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> dict[str, Any]:
    """What the loop does for the micro-batches of a step."""
    for x, y in batch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y) / len(batch)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss.detach() * len(batch), "norm": norm}


def rate(step: int, warm: int = 4, highest: float = 3e-3) -> float:
    if step < warm:
        return highest * (step + 1) / warm
    done = (step - warm) / max(STEPS - warm, 1)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def data(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(MICRO_BATCHES):
        start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        text = (start + torch.arange(LENGTH + 1) * 3) % VOCAB
        found.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
    return found


def build() -> tuple[Any, ...]:
    """What `apportion plan` and `apportion run` want of a file."""
    model = GPT()
    return body, model, model.optimizer(rate(0)), data(0)


def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = model.optimizer(rate(0))
    take_step = lambda batch: body(model, optimizer, batch)  # noqa: E731
    if len(sys.argv) > 1:
        program = ap.capture(body, model, optimizer, data(0))  # one
        take_step = ap.distribute(program, ap.Plan.load(sys.argv[1])).step  # and two
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        found = take_step(data(step))
        if step % 5 == 4:
            sys.stdout.write(f"{step} {float(found['loss']):.5f} {float(found['norm']):.5f}\n")


if __name__ == "__main__":
    main()
