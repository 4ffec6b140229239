"""Values that a step reads from its tensors while it is recorded: what it is told, and by whom.

A fake tensor has no value. Where a step asks for one (`loss.item()`, `if mask.any()`, `f"{loss}"`),
a ReadValues answers: with the value for the tensors at hand (value_origin.py), with a guess where
that cannot be known, or with a value changed on purpose, so that read_probes.py sees what the
step makes of it. Every question is noted as a ValueRead.

A number that `item()` gives is a ReadFloat or a ReadInt: it remembers its true value, and each
comparison of it is a question of its own, whose answer can be changed alone.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

import torch

from apportion.capture.call_place import CallPlace, attribute_of, call_place, setting_of
from apportion.capture.torch_private import without_modes
from apportion.capture.trace import RecordedCall, TensorType
from apportion.capture.value_origin import (
    DrawComparison,
    LeafComparison,
    Producers,
    ValueOrigin,
    draw_comparison,
    is_draw,
    leaf_comparison,
    origin_of,
    true_value,
)

BOOL, INT, FLOAT, ARRAY, SHAPE = "bool", "int", "float", "array", "shape"
# how a value is changed on purpose
NEAR, NAN, LARGE, NEGATIVE, ZERO = "near", "nan", "large", "negative", "zero"

Number = bool | int | float | complex


class RecordedSoFar(Protocol):
    """What is asked of the recorder of a step."""

    calls: list[RecordedCall]
    types: list[TensorType]
    constants: dict[int, torch.Tensor]

    def slot(self, tensor: torch.Tensor) -> int: ...


@dataclass(frozen=True, slots=True)
class ValueRead:
    """One value that the step asked for.

    kind     bool, int, float, array, or shape: values that decide the shape of a tensor, which are
             told only where they are the same in every step
    followed whether comparisons of the number are questions of their own
    guessed  whether the true value is not known
    origin   what it is made from
    draw     the comparison with a random number that it is, if it is one
    counter  the comparison with an input of the step that it is, if it is one
    setting  the name of what the random number or count is compared with, if it can be found
    """

    place: CallPlace
    kind: str
    followed: bool
    guessed: bool
    origin: ValueOrigin
    draw: DrawComparison | None = None
    setting: str = ""
    counter: LeafComparison | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may be another in another step."""
        fixed = self.draw is not None and self.draw.value is not None
        return not (fixed or self.origin.is_fixed or self.kind == SHAPE)

    @property
    def changes(self) -> tuple[str, ...]:
        """The ways to change it that show what it is used for, the most telling first."""
        if self.kind == BOOL or (self.kind == INT and self.followed):
            return (NEAR,) if self.kind == BOOL else (NEAR, LARGE)
        if self.kind == INT:
            return (NEAR, ZERO, LARGE, NEGATIVE)
        if self.kind == FLOAT and self.followed:
            return (NAN, NEAR)
        return (NEAR, NAN, LARGE, NEGATIVE, ZERO)

    @property
    def enough(self) -> tuple[str, ...]:
        """Those of the changes that are enough where the step does the same for each."""
        return (NAN,) if self.kind == FLOAT and self.followed else self.changes


@dataclass(frozen=True, slots=True)
class ReadAnswers:
    """What a step is told when it is recorded.

    live     the tensors behind the inputs, by slot; None where there is no data
    steady   the slots of inputs that no update changes
    batch    the names of inputs that are tensors of the batch, by slot
    change   how values are changed on purpose, None for not at all
    changed  the stacks of the reads to change; None for all
    guesses  the answers to the first questions of yes or no whose true answer is not known
    """

    live: Mapping[int, torch.Tensor | None]
    steady: frozenset[int] = frozenset()
    batch: Mapping[int, str] = field(default_factory=dict)
    change: str | None = None
    changed: frozenset[Any] | None = None
    guesses: tuple[bool, ...] = ()


def fixable(origins: Sequence[ValueOrigin], answers: ReadAnswers) -> tuple[str, ...]:
    """The names of the tensors of the batch that alone decide values of these origins; none where
    something else does, too, or there is no data."""
    leaves = {leaf for origin in origins for leaf in origin.leaves}
    if any(origin.draws or origin.opaque for origin in origins):
        return ()
    if not leaves <= answers.steady | set(answers.batch):
        return ()
    chosen = sorted(leaf for leaf in leaves if leaf in answers.batch)
    known = all(answers.live.get(leaf) is not None for leaf in chosen)
    return tuple(answers.batch[leaf] for leaf in chosen) if known else ()


