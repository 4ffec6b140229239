"""NASNet-A: two cells found by search, stacked; each reads the two cells before it.

Without the auxiliary classifier and the scheduled dropping of paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, initialise, random_images
from apportion.zoo.images import step as step

ABOUT = "NASNet-A on random images: separable convolutions, cross-entropy, SGD with momentum"
SOURCE = "Zoph et al., CVPR 2018, NASNet-A (6 @ 4032) on ImageNet; batch as for Inception-v3"

# A normal cell puts this many maps side by side, a reduction cell four.
WIDTH = 6


@dataclass(frozen=True, slots=True)
class Settings:
    """`cells` normal cells in each of `stages` stages, which a reduction cell separates, after
    `stems` reduction cells. `filters` is the channels at the end, `stem` of the first convolution.

    Raises ValueError where the channels do not divide.
    """

    cells: int = 6
    stages: int = 3
    stems: int = 2
    filters: int = 4032
    stem: int = 96
    image: int = 331
    classes: int = 1000
    batch: int = 64

    def __post_init__(self) -> None:
        unit = WIDTH << self.stages - 1
        least = unit * 2 << self.stems
        if self.filters % unit or self.filters < least:
            raise ValueError(
                f"filters={self.filters} is not a multiple of {unit} from {least} up, as "
                f"stages={self.stages} and stems={self.stems} need"
            )


TINY = Settings(
    cells=1, stages=1, stems=1, filters=36, stem=5, image=25, classes=7, batch=6
)  # fmt: skip


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=3e-4)


def pointwise(inward: int, outward: int) -> nn.Sequential:
    """ReLU, 1x1 convolution, batch norm."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inward, outward, 1, bias=False), _norm(outward))


class Halved(nn.Module):
    """Halves a map: of every two rows and columns the first for one half of the channels, the
    second for the other."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        half = outward // 2
        self.even = nn.Conv2d(inward, half, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inward, outward - half, 1, stride=2, bias=False)
        self.norm = _norm(outward)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        y: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return y


class Separable(nn.Sequential):
    """Twice: ReLU, a convolution of each channel alone, one of each place alone, batch norm."""

    def __init__(self, inward: int, outward: int, kernel: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for channels, pace in ((inward, stride), (outward, 1)):
            around = kernel // 2
            layers += [
                nn.ReLU(),
                nn.Conv2d(channels, channels, kernel, pace, around, groups=channels, bias=False),
                nn.Conv2d(channels, outward, 1, bias=False),
                _norm(outward),
            ]
        super().__init__(*layers)


def average(x: Tensor, stride: int = 1) -> Tensor:
    """Mean over 3x3 places, of which those outside do not count."""
    return F.avg_pool2d(x, 3, stride, padding=1, count_include_pad=False)


def greatest(x: Tensor, stride: int = 1) -> Tensor:
    """Maximum over 3x3 places."""
    return F.max_pool2d(x, 3, stride, padding=1)


@dataclass(frozen=True, slots=True)
class Shape:
    """Channels of a map, and how often it was halved."""

    channels: int
    halvings: int


class Cell(nn.Module):
    """What both cells begin with: the map before, and the one before that brought to its size and
    channels. The first cell has none before that, and reads its input twice."""

    def __init__(self, before: Shape, earlier: Shape | None, channels: int) -> None:
        super().__init__()
        self.near = pointwise(before.channels, channels)
        self.far: nn.Module = nn.Identity()
        if earlier is not None and earlier.halvings != before.halvings:
            self.far = Halved(earlier.channels, channels)
        elif earlier is not None and earlier.channels != channels:
            self.far = pointwise(earlier.channels, channels)
        self.reached = before.channels if earlier is None else channels


class NormalCell(Cell):
    """Keeps the size."""

    def __init__(self, before: Shape, earlier: Shape | None, channels: int) -> None:
        super().__init__(before, earlier, channels)
        self.near5, self.near3 = (Separable(channels, channels, k) for k in (5, 3))
        self.far3, self.far5, self.far3b = (Separable(channels, channels, k) for k in (3, 5, 3))
        self.shape = Shape(WIDTH * channels, before.halvings)

    def forward(self, before: Tensor, earlier: Tensor) -> Tensor:
        near, far = self.near(before), self.far(earlier)
        blocks = [
            far,
            self.near5(near) + self.far3(far),
            self.far5(far) + self.far3b(far),
            average(near) + far,
            average(far) + average(far),
            self.near3(near) + near,
        ]
        return torch.cat(blocks, dim=1)


class ReductionCell(Cell):
    """Halves the size."""

    def __init__(self, before: Shape, earlier: Shape | None, channels: int) -> None:
        super().__init__(before, earlier, channels)
        self.near5 = Separable(channels, channels, 5, stride=2)
        self.far7, self.far7b, self.far5 = (
            Separable(self.reached, channels, k, stride=2) for k in (7, 7, 5)
        )
        self.inner3 = Separable(channels, channels, 3)
        self.shape = Shape(4 * channels, before.halvings + 1)

    def forward(self, before: Tensor, earlier: Tensor) -> Tensor:
        near, far = self.near(before), self.far(earlier)
        first = self.near5(near) + self.far7(far)
        second = greatest(near, 2) + self.far7b(far)
        third = average(near, 2) + self.far5(far)
        fourth = average(first) + second
        fifth = self.inner3(first) + greatest(near, 2)
        return torch.cat([second, third, fourth, fifth], dim=1)


class NASNet(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, settings.stem, 3, stride=2, bias=False)
        self.norm = _norm(settings.stem)
        self.cells = nn.ModuleList(_cells(settings))
        self.head = nn.Linear(settings.filters, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        before = earlier = self.norm(self.stem(x))
        for cell in self.cells:
            before, earlier = cell(before, earlier), before
        logits: Tensor = self.head(F.relu(before).mean((2, 3)))
        return logits


def _cells(settings: Settings) -> Iterator[NormalCell | ReductionCell]:
    """All cells in order; a stage has twice the channels of the one before."""
    before, earlier = Shape(settings.stem, 0), None
    first = settings.filters // (WIDTH << settings.stages - 1)
    kinds: list[tuple[type[NormalCell | ReductionCell], int]] = [
        (ReductionCell, first >> settings.stems - number) for number in range(settings.stems)
    ]
    for stage in range(settings.stages):
        kinds += [(ReductionCell, first << stage)] * (stage > 0)
        kinds += [(NormalCell, first << stage)] * settings.cells
    for kind, channels in kinds:
        cell = kind(before, earlier, channels)
        before, earlier = cell.shape, before
        yield cell


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = NASNet(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=4e-5)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)
