"""AmoebaNet-D: two cells found by evolution, stacked; each reads the two cells before it.

A cell is five sums of two operations. Operations name what they read: 0 is the cell before, 1 the
one before that, 2 and up the sums so far; in a reduction cell those of 0 and 1 halve the map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apportion.zoo.images import Batch, initialise, random_images
from apportion.zoo.images import step as step

ABOUT = "AmoebaNet-D on random images: batch norm, cross-entropy, SGD with momentum"
SOURCE = "Real et al., AAAI 2019, cells as released with GPipe; size and image of GPipe's smallest"

# Two operations (what it reads, its name) for each sum, and what is put side by side at the end.
NORMAL = (
    ((1, "conv"), (1, "max3")),
    ((1, "same"), (0, "conv7")),
    ((0, "conv"), (0, "conv7")),
    ((2, "max3"), (2, "same")),
    ((1, "mean3"), (5, "conv")),
)
NORMAL_ENDS = (0, 3, 4, 6)
REDUCTION = (
    ((0, "max2"), (0, "max3")),
    ((2, "same"), (1, "conv3")),
    ((2, "conv7"), (2, "max3")),
    ((3, "same"), (1, "max2")),
    ((2, "mean3"), (3, "conv")),
)
REDUCTION_ENDS = (4, 5, 6)


@dataclass(frozen=True, slots=True)
class Settings:
    """`layers` normal cells in `stages` equal stages, each after a reduction cell, the first after
    two. `filters` is the channels of the first normal cell.

    Raises ValueError where these do not divide.
    """

    layers: int = 18
    filters: int = 208
    stages: int = 3
    image: int = 224
    classes: int = 1000
    batch: int = 128

    def __post_init__(self) -> None:
        if self.layers % self.stages:
            raise ValueError(f"layers={self.layers} is not a multiple of stages={self.stages}")
        if self.filters % 8:
            raise ValueError(f"filters={self.filters} is not a multiple of 8")


TINY = Settings(layers=1, filters=16, stages=1, image=37, classes=7, batch=6)


def _convolution(
    inward: int,
    outward: int,
    kernel: int | tuple[int, int] = 1,
    stride: int | tuple[int, int] = 1,
) -> list[nn.Module]:
    """ReLU, convolution, batch norm; of odd kernels the padding keeps the size."""
    height, width = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    around = (height // 2, width // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(inward, outward, kernel, stride, around, bias=False),
        nn.BatchNorm2d(outward),
    ]


def _operation(name: str, channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    if name == "conv":
        return nn.Sequential(*_convolution(channels, channels, 1, stride))
    if name == "conv3":
        return nn.Sequential(
            *_convolution(channels, inner),
            *_convolution(inner, inner, 3, stride),
            *_convolution(inner, channels),
        )
    if name == "conv7":
        return nn.Sequential(
            *_convolution(channels, inner),
            *_convolution(inner, inner, (1, 7), (1, stride)),
            *_convolution(inner, inner, (7, 1), (stride, 1)),
            *_convolution(inner, channels),
        )
    if name == "max2":
        return nn.MaxPool2d(2, stride, ceil_mode=True)
    if name == "max3":
        return nn.MaxPool2d(3, stride, padding=1)
    if name == "mean3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    assert name == "same" and stride == 1
    return nn.Identity()


class Halved(nn.Module):
    """Halves a map: of every two rows and columns the first for one half of the channels, the
    second for the other."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.relu, self.pad = nn.ReLU(), nn.ZeroPad2d((0, 1, 0, 1))
        self.even = nn.Conv2d(inward, outward // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inward, outward // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outward)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        halves = [self.even(x), self.odd(self.pad(x[:, :, 1:, 1:]))]
        y: Tensor = self.norm(torch.cat(halves, dim=1))
        return y


class Cell(nn.Module):
    """A normal or a reduction cell. `halved` tells that the map before is smaller than the one
    before that."""

    def __init__(
        self, before: int, earlier: int, channels: int, *, reduces: bool, halved: bool
    ) -> None:
        super().__init__()
        sums = REDUCTION if reduces else NORMAL
        self.ends: tuple[int, ...] = REDUCTION_ENDS if reduces else NORMAL_ENDS
        self.near = nn.Sequential(*_convolution(before, channels))
        self.far: nn.Module = nn.Identity()
        if halved:
            self.far = Halved(earlier, channels)
        elif earlier != channels:
            self.far = nn.Sequential(*_convolution(earlier, channels))
        self.reads = [source for pair in sums for source, _ in pair]
        self.operations = nn.ModuleList(
            _operation(name, channels, 2 if reduces and source < 2 else 1)
            for pair in sums
            for source, name in pair
        )
        self.outward = channels * len(self.ends)

    def forward(self, before: Tensor, earlier: Tensor) -> Tensor:
        states: list[Tensor] = [self.near(before), self.far(earlier)]
        for place in range(0, len(self.reads), 2):
            left, right = (self.operations[k](states[self.reads[k]]) for k in (place, place + 1))
            states.append(left + right)
        return torch.cat([states[end] for end in self.ends], dim=1)


class AmoebaNet(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        channels = settings.filters // 4
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        cells = list(_cells(settings))
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(cells[-1].outward, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        before = earlier = self.norm(self.stem(x))
        for cell in self.cells:
            before, earlier = cell(before, earlier), before
        logits: Tensor = self.head(before.mean((2, 3)))
        return logits


def _cells(settings: Settings) -> Iterator[Cell]:
    """All cells in order; every reduction cell doubles the channels."""
    channels = before = earlier = settings.filters // 4
    halved = False
    kinds = [True]
    for _ in range(settings.stages):
        kinds += [True, *[False] * (settings.layers // settings.stages)]
    for reduces in kinds:
        channels *= 2 if reduces else 1
        cell = Cell(before, earlier, channels, reduces=reduces, halved=halved)
        before, earlier, halved = cell.outward, before, reduces
        yield cell


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = AmoebaNet(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=4e-5)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)
