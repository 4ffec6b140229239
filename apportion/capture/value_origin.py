"""Where a value that a step reads comes from, and what it is for the tensors at hand.

A step that is recorded on fake tensors may want to know a value: `loss.item()`, `if mask.any()`.
The calls recorded so far say how the value is made. `origin_of` follows them back to what they
begin with; `true_value` runs them on the live parameters, buffers and batch. No code of the user's
runs for this. value_reads.py decides what the step is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.counter_random import uniform_tensor
from apportion.capture.torch_private import schema, without_modes
from apportion.capture.trace import RANDOM_UNIFORM, RecordedCall, TensorType, flat_results

# A value that needs more numbers than this to be computed is not: the step is told a guess.
_MOST_ELEMENTS = 1 << 27


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """What a value is made from.

    calls   the numbers of the recorded calls that make it
    leaves  the slots of inputs of the step that it depends on
    draws   whether it depends on random numbers
    opaque  whether it depends on something that cannot be followed
    """

    calls: tuple[int, ...]
    leaves: frozenset[int]
    draws: bool
    opaque: bool

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same in every step, as no input and no random number is in it."""
        return not (self.leaves or self.draws or self.opaque)


class Producers:
    """Which recorded call makes a slot, and which write to it, kept up with a list of calls that
    grows.

    writers  the calls that write to a memory, by its first slot
    """

    def __init__(self, calls: list[RecordedCall]) -> None:
        self.calls = calls
        self._known = 0
        self._maker: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        self.writers: dict[int, list[int]] = {}

    def update(self) -> dict[int, int]:
        """The number of the call that makes each slot so far."""
        for number in range(self._known, len(self.calls)):
            call = self.calls[number]
            for slot in call.outputs:
                if slot is not None:
                    self._maker.setdefault(slot, number)
            if not isinstance(call.target, str):
                self._note_memory(call, number)
        self._known = len(self.calls)
        return self._maker

    def memory(self, slot: int) -> int:
        """A slot of the tensor that this one is a view of, in the end."""
        while self._memory.get(slot, slot) != slot:
            slot = self._memory[slot]
        return slot

    def copied_from(self, slot: int, before: int) -> tuple[int, int] | None:
        """The slot that all of this one was copied from, and the call that did it, if nothing else
        has written to its memory and the copy came before a call."""
        writers = self.writers.get(self.memory(slot), ())
        if len(writers) != 1 or writers[0] >= before:
            return None
        call = self.calls[writers[0]]
        whole = str(call.target) == "aten.copy_.default" and call.args[0].index == slot
        return (call.args[1].index, writers[0]) if whole else None

    def _note_memory(self, call: RecordedCall, number: int) -> None:
        own = schema(call.target)
        shared = [
            slot
            for argument, given in zip(own.arguments, call.args, strict=False)
            if argument.alias_info is not None
            for slot in g.refs(given)
        ]
        views = any(each.alias_info is not None for each in own.returns)
        for slot in call.outputs if views and shared else ():
            if slot is not None and slot not in shared:
                self._memory.setdefault(slot, self.memory(shared[0]))
        if own.is_mutable:
            for slot in shared:
                self.writers.setdefault(self.memory(slot), []).append(number)


def origin_of(
    slot: int, producers: Producers, inputs: frozenset[int], constants: Mapping[int, torch.Tensor]
) -> ValueOrigin:
    """Follows the calls back from a slot, those that write to the memory of it included."""
    maker = producers.update()
    calls: set[int] = set()
    leaves, opaque = set(), False
    pending, seen = [slot], {slot}
    while pending:
        each = pending.pop()
        numbers = list(producers.writers.get(producers.memory(each), ()))
        if each in maker:
            numbers.append(maker[each])
        elif each in inputs:
            leaves.add(each)
        else:
            opaque |= each not in constants
        calls.update(numbers)
        new = {s for n in numbers for s in _read_slots(producers.calls[n])} - seen
        seen |= new
        pending.extend(new)
    made = [producers.calls[number] for number in calls]
    draws = any(call.target == RANDOM_UNIFORM for call in made)
    opaque |= any(isinstance(call.target, str) and call.target != RANDOM_UNIFORM for call in made)
    return ValueOrigin(tuple(sorted(calls)), frozenset(leaves), draws, opaque)


