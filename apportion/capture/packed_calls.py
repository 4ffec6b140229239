"""Packed sequences while a step is recorded: taken apart by operators that a Graph can have.

torch's pad_packed_sequence writes the lengths of the sequences to memory, which fake tensors do not
have. How many sequences there are at each time is known while a step is recorded, because packing
is refused otherwise (data_shapes.py). record.py puts `padded` in the place of torch's function.
"""

from __future__ import annotations

from typing import Any

import torch

from apportion.capture.torch_private import without_modes


def padded(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences side by side, filled up, and their lengths. `sizes` says how many there are at
    each time, `total_length` how long they shall be if it is not negative."""
    with without_modes():
        counts = sizes.tolist()
        length = max(total_length, len(counts)) if total_length >= 0 else len(counts)
        there = torch.zeros(length, counts[0], dtype=torch.bool)
        for time, count in enumerate(counts):
            there[time, :count] = True
        places = (there.flatten().cumsum(0) - 1).reshape(there.shape)
        lengths = there.sum(0)
    found: Any = data[places]
    if sum(counts) < places.numel():
        mask = there.reshape(*there.shape, *[1] * (data.dim() - 1))
        found = torch.where(mask, found, torch.full((), padding, dtype=data.dtype))
    return (found.transpose(0, 1) if batch_first else found), lengths
