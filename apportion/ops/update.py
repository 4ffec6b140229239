"""The optimizer's update of one parameter: composite, pointwise if all of its body is."""

from __future__ import annotations

from typing import Any

from apportion.formula import Undescribed
from apportion.graph import Body, refs
from apportion.ops.elementwise import ELEMENTWISE
from apportion.tdl import Operand, describe, f


def _sources(body: Body) -> list[set[int]]:
    """For each input and each result of the body the inputs it is computed from."""
    found: list[set[int]] = [{k} for k in range(body.inputs)]
    for op in body.ops:
        if op.kind.rpartition(".")[0] not in ELEMENTWISE:
            raise Undescribed(f"the update contains {op.kind}, which is not pointwise")
        found.append(set().union(*(found[r] for r in refs(op.args))))
    return found


@describe("apportion.update")
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
