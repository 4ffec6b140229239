"""Operators whose result has a shape that depends on data: what to write instead of each.

A Graph has fixed shapes. record.py asks here what to do where a step calls such an operator: where
the values that decide are the same in every step, they are computed and the operator becomes one of
a fixed shape; otherwise the step is refused, in words of the operator it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apportion.capture.trace import CaptureError

aten = torch.ops.aten


class ShapeFromData(CaptureError):
    """The step calls an operator whose result has a shape that depends on data."""


_MASK = (
    "take all elements and weigh them by the mask: (x * mask).sum() / mask.sum(), or "
    "torch.where(mask, x, other)"
)
_OUTSIDE = "compute it before the step and pass it in the batch"

_REMEDIES: dict[str, tuple[str, str]] = {
    "aten.nonzero": ("nonzero() or an index by a mask", _MASK),
    "aten.masked_select": ("masked_select()", _MASK),
    "aten.index": ("an index by a mask", _MASK),
    "aten._unique": ("unique()", _OUTSIDE),
    "aten._unique2": ("unique()", _OUTSIDE),
    "aten.unique_dim": ("unique()", _OUTSIDE),
    "aten.unique_consecutive": ("unique_consecutive()", _OUTSIDE),
    "aten.repeat_interleave": (
        "repeat_interleave() by a tensor",
        "repeat by a number, or gather by indices that are made before the step",
    ),
    "aten.bincount": (
        "bincount()", "use torch.nn.functional.one_hot(x, num_classes).sum(0)"
    ),
    "aten._pack_padded_sequence": (
        "pack_padded_sequence()",
        "run the recurrent layer on the padded batch and weigh its outputs by a mask",
    ),
    "aten._ctc_loss": (
        "ctc_loss() with lengths in tensors",
        "give input_lengths and target_lengths as tuples of int",
    ),
}  # fmt: skip


def shape_refusal(func: Any, at: str) -> str:
    """The sentence that refuses a call, ` at file.py:12`."""
    name, remedy = _REMEDIES.get(
        str(func).rpartition(".")[0], (str(func), "use a fixed shape or torch.where")
    )
    return (
        f"{name} gives a result whose value or shape depends on data{at}; a captured step must do "
        f"the same for every batch, so {remedy}"
    )


Fixed = Callable[[torch.Tensor], torch.Tensor | None]
"""The value of a tensor that is the same in every step; None for other tensors."""


def with_fixed_shape(func: Any, args: Any, fixed: Fixed) -> Any:
    """The result of a call by operators of fixed shapes; None where the shape depends on data."""
    if func is aten.nonzero.default:
        return _places(args[0], fixed)
    if func is aten.masked_select.default:
        x, mask = torch.broadcast_tensors(args[0], args[1])
        places = _places(args[1].expand(mask.shape), fixed)
        return None if places is None else x[tuple(places.unbind(1))]
    if func is aten.index.Tensor:
        return _indexed(args[0], args[1], fixed)
    return None


def _places(mask: torch.Tensor, fixed: Fixed) -> torch.Tensor | None:
    known = fixed(mask)
    return None if known is None else known.nonzero()


def _indexed(x: torch.Tensor, indices: Any, fixed: Fixed) -> torch.Tensor | None:
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        places = _places(index, fixed)
        if places is None:
            return None
        found.extend(places.unbind(1))
    result: torch.Tensor = aten.index.Tensor(x, found)
    return result
