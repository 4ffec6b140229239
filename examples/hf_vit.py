"""ViT of the transformers package: image classification.

apportion run examples/hf_vit.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the class."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, ViTForImageClassification, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = ViTConfig(
        image_size=12,
        patch_size=4,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        hidden_dropout_prob=0.1,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batch = {"pixel_values": torch.randn(8, 3, 12, 12), "labels": torch.randint(10, (8,))}
    return step, model, optimizer, batch
