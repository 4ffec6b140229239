"""torch.ctc_loss while a step is recorded: by the operator of it that a Graph can have.

torch.ctc_loss looks at the lengths of inputs and targets, and fake tensors have none to look at.
Lengths are numbers of the Graph, as its shapes are: tuples of int, or tensors that are the same in
every step. record.py puts `recorded_ctc_loss` in the place of torch's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from apportion.capture.data_shapes import Fixed, ShapeFromData, shape_refusal
from apportion.capture.torch_private import without_modes

_MEAN, _SUM = 1, 2


@contextmanager
def recorded_ctc_loss(fixed: Fixed, at: Callable[[], str]) -> Iterator[None]:
    """A context in which torch.ctc_loss takes fake tensors. `fixed` gives the value of a tensor
    that is the same in every step, `at` the user's line."""

    def numbers(lengths: Any) -> list[int]:
        if not isinstance(lengths, torch.Tensor):
            return [int(n) for n in lengths]
        known = fixed(lengths)
        if known is None:
            raise ShapeFromData(shape_refusal(torch.ops.aten._ctc_loss.Tensor, at()))
        with without_modes():
            return [int(n) for n in known.flatten().tolist()]

    def ctc_loss(
        scores: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any,
        blank: int = 0, reduction: int = _MEAN, zero_infinity: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        batched = scores.dim() == 3
        wide = scores if batched else scores.unsqueeze(1)
        frames, letters = numbers(input_lengths), numbers(target_lengths)
        found: torch.Tensor = torch.ops.aten._ctc_loss.default(
            wide, targets, frames, letters, blank, zero_infinity
        )[0]
        if zero_infinity:
            found = torch.where(found == torch.inf, torch.zeros_like(found), found)
        if reduction == _MEAN:
            return (found / torch.tensor(letters, dtype=found.dtype).clamp_min(1)).mean()
        if reduction == _SUM:
            return found.sum()
        return found if batched else found.squeeze(0)

    before: Any = torch.ctc_loss
    setattr(torch, "ctc_loss", ctc_loss)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch, "ctc_loss", before)  # noqa: B010
