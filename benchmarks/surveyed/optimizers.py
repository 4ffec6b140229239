"""Optimizers of packages, on one small network."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from surveyed.registry import PROGRAM, Registry, classify, labels

REGISTRY = Registry(PROGRAM)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))


def _optimizer(module: str, name: str, **settings: Any) -> Any:
    def make() -> Any:
        model = _network()
        kind = getattr(importlib.import_module(module), name)
        batch = (torch.randn(8, 8), labels(8))
        return classify, model, kind(model.parameters(), **{"lr": 1e-3} | settings), batch

    return make


PACKAGES: dict[str, tuple[str, ...]] = {
    "pytorch_optimizer": (
        "Lamb", "Lion", "AdaBelief", "RAdam", "LARS", "MADGRAD", "Adan", "CAME", "StableAdamW",
        "NovoGrad", "Tiger", "AdaFactor", "QHAdam", "Yogi",
    ),
    "torch_optimizer": ("Yogi", "DiffGrad", "Lamb", "AdaBound", "SWATS", "QHM", "AggMo", "Apollo"),
}  # fmt: skip
for _package, _names in PACKAGES.items():
    for _name in _names:
        _needs = f"{_package} pytorch_ranger" if _package == "torch_optimizer" else _package
        REGISTRY.add(_name, _optimizer(_package, _name), _needs)
REGISTRY.add("Lion", _optimizer("lion_pytorch", "Lion"), "lion_pytorch")
REGISTRY.add("NAdamW", _optimizer("timm.optim.nadamw", "NAdamW"), "timm torchvision")
REGISTRY.add("optim_Lamb", _optimizer("timm.optim.lamb", "Lamb"), "timm torchvision")
REGISTRY.add("optim_Lars", _optimizer("timm.optim.lars", "Lars"), "timm torchvision")
REGISTRY.add("optim_Adan", _optimizer("timm.optim.adan", "Adan"), "timm torchvision")
REGISTRY.add("optim_Adopt", _optimizer("timm.optim.adopt", "Adopt"), "timm torchvision")
REGISTRY.add("MADGRAD", _optimizer("madgrad", "MADGRAD"), "madgrad")
REGISTRY.add("Prodigy", _optimizer("prodigyopt", "Prodigy", lr=1.0), "prodigyopt")


@REGISTRY("schedulefree")
def AdamWScheduleFree() -> Any:
    from schedulefree import AdamWScheduleFree as Kind

    model = _network()
    optimizer = Kind(model.parameters(), lr=1e-3)
    optimizer.train()
    return classify, model, optimizer, (torch.randn(8, 8), labels(8))


REGISTRY.add("AdaBelief", _optimizer("adabelief_pytorch", "AdaBelief", print_change_log=False),
             "adabelief_pytorch colorama tabulate")  # fmt: skip
REGISTRY.add("Adan", _optimizer("adan_pytorch", "Adan"), "adan_pytorch")
REGISTRY.add("CAME", _optimizer("came_pytorch", "CAME"), "came_pytorch")
REGISTRY.add("AdamAtan2", _optimizer("adam_atan2_pytorch", "AdamAtan2"), "adam_atan2_pytorch")
