"""Operators that a recording answers itself: values that a program reads, and shapes that torch
does not give though the call has them in numbers.

Part of the room capture; record.py looks calls up here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apportion.capture.grouped_product import GROUPED_MM, fake_grouped_mm

aten = torch.ops.aten


def _whether_equal(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a.shape == b.shape and (a == b).all()


def _whether_close(a: torch.Tensor, b: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor:
    return torch.isclose(a, b, *how, **named).all()


READS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: lambda tensor: tensor,
    aten.equal.default: _whether_equal,
    aten.allclose.default: _whether_close,
}
"""Operators that give the program a value: the tensor with one element whose value it is."""


def _fake_ctc(
    scores: torch.Tensor, targets: torch.Tensor, frames: Any, letters: Any, *_: Any
) -> Any:
    steps, batch = scores.shape[:2]
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * max(letters) + 1)


def _fake_ctc_backward(grad: torch.Tensor, scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(scores)


FAKES: dict[Any, Callable[..., Any]] = {
    GROUPED_MM: fake_grouped_mm,
    aten._ctc_loss.default: _fake_ctc,
    aten._ctc_loss_backward.default: _fake_ctc_backward,
}
"""Results without data of operators whose shapes torch would take from data."""
