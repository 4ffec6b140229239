"""Draws: other values for the inputs of a Sample, so that a split does not hold by accident.

verify/ compares on draws that are near the sample's own values, hence in the operator's domain, and
in double precision where the kernel has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from apportion.verify.blind_search import outputs_of
from apportion.verify.sample import Sample

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def draw(sample: Sample, seed: int) -> tuple[torch.Tensor, ...]:
    """The sample's inputs with other values, near enough to be in its domain, and wider where the
    kernel takes that; the sample's own if it takes neither. From seed 2 on elements are shuffled
    too, those of whole numbers and truth values included."""
    generator = torch.Generator().manual_seed(seed)
    for wide, change, shuffle in (
        *([(True, True, True)] if seed >= 2 else []),
        *((True, True, False), (True, False, False), (False, True, False)),
    ):
        tensors = sample.tensors
        if wide:
            tensors = tuple(_widened(t) for t in tensors)
        if shuffle:
            tensors = tuple(_shuffled(t, generator) for t in tensors)
        if change:
            tensors = tuple(_perturbed(t, generator) for t in tensors)
        if _accepts(sample, tensors):
            return tensors
    return sample.tensors


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.dtype == torch.bool and tensor.numel() > 1 and tensor.unique().numel() == 1:
        return torch.rand(tensor.shape, generator=generator) < 0.5  # a mask of nothing hides much
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _perturbed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return tensor
    kind = tensor.dtype if tensor.is_floating_point() else _real(tensor.dtype)
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(kind)
    if tensor.is_complex():
        return tensor * (0.99 + 0.02 * noise)
    finite = tensor[tensor.isfinite()]
    if finite.numel() == 0:
        return tensor
    low, high = finite.min(), finite.max()
    if low == high:  # a gradient of ones or zeros makes false splits hold
        return tensor * (0.8 + 0.4 * noise) if low != 0 else tensor + 0.01 + 0.1 * noise
    changed = tensor * (0.99 + 0.02 * noise)
    return changed.clamp(low, high).where(tensor.isfinite(), tensor)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else torch.float32


def _accepts(sample: Sample, tensors: Sequence[torch.Tensor]) -> bool:
    if all(a is b for a, b in zip(tensors, sample.tensors, strict=True)):
        return True
    try:
        shapes = [t.shape for t in outputs_of(sample.call(sample.tensors))]
        return [t.shape for t in outputs_of(sample.call(tensors))] == shapes
    except Exception:
        return False
