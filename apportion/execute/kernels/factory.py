"""Tensors made from sizes: zeros where torch leaves what was there, and parts of sequences.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from apportion.execute.kernels.base import LEFT_OUT, OWN, Context, Kernel, own, resolve
from apportion.execute.kernels.random import global_index


@own("aten.empty.memory_format", "aten._efficientzerotensor.default")
def _zeros(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    size, kind = args
    return (torch.zeros(size, dtype=kind, device=context.device),)


@own("aten.empty_strided.default", "aten.empty_permuted.default")
def _zeros_in_order(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    size, _, kind = args
    return (torch.zeros(size, dtype=kind, device=context.device),)


@own("aten.empty_like.default")
def _zeros_like(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, kind = args
    return (torch.zeros_like(x, dtype=kind),)


@own("aten.new_empty.default")
def _new_zeros(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, size, kind = args
    return (x.new_zeros(size, dtype=kind),)


@own("aten.new_empty_strided.default")
def _new_zeros_in_order(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    x, size, _, kind = args
    return (x.new_zeros(size, dtype=kind),)


def _sequence(kind: str) -> Kernel:
    """Operators whose whole result is small: a part makes it all and takes its own. Computing the
    elements of a part from its ends would round differently."""

    def call(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
        make = resolve(kind)
        names = [a.name for a in make._schema.arguments if a.name not in LEFT_OUT]
        named, place = dict(zip(names, args, strict=False)), args[len(names) :]
        whole = make(**named, device=context.device)
        for dim, atoms in enumerate(place[0] if place else ()):
            if all((low, high) == (0, factor) for factor, low, high in atoms):
                continue
            whole = whole.index_select(dim, global_index(atoms, context.device))
        return (whole,)

    return call


_SEQUENCES = (
    *(f"aten.arange.{form}" for form in ("default", "start", "start_step")),
    *(
        f"aten.{name}.{form}"
        for name in ("linspace", "logspace")
        for form in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    ),
    "aten.tril_indices.default",
    "aten.triu_indices.default",
)
OWN.update({kind: _sequence(kind) for kind in _SEQUENCES})


@own("aten.eye.default", "aten.eye.m")
def _eye(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    """The last argument of a part is its size and the diagonal of its ones."""
    *sizes, kind = args if isinstance(args[-1], torch.dtype | None) else args[:-1]
    place = (sizes[0], sizes[-1], 0) if args[-1] is kind else args[-1]
    rows, columns, diagonal = place
    found = torch.zeros(rows, columns, dtype=kind, device=context.device)
    found.diagonal(diagonal).fill_(1)
    return (found,)