_SHAPE_ONLY = frozenset(
    f"aten.{name}.default"
    for name in (
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_empty_strided",
    )
)  # fmt: skip
"""Operators that read the shape and dtype of their first argument, and no value."""


def _read_slots(call: RecordedCall) -> list[int]:
    """The slots whose values a call reads."""
    args = call.args[1:] if str(call.target) in _SHAPE_ONLY else call.args
    return [*g.refs(args), *(slot for arg in call.kwargs.values() for slot in g.refs(arg))]


def true_value(
    slot: int,
    origin: ValueOrigin,
    calls: Sequence[RecordedCall],
    types: Sequence[TensorType],
    found: Mapping[int, torch.Tensor | None],
) -> torch.Tensor | None:
    """The tensor of a slot by running its calls, on `found`: the tensors of inputs and constants.

    None where an input has no data, a call cannot be run, or it would be too much to compute.
    Random numbers are those of step 0 with seed 0.
    """
    made = [calls[number] for number in origin.calls]
    work = sum(math.prod(types[s][0]) for call in made for s in call.outputs if s is not None)
    if origin.opaque or work > _MOST_ELEMENTS:
        return None
    if any(found.get(leaf) is None for leaf in origin.leaves):
        return None
    table: dict[int, Any] = {}
    last = {s: k for k, call in enumerate(made) for s in _read_slots(call)}
    with without_modes(), torch.no_grad():
        for number, call in enumerate(made):
            for each in _read_slots(call):
                if each not in table:
                    table[each] = _on_cpu(found[each])
            if str(call.target) in _SHAPE_ONLY:
                like, kind = call.args[0].index, types[call.args[0].index]
                kept = table.get(like)
                table[like] = torch.empty((), dtype=kind[1]).expand(kind[0])
                _run(call, table)
                table.pop(like)
                table.update({} if kept is None else {like: kept})
            else:
                _run(call, table)
            for each in _read_slots(call):
                if last[each] == number and each != slot:
                    table.pop(each, None)
        value = table.get(slot)
        return _on_cpu(found.get(slot)) if value is None else value


def _run(call: RecordedCall, table: dict[int, Any]) -> None:
    if call.target == RANDOM_UNIFORM:
        size, key, dtype = call.args
        results: Any = uniform_tensor((0, 0, key), size, getattr(torch, dtype.name))
    else:
        args = g.substitute(call.args, table)
        results = call.target(*args, **{k: g.substitute(v, table) for k, v in call.kwargs.items()})
    for slot, value in zip(call.outputs, flat_results(results), strict=True):
        if slot is not None:
            table[slot] = value


def _on_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that may be written to, laid out as the fake tensor of it is."""
    if tensor is None:
        return None
    return tensor.detach().to("cpu", copy=True).contiguous()


# what is known of a comparison with a random number, whatever is drawn


def decided(comparison: str, bound: float) -> bool | None:
    """What `draw < bound` is for every draw from [0, 1): True, False, or None where it depends.

    The comparison is lt, le, gt or ge.
    """
    if comparison in ("gt", "ge"):
        opposite = decided("le" if comparison == "gt" else "lt", bound)
        return None if opposite is None else not opposite
    if bound >= 1.0:
        return True
    never = bound <= 0.0 if comparison == "lt" else bound < 0.0
    return False if never else None


@dataclass(frozen=True, slots=True)
class DrawComparison:
    """A random number, compared: the read value is whether `draw <comparison> bound`, or not so."""

    comparison: str
    bound: float
    negated: bool = False

    @property
    def value(self) -> bool | None:
        """What it is for every draw, if that is one thing."""
        found = decided(self.comparison, self.bound)
        return None if found is None else found is not self.negated


_SAME_NUMBERS = frozenset(
    f"aten.{name}"
    for name in (
        "detach.default", "alias.default", "view.default", "_unsafe_view.default", "select.int",
        "squeeze.default", "unsqueeze.default", "expand.default", "slice.Tensor", "clone.default",
        "unbind.int", "reshape.default", "squeeze.dim",
    )
)  # fmt: skip
_ANY_OR_ALL = frozenset(["aten.any.default", "aten.all.default"])
_NOT = frozenset(["aten.logical_not.default", "aten.bitwise_not.default"])
_COMPARISONS = frozenset(["lt", "le", "gt", "ge"])


@dataclass(frozen=True, slots=True)
class LeafComparison:
    """A comparison of an input of the step with a number: `eq`, the bound and the input's slot."""

    comparison: str
    bound: float
    leaf: int

    def stays(self, value: float) -> bool:
        """Whether it has the same outcome for ever if the input has this value and only grows."""
        return value > self.bound or (value == self.bound and self.comparison in ("ge", "lt"))


