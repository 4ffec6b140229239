"""A multilayer perceptron that fits random targets: the smallest model worth dividing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "multilayer perceptron: Linear and ReLU, mean squared error, SGD with momentum"
SOURCE = "the textbook"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """`layers` Linear modules of `width` by `width`; `batch` samples."""

    layers: int = 4
    width: int = 1024
    batch: int = 64


TINY = Settings(layers=3, width=10, batch=7)


class MLP(nn.Module):
    """Linear modules with ReLU between them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(settings.layers))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(F.relu(x) if index else x)
        return x


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch."""
    x, target = batch
    return F.mse_loss(model(x), target)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = MLP(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shape = (settings.batch, settings.width)
    return model, optimizer, (torch.randn(shape), torch.randn(shape))
