"""How much a step trains on, and how much of that devices do in a second.

Part of the room plan. A Plan or its Graph comes in. A step whose inputs are numbers of tokens
(integers in two dimensions or more, and nothing else but labels) is counted in tokens, any other in
samples: the length of its first input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from apportion.graph import INPUT, Graph, Value
from apportion.plan.plan import Plan

INTEGERS = ("int64", "int32", "int16", "uint8")
TOKENS, SAMPLES = "tokens", "samples"


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a step trains on ("tokens" or "samples"), how many of them, and how many all devices and
    each of them do in a second."""

    unit: str
    count: int
    per_second: float
    per_device: float


def throughput(plan: Plan) -> Throughput | None:
    """Of a Plan's predicted step; None if the step has no input to count."""
    found, seconds = trained_on(plan.graph), plan.predicted.step_seconds
    if found is None or seconds <= 0:
        return None
    unit, count = found
    each = count / seconds
    return Throughput(unit, count, each, each / len(plan.cluster.devices))


def trained_on(graph: Graph) -> tuple[str, int] | None:
    """What a step trains on, and how many."""
    inputs = [
        value
        for value, made in zip(graph.values, graph.producer, strict=True)
        if made is None and value.role == INPUT and value.shape
    ]
    if not inputs:
        return None
    first = inputs[0]
    assert first.shape is not None
    if all(each.dtype in INTEGERS or _is_flat(each) for each in inputs) and not _is_flat(first):
        return TOKENS, math.prod(first.shape)
    return SAMPLES, first.shape[0]


def _is_flat(value: Value) -> bool:
    return value.shape is not None and len(value.shape) < 2
