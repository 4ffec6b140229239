"""Operators whose result has a shape that depends on data: what to write instead of each.

A Graph has fixed shapes. record.py asks here what to do where a step calls such an operator: where
the values that decide are the same in every step, they are computed and the operator becomes one of
a fixed shape; otherwise the step is refused, in words of the operator it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from apportion.capture.call_place import CallPlace
from apportion.capture.fixed_inputs import DependsOnData
from apportion.capture.torch_private import without_modes
from apportion.capture.trace import CaptureError

aten = torch.ops.aten


class ShapeFromData(DependsOnData):
    """The step calls an operator whose result has a shape that depends on data."""


_MASK = (
    "take all elements and weigh them by the mask: (x * mask).sum() / mask.sum(), or "
    "torch.where(mask, x, other), or torch.topk where it is always as many"
)
_OUTSIDE = (
    "compute it before the step and pass it in the batch, or leave out the part of the model that "
    "calls it"
)

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
        "give input_lengths and target_lengths as tuples of int that are the same for every batch",
    ),
}  # fmt: skip


def shape_refusal(func: Any, place: CallPlace, fixable: Sequence[str] = ()) -> ShapeFromData:
    """The refusal of a call at a place. `fixable` are the tensors of the batch that alone
    decide."""
    name, remedy = _REMEDIES.get(
        str(func).rpartition(".")[0], (str(func), "use a fixed shape or torch.where")
    )
    return ShapeFromData(
        f"{name} gives a result whose value or shape depends on data{place.at}; a captured step "
        f"must do the same for every batch, so {place.remedy(remedy)}",
        place.text,
        fixable,
    )


def deciding(func: Any, args: Any) -> list[torch.Tensor]:
    """The tensors whose values decide the shape of a call's result."""
    if func is aten.masked_select.default:
        return [args[1]]
    if func is aten.index.Tensor:
        return [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
    if func is aten._pack_padded_sequence.default:
        return [args[1]]
    return [x for x in args if isinstance(x, torch.Tensor)]


def refuse_layout(name: str, tensor: torch.Tensor) -> None:
    """Raises CaptureError for an input of the step that is no plain dense tensor."""
    what, remedy = "", "use to_dense() before the step"
    if tensor.is_nested:
        what, remedy = "a nested tensor", "pad it and pass a mask"
    elif tensor.is_quantized:
        what, remedy = "a quantized tensor", "use dequantize() before the step"
    elif tensor.layout is not torch.strided:
        what = f"a tensor of layout {tensor.layout}"
    if what:
        raise CaptureError(f"{name} is {what}; only dense tensors are supported, so {remedy}")


Fixed = Callable[[torch.Tensor], torch.Tensor | None]
"""The value of a tensor that is the same in every step; None for other tensors."""


def fixed_result(func: Any, args: Any, kwargs: Any, fixed: Fixed) -> Any:
    """The result of a call whose tensors are all the same in every step; None for others."""

    def known(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = fixed(value)
            if found is None:
                raise ShapeFromData
            return found
        return [known(x) for x in value] if isinstance(value, list | tuple) else value

    try:
        given, named = known(args), {name: known(value) for name, value in kwargs.items()}
    except ShapeFromData:
        return None
    with without_modes(), torch.no_grad():
        return func(*given, **named)


def with_fixed_shape(func: Any, args: Any, fixed: Fixed) -> Any:
    """The result of a call by operators of fixed shapes; None where the shape depends on data."""
    if func is aten.nonzero.default:
        mask = fixed(args[0])
        with without_modes():
            return None if mask is None else mask.nonzero()
    if func is aten.masked_select.default:
        x, mask = args
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        known = fixed(mask)
        if known is None:
            return None
        with without_modes():
            places = list(known.expand(shape).nonzero().unbind(1))
        return aten.index.Tensor(x.expand(shape), places)
    if func is aten.index.Tensor:
        return _indexed(args[0], args[1], fixed)
    if func is aten._pack_padded_sequence.default:
        return _packed(*args, fixed=fixed)
    return None


def _packed(
    x: torch.Tensor, lengths: torch.Tensor, batch_first: bool = False, *, fixed: Fixed
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The elements of all sequences, time by time, and how many sequences there are at each time;
    the latter as a tensor with data, because torch's recurrent layers look at it."""
    known = fixed(lengths)
    if known is None:
        return None
    with without_modes():
        own = known.tolist()
        counts = [sum(length > time for length in own) for time in range(max(own))]
        times = torch.tensor([time for time, count in enumerate(counts) for _ in range(count)])
        rows = torch.tensor([row for count in counts for row in range(count)])
        sizes = torch.tensor(counts)
    return aten.index.Tensor(x, [rows, times] if batch_first else [times, rows]), sizes


def _indexed(x: torch.Tensor, indices: Any, fixed: Fixed) -> torch.Tensor | None:
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        mask = fixed(index)
        if mask is None:
            return None
        with without_modes():
            found.extend(mask.nonzero().unbind(1))
    result: torch.Tensor = aten.index.Tensor(x, found)
    return result
