"""BERT of the transformers package: masked language modelling with padded inputs.

apportion run examples/hf_bert.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM

Batch = dict[str, torch.Tensor]
MASK = 3  # the token that stands for a hidden one


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The hidden tokens are predicted from all others."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, BertForMaskedLM, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = BertConfig(
        vocab_size=44,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=16,
    )
    model = BertForMaskedLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return step, model, optimizer, data(config.vocab_size)


def data(vocab: int) -> Batch:
    """Random tokens: every fourth is hidden and to be predicted, short samples are padded."""
    tokens = torch.randint(4, vocab, (8, 12))
    hidden = torch.rand(tokens.shape) < 0.25
    mask = torch.ones_like(tokens)
    mask[::2, -3:] = 0
    return {
        "input_ids": tokens.masked_fill(hidden, MASK) * mask,
        "attention_mask": mask,
        "labels": tokens.masked_fill(~hidden | (mask == 0), -100),
    }
