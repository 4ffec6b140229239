"""GPT-2 of the transformers package: causal language modelling, dropout, tied output weights.

apportion run examples/hf_gpt2.py:make --procs 4 --method tofu --check
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Every token predicts the next; the model shifts the labels itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, GPT2LMHeadModel, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = GPT2Config(
        vocab_size=44,
        n_positions=16,
        n_embd=24,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what the package falls back to, with a warning
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens = torch.randint(config.vocab_size, (8, 12))
    return step, model, optimizer, {"input_ids": tokens, "labels": tokens}
