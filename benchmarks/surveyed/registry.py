"""The registry of the survey: every program and idiom by name, with the function that makes it.

A `make()` returns what a FILE.py:function returns: (step, model, optimizer, batch) and, where the
gradients are clipped by capture, clip_norm, and where tensors of the batch are the same in every
step, their names. It is called under a seed of its own, and imports its
package itself, so that a package that is not installed only skips its programs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROGRAM, IDIOM = "program", "idiom"
MODULES = (
    "timm_models",
    "vision_packages",
    "lucidrains",
    "diffusion",
    "graphs",
    "science",
    "tabular",
    "language",
    "speech",
    "optimizers",
    "idioms",
)


@dataclass(frozen=True)
class Entry:
    """A program of the survey; `package` is what must be importable for it ("" for PyTorch)."""

    name: str
    kind: str
    package: str
    make: Callable[[], Any]

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(p) is not None for p in self.package.split() if p)


class Registry:
    """Collects the entries of one module of the survey."""

    def __init__(self, kind: str, package: str = "") -> None:
        self.kind, self.package = kind, package
        self.entries: list[Entry] = []

    def add(self, name: str, make: Callable[[], Any], package: str | None = None) -> None:
        package = self.package if package is None else package
        label = f"{package.split()[0]}/{name}" if package else name
        self.entries.append(Entry(label, self.kind, package, make))

    def __call__(self, package: str | None = None, name: str = "") -> Any:
        """A decorator that adds the function under its own name."""

        def added(make: Callable[[], Any]) -> Callable[[], Any]:
            self.add(name or make.__name__, make, package)
            return make

        return added


def entries() -> list[Entry]:
    """All entries, in the order of MODULES."""
    found: list[Entry] = []
    for name in MODULES:
        module = importlib.import_module(f"surveyed.{name}")
        found += module.REGISTRY.entries
    names = [entry.name for entry in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"these names are there twice: {', '.join(twice)}")
    return found


# What many programs have in common


def images(count: int = 4, size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, size, size)


def labels(count: int = 4, classes: int = 10) -> Tensor:
    return torch.randint(classes, (count,))


def tokens(count: int = 4, length: int = 16, vocabulary: int = 64) -> Tensor:
    return torch.randint(1, vocabulary, (count, length))


def adamw(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def sgd(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the labels."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def regress(model: nn.Module, batch: Any) -> Tensor:
    """The squared error of the targets."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss."""
    return model(batch)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of what the model makes, a loss for modules without a task."""
    made = model(*batch) if isinstance(batch, tuple) else model(batch)
    return made.square().mean()


def classifier(model: nn.Module, inputs: Tensor, classes: int = 10) -> Any:
    """The program that trains a model as a classifier."""
    return classify, model, adamw(model), (inputs, labels(len(inputs), classes))


def language_model(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the next token, for a model that returns logits."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
