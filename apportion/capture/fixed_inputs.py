"""Tensors of a batch that are the same in every step: named by the user, kept as they are.

Part of capture/. A Graph has fixed shapes, and some steps take shapes from data: a graph network
drops the self-loops of its edges, a packed sequence is as long as its lengths say. Where such a
tensor is the same in every step (`capture(..., fixed=["batch.edge_index"])`), the step may do with
it what it likes: it is a constant of the Graph. In: the names. Out: a FixedInput per tensor, and
`check_fixed`, which refuses a batch in which it is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture.batch_tree import FlatBatch, flatten
from apportion.capture.trace import CaptureError


class DependsOnData(CaptureError):
    """The step depends on data.

    place    the line that does
    fixable  the tensors of the batch that alone decide; none where something else does, too
    """

    def __init__(self, sentence: str = "", place: str = "", fixable: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.place, self.fixable = place, tuple(fixable)


def or_fixed(refusal: DependsOnData, names: Sequence[str], then: CaptureError | None) -> str:
    """A refusal, and the other remedy, to fix these tensors of the batch: what is refused `then`
    (None: nothing) is said too, and a remedy that leaves the same line refused is none."""
    if isinstance(then, DependsOnData) and then.place == refusal.place != "":
        return str(refusal)
    are = "is" if len(names) == 1 else "are"
    named = ", ".join(f'"{name}"' for name in names)
    left = "" if then is None else f", though then {str(then).partition(';')[0]}"
    return (
        f"{refusal}; or, if {', '.join(names)} {are} the same in every step, capture it with "
        f"fixed=[{named}]{left}"
    )


@dataclass(frozen=True, eq=False)
class FixedInput:
    """A tensor of the batch that is the same in every step: its position among the leaves, its name
    and a copy of it."""

    position: int
    name: str
    tensor: torch.Tensor


def fixed_inputs(batch: Any, names: Sequence[str]) -> tuple[FixedInput, ...]:
    """The tensors of these names: `batch.lengths`, or `lengths`; that of a list, dict or object in
    the batch stands for all its tensors. Raises CaptureError for a name that is not there."""
    flat = flatten(batch)
    if isinstance(names, str):
        names = (names,)
    chosen: dict[int, FixedInput] = {}
    for name in names:
        chosen.update({each.position: each for each in _named(flat, name)})
    return tuple(chosen[position] for position in sorted(chosen))


def _named(flat: FlatBatch, name: str) -> list[FixedInput]:
    full = name if name == "batch" or name.startswith("batch.") else f"batch.{name}"
    found = [
        (position, own, tensor)
        for position, own, tensor in flat.tensors
        if own == full or own.startswith(f"{full}.")
    ]
    if not found:
        there = ", ".join(own for _, own, _ in flat.tensors) or "no tensor"
        raise CaptureError(
            f"fixed names {name!r}, and the batch has no such tensor; it has {there}"
        )
    for _, own, tensor in found:
        if tensor.is_meta:
            raise CaptureError(
                f"{own} is to be fixed and has no data (meta device); give a batch with data"
            )
    return [FixedInput(p, own, tensor.detach().to("cpu", copy=True)) for p, own, tensor in found]


def check_fixed(fixed: Sequence[FixedInput], leaves: Sequence[Any]) -> None:
    """Raises ValueError if a fixed tensor is another one among the leaves of a batch."""
    for each in fixed:
        given = leaves[each.position].detach()
        if not _equal(given.to("cpu"), each.tensor):
            raise ValueError(
                f"{each.name} has other values than when the step was captured, and it is fixed "
                f"(fixed={[each.name]}); give it the same in every step or capture again"
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def fixed_notes(fixed: Sequence[FixedInput]) -> tuple[str, ...]:
    """What a user should know of it."""
    if not fixed:
        return ()
    names = ", ".join(each.name for each in fixed)
    return (f"fixed: {names} must be the same in every step, which is refused otherwise",)
