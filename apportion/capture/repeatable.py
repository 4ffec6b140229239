"""Whether a step does the same every time: it is recorded twice, and the two records compared.

Part of capture/. A Graph is one step for good. A step that draws numbers from Python's or NumPy's
generators, counts its calls, looks at the clock or keeps a tensor in an attribute is another one
every time; it would be captured as it was the first time. So the step is recorded again as it goes
on: with the attributes as the first time has left them, and other random numbers. If the records
differ, it is recorded once more from the same beginning, which tells state from randomness; what
differs is refused with its cause and the user's line.

In: a function that records the step. Out: what it recorded, and notes. Values of two records are
compared by what they are computed from (`_Numbering`), so that a mask that is computed the first
time and found in a cache the second is the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from apportion import graph as g
from apportion.capture.record import Recorder, record
from apportion.capture.torch_private import schema, storage_id
from apportion.capture.trace import RANDOM_UNIFORM, CaptureError, RecordedCall, Trace
from apportion.capture.untouched import LiveChange, LiveObjects
from apportion.capture.user_line import at_line, is_zoo_file, user_line, user_line_of

R = TypeVar("R")
Function = Callable[..., Sequence[torch.Tensor | None]]

_DRAWS = 5  # further records of a step that draws numbers and yet was the same for others


@dataclass(frozen=True)
class _ForwardPart:
    """How many calls the user's part of a step makes, and the slots that it ends with."""

    calls: int
    ends: tuple[int, ...]


class _ForwardEnd(Exception):
    """The user's part of a step is over, and no more is wanted."""

    def __init__(self, recorder: Recorder, part: _ForwardPart) -> None:
        super().__init__()
        self.recorder, self.part = recorder, part


@dataclass
class StepWatch:
    """What is known of the recordings of a step.

    steady  the slots of inputs that no update changes: buffers and parameters that are not trained
    first   the recorder of the first recording, which keeps its tensors alive
    kept    the slots of the first recorder whose tensors the last recording has read again, each
            with its slot there
    forward what the user's part of a step that returns its loss has come to, the first time
    stops   whether a recording ends there
    """

    steady: frozenset[int] = frozenset()
    first: Recorder | None = None
    kept: dict[int, int] = field(default_factory=dict)
    forward: _ForwardPart | None = None
    stops: bool = False

    def forward_done(self, recorder: Recorder, ends: Iterable[torch.Tensor]) -> None:
        """To be called where the user's part of a step that returns its loss is over, with what it
        returns and the buffers it leaves."""
        part = _ForwardPart(len(recorder.calls), tuple(recorder.slot(x) for x in ends))
        if self.first is None:
            self.forward = part
        elif self.stops:
            raise _ForwardEnd(recorder, part)

    @property
    def decided_by_forward(self) -> bool:
        """Whether no code of the user's ran in the rest of the first recording, as a hook does."""
        if self.forward is None or self.first is None:
            return False
        rest = self.first.calls[self.forward.calls :]
        return not any(call.site.phase == g.BACKWARD and call.site.line for call in rest)

    def same_forward(self, end: _ForwardEnd) -> bool:
        """Whether the user's part was call by call the same as the first time."""
        first, other, size = self.first, end.recorder, end.part.calls
        assert first is not None
        constants = other.constants.items()
        return (
            end.part == self.forward
            and all(s in first.constants and _equal(first.constants[s], t) for s, t in constants)
            and all(map(_same_call, first.calls[:size], other.calls))
        )

    def watched(self, function: Function) -> Function:
        """The function to record, watched."""

        def run(recorder: Recorder, *inputs: torch.Tensor) -> Sequence[torch.Tensor | None]:
            ends: Sequence[torch.Tensor | None] | None = None
            try:
                ends = function(recorder, *inputs)
                return ends
            finally:
                self._end(recorder, ends)

        return run

    def _end(self, recorder: Recorder, ends: Sequence[torch.Tensor | None] | None) -> None:
        if self.first is None:
            self.first = None if ends is None else recorder
            return
        before = {id(tensor): slot for slot, tensor in enumerate(self.first.tensors)}
        used = None if ends is None else _used(recorder, ends)
        self.kept = {
            self.first.slots[id(tensor)]: slot
            for slot, tensor in enumerate(recorder.tensors)
            if id(tensor) in before and slot not in recorder.constants
            if used is None or slot in used
        }

    @property
    def rewritten(self) -> bool:
        """Whether the first recording's slots were numbered anew (see Recorder.mutates)."""
        return self.first is not None and self.first.mutates

    def changing(self) -> list[int]:
        """Those of the kept tensors that depend on more than constants."""
        assert self.first is not None
        sources = _sources(self.first)
        steady = {s for s in self.steady if self.first.slots[id(self.first.tensors[s])] == s}
        return [slot for slot in self.kept if not sources[slot] <= steady]


