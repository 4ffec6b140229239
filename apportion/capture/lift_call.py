"""lift: one call of an operator or a function of tensors -> a Graph of its operators.

What capture.py does for a whole training step, done for one call: the same recorder, the same
rules, no optimizer. verify/ looks at operators through this, so that what it checks is what a
captured step contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.decompose import decompose
from apportion.capture.normalise import NormalisedTrace, normalise
from apportion.capture.random_rules import RANDOM_RULES
from apportion.capture.record import fake_mode, record
from apportion.capture.torch_private import OpOverload, is_composite, schema
from apportion.capture.trace import (
    CallSite,
    CaptureError,
    RecordedCall,
    Trace,
    dtype_name,
    flat_results,
)


@dataclass(frozen=True)
class LiftedCall:
    """The Graph of one call.

    inputs     the Values of the call's tensors
    outputs    the Values of its results (None: absent)
    constants  tensors that the function found somewhere, by Value
    """

    graph: g.Graph
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    constants: dict[int, torch.Tensor]


def flatten_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
    """The arguments with `Ref(k)` in the place of tensors, and the tensors, each once."""
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def with_refs(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in places:
                places[id(value)] = len(tensors)
                tensors.append(value)
            return g.Ref(places[id(value)])
        if isinstance(value, list | tuple):
            return tuple(with_refs(x) for x in value)
        return value

    return with_refs(tuple(args)), {k: with_refs(v) for k, v in kwargs.items()}, tensors


def lift_call(
    target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> LiftedCall:
    """The Graph of one call; raises CaptureError if it has none."""
    given, named, tensors = flatten_arguments(args, kwargs)
    if isinstance(target, OpOverload) and _is_plain(target):
        trace = _trace_of_operator(target, given, named, tensors)
    else:
        trace = _trace_of_function(target, given, named, tensors)
    return _build_graph(trace, decompose(normalise(trace)))


def _is_plain(target: OpOverload) -> bool:
    return not (target in RANDOM_RULES or schema(target).is_mutable or is_composite(target))


def _trace_of_operator(
    target: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
) -> Trace:
    types = [(tuple(t.shape), t.dtype) for t in tensors]
    result = target(
        *g.substitute(args, tensors), **{k: g.substitute(v, tensors) for k, v in kwargs.items()}
    )
    outputs: list[int | None] = []
    for item in flat_results(result):
        if isinstance(item, torch.Tensor):
            types.append((tuple(item.shape), item.dtype))
        outputs.append(len(types) - 1 if isinstance(item, torch.Tensor) else None)
    call = RecordedCall(target, args, kwargs, tuple(outputs), CallSite())
    return Trace((call,), tuple(types), {}, tuple(range(len(tensors))), tuple(outputs))


def _trace_of_function(
    target: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
) -> Trace:
    mode = fake_mode()
    fakes = [mode.from_tensor(t) for t in tensors]

    def run(recorder: Any, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        named = {k: g.substitute(v, inputs) for k, v in kwargs.items()}
        result = target(*g.substitute(args, inputs), **named)
        return [x if isinstance(x, torch.Tensor) else None for x in flat_results(result)]

    return record(run, fakes, mode)


def _build_graph(trace: Trace, normalised: NormalisedTrace) -> LiftedCall:
    values: list[g.Value] = []
    index: dict[int, int] = {}

    def add(slot: int, name: str, role: str) -> int:
        shape, dtype = normalised.types[slot]
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
    for number, node in enumerate(normalised.nodes):
        slots = list(dict.fromkeys(g.refs(node.args)))
        places = {slot: k for k, slot in enumerate(slots)}
        made = _output_values(node.outputs, number, normalised, add, values)
        args = g.substitute(node.args, {s: g.Ref(k) for s, k in places.items()})
        ops.append(
            g.Op(f"op{number}", node.kind, tuple(index[s] for s in slots), made, args,
                 line=node.site.line)
        )  # fmt: skip
    graph = g.Graph(tuple(values), tuple(ops))
    g.verify(graph)
    outputs = tuple(None if s is None else index[s] for s in normalised.outputs)
    return LiftedCall(graph, inputs, outputs, constants)


def _output_values(
    slots: Sequence[int | None],
    number: int,
    normalised: NormalisedTrace,
    add: Any,
    values: list[g.Value],
) -> tuple[int, ...]:
    slots = list(slots)
    while slots and slots[-1] is None:
        slots.pop()
    dtype = next((normalised.types[s][1] for s in slots if s is not None), torch.float32)
    found = []
    for position, slot in enumerate(slots):
        name = f"value{number}.{position}"
        if slot is not None:
            found.append(add(slot, name, g.ACTIVATION))
        else:  # an output that is absent is an empty Value
            values.append(g.Value(name, g.ACTIVATION, (0,), dtype_name(dtype), 0))
            found.append(len(values) - 1)
    return tuple(found)
