"""torch.ctc_loss while a step is recorded: by the operator of it that a Graph can have.

torch.ctc_loss looks at the lengths of inputs and targets, and fake tensors have none to look at.
Lengths are numbers of the Graph, as its shapes are: tuples of int, or tensors that are the same in
every step. record.py puts `recorded_ctc_loss` in the place of torch's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from apportion.capture.call_place import CallPlace
from apportion.capture.data_shapes import shape_refusal
from apportion.capture.torch_private import without_modes

_MEAN, _SUM = 1, 2


class KnownValues(Protocol):
    """Who knows the value of a tensor that is the same in every step, and what decides others."""

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor | None: ...

    def fixable(self, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]: ...


@contextmanager
def recorded_ctc_loss(recorder: KnownValues, place: Callable[[], CallPlace]) -> Iterator[None]:
    """A context in which torch.ctc_loss takes fake tensors; `place` is what runs now."""

    def numbers(lengths: Any, unknown: Sequence[torch.Tensor]) -> list[int]:
        if not isinstance(lengths, torch.Tensor):
            return [int(n) for n in lengths]
        known = recorder.fixed(lengths)
        if known is None:
            fixable = recorder.fixable(unknown)
            raise shape_refusal(torch.ops.aten._ctc_loss.Tensor, place(), fixable)
        with without_modes():
            return [int(n) for n in known.flatten().tolist()]

    def ctc_loss(
        scores: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any,
        blank: int = 0, reduction: int = _MEAN, zero_infinity: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        batched = scores.dim() == 3
        wide = scores if batched else scores.unsqueeze(1)
        given = [x for x in (input_lengths, target_lengths) if isinstance(x, torch.Tensor)]
        frames, letters = numbers(input_lengths, given), numbers(target_lengths, given)
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