def _sources(recorder: Recorder) -> dict[int, set[int]]:
    """By slot, the slots that it was computed from and that nothing was computed for: inputs and
    random draws, not constants."""
    made = {s for call in recorder.calls for s in call.outputs if s is not None}
    draws = {call.outputs[0] for call in recorder.calls if call.target == RANDOM_UNIFORM}
    found: dict[int, set[int]] = {}
    for slot in range(len(recorder.tensors)):
        free = slot in draws or (slot not in made and slot not in recorder.constants)
        found[slot] = {slot} if free else set()
    memory: dict[int, set[int]] = {}
    for call in recorder.calls:
        read = [*g.refs(call.args), *g.refs(tuple(call.kwargs.values()))]
        written = [s for s in call.outputs if s is not None]
        if not isinstance(call.target, str) and schema(call.target).is_mutable:
            written += read
        everything = set().union(
            *(found[s] | memory.get(_memory(recorder, s), set()) for s in read)
        )
        for slot in written:
            found[slot] |= everything
            memory.setdefault(_memory(recorder, slot), set()).update(everything)
    return {s: found[s] | memory.get(_memory(recorder, s), set()) for s in found}


def _used(recorder: Recorder, ends: Sequence[torch.Tensor | None]) -> set[int]:
    """The slots that the results of a recording depend on."""
    used = {recorder.slot(x) for x in ends if x is not None}
    memories = {_memory(recorder, slot) for slot in used}
    for call in reversed(recorder.calls):
        read = [*g.refs(call.args), *g.refs(tuple(call.kwargs.values()))]
        written = [s for s in call.outputs if s is not None]
        if not isinstance(call.target, str) and schema(call.target).is_mutable:
            written += read
        if any(s in used or _memory(recorder, s) in memories for s in written):
            used.update(read)
            memories.update(_memory(recorder, s) for s in read)
    return used


def _memory(recorder: Recorder, slot: int) -> int:
    return storage_id(recorder.tensors[slot])


def is_ours(step: Any, model: Any) -> bool:
    """Whether a step and all of its model are the zoo's, which is known to do the same every
    time."""
    code = getattr(step, "__code__", None)
    if code is None or not is_zoo_file(code.co_filename) or not isinstance(model, torch.nn.Module):
        return False
    return all(type(m).__module__.startswith(_KNOWN) for m in model.modules())


_KNOWN = ("apportion.zoo.", "torch.nn.modules.")


