"""ResNets of bottleneck blocks, of 50, 101, 152 layers or of as many blocks as one likes.

They differ from `wresnet` in that the blocks of each stage are settings, so that depth can be
raised until memory ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo.images import Batch, initialise, random_images, step
from apportion.zoo.wresnet import EXPANSION, Bottleneck, convolution

ABOUT = "ResNet on random images: batch norm, cross-entropy, SGD with momentum"
SOURCE = "He et al., CVPR 2016, stride in the 3x3 convolutions"


@dataclass(frozen=True, slots=True)
class Settings:
    """`stage1` to `stage4` are the blocks of each stage; `base` the channels of the stem."""

    stage1: int = 3
    stage2: int = 4
    stage3: int = 6
    stage4: int = 3
    base: int = 64
    image: int = 224
    classes: int = 1000
    batch: int = 32

    @property
    def stages(self) -> tuple[int, ...]:
        """The blocks of all stages."""
        return self.stage1, self.stage2, self.stage3, self.stage4


TINY = Settings(stage1=1, stage2=1, stage3=1, stage4=1, base=3, image=35, classes=7, batch=6)


class ResNet(nn.Module):
    """Images (batch, 3, image, image) to logits (batch, classes)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        base = inward = settings.base
        self.stem, self.norm = convolution(3, base, 7, 2), nn.BatchNorm2d(base)
        stages = []
        for number, count in enumerate(settings.stages):
            blocks = []
            for place in range(count):
                stride = 2 if number and not place else 1
                blocks.append(Bottleneck(inward, base << number, stride))
                inward = EXPANSION * (base << number)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inward, settings.classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.stages(F.max_pool2d(x, 3, 2, padding=1))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model = ResNet(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    return model, optimizer, random_images(settings.batch, 3, settings.image, settings.classes)


def _of_depth(depth: int, source: str, tiny: Settings, **settings: int) -> SimpleNamespace:
    """A ResNet with defaults of its own, as a model of the zoo."""
    return SimpleNamespace(
        ABOUT=ABOUT.replace("ResNet", f"ResNet-{depth}"),
        SOURCE=f"{SOURCE}; batch of {source}",
        Settings=partial(Settings, **settings),
        TINY=tiny,
        build=build,
        step=step,
    )


RESNET50 = _of_depth(50, "P3 per GPU", TINY)
RESNET101 = _of_depth(
    101,
    "FlexFlow per GPU",
    Settings(stage1=1, stage2=1, stage3=2, stage4=1, base=3, image=35, classes=5, batch=6),
    stage3=23,
    batch=64,
)
RESNET152 = _of_depth(
    152,
    "TensorFlowMem",
    Settings(stage1=1, stage2=2, stage3=2, stage4=1, base=2, image=35, classes=6, batch=7),
    stage2=8,
    stage3=36,
)
