"""Copies of tensors to the host and back.

Part of the room execute. A tensor of a device comes in and one in the host's memory goes out, or
the other way round. A process that is its own device has no other memory: there the host is a pool
beside torch's allocator, so that what lies in it is not counted as the device's. On a CUDA device
the host's memory is pinned, and copies are made in the order of the device's stream: whatever reads
a tensor afterwards, or takes the memory of one that was dropped, comes after the copy.
"""

from __future__ import annotations

import numpy as np
import torch


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy in the host's memory; RuntimeError if it has none left."""
    if tensor.device.type == "meta":
        return tensor.new_empty(tensor.shape)
    make = _in_pool if tensor.device.type == "cpu" else _pinned
    try:
        room = make(tensor)
    except (MemoryError, RuntimeError) as error:
        size = tensor.numel() * tensor.element_size()
        raise RuntimeError(
            f"the host has no memory for {size} bytes of an offloaded activation: offload less, or "
            "recompute"
        ) from error
    return room.copy_(tensor, non_blocking=True)


def from_host(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A dense copy in the device's memory."""
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return room.copy_(tensor, non_blocking=True)


def _in_pool(tensor: torch.Tensor) -> torch.Tensor:
    """Room for a tensor that torch's allocator does not know of."""
    raw = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), np.uint8))
    return raw.view(tensor.dtype).view(tensor.shape)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