class RepeatedRecording(Generic[R]):
    """Records a step from the beginning, as often as it is called; after the first time, and only
    then, it is recorded again to see whether that is the same, unless that is known."""

    def __init__(
        self,
        record: Callable[..., R],
        trace_of: Callable[[R], Trace],
        live: LiveObjects,
        watch: StepWatch,
        compares: bool = True,
    ) -> None:
        self._record, self._trace_of = record, trace_of
        self._live, self._watch = live, watch
        self.notes: tuple[str, ...] = ()
        self._lines: list[str] = []
        self._done = not compares

    def __call__(self, *args: Any) -> R:
        """The record; raises CaptureError if the step is another one every time."""
        self._live.restore()
        # torch.jit runs a function in another way after the first time
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result = self._record(*args)
            if not self._done:
                self._done = True
                self._compare(args, self._trace_of(result))
        return result

    def _compare(self, args: tuple[Any, ...], first: Trace) -> None:
        changes, drawn = self._live.changes(), self._live.drawn_from()
        if self._watch.decided_by_forward:
            if not drawn and self._same_forward(args):
                self.notes = tuple(_left_alone(changes))
                return
            self._live.restore()
            self._watch.first = None
            self._record(*args)
        difference = self._difference(args, first, seed=1)
        if self._watch.changing():
            raise _state_kept(changes, difference or "")
        filled = bool(self._watch.kept) and self._watch.rewritten
        if difference is None:
            self._draw_more(args, first, drawn)
            self.notes += tuple(_left_alone(changes))
            return
        for seed in range(_SMALLEST, _SMALLEST + _DRAWS) if drawn else (_SMALLEST,):
            self._live.restore()
            unlike = self._difference(args, first, seed=seed)
            if unlike is not None:
                raise _random(drawn, at_line(self._lines[0]) if self._lines else unlike)
        if not filled:
            raise _other_next_time(changes, difference)

    def _same_forward(self, args: tuple[Any, ...]) -> bool:
        """Whether the user's part of the step is the same once more; the rest is not recorded."""
        watch = self._watch
        watch.stops, watch.kept = True, {}
        try:
            with _other_numbers(1):
                self._record(*args)
        except _ForwardEnd as end:
            return not watch.kept and watch.same_forward(end)
        except Exception:
            return False
        finally:
            watch.stops = False
        return False

    def _draw_more(
        self,
        args: tuple[Any, ...],
        first: Trace,
        drawn: Sequence[str],
    ) -> None:
        """A step that draws numbers may do the same for many of them: extreme ones and some more
        are tried."""
        for seed in range(_SMALLEST, _SMALLEST + _DRAWS) if drawn else ():
            self._live.restore()
            difference = self._difference(args, first, seed)
            if difference is not None:
                raise _random(drawn, at_line(self._lines[0]) if self._lines else difference)
        if drawn:
            self.notes = (
                f"the step draws random numbers from {' and '.join(drawn)}, which made no "
                f"difference in {_DRAWS + 2} recordings",
            )

    def _difference(
        self,
        args: tuple[Any, ...],
        first: Trace,
        seed: int,
    ) -> str | None:
        """Where another recording is another, as ` at file.py:12`, or ""; None if nowhere."""
        watch = self._watch
        watch.kept = {}
        try:
            with _other_numbers(seed) as self._lines:
                other = self._trace_of(self._record(*args))
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            return f"{at_line(user_line_of(error))}, where it fails: {said}"
        if not watch.kept and _alike(first, other):
            return None
        numbering = _Numbering()
        own = numbering.of(first, {})
        known = {there: own.get(here, -1) for here, there in watch.kept.items()}
        theirs = numbering.of(other, dict.fromkeys(known, -1) if watch.rewritten else known)
        if _ends(first, own) == _ends(other, theirs):
            return None
        return at_line(_first_difference(first, own, other, theirs))


def _left_alone(changes: Sequence[LiveChange]) -> Iterator[str]:
    """A note on numbers that the step counts without computing with them."""
    numbers = (int, float)
    counted = [c.name for c in changes if type(c.after) in numbers and type(c.before) in numbers]
    if counted:
        more = f" and {len(counted) - 1} more" if len(counted) > 1 else ""
        yield (
            f"the step changes {counted[0]}{more}, which makes no difference to what it computes: "
            "a divided run leaves it as it is"
        )


def _alike(one: Trace, two: Trace) -> bool:
    """Whether two traces are the same, call by call and slot by slot."""
    if (one.inputs, one.outputs, len(one.calls)) != (two.inputs, two.outputs, len(two.calls)):
        return False
    same = one.constants.keys() == two.constants.keys() and all(
        _equal(tensor, two.constants[slot]) for slot, tensor in one.constants.items()
    )
    return same and all(map(_same_call, one.calls, two.calls))


def _same_call(one: RecordedCall, two: RecordedCall) -> bool:
    return (one.target, one.outputs) == (two.target, two.outputs) and repr(
        (one.args, one.kwargs)
    ) == repr((two.args, two.kwargs))


def _ends(trace: Trace, numbers: Mapping[int, int]) -> list[int | None]:
    return [None if slot is None else numbers[slot] for slot in trace.outputs]


def _first_difference(
    one: Trace, ours: Mapping[int, int], two: Trace, theirs: Mapping[int, int]
) -> str:
    """The line of the first call that only one of two traces has."""
    for trace, numbers, others in ((two, theirs, ours), (one, ours, theirs)):
        known = set(others.values())
        for call in trace.calls:
            new = any(s is not None and numbers[s] not in known for s in call.outputs)
            if new and call.site.line:
                return call.site.line
    return ""


