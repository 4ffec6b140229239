"""ResNet of the transformers package: image classification with batch norm.

apportion run examples/hf_resnet.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ResNetConfig, ResNetForImageClassification

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the class."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, ResNetForImageClassification, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = ResNetConfig(
        embedding_size=12, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck",
        num_labels=10,
    )  # fmt: skip
    model = ResNetForImageClassification(config)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}
    return step, model, optimizer, batch
