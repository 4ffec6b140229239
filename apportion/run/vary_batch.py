"""vary: other batches than the one a step was captured with, that are as valid as it is.

Part of the room run. A check that trained on one batch only would not see a tensor that was baked
into the step. So the steps after the first get other data, made from the given one. What a tensor
means is not known, hence the rules:

    floating        rows in another order, and halved: bounds, signs and minus infinity stay
    whole numbers   elements in another order: all are indices into the same
      in order      offsets, positions, sorted lengths, padding masks: rows in another order, and
                    nothing at all where there is one row
    truth values    rows in another order

Where a step does not take that, MILD leaves whole numbers alone, and AS_GIVEN everything.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from apportion.capture import flatten

AS_GIVEN, MILD, FREE = 0, 1, 2
"""How much a batch is varied."""


def vary(batch: Any, seed: int, step: int, freedom: int = FREE, fixed: Container[int] = ()) -> Any:
    """The batch of a step: the given one at first, then others that depend on seed and step. The
    leaves at the positions `fixed` stay as they are."""
    if step == 0 or freedom == AS_GIVEN:
        return batch
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    flat = flatten(batch)
    leaves = [
        _varied(leaf, generator, freedom)
        if isinstance(leaf, torch.Tensor) and position not in fixed
        else leaf
        for position, leaf in enumerate(flat.leaves)
    ]
    return flat.rebuild(leaves)


def _varied(tensor: torch.Tensor, generator: torch.Generator, freedom: int) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return _rows_shuffled(tensor, generator) * 0.5
    if freedom == MILD:
        return tensor
    if tensor.dtype == torch.bool or in_order(tensor):
        rows = tensor.dim() > 1 and tensor.shape[0] > 1
        return _rows_shuffled(tensor, generator) if rows else tensor
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


def _rows_shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The tensor in another order along its first dimension that has one."""
    dim = next((d for d, n in enumerate(tensor.shape) if n > 1), None)
    if dim is None:
        return tensor
    return tensor.index_select(dim, torch.randperm(tensor.shape[dim], generator=generator))


def in_order(tensor: torch.Tensor) -> bool:
    """Whether every row of numbers goes up or down, or stays."""
    if not tensor.dim() or tensor.shape[-1] < 2:
        return not tensor.dim()
    steps = tensor[..., 1:].to(torch.int64) - tensor[..., :-1].to(torch.int64)
    return bool(((steps >= 0).all(-1) | (steps <= 0).all(-1)).all())


def accepted(
    batch: Any,
    seed: int,
    steps: int,
    trial: Callable[[list[Any]], Any],
    fixed: Container[int] = (),
    first: int = 0,
    most: int = FREE,
) -> tuple[int, Any]:
    """The most freedom with whose batches `trial(batches)` does not fail, and its result. What
    fails with the batch as it was given has another reason, and is raised. `first` is the number of
    the first step, `most` the freedom to begin with."""
    for freedom in range(most, AS_GIVEN - 1, -1):
        numbers = range(first, first + steps)
        batches = [vary(batch, seed, step, freedom, fixed) for step in numbers]
        try:
            return freedom, trial(batches)
        except Exception:
            if freedom == AS_GIVEN:
                raise
    raise AssertionError
