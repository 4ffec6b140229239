"""Mixtral of the transformers package: causal language modelling with a mixture of experts.

apportion run examples/hf_mixtral.py:make --procs 4 --method tofu --check

How many tokens an expert gets depends on data, and a captured step may not. `batched_mm` is the
package's implementation of the experts in which all shapes are fixed, and with an attention mask
the load-balancing loss has fixed shapes too.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

Batch = dict[str, torch.Tensor]


def step(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Every token predicts the next; the model shifts the labels itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def make() -> tuple[Any, MixtralForCausalLM, torch.optim.Optimizer, Batch]:
    """(step, model, optimizer, batch), small enough to run on a laptop."""
    config = MixtralConfig(
        vocab_size=44,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        output_router_logits=True,
        experts_implementation="batched_mm",
    )
    model = MixtralForCausalLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens = torch.randint(config.vocab_size, (4, 10))
    mask = torch.ones_like(tokens)
    return step, model, optimizer, {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
