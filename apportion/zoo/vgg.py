"""VGG-16: thirteen 3x3 convolutions in five groups, three fully connected layers with dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, initialise, random_images
from apportion.zoo.images import step as step

ABOUT = "VGG-16 on random images: dropout, cross-entropy, SGD with momentum"
SOURCE = "Simonyan and Zisserman, ICLR 2015, configuration D; batch of OptCNN per GPU"

# Convolutions of each group, and their channels as multiples of the first.
GROUPS = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


@dataclass(frozen=True, slots=True)
class Settings:
    """`base` is the channels of the first group, `hidden` the units of the fully connected
    layers.

    Raises ValueError for images that the five poolings leave nothing of.
    """

    base: int = 64
    hidden: int = 4096
    image: int = 224
    classes: int = 1000
    batch: int = 32
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.image < 32:
            raise ValueError(f"image={self.image} is below 32, the least that VGG-16 can see")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")


TINY = Settings(base=2, hidden=14, image=64, classes=7, batch=6)


class VGG16(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inward = 3
        for count, multiple in GROUPS:
            outward = multiple * settings.base
            for _ in range(count):
                layers += [nn.Conv2d(inward, outward, 3, padding=1), nn.ReLU()]
                inward = outward
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        left = settings.image // 2 ** len(GROUPS)
        self.dropout = settings.dropout
        self.full1 = nn.Linear(inward * left * left, settings.hidden)
        self.full2 = nn.Linear(settings.hidden, settings.hidden)
        self.head = nn.Linear(settings.hidden, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.full1(self.features(x).flatten(1)))
        x = F.relu(self.full2(F.dropout(x, self.dropout, self.training)))
        logits: Tensor = self.head(F.dropout(x, self.dropout, self.training))
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = VGG16(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)
