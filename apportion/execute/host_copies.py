"""Copies of tensors to the host and back.

Part of the room execute. A tensor of a device comes in and one in the host's memory goes out, or
the other way round. A process that is its own device has no other memory: there the host is a pool
beside torch's allocator, so that what lies in it is not counted as the device's. A rank on a GPU
has pinned memory (pinned_memory.py), and copies beside what it computes (host_traffic.py).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from apportion.quantity import format_quantity


def host_room(shape: tuple[int, ...], dtype: torch.dtype, place: str) -> torch.Tensor:
    """Memory of the host for a tensor of a rank on torch's device `place`, which is no GPU;
    RuntimeError if it has none left."""
    if place == "meta":
        return torch.empty(shape, dtype=dtype, device=place)
    try:
        return _in_pool(shape, dtype)
    except (MemoryError, RuntimeError) as error:
        size = format_quantity(math.prod(shape) * dtype.itemsize, "B")
        raise RuntimeError(
            f"the host has no memory for {size} more that the plan keeps there: plan with less on "
            "the host (--offload, --host-state), or recompute"
        ) from error


def from_host(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A dense copy in the device's memory."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return room.copy_(tensor, non_blocking=True)


def _in_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Room for a tensor that torch's allocator does not know of."""
    raw = torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, np.uint8))
    return raw.view(dtype).view(shape)
