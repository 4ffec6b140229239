"""The optimizer's update of one parameter: composite, pointwise if all of its body is, or fused.
Updates of several parameters are taken apart before (capture/decompose/foreach.py)."""

from __future__ import annotations

from typing import Any

from apportion.describe.descriptions import describe, unsplit
from apportion.describe.errors import Undescribed
from apportion.describe.language import Operand, axes, f, reduce
from apportion.describe.ops.elementwise import ELEMENTWISE
from apportion.graph import Body, refs

UPDATE_KIND = "apportion.update"
HOST_UPDATE_KIND = "apportion.host_update"
"""The same where the host does it, on state that lies there (memory/host_state.py)."""

_SCALARS = ("aten.full.default", "aten.zeros.default", "aten.ones.default")
"""Kinds that make a number, where their size is that of a scalar."""


def _sources(body: Body) -> list[set[int]]:
    """For each input and each result of the body the inputs it is computed from."""
    found: list[set[int]] = [{k} for k in range(body.inputs)]
    for op in body.ops:
        if op.kind in _SCALARS and op.args[0] == ():
            found.append(set())
            continue
        if op.kind.rpartition(".")[0] not in ELEMENTWISE:
            raise Undescribed(f"the update contains {op.kind}, which is not pointwise")
        found.append(set().union(*(found[r] for r in refs(op.args))))
    return found


@describe(UPDATE_KIND, HOST_UPDATE_KIND)
def update(*operands: Operand, body: Body, out: tuple[tuple[int, ...], ...]) -> Any:
    sources = _sources(body)
    outputs = []
    for shape, result in zip(out, body.outputs, strict=True):
        used = [operands[k] for k in sorted(sources[result])]
        if any(x.shape not in ((), shape) for x in used):
            raise Undescribed("the update mixes tensors of several shapes")
        outputs.append(_pointwise(used))
    return tuple(outputs)


def _pointwise(used: list[Operand]) -> Any:
    return lambda *i: f("update", *(x.at(i) if x.ndim else x[()] for x in used))


@describe(*(f"aten._fused_{name}" for name in ("adam", "adamw", "sgd", "adagrad")))
def fused(*args: Any, out: tuple[tuple[int, ...], ...]) -> Any:
    """One parameter, its gradient and its state, elementwise; numbers of steps and rates are
    scalars."""
    lists = [arg for arg in args if isinstance(arg, tuple)]
    if any(len(items) > 1 for items in lists):
        raise Undescribed("several parameters in one call")
    used = [x for items in (*lists, args) for x in items if isinstance(x, Operand)]
    if any(x.ndim and x.shape != out[0] for x in used):
        raise Undescribed("state of another shape than the parameter's")
    scalars = [x for x in used if not x.ndim]
    return tuple(_pointwise(used if shape == out[0] else scalars) for shape in out)


@describe("aten._amp_foreach_non_finite_check_and_unscale")
def unscale(tensors: Any, found: Operand, scale: Operand) -> Any:
    """One gradient, scaled, and whether it has an element that is not finite, or one before had."""
    if len(tensors) > 1:
        raise Undescribed("several gradients in one call")
    (x,) = tensors
    k = axes("i", x.ndim)
    one = (0,) * scale.ndim

    def seen(*j: Any) -> Any:
        check = f("finite", x[k], found[(0,) * found.ndim])
        return reduce("max", k, check) if k else check

    return lambda *i: f("unscale", x[i], scale[one]), seen


unsplit("aten._amp_update_scale", why="the scale of a loss is one number")
