"""The optimizer's update: its body, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from apportion.graph import Body, refs, substitute
from apportion.kernels.base import Context, dtype, kernel, own


@own("apportion.update")
def _update(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    number, *tensors = args
    body = context.bodies[number]
    last = _last_uses(body)
    known: list[Any] = list(tensors)
    for place, op in enumerate(body.ops, start=body.inputs):
        values = [substitute(a, known, dtype=dtype, setting=context.setting) for a in op.args]
        known.append(kernel(op.kind)(context, values)[0])
        del values
        for used in last.get(place, ()):
            known[used] = None
    return tuple(known[k] for k in body.outputs)


@cache
def _last_uses(body: Body) -> dict[int, tuple[int, ...]]:
    """For each result's place the results that nobody reads after it is computed."""
    last: dict[int, int] = {}
    for place, op in enumerate(body.ops, start=body.inputs):
        last[place] = place
        last |= dict.fromkeys(refs(op.args), place)
    found: dict[int, tuple[int, ...]] = {}
    for result, place in last.items():
        if result >= body.inputs and result not in body.outputs:
            found[place] = (*found.get(place, ()), result)
    return found
