"""What the image classifiers share: random images with random labels, and the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def random_images(batch: int, channels: int, image: int, classes: int) -> Batch:
    """Square images of normal noise, each with a class."""
    return torch.randn(batch, channels, image, image), torch.randint(classes, (batch,))


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one batch: cross-entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def initialise(model: nn.Module) -> None:
    """He's initialisation for what ReLUs follow: weights by fan-out, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