def draw_comparison(slot: int, producers: Producers) -> DrawComparison | None:
    """The comparison of one draw with a number that a slot is, if it is one."""
    root, found, negated = _compared(slot, producers)
    maker = producers.update()
    drawn = root in maker and producers.calls[maker[root]].target == RANDOM_UNIFORM
    if not drawn or found is None or found[0] not in _COMPARISONS:
        return None
    return DrawComparison(*found, negated)


def leaf_comparison(
    slot: int, producers: Producers, leaves: frozenset[int]
) -> LeafComparison | None:
    """The comparison of one input with a number that a slot is, if it is one."""
    root, found, _ = _compared(slot, producers)
    return LeafComparison(*found, root) if root in leaves and found is not None else None


def _compared(slot: int, producers: Producers) -> tuple[int, tuple[str, float] | None, bool]:
    """Follows a slot back over one comparison with a number: where that ends, the comparison, and
    whether its outcome is negated."""
    maker, negated = producers.update(), False
    found: tuple[str, float] | None = None
    reader = len(producers.calls)
    while slot in maker:
        copied = producers.copied_from(slot, reader)
        if copied is not None:
            slot, reader = copied
            continue
        reader = maker[slot]
        call = producers.calls[reader]
        kind = str(call.target)
        name, _, form = kind.removeprefix("aten.").partition(".")
        if kind in _NOT and found is None:
            negated = not negated
        elif kind in _ANY_OR_ALL and found is None:
            pass
        elif name in (*_COMPARISONS, "eq", "ne") and form == "Scalar" and found is None:
            found = (name, float(call.args[1]))
        elif not (kind in _SAME_NUMBERS or _is_exact_cast(call)):
            break
        slot = call.args[0].index
    return slot, found, negated


def grows(leaf: int, calls: Sequence[RecordedCall], outputs: Sequence[int | None]) -> bool:
    """Whether the step ends with this input and a positive number added, and not as it was."""
    maker = {s: call for call in calls for s in call.outputs if s is not None}
    ends = set()
    for end in outputs:
        slot, added = end, False
        while slot in maker and slot is not None:
            call = maker[slot]
            step = call.args[1] if len(call.args) > 1 else None
            counts = str(call.target) in ("aten.add.Tensor", "aten.add.Scalar")
            if counts and isinstance(step, int | float) and step > 0:
                added = True
            elif str(call.target) not in _SAME_NUMBERS:
                break
            slot = call.args[0].index
        if slot == leaf:
            ends.add(added)
    return ends == {True}


def is_draw(slot: int, producers: Producers) -> bool:
    """Whether a slot is a random number from [0, 1) as it was drawn."""
    maker = producers.update()
    while slot in maker:
        call = producers.calls[maker[slot]]
        if call.target == RANDOM_UNIFORM:
            return True
        if not (str(call.target) in _SAME_NUMBERS or _is_exact_cast(call)):
            return False
        slot = call.args[0].index
    return False


def _is_exact_cast(call: RecordedCall) -> bool:
    wide = (torch.float32, torch.float64)
    return str(call.target) == "aten._to_copy.default" and call.kwargs.get("dtype") in wide
