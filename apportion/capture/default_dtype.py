"""Casts in the place of torch's default dtype, which a worker that runs the Graph need not have.

Part of normalise.py. `counts * 0.5` of whole numbers has the default dtype of the process that
captures. Where that is not float32, the whole numbers are cast to it first, so that the result has
that dtype everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.node import Node
from apportion.capture.trace import TensorType, dtype_name

_CAST = "aten._to_copy.default"


def cast_first(node: Node, types: list[TensorType]) -> list[Node]:
    """The node, after casts of its whole numbers where its result has a default dtype but
    float32."""
    dtype = _default_dtype_of(node, types)
    if dtype is None:
        return [node]
    casts: dict[int, int] = {}
    made = []
    for slot in _whole_numbers(node):
        types.append((types[slot][0], dtype))
        casts[slot] = len(types) - 1
        args = (g.Ref(slot), g.Dtype(dtype_name(dtype)), False)
        made.append(replace(node, kind=_CAST, args=args, outputs=(casts[slot],)))
    return [*made, replace(node, args=_recast(node.args, casts, _condition(node)))]


def _default_dtype_of(node: Node, types: list[TensorType]) -> torch.dtype | None:
    """The dtype of a result that follows torch's default, if that is not float32."""
    dtypes = {types[slot][1] for slot in node.results}
    read = [types[slot][1] for slot in g.refs(node.args)]
    plain = len(dtypes) == 1 and node.kind.startswith("aten.")
    if not plain or not read or any(x.is_floating_point or x.is_complex for x in read):
        return None
    (dtype,) = dtypes
    if not dtype.is_floating_point or dtype == torch.float32 or _names_dtype(node.args):
        return None
    return dtype


def _names_dtype(args: Any) -> bool:
    if isinstance(args, tuple):
        return any(map(_names_dtype, args))
    return isinstance(args, g.Dtype)


def _condition(node: Node) -> int:
    """The slot that only chooses and is no number: the condition of a where; -1 for none."""
    first = node.args[0]
    chooses = node.kind.startswith("aten.where.") and isinstance(first, g.Ref)
    return first.index if chooses and isinstance(first, g.Ref) else -1


def _whole_numbers(node: Node) -> Iterator[int]:
    condition = _condition(node)
    for slot in dict.fromkeys(g.refs(node.args)):
        if slot != condition:
            yield slot


def _recast(arg: Any, casts: dict[int, int], condition: int) -> Any:
    if isinstance(arg, g.Ref):
        return arg if arg.index == condition else g.Ref(casts[arg.index])
    if isinstance(arg, tuple):
        return tuple(_recast(each, casts, condition) for each in arg)
    return arg
