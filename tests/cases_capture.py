"""Tiny models and steps for the tests of capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apportion.capture.capture import capture
from apportion.capture.program import Program
from apportion.capture.reference import cast_batch


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, width: int = 8, vocab: int = 11) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(6, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, 2, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mse_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def token_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def vectors(*shape: int) -> Any:
    return torch.randn(5, *(shape or (4,))), torch.randn(5, 3)


def tokens() -> Any:
    y = torch.randint(11, (3, 6))
    y[0, 2] = -100
    return {"x": torch.randint(11, (3, 6)), "y": y}


@dataclass
class Case:
    step: Callable[..., Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[], Any] = vectors
    clip_norm: float | None = None
    random: bool = False


def sgd(**settings: Any) -> Any:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def adam(**settings: Any) -> Any:
    return lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, **settings)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Writing(nn.Module):
    """Mutates views, keeps a counter, reassigns a buffer, holds a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("last", torch.zeros(()))
        self.mask = torch.tensor([1.0, 0.0, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x) * self.mask.to(x.dtype)
        y[:, 0] = y[:, 1] * 2
        y[0].mul_(3)
        self.count[1] += 1
        self.last = y.detach().mean()
        return y + torch.tensor(0.5, dtype=x.dtype) * self.count.sum() + self.last


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh())
        self.out = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.out(checkpoint(self.inner, x, use_reentrant=False))


def noisy_step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    x = x + 0.1 * torch.randn_like(x) + torch.rand(4, dtype=x.dtype)
    return (
        F.mse_loss(model(x), y, reduction="none") * torch.bernoulli(torch.full_like(y, 0.5))
    ).sum()


def weighted_step(model: nn.Module, batch: Any) -> torch.Tensor:
    weight = torch.tensor([0.2, 0.5, 1.5], dtype=batch[0].dtype)
    target = (batch[1].detach()[:, 0] > 0).long()
    return F.cross_entropy(model(batch[0]), target, weight=weight, label_smoothing=0.1)


class Renormed(nn.Module):
    """Changes parameters in the forward pass: one that is trained, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3, max_norm=0.5)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1.5)
        return self.embed((x.abs().sum(1) * 2).long().clamp(max=10)) * self.scale


CASES = {
    "mlp, plain sgd": Case(mse_step, mlp, sgd()),
    "mlp, momentum": Case(mse_step, mlp, sgd(momentum=0.9, weight_decay=0.01)),
    "mlp, nesterov": Case(mse_step, mlp, sgd(momentum=0.9, nesterov=True, maximize=True)),
    "mlp, tensor lr": Case(
        mse_step, mlp, lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.125))
    ),
    "mlp, adam amsgrad": Case(mse_step, mlp, adam(amsgrad=True, weight_decay=0.1)),
    "gpt, adamw": Case(token_step, GPT, adamw, tokens),
    "gpt, clipped": Case(token_step, GPT, adamw, tokens, clip_norm=0.05),
    "mlp, not clipped": Case(mse_step, mlp, sgd(), clip_norm=1e6),
    "frozen": Case(mse_step, frozen, sgd(momentum=0.9)),
    "batch norm": Case(mse_step, batch_norm, sgd(momentum=0.9), lambda: vectors(2, 4, 4)),
    "output object": Case(lambda m, b: Output(mse_step(m, b)), mlp, sgd()),
    "output dict": Case(lambda m, b: {"loss": mse_step(m, b)}, mlp, sgd()),
    "mutations": Case(mse_step, Writing, sgd()),
    "changed parameters": Case(mse_step, Renormed, sgd(momentum=0.9)),
    "lstm": Case(mse_step, Recurrent, sgd(), lambda: vectors(6, 4)),
    "weighted loss": Case(weighted_step, mlp, sgd()),
    "gpt with dropout": Case(token_step, lambda: GPT(0.1), adamw, tokens, 1.0, random=True),
    "encoder layer": Case(mse_step, Encoder, sgd(), lambda: vectors(6, 4), random=True),
    "noise": Case(noisy_step, mlp, adam(), random=True),
    "checkpoint": Case(mse_step, Checkpointed, sgd(), random=True),
}


def captured(case: Case, dtype: torch.dtype = torch.float64) -> Program:
    torch.manual_seed(0)
    model = case.model().to(dtype)
    batch = cast_batch(case.batch(), dtype)
    return capture(case.step, model, case.optimizer(model), batch, case.clip_norm)


def batches(case: Case, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(1)
    return [cast_batch(case.batch(), dtype) for _ in range(3)]
