"""LeNet-5: two convolutions with average pooling and three fully connected layers, all tanh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, random_images
from apportion.zoo.images import step as step

ABOUT = "LeNet-5 on random digits: cross-entropy, SGD"
SOURCE = "LeCun et al., Proc. IEEE 1998, every map of C3 reading all of S2; batch of OptCNN per GPU"


@dataclass(frozen=True, slots=True)
class Settings:
    """`first` and `second` are the maps of the convolutions, `hidden` and `last` the units of
    the fully connected layers before the classes.

    Raises ValueError for images that the second pooling leaves nothing of.
    """

    first: int = 6
    second: int = 16
    hidden: int = 120
    last: int = 84
    image: int = 32
    classes: int = 10
    batch: int = 32

    def __post_init__(self) -> None:
        if self.image < 16:
            raise ValueError(f"image={self.image} is below 16, the least that LeNet can see")


TINY = Settings(first=3, second=5, hidden=9, last=7, image=20, classes=4, batch=6)


class LeNet(nn.Module):
    """Images (batch, 1, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        left = ((settings.image - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(1, settings.first, 5)
        self.conv2 = nn.Conv2d(settings.first, settings.second, 5)
        self.full1 = nn.Linear(settings.second * left * left, settings.hidden)
        self.full2 = nn.Linear(settings.hidden, settings.last)
        self.head = nn.Linear(settings.last, settings.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)
        x = torch.tanh(self.full1(x.flatten(1)))
        logits: Tensor = self.head(torch.tanh(self.full2(x)))
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = LeNet(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, random_images(settings.batch, 1, settings.image, settings.classes)
