"""Image classifiers drawn from the two search spaces of ENAS on CIFAR-10, one for each `graph`.

Re-created after the paper: no network that ENAS found, and none of Placeto's graphs, which are
drawn from the same spaces. Of an odd `graph` the whole network is drawn (ENAS's macro space):

    `layers` layers, each one of six operators; earlier layers, each with probability 0.4, are put
    beside its result, and a 1x1 convolution brings them together. After a third and two thirds
    of the layers all maps are halved and the channels doubled.

Of an even `graph` two cells are drawn (the micro space) and stacked as NASNet's are:

    `blocks` blocks, each the sum of two operators, each on one of the two cells before or of the
    blocks before; what no block reads is the cell's output. The second cell halves the maps, in
    place of a normal cell after a third and two thirds of the `layers` cells.

Without the auxiliary classifier and the dropping of paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, initialise, random_images
from apportion.zoo.images import step as step
from apportion.zoo.nasnet import Halved, Separable, average, greatest, pointwise

ABOUT = "a CIFAR-10 classifier drawn from ENAS's spaces: cross-entropy, SGD with momentum"
SOURCE = "re-created after Pham et al., ICML 2018 (ENAS), as used by Addanki et al., NeurIPS 2019"

SKIP = 0.4  # ENAS's target for how many of the earlier layers are read


@dataclass(frozen=True, slots=True)
class Settings:
    """`graph` says which network is drawn. `filters` of the first layers; `layers` are layers, or
    cells of `blocks` blocks.

    Raises ValueError where there is nothing to halve.
    """

    graph: int = 1
    layers: int = 9
    blocks: int = 5
    filters: int = 36
    image: int = 32
    classes: int = 10
    batch: int = 128

    def __post_init__(self) -> None:
        if self.layers < 3:
            raise ValueError(f"layers={self.layers} is below 3")


TINY = Settings(graph=1, layers=3, blocks=2, filters=4, image=8, classes=5, batch=6)


def _convolved(channels: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
    )


# Whole networks


class LayerOperator(nn.Module):
    """One of the six operators of a layer."""

    def __init__(self, kind: int, channels: int) -> None:
        super().__init__()
        self.kind = kind
        self.enter = pointwise(channels, channels)
        self.body: nn.Module = nn.Identity()
        if kind < 2:
            self.body = _convolved(channels, (3, 5)[kind])
        elif kind < 4:
            self.body = Separable(channels, channels, (3, 5)[kind - 2])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.kind >= 4:
            return (average, greatest)[self.kind - 4](x)
        y: Tensor = self.body(x)
        return y


class DrawnLayer(nn.Module):
    """An operator on the layer before, with the results of `skips` earlier ones put beside it."""

    def __init__(self, kind: int, skips: Sequence[int], channels: int) -> None:
        super().__init__()
        self.skips = tuple(skips)
        self.operator = LayerOperator(kind, channels)
        self.gather = pointwise(channels * (1 + len(skips)), channels) if skips else None

    def forward(self, before: Sequence[Tensor]) -> Tensor:
        made: Tensor = self.operator(before[-1])
        if self.gather is not None:
            made = self.gather(torch.cat([made, *(before[k] for k in self.skips)], dim=1))
        return made


class DrawnNetwork(nn.Module):
    """Images to logits, every layer drawn."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        draw, channels = Random(settings.graph), settings.filters
        drawn = [
            (draw.randrange(6), [k for k in range(number) if draw.random() < SKIP])
            for number in range(settings.layers)
        ]
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.layers = nn.ModuleList()
        self.halvings = nn.ModuleDict()
        for number, (kind, skips) in enumerate(drawn):
            if number in (settings.layers // 3, 2 * settings.layers // 3):
                read = {number}.union(*(later for _, later in drawn[number:]))
                for k in sorted(k for k in read if k <= number):
                    self.halvings[f"{number}_{k}"] = Halved(channels, 2 * channels)
                channels *= 2
            self.layers.append(DrawnLayer(kind, skips, channels))
        self.head = nn.Linear(channels, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.norm(self.stem(x))]
        for number, layer in enumerate(self.layers):
            for k in range(number + 1):
                if f"{number}_{k}" in self.halvings:
                    maps[k] = self.halvings[f"{number}_{k}"](maps[k])
            maps.append(layer(maps))
        logits: Tensor = self.head(F.relu(maps[-1]).mean((2, 3)))
        return logits


# Cells


@dataclass(frozen=True, slots=True)
class DrawnBlock:
    """Two inputs, 0 and 1 for the cells before, 2 and up for blocks; and two operators of five."""

    inputs: tuple[int, int]
    kinds: tuple[int, int]


def draw_cell(draw: Random, blocks: int) -> tuple[DrawnBlock, ...]:
    """A cell: every block reads two of what is there, the first both cells before, so that no
    cell is without use."""
    return tuple(
        DrawnBlock(
            (draw.randrange(number + 2), draw.randrange(number + 2)) if number else (0, 1),
            (draw.randrange(5), draw.randrange(5)),
        )
        for number in range(blocks)
    )


class BlockOperator(nn.Module):
    """Identity, separable convolution of 3 or 5, average or maximum; with a stride where halved."""

    def __init__(self, kind: int, channels: int, stride: int) -> None:
        super().__init__()
        self.kind, self.stride = kind, stride
        self.body: nn.Module = nn.Identity()
        if kind == 0 and stride == 2:
            self.body = Halved(channels, channels)
        elif kind in (1, 2):
            self.body = Separable(channels, channels, (3, 5)[kind - 1], stride)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind >= 3:
            return (average, greatest)[self.kind - 3](x, self.stride)
        y: Tensor = self.body(x)
        return y


class DrawnCell(nn.Module):
    """The two cells before, brought to `channels` channels and one size; then the blocks."""

    def __init__(
        self, blocks: Sequence[DrawnBlock], before: int, earlier: int, channels: int,
        halves: bool, far_halves: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = tuple(blocks)
        self.near = pointwise(before, channels)
        self.far = Halved(earlier, channels) if far_halves else pointwise(earlier, channels)
        self.operators = nn.ModuleList(
            BlockOperator(kind, channels, 2 if halves and source < 2 else 1)
            for block in blocks
            for kind, source in zip(block.kinds, block.inputs, strict=True)
        )
        read = {source for block in blocks for source in block.inputs}
        self.loose = tuple(k for k in range(2, 2 + len(blocks)) if k not in read)
        self.width = channels * len(self.loose)

    def forward(self, before: Tensor, earlier: Tensor) -> Tensor:
        there: list[Tensor] = [self.far(earlier), self.near(before)]
        for number, block in enumerate(self.blocks):
            first, second = self.operators[2 * number], self.operators[2 * number + 1]
            there.append(first(there[block.inputs[0]]) + second(there[block.inputs[1]]))
        return torch.cat([there[k] for k in self.loose], dim=1)


class DrawnCells(nn.Module):
    """Images to logits, two cells drawn and stacked."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        draw, channels = Random(settings.graph), settings.filters
        kinds = [draw_cell(draw, settings.blocks) for _ in range(2)]
        self.stem = nn.Conv2d(3, 3 * channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3 * channels)
        self.cells = nn.ModuleList()
        before = earlier = 3 * channels
        halved = False
        for number in range(settings.layers):
            halves = number in (settings.layers // 3, 2 * settings.layers // 3)
            channels *= 2 if halves else 1
            cell = DrawnCell(kinds[halves], before, earlier, channels, halves, halved)
            before, earlier, halved = cell.width, before, halves
            self.cells.append(cell)
        self.head = nn.Linear(before, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        before = earlier = self.norm(self.stem(x))
        for cell in self.cells:
            before, earlier = cell(before, earlier), before
        logits: Tensor = self.head(F.relu(before).mean((2, 3)))
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state; the network itself is
    drawn by `graph` alone."""
    model = DrawnNetwork(settings) if settings.graph % 2 else DrawnCells(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)
