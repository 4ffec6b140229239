"""WaveNet: stacks of dilated causal convolutions with gates, over quantised sound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "WaveNet on random sound: dilated convolutions, cross-entropy, Adam"
SOURCE = (
    "van den Oord et al., arXiv 2016; depth of GDP, Zhou et al. 2019; channels and samples ours"
)

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """`layers` gated layers in `stacks` equal stacks; dilation doubles with each layer of a stack.
    `residual` and `skip` are the channels of their connections, `levels` those of the sound.

    Raises ValueError where the layers do not divide.
    """

    stacks: int = 2
    layers: int = 18
    residual: int = 64
    skip: int = 256
    levels: int = 256
    samples: int = 4096
    batch: int = 8

    def __post_init__(self) -> None:
        if self.layers % self.stacks:
            raise ValueError(f"layers={self.layers} is not a multiple of stacks={self.stacks}")


TINY = Settings(stacks=2, layers=6, residual=6, skip=7, levels=11, samples=13, batch=5)


class Causal(nn.Module):
    """A convolution of two taps, the later of which is at its own place."""

    def __init__(self, inward: int, outward: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inward, outward, 2, dilation=dilation)
        self.dilation = dilation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.pad(x, (self.dilation, 0)))
        return y


class Layer(nn.Module):
    """A gated layer: what it adds to the residual stream, and what it skips to the end. The last
    one has no stream to add to."""

    def __init__(self, settings: Settings, dilation: int, *, last: bool) -> None:
        super().__init__()
        width = settings.residual
        self.filter, self.gate = Causal(width, width, dilation), Causal(width, width, dilation)
        self.skip = nn.Conv1d(width, settings.skip, 1)
        self.residual = None if last else nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        return x if self.residual is None else x + self.residual(y), self.skip(y)


class WaveNet(nn.Module):
    """Levels (batch, samples) to logits of the next ones (batch, levels, samples)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        depth = settings.layers // settings.stacks
        last = settings.layers - 1
        self.levels = nn.Embedding(settings.levels, settings.residual)
        self.first = Causal(settings.residual, settings.residual)
        self.layers = nn.ModuleList(
            Layer(settings, 2 ** (k % depth), last=k == last) for k in range(settings.layers)
        )
        self.end1 = nn.Conv1d(settings.skip, settings.skip, 1)
        self.end2 = nn.Conv1d(settings.skip, settings.levels, 1)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.first(self.levels(sound).transpose(1, 2))
        total = None
        for layer in self.layers:
            x, skip = layer(x)
            total = skip if total is None else total + skip
        assert total is not None
        logits: Tensor = self.end2(F.relu(self.end1(F.relu(total))))
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: every sample predicts the next."""
    sound, targets = batch
    return F.cross_entropy(model(sound), targets)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = WaveNet(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sound = torch.randint(settings.levels, (settings.batch, settings.samples + 1))
    return model, optimizer, (sound[:, :-1].contiguous(), sound[:, 1:].contiguous())
