"""Opening: composite operators -> the same computation with its statistics as Values.

A rewriting of the Graph in split/, after which composites can be cut inside.
A softmax, a layer norm or an attention is one fast kernel as long as nobody cuts the axis that it
normalises. Its second description is a decomposition: partial statistics that a reducer combines
(a sum, or the log of a sum of exponentials), then a kernel that is pointwise once they are known.
Opening replaces such operators in a Graph; Values keep their numbers, so that whatever was bound to
the Graph is bound to the opened one. docs/design/009-opening.md.

    softmax        lse = log_sum_exp(x);            exp(x - lse)
    its backward   s = sum of grad * out;           out * (grad - s)
    layer norm     sum, then sum of squares around the mean;  (x - mean) * rstd * w + b
    its backward   two sums of each row, sums of the columns; pointwise
    attention      lse = log_sum_exp of q.k;        sum over keys of exp(q.k - lse) * v
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from apportion.graph import Arg, Graph, Op, Ref, Value, nbytes_of

_NARROW = ("float16", "bfloat16")

Rule = Callable[["_OpenedGraphBuilder", Op], bool]
_OPENINGS: dict[str, Rule] = {}
"""The rule of each composite kind: a registry that the decorator below fills while this file is
loaded. A rule appends the Ops of the decomposition; it returns False to leave the Op as it is."""


def _rule(*kinds: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        _OPENINGS.update(dict.fromkeys(kinds, function))
        return function

    return register


_PARTIAL = "log_sum_exp row_dot row_sum row_squares layer_norm_reduce sdpa_lse sdpa_values"
STATISTICS = frozenset(f"apportion.{name}" for name in _PARTIAL.split())
"""Kinds of opened operators that leave partial values just where a composite is cut inside."""


def composites(graph: Graph) -> tuple[int, ...]:
    """The operators that can be opened."""
    return tuple(index for index, op in enumerate(graph.ops) if op.kind in _OPENINGS)


def open_composites(graph: Graph, which: Sequence[int] | None = None) -> Graph:
    """The Graph with composite operators opened, all of them or those named; the Graph itself if
    there are none. Raises ValueError for an operator that is no composite."""
    return open_graph(graph, composites(graph) if which is None else which)[0]


def open_graph(graph: Graph, which: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """The opened Graph, and for each of its Ops the one of the Graph that it comes from."""
    if not which:
        return graph, tuple(range(len(graph.ops)))
    if not set(which) <= set(composites(graph)):
        raise ValueError("the strategy opens an operator that is no composite")
    opener = _OpenedGraphBuilder(graph)
    origins: list[int] = []
    for index, op in enumerate(graph.ops):
        opener.moved[index] = len(opener.ops)
        if index not in which or not _OPENINGS[op.kind](opener, op):
            opener.ops.append(op)
        origins += [index] * (len(opener.ops) - len(origins))
    ops = tuple([_renumbered(op, opener.moved) for op in opener.ops])
    return replace(graph, values=tuple(opener.values), ops=ops), tuple(origins)


def _renumbered(op: Op, moved: dict[int, int]) -> Op:
    """An Op whose forward Op has another number in the opened Graph."""
    if op.forward is None or moved[op.forward] == op.forward:
        return op
    return Op(
        op.name, op.kind, op.inputs, op.outputs, op.args, op.phase, op.line, op.module,
        moved[op.forward], op.parameter, op.body,
    )  # fmt: skip


class _OpenedGraphBuilder:
    """The Values and Ops of an opened Graph so far; `moved` gives the new number of an Op."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.moved: dict[int, int] = {}

    def shape(self, value: int) -> tuple[int, ...]:
        return self.values[value].shape or ()

    def wide(self, value: int) -> str:
        """The dtype in which statistics of a Value are kept."""
        dtype = self.values[value].dtype or "float32"
        return "float32" if dtype in _NARROW else dtype

    def value(self, op: Op, what: str, shape: tuple[int, ...], dtype: str) -> int:
        """A new Value."""
        role = self.values[op.outputs[0]].role
        name = f"{self.values[op.outputs[0]].name}.{what}"
        self.values.append(Value(name, role, shape, dtype, nbytes_of(shape, dtype)))
        return len(self.values) - 1

    def op(
        self, like: Op, what: str, inputs: list[int | None], outputs: list[int], *rest: Any
    ) -> None:
        """A new Op: tensors first (None: absent), then other arguments."""
        given = [v for v in inputs if v is not None]
        slots = list(dict.fromkeys(given))
        args: list[Arg] = [None if v is None else Ref(slots.index(v)) for v in inputs]
        self.ops.append(
            replace(
                like,
                name=f"{like.name}.{what}",
                kind=f"apportion.{what}",
                inputs=tuple(slots),
                outputs=tuple(outputs),
                args=(*args, *rest),
            )
        )

    def input(self, op: Op, position: int) -> int | None:
        """The Value that an argument is; None if it is no tensor."""
        arg = op.args[position] if position < len(op.args) else None
        return op.inputs[arg.index] if isinstance(arg, Ref) else None


