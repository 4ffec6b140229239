"""The optimizer's update: its body, operator by operator.

Kernels of the room execute: a Context and arguments come in, a tuple of tensors goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe import HOST_UPDATE_KIND, UPDATE_KIND
from apportion.execute.kernels.base import Context, Template, kernel, own, template
from apportion.graph import Body, refs

PreparedBody = list[tuple[str, Template, tuple[int, ...]]]
"""Kind, arguments, and the results that nobody reads afterwards, of each operator of a Body."""

_prepared: dict[int, tuple[Body, PreparedBody]] = {}
"""A cache by identity, because hashing a whole Body takes long; it keeps the Body alive."""
_MOST = 4096


@own(UPDATE_KIND, HOST_UPDATE_KIND)
def _update(context: Context, args: Sequence[Any]) -> tuple[Any, ...]:
    number, *tensors = args
    return run_body(context.bodies[number], tensors, context)


def run_body(body: Body, tensors: Sequence[Any], context: Context) -> tuple[Any, ...]:
    """What a Body makes of its inputs."""
    known: list[Any] = list(tensors)
    for kind, call, unread in _program(body):
        values = call.fill(known, context)
        known.append(kernel(kind)(context, values)[0])
        del values
        for used in unread:
            known[used] = None
    return tuple(known[k] for k in body.outputs)


def _program(body: Body) -> PreparedBody:
    found = _prepared.get(id(body))
    if found is None or found[0] is not body:
        if len(_prepared) >= _MOST:
            _prepared.clear()
        last = _last_uses(body)
        places = range(body.inputs, body.inputs + len(body.ops))
        steps = [
            (op.kind, template(op.args), last.get(place, ()))
            for place, op in zip(places, body.ops, strict=True)
        ]
        found = _prepared[id(body)] = (body, steps)
    return found[1]


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