_SAME_VALUE = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")


class _Numbering:
    """Numbers for the values of several traces: the same for the same computation."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._constants: list[torch.Tensor] = []

    def of(self, trace: Trace, known: Mapping[int, int]) -> dict[int, int]:
        """The number of every slot; `known` has those of slots that nothing in the trace makes."""
        found = {slot: n if n >= 0 else self._number(object()) for slot, n in known.items()}
        found |= {slot: self._number(("input", k)) for k, slot in enumerate(trace.inputs)}
        found |= {s: self._number(("constant", self._same(t))) for s, t in trace.constants.items()}
        for call in trace.calls:
            if str(call.target) in _SAME_VALUE:
                (source,), (made,) = g.refs(call.args), call.outputs
                assert made is not None
                found[made] = self._frozen(g.Ref(source), found)[1]
                continue
            key = (str(call.target), self._frozen(call.args, found), self._named(call, found))
            for place, slot in enumerate(call.outputs):
                if slot is not None:
                    found[slot] = self._number((key, place))
        return found

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _named(self, call: RecordedCall, found: dict[int, int]) -> Any:
        return tuple((k, self._frozen(v, found)) for k, v in sorted(call.kwargs.items()))

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
            if known is tensor or _equal(known, tensor):
                return place
        self._constants.append(tensor)
        return len(self._constants) - 1


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
        return False
    if one.is_meta or (one.data_ptr() == two.data_ptr() and one.stride() == two.stride()):
        return True
    return bool(((one == two) | ((one != one) & (two != two))).all())


# random numbers of others than torch


@contextmanager
def _other_numbers(seed: int) -> Iterator[list[str]]:
    """A context in which Python's and NumPy's generators begin with other numbers. For two of the
    seeds every other number that Python draws is the smallest, or the largest, there is; and the
    user's lines that draw them are listed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    lines: list[str] = []
    if seed not in (_SMALLEST, _LARGEST):
        yield lines
        return
    shared: Any = random._inst
    module: Any = random
    before = (random.random, random.getrandbits)
    largest = seed == _LARGEST
    turn = itertools.cycle((True, False))

    def number() -> float:
        lines.append(user_line(record.__code__))
        extreme = 1.0 - 2.0**-53 if largest else 0.0
        return extreme if next(turn) else before[0]()

    def bits(count: int) -> int:
        lines.append(user_line(record.__code__))
        extreme = (1 << count) - 1 if largest else 0
        return extreme if next(turn) else before[1](count)

    try:
        shared.random = module.random = number
        shared.getrandbits = module.getrandbits = bits
        yield lines
    finally:
        module.random, module.getrandbits = before
        del shared.random, shared.getrandbits


_SMALLEST, _LARGEST = 2, 3


# refusals


def _state_kept(changes: Sequence[LiveChange], where: str) -> CaptureError:
    holders = [change.name for change in changes if isinstance(change.after, torch.Tensor)]
    place = f"in {holders[0]}" if holders else "from one time"
    return CaptureError(
        f"the step keeps a tensor {place} and reads it the next time{where}; a captured step "
        "begins with the same every time, so make it a buffer (register_buffer) that the step "
        "writes to with copy_, or pass it in the batch"
    )


def _other_next_time(changes: Sequence[LiveChange], where: str) -> CaptureError:
    shown = [f"{c.name} ({_short(c.before)}, then {_short(c.after)})" for c in changes[:2]]
    because = f", because it changes {' and '.join(shown)}" if shown else ""
    return CaptureError(
        f"the step does another thing the second time{where}{because}; a captured step is the same "
        "every time, so keep such state out of the step, or make it a tensor in the batch or a "
        "buffer that the step writes to"
    )


def _random(drawn: Sequence[str], where: str) -> CaptureError:
    if drawn:
        return CaptureError(
            f"the step draws random numbers from {' and '.join(drawn)}{where}, which would stay as "
            "they are drawn once; use torch.rand and its like, or draw them outside and pass them "
            "in the batch"
        )
    return CaptureError(
        f"the step is another one every time{where}: it depends on something else than its model "
        "and batch, such as the clock, an iterator or a generator of random numbers; pass that in "
        "the batch"
    )


def _short(value: Any) -> str:
    shown = "nothing" if type(value) is object else repr(value)
    return shown if len(shown) < 40 else type(value).__name__
