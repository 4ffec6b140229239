"""Batch norm without momentum, in operators alone: its running statistics are plain averages.

Part of capture/. With momentum=None, torch.nn's batch norm weighs the statistics of a batch by one
over the number of batches so far, which it reads as a Python number. While a step is recorded, the
function of this file stands in the place of its forward: it lets torch leave the statistics of the
batch in two tensors, and averages with the number as a tensor, which comes to the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from apportion.capture.torch_private import BatchNorm

_FORWARD = BatchNorm.forward


def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """What BatchNorm.forward does."""
    counts = norm.training and norm.track_running_stats and norm.num_batches_tracked is not None
    if norm.momentum is not None or not counts:
        return _FORWARD(norm, x)
    norm._check_input_dim(x)
    norm.num_batches_tracked.add_(1)
    mean, variance = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    made = F.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = norm.num_batches_tracked.double().reciprocal()
    for average, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        own = share.to(average.dtype)
        average.copy_(own * new + (1 - own) * average)
    return made
