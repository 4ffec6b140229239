"""Llama of the transformers package: causal language modelling, grouped-query attention.

apportion run examples/hf_llama.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Every token predicts the next; the model shifts the labels itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, LlamaForCausalLM, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = LlamaConfig(
        vocab_size=44,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    model = LlamaForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens = torch.randint(config.vocab_size, (8, 12))
    return step, model, optimizer, {"input_ids": tokens, "labels": tokens}
