"""T5 of the transformers package: encoder and decoder, relative positions, padded inputs.

apportion run examples/hf_t5.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The decoder predicts the labels, which the model shifts itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, T5ForConditionalGeneration, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = T5Config(
        vocab_size=44, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    labels = torch.randint(2, config.vocab_size, (8, 6))
    labels[1::2, -1] = -100  # shorter targets: these positions do not count
    mask = torch.ones(8, 10, dtype=torch.long)
    mask[::2, -2:] = 0  # shorter inputs
    tokens = torch.randint(2, config.vocab_size, (8, 10)) * mask
    return step, model, optimizer, {"input_ids": tokens, "attention_mask": mask, "labels": labels}
