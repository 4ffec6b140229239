"""same_recordings: whether two Traces of a step compute the same, and the line where they do not.

Part of capture/. In: two Traces whose inputs are the same, and the values that some inputs begin
with. Out: None, or the user's line of the first difference. Two values are the same if they are
computed by the same calls from the same values, or if both follow from fixed things alone
(fixed_values.py) and have the same elements: a mask that is computed the first time and found in a
cache, an attribute or a buffer, the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.fixed_values import (
    BeginValues,
    FixedValues,
    read_slots,
    same_values,
    without_likes,
)
from apportion.capture.normalise import arguments_in_order
from apportion.capture.trace import RecordedCall, Trace

_SAME_VALUE = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")


def line_of_difference(one: Trace, two: Trace, begins: BeginValues) -> str | None:
    """The user's line where two recordings of a step part, "" if it is not known; None if they
    compute the same from inputs that begin with these values."""
    if len(one.outputs) != len(two.outputs):
        return ""
    return _Comparison(_plain(one), _plain(two), begins).difference()


def same_computation(trace: Trace, one: int, two: int) -> bool:
    """Whether two slots of a trace that writes to no tensor are computed by the same calls from the
    same values."""
    trace = _in_order(replace(trace, outputs=(one, two)))
    numbers = _Numbering().of(trace)
    return numbers[one] == numbers[two]


def _plain(trace: Trace) -> Trace:
    """The trace without the copies into its inputs that functionalization ends with."""
    given = set(trace.inputs)
    kept = [c for c in trace.calls if given.isdisjoint(s for s in c.outputs if s is not None)]
    return without_likes(replace(trace, calls=tuple(kept)))


class _Comparison:
    """The pairs of slots that have to be the same, as far as they were looked at."""

    def __init__(self, one: Trace, two: Trace, begins: BeginValues) -> None:
        self._values = (FixedValues(one, begins), FixedValues(two, begins))
        self._sides = one, two = (_in_order(one), _in_order(two))
        numbering = _Numbering()
        self._numbers = (numbering.of(one), numbering.of(two))
        self._makers = (_makers(one), _makers(two))

    def difference(self) -> str | None:
        one, two = self._sides
        waiting = list(zip(reversed(one.outputs), reversed(two.outputs), strict=True))
        seen: set[tuple[int, int]] = set()
        while waiting:
            first, second = waiting.pop()
            if first is None or second is None:
                if first is not second:
                    return ""
                continue
            a, b = (_source(m, s) for m, s in zip(self._makers, (first, second), strict=True))
            if (a, b) in seen or self._numbers[0][a] == self._numbers[1][b]:
                continue
            seen.add((a, b))
            more = self._parts(a, b)
            if more is None:
                return self._line(a, b)
            waiting.extend(more)
        return None

    def _parts(self, a: int, b: int) -> list[tuple[int | None, int | None]] | None:
        """The pairs that must be the same for this one to be; None if it is not whatever they
        are."""
        if self._sides[0].types[a] != self._sides[1].types[b]:
            return None
        x, y = self._values[0].value(a), self._values[1].value(b)
        if x is not None and y is not None:
            return [] if same_values(x, y) else None
        first, second = self._makers[0].get(a), self._makers[1].get(b)
        if first is None or second is None:
            return None
        (call, place), (other, there) = first, second
        if call.target != other.target or place != there:
            return None
        pairs: list[tuple[int | None, int | None]] = []
        return pairs if _matched(call.args, other.args, pairs) else None

    def _line(self, a: int, b: int) -> str:
        """The line of what makes either, or else of what reads it first."""
        calls = [m[s][0] for m, s in zip(self._makers[::-1], (b, a), strict=True) if s in m]
        for trace, slot in zip(self._sides[::-1], (b, a), strict=True):
            calls += [call for call in trace.calls if slot in read_slots(call)]
        return next((call.site.line for call in calls if call.site.line), "")


def _in_order(trace: Trace) -> Trace:
    """The trace with all arguments of each call in the order of its schema."""
    types = list(trace.types)
    calls = [replace(c, args=arguments_in_order(c, types), kwargs={}) for c in trace.calls]
    return replace(trace, calls=tuple(calls))


Makers = dict[int, tuple[RecordedCall, int]]


def _makers(trace: Trace) -> Makers:
    found: Makers = {}
    for call in trace.calls:
        for place, slot in enumerate(call.outputs):
            if slot is not None:
                found.setdefault(slot, (call, place))
    return found


def _source(makers: Makers, slot: int) -> int:
    """The slot that this one is another name of."""
    while slot in makers and str(makers[slot][0].target) in _SAME_VALUE:
        (slot,) = g.refs(makers[slot][0].args)
    return slot


def _matched(one: Any, two: Any, pairs: list[tuple[int | None, int | None]]) -> bool:
    """Whether two arguments are the same but for their tensors, which are added to the pairs."""
    if isinstance(one, g.Ref) and isinstance(two, g.Ref):
        pairs.append((one.index, two.index))
        return True
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(
            _matched(a, b, pairs) for a, b in zip(one, two, strict=True)
        )
    return type(one) is type(two) and repr(one) == repr(two)


class _Numbering:
    """Numbers for the values of several traces: the same for the same computation."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._constants: list[torch.Tensor] = []

    def of(self, trace: Trace) -> dict[int, int]:
        """The number of every slot."""
        found = {slot: self._number(("input", k)) for k, slot in enumerate(trace.inputs)}
        found |= {s: self._number(("constant", self._same(t))) for s, t in trace.constants.items()}
        for call in trace.calls:
            if str(call.target) in _SAME_VALUE:
                (source,), (made,) = g.refs(call.args), call.outputs
                assert made is not None
                found[made] = self._frozen(g.Ref(source), found)[1]
                continue
            key = (str(call.target), self._frozen(call.args, found))
            for place, slot in enumerate(call.outputs):
                if slot is not None:
                    found[slot] = self._number((key, place))
        for slot in trace.outputs:
            if slot is not None:
                self._frozen(g.Ref(slot), found)
        return found

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _frozen(self, arg: Any, found: dict[int, int]) -> Any:
        if isinstance(arg, g.Ref):
            if arg.index not in found:
                found[arg.index] = self._number(object())
            return ("value", found[arg.index])
        if isinstance(arg, list | tuple):
            return tuple(self._frozen(x, found) for x in arg)
        return (type(arg).__name__, repr(arg))

    def _same(self, tensor: torch.Tensor) -> int:
        """The place of the first tensor with the same elements."""
        for place, known in enumerate(self._constants):
            if known is tensor or equal_tensors(known, tensor):
                return place
        self._constants.append(tensor)
        return len(self._constants) - 1


def equal_tensors(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have the same type and elements; those without data are."""
    if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
        return False
    if one.is_meta or (one.data_ptr() == two.data_ptr() and one.stride() == two.stride()):
        return True
    return bool(((one == two) | ((one != one) & (two != two))).all())
