"""Lift: any callable on tensors -> a Graph of its operators, by the rules of capture.

What capture does for a whole training step, done for one operator or a small function: the same
recorder, the same rewriting, no optimizer. The oracle of splits looks at operators through this, so
that what is checked is what a captured step contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.counter_random import RULES
from apportion.capture.decompose import decompose
from apportion.capture.normalise import Rewritten, rewrite
from apportion.capture.record import (
    Call,
    CaptureError,
    Site,
    Trace,
    dtype_name,
    fake_mode,
    flat_results,
    is_composite,
    record,
)


@dataclass(frozen=True)
class Lifted:
    """A Graph, the Values of its inputs, those of its results (None: absent), and found data."""

    graph: g.Graph
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    constants: dict[int, torch.Tensor]


def flatten_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """The arguments with `Ref(k)` in the place of tensors, and the tensors, each once."""
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def hold(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in places:
                places[id(value)] = len(tensors)
                tensors.append(value)
            return g.Ref(places[id(value)])
        if isinstance(value, list | tuple):
            return tuple(hold(x) for x in value)
        return value

    return hold(tuple(args)), {k: hold(v) for k, v in kwargs.items()}, tensors


def lift(target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Lifted:
    """The Graph of one call; raises CaptureError if it has none."""
    held, named, tensors = flatten_arguments(args, kwargs)
    if isinstance(target, torch._ops.OpOverload) and _is_plain(target):
        trace = _trace_of_one(target, held, named, tensors)
    else:
        trace = _recorded(target, held, named, tensors)
    return _graph(trace, decompose(rewrite(trace)))


def _is_plain(target: torch._ops.OpOverload) -> bool:
    return not (target in RULES or target._schema.is_mutable or is_composite(target))


def _trace_of_one(target: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Trace:
    types = [(tuple(t.shape), t.dtype) for t in tensors]
    result = target(
        *g.substitute(args, tensors), **{k: g.substitute(v, tensors) for k, v in kwargs.items()}
    )
    outputs: list[int | None] = []
    for item in flat_results(result):
        if isinstance(item, torch.Tensor):
            types.append((tuple(item.shape), item.dtype))
        outputs.append(len(types) - 1 if isinstance(item, torch.Tensor) else None)
    call = Call(target, args, kwargs, tuple(outputs), Site())
    return Trace((call,), tuple(types), {}, tuple(range(len(tensors))), tuple(outputs))


def _recorded(target: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Trace:
    mode = fake_mode()
    fakes = [mode.from_tensor(t) for t in tensors]

    def run(recorder: Any, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        named = {k: g.substitute(v, inputs) for k, v in kwargs.items()}
        result = target(*g.substitute(args, inputs), **named)
        return [x if isinstance(x, torch.Tensor) else None for x in flat_results(result)]

    return record(run, fakes, mode)


def _graph(trace: Trace, rewritten: Rewritten) -> Lifted:
    values: list[g.Value] = []
    index: dict[int, int] = {}

    def add(slot: int, name: str, role: str) -> int:
        shape, dtype = rewritten.types[slot]
        kind = dtype_name(dtype)
        if kind not in g.ITEMSIZE:
            raise CaptureError(f"{name} has the dtype {kind}, which a Graph cannot hold")
        values.append(g.Value(name, role, shape, kind, g.nbytes_of(shape, kind)))
        index[slot] = len(values) - 1
        return index[slot]

    inputs = tuple(add(slot, f"input{k}", g.INPUT) for k, slot in enumerate(trace.inputs))
    constants = {
        add(slot, f"constant{k}", g.BUFFER): tensor
        for k, (slot, tensor) in enumerate(trace.constants.items())
    }
    ops = []
    for number, node in enumerate(rewritten.nodes):
        slots = list(dict.fromkeys(g.refs(node.args)))
        places = {slot: k for k, slot in enumerate(slots)}
        made = _made(node.outputs, number, rewritten, add, values)
        args = g.substitute(node.args, {s: g.Ref(k) for s, k in places.items()})
        ops.append(
            g.Op(f"op{number}", node.kind, tuple(index[s] for s in slots), made, args,
                 line=node.site.line)
        )  # fmt: skip
    graph = g.Graph(tuple(values), tuple(ops))
    g.verify(graph)
    outputs = tuple(None if s is None else index[s] for s in rewritten.outputs)
    return Lifted(graph, inputs, outputs, constants)


def _made(
    slots: Sequence[int | None], number: int, rewritten: Rewritten, add: Any, values: list[g.Value]
) -> tuple[int, ...]:
    slots = list(slots)
    while slots and slots[-1] is None:
        slots.pop()
    dtype = next((rewritten.types[s][1] for s in slots if s is not None), torch.float32)
    found = []
    for position, slot in enumerate(slots):
        name = f"value{number}.{position}"
        if slot is not None:
            found.append(add(slot, name, g.ACTIVATION))
        else:  # an output that is absent is an empty Value
            values.append(g.Value(name, g.ACTIVATION, (0,), dtype_name(dtype), 0))
            found.append(len(values) - 1)
    return tuple(found)