def _reduced_shape(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in dims else n for d, n in enumerate(shape))


@_rule("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def _softmax(make: _OpenedGraphBuilder, op: Op) -> bool:
    x, dim = make.input(op, 0), op.args[1]
    assert x is not None and isinstance(dim, int)
    shape = make.shape(x)
    if not shape:
        return False
    d = dim % len(shape)
    wide = make.wide(op.outputs[0])
    lse = make.value(op, "lse", _reduced_shape(shape, (d,)), wide)
    make.op(op, "log_sum_exp", [x], [lse], d)
    what = f"{op.kind.split('.')[1].strip('_')}_of"
    make.op(op, what, [x, lse], list(op.outputs), make.values[op.outputs[0]].dtype)
    return True


@_rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def _softmax_backward(make: _OpenedGraphBuilder, op: Op) -> bool:
    grad, out, dim = make.input(op, 0), make.input(op, 1), op.args[2]
    assert grad is not None and out is not None and isinstance(dim, int)
    shape = make.shape(grad)
    if not shape:
        return False
    d = dim % len(shape)
    log = "log" in op.kind
    total = make.value(op, "total", _reduced_shape(shape, (d,)), make.wide(grad))
    make.op(op, "row_dot", [grad, None if log else out], [total], d)
    what = "log_softmax_backward_of" if log else "softmax_backward_of"
    make.op(op, what, [grad, out, total], list(op.outputs), make.values[op.outputs[0]].dtype)
    return True


@_rule("aten.native_layer_norm.default")
def _layer_norm(make: _OpenedGraphBuilder, op: Op) -> bool:
    x, weight, bias = make.input(op, 0), make.input(op, 2), make.input(op, 3)
    normal, eps = op.args[1], op.args[4]
    assert x is not None and isinstance(normal, tuple)
    shape, rank = make.shape(x), len(normal)
    count = math.prod(shape[len(shape) - rank :])
    rows = _reduced_shape(shape, tuple(range(len(shape) - rank, len(shape))))
    total, squares = (make.value(op, what, rows, make.wide(x)) for what in ("sum", "squares"))
    make.op(op, "row_sum", [x], [total], rank)
    make.op(op, "row_squares", [x, total], [squares], rank, count)
    if len(op.outputs) > 1:
        make.op(op, "row_statistics", [total, squares], list(op.outputs[1:3]), count, eps)
    make.op(
        op, "layer_norm_of", [x, total, squares, weight, bias], [op.outputs[0]], rank, count, eps
    )
    return True


@_rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(make: _OpenedGraphBuilder, op: Op) -> bool:
    grad, x, mean, rstd, weight = (make.input(op, k) for k in (0, 1, 3, 4, 5))
    normal, mask = op.args[2], op.args[7]
    assert x is not None and mean is not None and isinstance(normal, tuple)
    assert isinstance(mask, tuple)
    shape, rank = make.shape(x), len(normal)
    count = math.prod(shape[len(shape) - rank :])
    rows = _reduced_shape(shape, tuple(range(len(shape) - rank, len(shape))))
    outputs = dict(enumerate(op.outputs))
    if mask[0]:
        sums = [make.value(op, what, rows, make.wide(x)) for what in ("sum", "dot")]
        make.op(op, "layer_norm_reduce", [grad, x, mean, rstd, weight], sums, rank)
        inputs = [grad, x, mean, rstd, weight, *sums]
        make.op(op, "layer_norm_backward_of", inputs, [outputs[0]], rank, count)
    for k, what in ((1, "layer_norm_weight"), (2, "layer_norm_bias")):
        if k < len(mask) and mask[k] and k in outputs:
            inputs = [grad, x, mean, rstd] if k == 1 else [grad]
            make.op(op, what, inputs, [outputs[k]], rank)
    absent = [v for k, v in outputs.items() if not mask[k]]
    if absent:  # empty Values that nobody reads
        make.op(op, "absent", [], absent)
    return True


@_rule("apportion.sdpa")
def _attention(make: _OpenedGraphBuilder, op: Op) -> bool:
    q, k, v, mask = make.input(op, 0), make.input(op, 1), make.input(op, 2), make.input(op, 5)
    causal, scale = op.args[4], op.args[6]
    assert q is not None
    found, lse = (make.value(op, what, make.shape(q)[:3], make.wide(q)) for what in ("sum", "lse"))
    if len(op.outputs) > 1:
        make.values.pop()
        lse = op.outputs[1]
    make.op(op, "sdpa_lse", [q, k, mask], [found], causal, scale)
    make.op(op, "sdpa_seen", [found], [lse])  # rows that see no key
    make.op(op, "sdpa_values", [q, k, v, lse, mask], [op.outputs[0]], causal, scale)
    return True
