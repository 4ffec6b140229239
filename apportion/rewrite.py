"""Trace -> Nodes: arguments in schema order, aliases and dead calls gone, kernels made device-neutral.

detach, alias, lift_fresh, a copy to the same dtype, t of t   vanish: their result is renamed
flash attention for CPUs and its backward                     apportion.sdpa, apportion.sdpa_backward
nll_loss_forward with a mean                                  the sum and the total weight, then a division:
                                                              parts of a sum can be added, parts of a mean not
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from apportion import graph as g
from apportion.trace import Call, CaptureError, Site, Trace, dtype_name

SDPA, SDPA_BACKWARD = "apportion.sdpa", "apportion.sdpa_backward"

_MEAN, _SUM = 1, 2
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_KINDS = {
    f"{_CPU_ATTENTION}.default": SDPA,
    f"{_CPU_ATTENTION}_backward.default": SDPA_BACKWARD,
}
_ALIASES = frozenset(
    f"aten.{name}.default" for name in ("detach", "alias", "lift_fresh", "lift_fresh_copy", "lift")
)
# Arguments that name a place or a memory order; a Graph has neither.
_DROPPED = frozenset(["device", "layout", "pin_memory", "generator", "memory_format"])


@dataclass(frozen=True, slots=True)
class Node:
    """One Op in the making: tensors are `Ref(slot)`."""

    kind: str
    args: tuple[g.Arg, ...]
    outputs: tuple[int | None, ...]
    site: Site


@dataclass(frozen=True)
class Rewritten:
    """Nodes in running order, the slots' shapes and dtypes, and the slots of the trace's results."""

    nodes: tuple[Node, ...]
    types: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    outputs: tuple[int | None, ...]


def rewrite(trace: Trace) -> Rewritten:
    """Applies all rules of this file."""
    types = list(trace.types)
    nodes, outputs = _unaliased(trace, types)
    nodes = [new for node in nodes for new in _sum_then_divide(node, types)]
    return Rewritten(tuple(_live(nodes, outputs)), tuple(types), outputs)


def _unaliased(trace: Trace, types: list[Any]) -> tuple[list[Node], tuple[int | None, ...]]:
    renamed: dict[int, int] = {}
    transposed: dict[int, int] = {}
    nodes = []
    for call in trace.calls:
        kind, args = str(call.target), _renamed(_arguments(call), renamed)
        same = _same(kind, args, call.outputs, transposed, types)
        if same is not None:
            renamed[call.outputs[0]] = same  # type: ignore[index]
            continue
        if kind == "aten.t.default":
            transposed[call.outputs[0]] = args[0].index  # type: ignore[index, union-attr]
        nodes.append(Node(_KINDS.get(kind, kind), args, call.outputs, call.site))
    ends = tuple(None if s is None else renamed.get(s, s) for s in trace.outputs)
    return nodes, ends


def _same(
    kind: str,
    args: tuple[g.Arg, ...],
    outputs: tuple[int | None, ...],
    transposed: dict[int, int],
    types: list[Any],
) -> int | None:
    """The slot that the call's result is equal to, if it computes nothing."""
    if not args or not isinstance(args[0], g.Ref):
        return None
    source = args[0].index
    if kind in _ALIASES:
        return source
    if kind == "aten._to_copy.default" and types[outputs[0]][1] == types[source][1]:
        return source
    return transposed.get(source) if kind == "aten.t.default" else None


def _sum_then_divide(node: Node, types: list[Any]) -> list[Node]:
    names = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
    if node.kind not in names or node.args[3] != _MEAN:
        return [node]
    mean, weight = node.outputs
    assert mean is not None and weight is not None
    types.append(types[mean])
    total = len(types) - 1
    args = (*node.args[:3], _SUM, *node.args[4:])
    division = replace(
        node, kind="aten.div.Tensor", args=(g.Ref(total), g.Ref(weight)), outputs=(mean,)
    )
    return [replace(node, args=args, outputs=(total, weight)), division]


def _live(nodes: list[Node], outputs: tuple[int | None, ...]) -> list[Node]:
    """The nodes whose results are used; the Graph is functional, so nothing else has an effect."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if any(s is not None and s in needed for s in node.outputs):
            needed.update(g.refs(node.args))
            kept.append(node)
    return kept[::-1]


def _arguments(call: Call) -> tuple[g.Arg, ...]:
    """All arguments in schema order with defaults filled in, places and memory orders left out."""
    if isinstance(call.target, str):
        return call.args
    given = []
    for position, argument in enumerate(call.target._schema.arguments):
        if argument.name in _DROPPED:
            continue
        if position < len(call.args):
            value = call.args[position]
        else:
            value = call.kwargs.get(argument.name, argument.default_value)
        given.append(_argument(value))
    return tuple(given)


def _argument(value: Any) -> g.Arg:
    if isinstance(value, torch.dtype):
        return g.Dtype(dtype_name(value))
    if isinstance(value, list | tuple):
        return tuple(_argument(x) for x in value)
    if isinstance(value, float):
        return float(value)  # torch may hand a subclass through
    if value is None or isinstance(value, g.Ref | g.Dtype | bool | int | str):
        return value
    raise CaptureError(
        f"an operator has an argument of type {type(value).__name__}, which a Graph cannot hold"
    )


def _renamed(arg: Any, renamed: dict[int, int]) -> Any:
    if isinstance(arg, g.Ref):
        return g.Ref(renamed[arg.index]) if arg.index in renamed else arg
    if isinstance(arg, tuple):
        return tuple(_renamed(x, renamed) for x in arg)
    return arg
