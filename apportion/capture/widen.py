"""widened: the same Graph in float64, in which rounding is too small to hide a wrong result.

Part of capture/. A Graph comes in, whatever precision or mix of precisions it is in; out goes one
with the same Ops and Values, so that a strategy for one is a strategy for the other. What changes
is the dtype of floating Values and every dtype that an Op names: a cast between two precisions, as
autocast makes them, becomes a cast to the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from apportion import graph as g

_COMPLEX = {"complex64": "complex128"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_HALF_TO_FLOAT = ("aten._softmax.default", "aten._log_softmax.default")
_BITS = "aten.view.dtype"
_FIXED_STATE = 2  # of an update's inputs the parameter and the gradient come before the state


def widened(graph: g.Graph, to: str = "float64") -> g.Graph:
    """The Graph with all its narrower floating Values in `to`. Raises ValueError if an Op looks at
    the bits of a floating tensor, which has others there.

    The step count of a known optimizer stays as it is: it is a whole number, and the kernels that
    fuse its update want it so.
    """
    wide = {name: to for name in _FLOATS if g.ITEMSIZE[name] < g.ITEMSIZE[to]}
    if to == "float64":
        wide |= _COMPLEX
    for op in graph.ops:
        if op.kind == _BITS and any(graph.values[v].dtype in wide for v in op.inputs + op.outputs):
            raise ValueError(f"operator {op.name!r} looks at the bits of a tensor{_at(op.line)}")
    counts = set(_step_counts(graph))
    return replace(
        graph,
        values=tuple(
            value if index in counts else _value(value, wide)
            for index, value in enumerate(graph.values)
        ),
        ops=tuple(replace(op, args=_args(op.kind, op.args, wide)) for op in graph.ops),
        bodies=tuple(_body(body, wide) for body in graph.bodies),
    )


def _at(line: str) -> str:
    return f" (at {line})" if line else ""


def _value(value: g.Value, wide: dict[str, str]) -> g.Value:
    if value.dtype not in wide or value.shape is None:
        return value
    kind = wide[value.dtype]
    return replace(value, dtype=kind, nbytes=g.nbytes_of(value.shape, kind))


def _args(kind: str, args: tuple[g.Arg, ...], wide: dict[str, str]) -> tuple[g.Arg, ...]:
    given: tuple[g.Arg, ...] = _arg(args, wide)
    return (*given[:2], False) if kind in _HALF_TO_FLOAT else given


def _arg(arg: Any, wide: dict[str, str]) -> Any:
    if isinstance(arg, g.Dtype):
        return g.Dtype(wide.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(_arg(item, wide) for item in arg)
    return arg


def _step_counts(graph: g.Graph) -> Iterator[int]:
    """The Values that count the steps of updates that fused kernels know, before and after."""
    for op in graph.ops:
        recipe = None if op.body is None else graph.bodies[op.body].recipe
        if recipe is not None and "step" in recipe.state:
            place = recipe.state.index("step")
            yield op.inputs[_FIXED_STATE + place]
            yield op.outputs[1 + place]


def _body(body: g.Body, wide: dict[str, str]) -> g.Body:
    """What makes the new step count is left as it is, because the count is."""
    kept = -1
    if body.recipe is not None and "step" in body.recipe.state:
        kept = body.outputs[1 + body.recipe.state.index("step")] - body.inputs
    return replace(
        body,
        ops=tuple(
            op if place == kept else replace(op, args=_args(op.kind, op.args, wide))
            for place, op in enumerate(body.ops)
        ),
    )
