"""Inception-v3: blocks of parallel convolutions, wide kernels factored, an auxiliary classifier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, random_images

ABOUT = "Inception-v3 on random images: auxiliary classifier, cross-entropy, SGD with momentum"
SOURCE = "Szegedy et al., CVPR 2016, channels of its public release; batch of FlexFlow per GPU"

# Channels are written as in the release, whose stem begins with this many.
BASE = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """`base` is the channels of the first convolution, to which all others are proportional;
    `blocks35`, `blocks17` and `blocks8` count the blocks that see maps of 35, 17 and 8 of 299.
    `auxiliary` weighs the loss of the auxiliary classifier; without weight there is none.

    Raises ValueError for images too small to pass.
    """

    base: int = BASE
    blocks35: int = 3
    blocks17: int = 4
    blocks8: int = 2
    image: int = 299
    classes: int = 1000
    batch: int = 64
    dropout: float = 0.5
    auxiliary: float = 0.4

    def __post_init__(self) -> None:
        least = 107 if self.auxiliary else 75
        if self.image < least:
            raise ValueError(
                f"image={self.image} is below {least}, the least that Inception-v3 can see"
            )
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is not below 1")

    def channels(self, released: int) -> int:
        """The channels in the place of those of the release."""
        return max(1, released * self.base // BASE)


TINY = Settings(
    base=1, blocks35=1, blocks17=1, blocks8=1, image=107, classes=7, batch=6, dropout=0.2
)  # fmt: skip

Kernel = int | tuple[int, int]


class Conv(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self, inward: int, outward: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0
    ) -> None:
        super().__init__(
            nn.Conv2d(inward, outward, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(outward, eps=1e-3),
            nn.ReLU(),
        )


class Branches(nn.Module):
    """The same input through several branches, side by side in the channels of the output."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _row(inward: int, *layers: tuple[Kernel, int] | tuple[Kernel, int, int]) -> nn.Sequential:
    """Convolutions one after another: kernel, channels and, where it shrinks the map, stride."""
    made = []
    for kernel, outward, *shrinks in layers:
        height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        padding, stride = (0, shrinks[0]) if shrinks else ((height // 2, width // 2), 1)
        made.append(Conv(inward, outward, kernel, stride, padding))
        inward = outward
    return nn.Sequential(*made)


def _pooled(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), Conv(inward, outward, 1))


class Builder:
    """Makes blocks one after another; `inward` is the channels that the next one gets."""

    def __init__(self, settings: Settings) -> None:
        self.n, self.inward = settings.channels, 3

    def stem(self) -> nn.Sequential:
        """From the images to maps of 35 of 299."""
        n = self.n
        self.inward = n(192)
        return nn.Sequential(
            Conv(3, n(32), 3, 2),
            Conv(n(32), n(32), 3),
            Conv(n(32), n(64), 3, padding=1),
            nn.MaxPool2d(3, 2),
            Conv(n(64), n(80), 1),
            Conv(n(80), n(192), 3),
            nn.MaxPool2d(3, 2),
        )

    def wide(self, pooled: int) -> Branches:
        """5x5 and two 3x3 convolutions."""
        n, inward = self.n, self.inward
        self.inward = n(64) + n(64) + n(96) + n(pooled)
        return Branches(
            _row(inward, (1, n(64))),
            _row(inward, (1, n(48)), (5, n(64))),
            _row(inward, (1, n(64)), (3, n(96)), (3, n(96))),
            _pooled(inward, n(pooled)),
        )

    def shrink_first(self) -> Branches:
        """From 35 to 17."""
        n, inward = self.n, self.inward
        self.inward = n(384) + n(96) + inward
        return Branches(
            _row(inward, (3, n(384), 2)),
            _row(inward, (1, n(64)), (3, n(96)), (3, n(96), 2)),
            nn.MaxPool2d(3, 2),
        )

    def factored(self, inner: int) -> Branches:
        """7x7 convolutions as 1x7 and 7x1."""
        n, inward, c = self.n, self.inward, self.n(inner)
        self.inward = 4 * n(192)
        across, down = (1, 7), (7, 1)
        return Branches(
            _row(inward, (1, n(192))),
            _row(inward, (1, c), (across, c), (down, n(192))),
            _row(inward, (1, c), (down, c), (across, c), (down, c), (across, n(192))),
            _pooled(inward, n(192)),
        )

    def shrink_second(self) -> Branches:
        """From 17 to 8."""
        n, inward = self.n, self.inward
        self.inward = n(320) + n(192) + inward
        return Branches(
            _row(inward, (1, n(192)), (3, n(320), 2)),
            _row(inward, (1, n(192)), ((1, 7), n(192)), ((7, 1), n(192)), (3, n(192), 2)),
            nn.MaxPool2d(3, 2),
        )

    def forked(self) -> Branches:
        """3x3 convolutions as 1x3 beside 3x1."""
        n, inward, c = self.n, self.inward, self.n(384)
        self.inward = n(320) + 4 * c + n(192)

        def fork() -> Branches:
            return Branches(_row(c, ((1, 3), c)), _row(c, ((3, 1), c)))

        return Branches(
            _row(inward, (1, n(320))),
            nn.Sequential(_row(inward, (1, c)), fork()),
            nn.Sequential(_row(inward, (1, n(448)), (3, c)), fork()),
            _pooled(inward, n(192)),
        )


class Auxiliary(nn.Module):
    """A classifier of the maps of 17, trained beside the one at the end."""

    def __init__(self, settings: Settings, inward: int) -> None:
        super().__init__()
        n = settings.channels
        size = ((((settings.image - 1) // 2 - 3) // 2 - 2) - 1) // 2  # of the 35
        pooled = ((size - 1) // 2 - 5) // 3 + 1
        self.conv1, self.conv2 = Conv(inward, n(128), 1), Conv(n(128), n(768), min(5, pooled))
        self.head = nn.Linear(n(768), settings.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(F.avg_pool2d(x, 5, 3)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class InceptionV3(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes), auxiliary ones after them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        make = Builder(settings)
        inner = [160] * settings.blocks17
        inner[-1], inner[0] = 192, 128
        self.stem = make.stem()
        self.blocks35 = nn.Sequential(
            *(make.wide(64 if k else 32) for k in range(settings.blocks35))
        )
        self.shrink1 = make.shrink_first()
        self.blocks17 = nn.Sequential(*map(make.factored, inner))
        self.auxiliary_weight = settings.auxiliary
        self.auxiliary = Auxiliary(settings, make.inward) if settings.auxiliary else None
        self.shrink2 = make.shrink_second()
        self.blocks8 = nn.Sequential(*(make.forked() for _ in range(settings.blocks8)))
        self.dropout = settings.dropout
        self.head = nn.Linear(make.inward, settings.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.blocks17(self.shrink1(self.blocks35(self.stem(x))))
        beside = None if self.auxiliary is None else self.auxiliary(x)
        x = self.blocks8(self.shrink2(x)).mean((2, 3))
        return self.head(F.dropout(x, self.dropout, self.training)), beside


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch, with that of the auxiliary classifier."""
    assert isinstance(model, InceptionV3)
    images, labels = batch
    logits, beside = model(images)
    loss = F.cross_entropy(logits, labels)
    if beside is None:
        return loss
    return loss + model.auxiliary_weight * F.cross_entropy(beside, labels)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = InceptionV3(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.045, momentum=0.9)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)
