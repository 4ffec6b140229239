"""ConvNeXt of the transformers package: image classification, depthwise convolutions, drop path.

apportion run examples/hf_convnext.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ConvNextConfig, ConvNextForImageClassification

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the class."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, ConvNextForImageClassification, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = ConvNextConfig(
        hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 2, 1], drop_path_rate=0.1, num_labels=10
    )
    model = ConvNextForImageClassification(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}
    return step, model, optimizer, batch
