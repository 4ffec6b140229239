"""fixed_values: the values in a Trace that follow from nothing that changes from step to step.

Part of capture/. A Trace comes in, and the tensors that some of its inputs begin with: buffers, and
parameters that no optimizer trains. A slot that is computed from these and from constants, not from
the batch, a trained parameter or a random draw, has a value that can be computed now; that value
goes out. Where there is no data (the meta device), numbers are put in its place that tell two
computations apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from apportion import graph as g
from apportion.capture.torch_private import schema, without_modes
from apportion.capture.trace import RecordedCall, Trace
from apportion.capture.value_origin import Producers, origin_of, true_value

BeginValues = Callable[[int], torch.Tensor | None]
"""The tensor that an input begins with, by its position; None where it is another in every step."""

aten = torch.ops.aten


class FixedValues:
    """The values of one Trace, each computed when it is asked for."""

    def __init__(self, trace: Trace, begins: BeginValues) -> None:
        self._trace, self._begins = trace, begins
        self._producers = Producers(list(trace.calls))
        self._places = {slot: place for place, slot in enumerate(trace.inputs)}
        self._known: dict[int, torch.Tensor | None] = {}
        self._moving: set[int] | None = None

    def value(self, slot: int) -> torch.Tensor | None:
        """The value of a slot; None if it may be another in another step, or cannot be computed."""
        if slot not in self._known:
            self._known[slot] = None if slot in self._others() else self._value(slot)
        return self._known[slot]

    def _value(self, slot: int) -> torch.Tensor | None:
        trace = self._trace
        origin = origin_of(slot, self._producers, frozenset(trace.inputs), trace.constants)
        if origin.draws or origin.opaque:
            return None
        found = {leaf: self._begins(self._places[leaf]) for leaf in origin.leaves}
        if any(tensor is None for tensor in found.values()):
            return None
        constants = {s: with_data(t) for s, t in trace.constants.items()}
        try:
            return true_value(slot, origin, trace.calls, trace.types, {**constants, **found})
        except Exception:  # a kernel that does not run here: the value is not known
            return None

    def _others(self) -> set[int]:
        """Slots that are known to depend on something that changes, whatever is written where."""
        if self._moving is None:
            moving = {s for s, place in self._places.items() if self._begins(place) is None}
            for call in self._trace.calls:
                if isinstance(call.target, str) or not moving.isdisjoint(read_slots(call)):
                    moving.update(s for s in call.outputs if s is not None)
            self._moving = moving
        return self._moving


def read_slots(call: RecordedCall) -> Iterator[int]:
    """The slots that a call reads."""
    yield from g.refs(call.args)
    for arg in call.kwargs.values():
        yield from g.refs(arg)


def with_data(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or numbers of its shape and dtype where it has none; always the same ones."""
    if not tensor.is_meta:
        return tensor
    with without_modes():
        if not tensor.dtype.is_floating_point or math.prod(tensor.shape) > _MOST_ELEMENTS:
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        numbers = torch.Generator().manual_seed(17 + tensor.dim())
        return torch.rand(tuple(tensor.shape), generator=numbers).to(tensor.dtype)


_MOST_ELEMENTS = 1 << 24


def same_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have the same elements; the last digits of floats may differ, as one
    function rounds in two ways for parts of other sizes."""
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    with without_modes(), torch.no_grad():
        if one.is_meta or two.is_meta:
            return one.is_meta and two.is_meta
        one, two = one.detach().cpu(), two.detach().cpu()
        if not one.dtype.is_floating_point:
            return bool(torch.equal(one, two))
        digits = 4 * torch.finfo(one.dtype).eps
        return bool(torch.allclose(one, two, rtol=digits, atol=0.0, equal_nan=True))


# calls that look at no element of their tensor


@dataclass(frozen=True)
class _LikeRule:
    """Where a call that fills a tensor has its shape, None for that of its result, and its number:
    one that is fixed, or the position of an argument."""

    number: float | None
    position: int = 0


_LIKE: Mapping[object, _LikeRule] = {
    aten.zeros_like.default: _LikeRule(0),
    aten.ones_like.default: _LikeRule(1),
    aten.full_like.default: _LikeRule(None, 1),
    aten.new_zeros.default: _LikeRule(0),
    aten.new_ones.default: _LikeRule(1),
    aten.new_full.default: _LikeRule(None, 2),
    aten.zeros.default: _LikeRule(0),
    aten.ones.default: _LikeRule(1),
}


def without_likes(trace: Trace) -> Trace:
    """The trace with tensors that are filled with one number made from no other tensor."""
    calls = [_filled(call, trace) for call in trace.calls]
    return replace(trace, calls=tuple(calls))


def _filled(call: RecordedCall, trace: Trace) -> RecordedCall:
    rule = None if isinstance(call.target, str) else _LIKE.get(call.target)
    if rule is None or call.outputs[0] is None:
        return call
    number = call.args[rule.position] if rule.number is None else rule.number
    if isinstance(number, g.Ref):
        return call
    shape, dtype = trace.types[call.outputs[0]]
    number = bool(number) if dtype == torch.bool else number
    return replace(call, target=aten.full.default, args=(shape, number), kwargs={"dtype": dtype})


def slots_that_matter(trace: Trace) -> set[int]:
    """The slots that the results of a trace depend on; whatever is written into a memory counts for
    all that lies in it."""
    producers = Producers(list(trace.calls))
    producers.update()
    memory = producers.memory
    needed = {s for s in trace.outputs if s is not None}
    memories = {memory(s) for s in needed}
    for call in reversed(trace.calls):
        read = list(read_slots(call))
        written = [s for s in call.outputs if s is not None]
        if not isinstance(call.target, str) and schema(call.target).is_mutable:
            written += read
        if any(s in needed or memory(s) in memories for s in written):
            needed.update(read)
            memories.update(memory(s) for s in read)
    return needed
