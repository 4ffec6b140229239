"""Wide ResNets as Tofu trains them: bottleneck blocks, all channels widened, batch norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABOUT = "wide ResNet on random images: batch norm, cross-entropy, SGD with momentum"
SOURCE = "Wang, Huang and Li, EuroSys 2019 (Tofu); Zagoruyko and Komodakis, BMVC 2016"

Batch = tuple[Tensor, Tensor]

BLOCKS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
EXPANSION = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """`width` multiplies the channels of every convolution, in and out; `base` is the stem's
    without it.

    Raises ValueError for a depth that there is none of.
    """

    depth: int = 50
    width: int = 4
    base: int = 64
    image: int = 224
    classes: int = 1000
    batch: int = 32

    def __post_init__(self) -> None:
        if self.depth not in BLOCKS:
            raise ValueError(f"depth={self.depth} is none of {', '.join(map(str, BLOCKS))}")


TINY = Settings(depth=14, width=1, base=5, image=19, classes=7, batch=6)


def convolution(inward: int, outward: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Without bias, because a batch norm follows; of odd kernels the padding keeps the size."""
    return nn.Conv2d(inward, outward, kernel, stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is projected where the shape
    changes."""

    def __init__(self, inward: int, inner: int, stride: int) -> None:
        super().__init__()
        outward = EXPANSION * inner
        self.conv1, self.norm1 = convolution(inward, inner, 1), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = convolution(inner, inner, 3, stride), nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = convolution(inner, outward, 1), nn.BatchNorm2d(outward)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inward != outward:
            self.shortcut = nn.Sequential(
                convolution(inward, outward, 1, stride), nn.BatchNorm2d(outward)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        channels = settings.base * settings.width
        self.stem, self.norm = convolution(3, channels, 7, 2), nn.BatchNorm2d(channels)
        stages, inward = [], channels
        for number, count in enumerate(BLOCKS[settings.depth]):
            blocks, inner = [], channels << number
            for place in range(count):
                blocks.append(Bottleneck(inward, inner, 2 if number and not place else 1))
                inward = EXPANSION * inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inward, settings.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.stages(F.max_pool2d(x, 3, 2, padding=1))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = WideResNet(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(settings.batch, 3, settings.image, settings.image)
    return model, optimizer, (images, torch.randint(settings.classes, (settings.batch,)))
