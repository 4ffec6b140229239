"""Padding with what is there: mirrored, or the last element again.

Dimensions that are padded are opaque: the edge is elsewhere in a part. constant_pad_nd is with the
slices.
"""

from __future__ import annotations

from typing import Any

from apportion.describe.descriptions import describe
from apportion.describe.language import Operand, Output, axes, opaque


def _padded(tensors: tuple[Operand, ...], padding: Any) -> Any:
    """The last dims, of which `padding` gives two numbers each, the last dim first."""
    i = axes("i", tensors[0].ndim)
    touched = {len(i) - 1 - n // 2 for n, width in enumerate(padding) if width}
    read = tuple(slice(None) if d in touched else i[d] for d in range(len(i)))
    made = opaque(*(x[read] for x in tensors))[tuple(i[d] for d in sorted(touched))]
    return Output.of(i, made)


@describe(
    *(f"aten.{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3))
)
def pad(x: Any, padding: Any) -> Any:
    return _padded((x,), padding)


@describe(
    *(
        f"aten.{kind}_pad{rank}d_backward"
        for kind in ("reflection", "replication")
        for rank in (1, 2, 3)
    )
)
def pad_backward(grad: Any, x: Any, padding: Any) -> Any:
    return _padded((grad, x), padding)
