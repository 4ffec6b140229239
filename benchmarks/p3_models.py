"""The models of P3's evaluation, so narrow that two cores compute them as a GPU does the real ones.

    zoo.load("benchmarks/p3_models.py:vgg19")        a step, a model, an optimizer and a batch

    resnet50     half of the channels and classes, images of 96
    vgg19        a quarter of the channels, units and classes, images of 224, so that the first
                 fully connected layer has its 71.5% of all parameters
    sockeye      2 + 2 layers of LSTM cells and one-layer attention, half of the 512 units and of
                 IWSLT15's words (17,000 English, 7,700 Vietnamese), sentences of 10
    inception_v3 half of the channels and classes, images of 107; no auxiliary classifier
    tiny         to see that all of it runs

Batch norm is replaced by group norm with as many parameters. In P3's evaluation every worker
normalised by its own samples; our plans normalise by all samples, as the undivided step does, with
exchanges in every layer, which would be measured too. Nothing is dropped out, so that everybody's
losses are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apportion.zoo import images, inception, mlp, nmt, resnet
from apportion.zoo.rnn import Cell, unroll

Made = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Any]

GROUP = 8  # channels that are normalised together


@dataclass(frozen=True)
class Published:
    """What P3's authors say of a model: by how much P3 is faster than WFBP, at best."""

    name: str
    gain: float


PUBLISHED = {
    "resnet50": Published("ResNet-50", 0.25),
    "vgg19": Published("VGG-19", 0.66),
    "sockeye": Published("Sockeye", 0.38),
    "inception_v3": Published("InceptionV3", 0.18),
}
BATCH = {"resnet50": 16, "vgg19": 6, "sockeye": 64, "inception_v3": 16, "tiny": 8}


def spec(name: str) -> str:
    """By which the zoo loads a model of this file."""
    return f"{Path(__file__).resolve()}:{name}"


def resnet50() -> Made:
    settings = resnet.Settings(base=32, image=96, classes=500, batch=BATCH["resnet50"])
    model, _, batch = resnet.build(settings)
    return images.step, by_groups(model), _sgd(model), batch


class VGG19(nn.Module):
    """Configuration E: sixteen 3x3 convolutions in five groups, three fully connected layers."""

    def __init__(self, base: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inward = 3
        for count, multiple in ((2, 1), (2, 2), (4, 4), (4, 8), (4, 8)):
            for _ in range(count):
                layers += [nn.Conv2d(inward, multiple * base, 3, padding=1), nn.ReLU()]
                inward = multiple * base
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.full1 = nn.Linear(inward * 7 * 7, hidden)
        self.full2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, classes)
        images.initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.full1(self.features(x).flatten(1)))
        logits: Tensor = self.head(F.relu(self.full2(x)))
        return logits


def vgg19() -> Made:
    model = VGG19(base=16, hidden=1024, classes=250)
    return images.step, model, _sgd(model), images.random_images(BATCH["vgg19"], 3, 224, 250)


class Sockeye(nn.Module):
    """Source (batch, words) and target tokens (batch, words) to logits (batch, words, target
    vocabulary); a network with one hidden layer scores source words for every target word."""

    def __init__(self, hidden: int, source: int, target: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, hidden), nn.Embedding(target, hidden)
        self.encoder = nn.ModuleList(Cell(hidden) for _ in range(2))
        self.decoder = nn.ModuleList(Cell(hidden) for _ in range(2))
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        xs, ys = self.source(source).unbind(1), self.target(target).unbind(1)
        for encode, decode in zip(self.encoder, self.decoder, strict=True):
            assert isinstance(encode, Cell) and isinstance(decode, Cell)
            xs, state = unroll(encode, xs, encode.begin(xs[0]))
            ys, _ = unroll(decode, ys, state)
        memory, queries = torch.stack(xs, dim=1), torch.stack(ys, dim=1)
        pairs = torch.tanh(self.query(queries).unsqueeze(2) + self.key(memory).unsqueeze(1))
        context = F.softmax(self.score(pairs).squeeze(3), dim=2) @ memory
        logits: Tensor = self.head(torch.tanh(self.mix(torch.cat([context, queries], dim=2))))
        return logits


def sockeye() -> Made:
    vocabularies, words = (8_500, 3_850), 10
    model = Sockeye(256, *vocabularies)
    batch = nmt.sentences(min(vocabularies), BATCH["sockeye"], words, words)
    return nmt.step, model, torch.optim.Adam(model.parameters(), lr=3e-4), batch


def inception_v3() -> Made:
    settings = inception.Settings(
        base=16, image=107, classes=500, batch=BATCH["inception_v3"], dropout=0, auxiliary=0
    )
    model, _, batch = inception.build(settings)
    return inception_step, by_groups(model), _sgd(model), batch


def inception_step(model: nn.Module, batch: images.Batch) -> Tensor:
    """The loss of one batch, whatever wraps the model."""
    pictures, labels = batch
    logits, _ = model(pictures)
    return F.cross_entropy(logits, labels)


def tiny() -> Made:
    model, optimizer, batch = mlp.build(mlp.Settings(layers=4, width=256, batch=BATCH["tiny"]))
    return mlp.step, model, optimizer, batch


def by_groups(model: nn.Module) -> nn.Module:
    """The model, its batch norms replaced by group norms."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(max(1, channels // GROUP), channels))
    return model


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
