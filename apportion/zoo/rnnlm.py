"""FlexFlow's recurrent language model: like Tofu's, with two wide layers and forty steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from apportion.zoo import rnn
from apportion.zoo.rnn import Batch, step

ABOUT = "two-layer LSTM language model on random tokens, unrolled: cross-entropy, SGD"
SOURCE = "Jia, Zaharia and Aiken, MLSys 2019 (FlexFlow); Zaremba et al., arXiv 1409.2329"

__all__ = ["ABOUT", "SOURCE", "TINY", "Settings", "build", "step"]


@dataclass(frozen=True, slots=True)
class Settings:
    """FlexFlow's, with the words of the Penn Treebank; GDP has `layers` 2, 4 and 8."""

    layers: int = 2
    hidden: int = 2048
    steps: int = 40
    vocab: int = 10000
    batch: int = 64


TINY = Settings(layers=2, hidden=8, steps=4, vocab=14, batch=6)


def build(settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Model, optimizer and one batch, from torch's current random state."""
    model, _, batch = rnn.build(
        rnn.Settings(
            settings.layers, settings.hidden, settings.steps, settings.vocab, settings.batch
        )
    )
    return model, torch.optim.SGD(model.parameters(), lr=1.0), batch