class ReadValues:
    """Answers what one recording of a step asks, and notes it.

    reads    what was asked, in order
    guessed  the answers to questions of yes or no whose true answer is not known
    taken    the stacks of the reads whose numbers were computed with, as tensors
    """

    def __init__(self, answers: ReadAnswers, outermost: CodeType) -> None:
        self.reads: list[ValueRead] = []
        self._answers, self._outermost = answers, outermost
        self._recorder: RecordedSoFar | None = None
        self._producers = Producers([])
        self.guessed: list[bool] = []
        self._numbers: dict[int, tuple[Any, torch.Tensor, ValueRead]] = {}
        self.taken: set[Any] = set()

    def begin(self, recorder: RecordedSoFar) -> None:
        """Answers for this recorder from now on, and forgets what another one asked."""
        self.reads.clear()
        self.guessed.clear()
        self.taken.clear()
        self._recorder, self._producers = recorder, Producers(recorder.calls)

    def end(self) -> None:
        """Forgets the recorder; numbers that the step keeps are then plain ones."""
        self._recorder = None

    def number(self, tensor: torch.Tensor, *, followed: bool = False) -> Number:
        """What the step is told of a tensor with one element."""
        kind = BOOL if tensor.dtype == torch.bool else INT
        kind = FLOAT if tensor.dtype.is_floating_point else kind
        found, guessed, origin, slot = self._truth(tensor)
        with without_modes():
            true: Any = self._guess(kind) if found is None else found.item()
        draw = draw_comparison(slot, self._producers) if kind == BOOL else None
        if draw is not None and draw.value is not None:
            true = draw.value
        inputs = frozenset(self._answers.live)
        counter = leaf_comparison(slot, self._producers, inputs) if kind == BOOL else None
        read = ValueRead(
            self._place(),
            kind,
            followed,
            guessed,
            origin,
            draw,
            self._setting(draw, counter),
            counter,
        )
        self.reads.append(read)
        told = self._told(read, true)
        if followed and kind in (INT, FLOAT):
            told = (ReadFloat if kind == FLOAT else ReadInt)(told)
            told.follow(true, self, read, is_draw=is_draw(slot, self._producers))
        elif kind == FLOAT:
            told = told * 1.0  # an object of its own, by which it is known again
        self._numbers[id(told)] = (told, tensor, read)
        number: Number = told
        return number

    def is_open(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have other values in another step."""
        recorder = self._recorder
        if recorder is None:
            return True
        inputs = frozenset(self._answers.live)
        slot = recorder.slot(tensor)
        return not origin_of(slot, self._producers, inputs, recorder.constants).is_fixed

    def as_float(self, tensor: torch.Tensor) -> float:
        """The same where the step makes a float of the tensor, whatever its dtype."""
        told = float(self.number(tensor)) * 1.0  # type: ignore[arg-type]
        self._numbers[id(told)] = (told, tensor, self.reads[-1])
        return told

    def array(self, tensor: torch.Tensor) -> Any:
        """What the step is told of a whole tensor, as a NumPy array."""
        found, guessed, origin, _ = self._truth(tensor)
        read = ValueRead(self._place(), ARRAY, False, guessed, origin)
        self.reads.append(read)
        with without_modes():
            if found is None:
                found = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
            if self._is_changed(read):
                found = (
                    found.logical_not()
                    if found.dtype == torch.bool
                    else _shifted(found, self._answers.change)
                )
            return found.numpy()

    def fixed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that is the same in every step; None for other tensors."""
        found, _, origin, _ = self._truth(tensor)
        if found is None or origin.draws or not origin.leaves <= self._answers.steady:
            return None
        self.reads.append(ValueRead(self._place(), SHAPE, False, False, origin))
        return found

    def fixable(self, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The tensors of the batch that alone decide the values of these; none where something else
        does, too."""
        return fixable([self._truth(x)[2] for x in tensors], self._answers)

    def choice(self, true: bool, number: _Followed, draw: DrawComparison | None) -> bool:
        """What the step is told of a comparison of a number."""
        if self._recorder is None:
            return true
        if draw is not None and draw.value is not None:
            return draw.value
        origin, guessed = number.read.origin, number.read.guessed
        if guessed:
            true = bool(self._guess(BOOL, true))
        read = ValueRead(self._place(), BOOL, False, guessed, origin, draw, self._setting(draw))
        self.reads.append(read)
        return bool(self._told(read, true))

    def tensor_of(self, number: Any) -> torch.Tensor | None:
        """The tensor that a number was read from, or that it is by arithmetic on numbers that were;
        None if it is neither."""
        known = self._numbers.get(id(number))
        if known is not None and known[0] is number:
            return known[1]
        if not isinstance(number, ReadFloat | ReadInt) or number.made_by is None:
            return None
        dtype = torch.float64 if isinstance(number, float) else torch.int64
        made: torch.Tensor | None = self._computed(number, dtype)
        return made

    def operand(self, tensor: torch.Tensor, number: Any, written: bool) -> Any:
        """What a tensor is computed with where the step gives it a number: a tensor without
        dimensions if the number was read and may be another in another step."""
        if self._recorder is None or not isinstance(number, float | ReadInt):
            return number
        reads = [read for read in self._reads_of(number) if read.is_open]
        value = self.tensor_of(number) if reads else None
        if value is None:
            return number
        self.taken.update(read.place.stack for read in reads)
        plain = float(number) if isinstance(number, float) else int(number)
        dtype = tensor.dtype if written else torch.result_type(tensor, plain)
        return value.detach().reshape(()).to(dtype)

    def _reads_of(self, number: Any) -> list[ValueRead]:
        """The reads that a number comes from."""
        known = self._numbers.get(id(number))
        if known is not None and known[0] is number:
            return [known[2]]
        if not isinstance(number, ReadFloat | ReadInt) or number.made_by is None:
            return []
        return [read for operand in number.made_by[1] for read in self._reads_of(operand)]

    def extreme(self, name: str, numbers: Sequence[Any]) -> Any:
        """The largest (max) or smallest (min) of numbers, one of which was read."""
        choose = max if name == "max" else min
        base = float if any(isinstance(x, float) for x in numbers) else int
        first = next(x for x in numbers if isinstance(x, ReadFloat | ReadInt))
        true = choose(base(getattr(x, "true", x)) for x in numbers)
        told = _told_apart(choose(base(x) for x in numbers), true, numbers)
        result = ReadFloat(told) if base is float else ReadInt(told)
        result.follow(true, self, first.read, is_draw=False)
        result.made_by = (name, (first, *(x for x in numbers if x is not first)))
        return result

    def _computed(self, number: Any, dtype: torch.dtype) -> Any:
        if not isinstance(number, ReadFloat | ReadInt):
            return number
        if number.made_by is None:
            tensor = self.tensor_of(number)
            return float(number) if tensor is None else tensor.detach().to(dtype)
        name, operands = number.made_by
        first, *others = (self._computed(each, dtype) for each in operands)
        for each in others if name in ("max", "min") else ():
            if isinstance(each, torch.Tensor):
                first = (torch.maximum if name == "max" else torch.minimum)(first, each)
            else:
                first = first.clamp_min(each) if name == "max" else first.clamp_max(each)
        return first if name in ("max", "min") else getattr(first, name)(*others)

    def _place(self) -> CallPlace:
        return call_place(self._outermost)

    def _setting(self, draw: DrawComparison | None, counter: LeafComparison | None = None) -> str:
        if counter is not None and counter.bound > 1:
            return attribute_of(counter.bound, self._outermost)
        if draw is None or draw.value is not None:
            return ""
        return setting_of(draw.bound, self._outermost)

    def _truth(self, tensor: torch.Tensor) -> tuple[torch.Tensor | None, bool, ValueOrigin, int]:
        """The tensor with data, whether there is none, where it comes from, and its slot."""
        recorder, live = self._recorder, self._answers.live
        assert recorder is not None
        slot = recorder.slot(tensor)
        origin = origin_of(slot, self._producers, frozenset(live), recorder.constants)
        found = true_value(
            slot, origin, recorder.calls, recorder.types, {**recorder.constants, **live}
        )
        return found, found is None, origin, slot

    def _guess(self, kind: str, likely: bool = False) -> Number:
        """An answer where the true one is not known."""
        if kind != BOOL:
            return 1.0 if kind == FLOAT else 1
        given, number = self._answers.guesses, len(self.guessed)
        self.guessed.append(given[number] if number < len(given) else likely)
        return self.guessed[-1]

    def _is_changed(self, read: ValueRead) -> bool:
        changed = self._answers.changed
        named = changed is None or read.place.stack in changed
        return named and read.is_open and self._answers.change in read.changes

    def _told(self, read: ValueRead, true: Any) -> Any:
        return _changed(read.kind, true, self._answers.change) if self._is_changed(read) else true


def _changed(kind: str, true: Any, change: str | None) -> Any:
    """Another value than the true one."""
    if kind == BOOL:
        return not true
    if kind == INT:
        numbers = {NEAR: true + 1, ZERO: 1 if true == 0 else 0, LARGE: true + 9973, NEGATIVE: -7}
        return numbers[change or NEAR]
    finite = true if math.isfinite(true) else 1.0
    return {
        NEAR: finite + 0.37 * max(1.0, abs(finite)),
        NAN: math.nan,
        LARGE: 1e30,
        NEGATIVE: -1e30,
        ZERO: 0.0 if true != 0 else 1e-3,
    }[change or NEAR]


def _shifted(tensor: torch.Tensor, change: str | None) -> torch.Tensor:
    kind = FLOAT if tensor.dtype.is_floating_point else INT
    flat = [_changed(kind, true, change) for true in tensor.flatten().tolist()]
    return torch.tensor(flat).to(tensor.dtype).reshape(tensor.shape)


# numbers that are followed


@contextmanager
def read_extremes(reads: ReadValues) -> Iterator[None]:
    """A context in which Python's max and min take a number that was read for what it is: they
    give another one, and make no choice."""
    module: Any = builtins
    plain = {name: getattr(module, name) for name in ("max", "min")}

    def following(name: str) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            numbers = len(args) > 1 and not kwargs and all(isinstance(x, int | float) for x in args)
            if numbers and any(isinstance(x, ReadFloat | ReadInt) for x in args):
                return reads.extreme(name, args)
            return plain[name](*args, **kwargs)

        return choose

    try:
        for name in plain:
            setattr(module, name, following(name))
        yield
    finally:
        for name, function in plain.items():
            setattr(module, name, function)


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        true = getattr(type(self.true), name)(self.true, getattr(other, "true", other))
        if not isinstance(true, bool):
            return true
        plain = isinstance(other, int | float) and not hasattr(other, "true")
        draw = None
        if self.is_draw and plain and name.strip("_") in ("lt", "le", "gt", "ge"):
            draw = DrawComparison(name.strip("_"), float(other))
        return self.source.choice(true, self, draw)

    return compare


def _told_apart(told: Any, true: Any, operands: Sequence[Any]) -> Any:
    """Another result than the true one where an operand is another, though the operation hides it
    (the largest of two, a quotient without its rest)."""
    changed = any(float(x) != float(getattr(x, "true", x)) for x in operands)
    return true + 1 if changed and told == true else told


def _arithmetic(name: str) -> Callable[..., Any]:
    def compute(self: Any, *others: Any) -> Any:
        if not all(isinstance(x, int | float) for x in others):
            return NotImplemented
        base = float if any(isinstance(x, float) for x in (self, *others)) else int
        told = getattr(base, name)(*(base(x) for x in (self, *others)))
        true = getattr(base, name)(*(base(getattr(x, "true", x)) for x in (self, *others)))
        if name in ("__floordiv__", "__mod__"):
            told = _told_apart(told, true, (self, *others))
        result = ReadFloat(told) if isinstance(told, float) else ReadInt(told)
        result.follow(true, self.source, self.read, is_draw=False)
        result.made_by = (name, (self, *others))
        return result

    return compute


class _Followed:
    """What ReadFloat and ReadInt share.

    true     the value without the change on purpose
    source   who answers comparisons
    read     the read it comes from
    is_draw  whether it is a random number from [0, 1) as it was drawn
    made_by  the arithmetic that made it of others, if it was not read itself
    """

    made_by: tuple[str, tuple[Any, ...]] | None = None
    true: Any
    source: ReadValues
    read: ValueRead
    is_draw: bool

    def follow(self, true: Any, source: ReadValues, read: ValueRead, *, is_draw: bool) -> None:
        """Makes the number one of a step that is recorded."""
        self.true, self.source, self.read, self.is_draw = true, source, read, is_draw

    def __bool__(self) -> bool:
        return self.source.choice(bool(self.true), self, None)

    __lt__, __le__ = _comparison("__lt__"), _comparison("__le__")
    __gt__, __ge__ = _comparison("__gt__"), _comparison("__ge__")
    __eq__, __ne__ = _comparison("__eq__"), _comparison("__ne__")
    __add__, __radd__ = _arithmetic("__add__"), _arithmetic("__radd__")
    __sub__, __rsub__ = _arithmetic("__sub__"), _arithmetic("__rsub__")
    __mul__, __rmul__ = _arithmetic("__mul__"), _arithmetic("__rmul__")
    __truediv__, __rtruediv__ = _arithmetic("__truediv__"), _arithmetic("__rtruediv__")
    __floordiv__, __mod__ = _arithmetic("__floordiv__"), _arithmetic("__mod__")
    __pow__, __rpow__ = _arithmetic("__pow__"), _arithmetic("__rpow__")
    __neg__, __abs__ = _arithmetic("__neg__"), _arithmetic("__abs__")


class ReadFloat(_Followed, float):
    """A float that a step read; see the head of this file."""

    __hash__ = float.__hash__


class ReadInt(_Followed, int):
    """An int that a step read; see the head of this file."""

    __hash__ = int.__hash__
