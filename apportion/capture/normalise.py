"""normalise: Trace -> Nodes, with all arguments in schema order and without aliases or dead calls.

The second station of capture/, after record.py and before decompose/.

- detach, alias, lift_fresh, a copy to the same dtype, a view, expand or slice to the same shape,
  a cat with nothing but empty tensors and t of t vanish: their result is renamed. _unsafe_view and
  _reshape_alias become view.
- Flash attention for CPUs and its backward become apportion.sdpa and apportion.sdpa_backward.
- nll_loss_forward with a mean becomes the sum and the total weight, then a division: parts of a sum
  can be added, parts of a mean cannot.
- Whole numbers are cast where the result would have torch's default dtype, if that is not float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.default_dtype import cast_first
from apportion.capture.node import Node as Node
from apportion.capture.node import NormalisedTrace as NormalisedTrace
from apportion.capture.torch_private import schema
from apportion.capture.trace import (
    CaptureError,
    RecordedCall,
    TensorType,
    Trace,
    dtype_name,
)

SDPA, SDPA_BACKWARD = "apportion.sdpa", "apportion.sdpa_backward"

_MEAN, _SUM = 1, 2
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_VIEW = "aten.view.default"
_KINDS = {
    f"{_CPU_ATTENTION}.default": SDPA,
    f"{_CPU_ATTENTION}_backward.default": SDPA_BACKWARD,
    "aten._unsafe_view.default": _VIEW,
    "aten._reshape_alias.default": _VIEW,
}
# Equal to their input where they keep its shape.
_SAME_SHAPE = frozenset([_VIEW, "aten.expand.default", "aten.slice.Tensor"])
_ALIASES = frozenset(
    f"aten.{name}.default" for name in ("detach", "alias", "lift_fresh", "lift_fresh_copy", "lift")
)
# Arguments that name a place or a memory order; a Graph has neither.
DROPPED = frozenset(["device", "layout", "pin_memory", "generator", "memory_format"])


def normalise(trace: Trace) -> NormalisedTrace:
    """Applies all rules of this file."""
    types = list(trace.types)
    nodes, outputs = _without_aliases(trace, types)
    nodes = [new for node in nodes for new in _sum_then_divide(node, types)]
    nodes = [new for node in nodes for new in cast_first(node, types)]
    return NormalisedTrace(tuple(live_nodes(nodes, outputs)), tuple(types), outputs)


def _without_aliases(
    trace: Trace, types: list[TensorType]
) -> tuple[list[Node], tuple[int | None, ...]]:
    renamed: dict[int, int] = {}
    transposed: dict[int, int] = {}
    nodes = []
    for call in trace.calls:
        node = _node(call, renamed, types)
        if node.kind == SDPA:
            _correct_logsumexp(node, types)
        same = _equal_slot(node, transposed, types)
        if same is None:
            nodes.append(node)
        else:
            renamed[node.results[0]] = same
    ends = tuple(None if s is None else renamed.get(s, s) for s in trace.outputs)
    return nodes, ends


def _node(call: RecordedCall, renamed: dict[int, int], types: list[TensorType]) -> Node:
    kind, args = str(call.target), _renamed(arguments_in_order(call, types), renamed)
    if kind == "aten._reshape_alias.default":
        args = args[:2]
    return Node(_KINDS.get(kind, kind), args, call.outputs, call.site)


def _correct_logsumexp(node: Node, types: list[TensorType]) -> None:
    """Attention's log of sums has the precision it is computed in, whatever a fake kernel says."""
    query, result = node.args[0], node.outputs[1]
    if isinstance(query, g.Ref) and result is not None:
        wide = torch.promote_types(types[query.index][1], torch.float32)
        types[result] = (types[result][0], wide)


def _equal_slot(node: Node, transposed: dict[int, int], types: list[TensorType]) -> int | None:
    """The slot that the node's result is equal to, if it computes nothing."""
    if node.kind == "aten.cat.default":
        return _only_part(node, types)
    if not node.args or not isinstance(node.args[0], g.Ref) or not node.results:
        return None
    source, result = node.args[0].index, node.results[0]
    if node.kind in _ALIASES:
        return source
    if node.kind == "aten._to_copy.default" or node.kind in _SAME_SHAPE:
        return source if types[result] == types[source] else None
    if node.kind == "aten.t.default":
        transposed[result] = source
        return transposed.get(source)
    return None


def _only_part(node: Node, types: list[TensorType]) -> int | None:
    """The one tensor of a cat that is not empty, as keys are that a new cache is extended by."""
    full = [slot for slot in g.refs(node.args) if math.prod(types[slot][0])]
    return full[0] if len(full) == 1 and types[full[0]] == types[node.results[0]] else None


def _sum_then_divide(node: Node, types: list[TensorType]) -> list[Node]:
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


def live_nodes(nodes: list[Node], outputs: tuple[int | None, ...]) -> list[Node]:
    """The nodes whose results are used; the Graph is functional, so nothing else has an effect."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.results):
            needed.update(g.refs(node.args))
            kept.append(node)
    return kept[::-1]


def arguments_in_order(call: RecordedCall, types: list[TensorType]) -> tuple[g.Arg, ...]:
    """All arguments in schema order with defaults filled in, places and memory orders left out.

    What is made from no tensor has the dtype it was recorded with, whatever torch's default is.
    """
    if isinstance(call.target, str):
        return call.args
    made = not any(True for _ in g.refs((call.args, *call.kwargs.values())))
    given = []
    for position, argument in enumerate(schema(call.target).arguments):
        if argument.name in DROPPED:
            continue
        if position < len(call.args):
            value = call.args[position]
        else:
            value = call.kwargs.get(argument.name, argument.default_value)
        if made and argument.name == "dtype" and call.outputs[0] is not None:
            value = types[call.outputs[0]][1]
        given.append(_argument(value))
    return tuple(given)


def _argument(value: Any) -> g.Arg:
    if isinstance(value, torch.dtype):
        return g.Dtype(dtype_name(value))
    if isinstance(value, list | tuple):
        return tuple(_argument(x) for x in value)
    if isinstance(value, float):
        return float(value)  # torch may hand a subclass through
    if value is None or isinstance(value, g.Ref | g.Dtype | bool | int | complex | str):
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
