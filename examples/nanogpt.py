"""A small GPT that learns to count, trained by hand on as many ranks as torchrun starts.

    apportion plan examples/nanogpt.py:make --cluster local:4 --devices 4,3,2 --out book/
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/nanogpt.py book/ run/

It saves every few steps into run/. Whatever ends it, the same command, with as many processes or
with others, goes on from the last checkpoint, and the losses are those of a run that nothing
interrupted. Batches are a function of the step's number, so that resuming needs no loader.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import apportion as ap

VOCABULARY = "\n abcdefghijklmnopqrstuvwxyz"
SEQUENCE, BATCH, WIDTH, LAYERS, HEADS = 32, 12, 48, 2, 4
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def corpus() -> torch.Tensor:
    """Numbers in words, one a line, as indices into the vocabulary."""
    lines = [" ".join(WORDS[int(digit)] for digit in str(n)) for n in range(2000)]
    return torch.tensor([VOCABULARY.index(letter) for letter in "\n".join(lines)])


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, seq, HEADS, width // HEADS).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class NanoGPT(nn.Module):
    """A decoder; given labels it returns the loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), WIDTH)
        self.places = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY), bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return {"loss": loss, "logits": logits}


def batch_of(number: int, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """The batch of a step: random stretches of the text, and the same one letter later."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts.tolist()])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    loss: torch.Tensor = model(**batch)["loss"]
    return loss


def make(dtype: torch.dtype = torch.float32) -> tuple[Any, nn.Module, Any, Any]:
    """The step, the model, the optimizer and a batch: what `apportion plan FILE:make` calls."""
    torch.manual_seed(0)
    model = NanoGPT().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return step, model, optimizer, batch_of(0, corpus())


def make_double() -> tuple[Any, nn.Module, Any, Any]:
    """The same in float64, for --double."""
    return make(torch.float64)


def rate(number: int, steps: int) -> float:
    """The learning rate of a step, relative to the largest: up, then down along a cosine."""
    return min(1.0, (number + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * number / steps))


def main() -> None:
    """Trains, in one rank of a torchrun job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("plan", help="a saved plan, or a plan book")
    parser.add_argument("save", help="the folder of checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--interface", default=None)
    parser.add_argument("--double", action="store_true", help="in float64")
    given = parser.parse_args()

    torch.set_num_threads(1)
    text = corpus()
    one, model, optimizer, batch = make(torch.float64 if given.double else torch.float32)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate(n, given.steps))
    program = ap.capture(one, model, optimizer, batch)
    runner = ap.distribute(program, given.plan, patience=given.patience, interface=given.interface)
    runner.resume(given.save, schedule=schedule)
    for number in range(runner.steps_done, given.steps):
        loss = runner.step(batch_of(number, text))
        schedule.step()
        if runner.rank == 0:
            print(f"step {number} loss {float(loss):.15f}", flush=True)
        if (number + 1) % given.save_every == 0:
            runner.save(given.save, schedule=schedule)
    runner.finish()
    runner.saved()


if __name__ == "__main__":
    main()
