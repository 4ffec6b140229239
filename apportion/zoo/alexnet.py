"""AlexNet in one tower: five convolutions, three fully connected layers with dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, initialise, random_images
from apportion.zoo.images import step as step

ABOUT = "AlexNet on random images: dropout, cross-entropy, SGD with momentum"
SOURCE = "Krizhevsky, One weird trick, arXiv 2014, without the normalisation; batch of FlexFlow"


@dataclass(frozen=True, slots=True)
class Settings:
    """`base` is the channels of the first convolution, of which the others are multiples;
    `hidden` the units of the fully connected layers.

    Raises ValueError for images that the last pooling leaves nothing of.
    """

    base: int = 64
    hidden: int = 4096
    image: int = 224
    classes: int = 1000
    batch: int = 256
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.image < 63:
            raise ValueError(f"image={self.image} is below 63, the least that AlexNet can see")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")


TINY = Settings(base=2, hidden=14, image=95, classes=7, batch=6)


def _pooled(size: int) -> int:
    return (size - 3) // 2 + 1


class AlexNet(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        base, hidden = settings.base, settings.hidden
        left = _pooled(_pooled(_pooled((settings.image - 7) // 4 + 1)))
        self.dropout = settings.dropout
        self.conv1 = nn.Conv2d(3, base, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(base, 3 * base, 5, padding=2)
        self.conv3 = nn.Conv2d(3 * base, 6 * base, 3, padding=1)
        self.conv4 = nn.Conv2d(6 * base, 4 * base, 3, padding=1)
        self.conv5 = nn.Conv2d(4 * base, 4 * base, 3, padding=1)
        self.full1 = nn.Linear(4 * base * left * left, hidden)
        self.full2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 3, 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 3, 2)
        x = F.relu(self.conv4(F.relu(self.conv3(x))))
        x = F.max_pool2d(F.relu(self.conv5(x)), 3, 2).flatten(1)
        x = F.relu(self.full1(F.dropout(x, self.dropout, self.training)))
        x = F.relu(self.full2(F.dropout(x, self.dropout, self.training)))
        logits: Tensor = self.head(x)
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = AlexNet(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)
