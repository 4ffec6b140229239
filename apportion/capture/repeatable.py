"""Whether a step does the same every time: it is recorded twice, and the two records compared.

Part of capture/. A Graph is one step for good. A step that draws numbers from Python's or NumPy's
generators, counts its calls, looks at the clock or keeps a tensor in an attribute is another one
every time; it would be captured as it was the first time. So the step is recorded again as it goes
on: with the attributes as the first time has left them, and other random numbers. If the records
differ, it is recorded once more from the same beginning, which tells state from randomness; what
differs is refused with its cause and the user's line.

In: a function that records the step. Out: what it recorded, and notes. A tensor that one recording
leaves and the next one reads is a constant there if its value follows from fixed things only
(fixed_values.py), and state that is refused if not; what a buffer begins the next recording with is
known in the same way. So a table that is computed the first time and found in a cache the second
is the same (same_recordings.py); a step with caches is recorded three times.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from apportion import graph as g
from apportion.capture.fixed_values import (
    BeginValues,
    FixedValues,
    same_values,
    slots_that_matter,
    with_data,
    without_likes,
)
from apportion.capture.record import Recorder, record
from apportion.capture.same_recordings import equal_tensors, line_of_difference
from apportion.capture.trace import CaptureError, RecordedCall, Trace
from apportion.capture.untouched import LiveChange, LiveObjects
from apportion.capture.user_line import at_line, is_zoo_file, user_line, user_line_of
from apportion.capture.written_tensors import ReplacedState, TensorPlace, WrittenTensor

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


@dataclass(frozen=True, eq=False)
class _Recording:
    """One recording of a step.

    recorder  keeps its tensors alive
    trace     what it recorded, before writes to views are made functional
    values    those of them that follow from fixed things
    after     the slots that its inputs have become, by their positions
    moving    slots of tensors that an earlier recording has left, which depend on more than that
    found     whether it has read any tensor that an earlier one has left
    reread    these tensors, each with its value where that is fixed
    """

    recorder: Recorder
    trace: Trace
    values: FixedValues
    after: Mapping[int, int]
    moving: frozenset[int]
    found: bool
    reread: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]

    def kept(self, tensor: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
        """Whether this recording has seen a tensor, and the value it left in it, if that is
        fixed."""
        slot = self.recorder.slots.get(id(tensor))
        return (False, None) if slot is None else (True, self.values.value(slot))

    def end(self, place: int) -> torch.Tensor | None:
        """The value that an input has become, if that is fixed."""
        return self.values.value(self.after[place]) if place in self.after else None


class StepWatch:
    """What is known of the recordings of a step that go on from each other.

    inputs  the live tensors of inputs that no update changes, by position: buffers and parameters
            that are not trained
    forward what the user's part of a step that returns its loss has come to, the first time
    stops   whether a recording ends there
    remade  whether the step has made a buffer anew in another shape
    needs_grad  whether a parameter needs a gradient, where the last step has changed that
    """

    def __init__(self, inputs: Mapping[int, torch.Tensor]) -> None:
        self._live = inputs
        self._recordings: list[_Recording] = []
        self._after: Mapping[int, torch.Tensor] = {}
        self._found: dict[int, bool] = {}
        self.needs_grad: Mapping[int, bool] = {}
        self.forward: _ForwardPart | None = None
        self.stops = self.remade = False

    def begin(self) -> None:
        """To be called where all objects are as they were before the first recording."""
        self._recordings.clear()
        self.needs_grad = {}

    def live_value(self, place: int) -> torch.Tensor | None:
        """What an input begins the first recording with, if no update changes it."""
        return with_data(self._live[place]) if place in self._live else None

    @property
    def last_end(self) -> BeginValues:
        """What the inputs begin the next recording with."""
        return self._recordings[-1].end if self._recordings else self.live_value

    @property
    def read_last(self) -> list[int]:
        """The ids of the tensors of earlier recordings that the last one has read."""
        return [id(x) for x, _ in self._recordings[-1].reread] if self._recordings else []

    @property
    def last(self) -> _Recording:
        """The recording that was made last."""
        return self._recordings[-1]

    def forward_done(self, recorder: Recorder, ends: Iterable[torch.Tensor]) -> None:
        """To be called where the user's part of a step that returns its loss is over, with what it
        returns and the buffers it leaves."""
        part = _ForwardPart(len(recorder.calls), tuple(recorder.slot(x) for x in ends))
        if not self._recordings:
            self.forward = part
        elif self.stops:
            raise _ForwardEnd(recorder, part)

    def step_done(
        self, after: Mapping[int, torch.Tensor], needs_grad: Mapping[int, bool], remade: bool
    ) -> None:
        """To be called at the end of a step, with what its inputs have become, by position; whether
        those parameters need a gradient for which that was otherwise; and whether the step has made
        a buffer anew in another shape."""
        self._after, self.needs_grad, self.remade = after, needs_grad, remade

    @property
    def decided_by_forward(self) -> bool:
        """Whether no code of the user's ran in the rest of the first recording, as a hook does."""
        if self.forward is None or not self._recordings or self.needs_grad:
            return False
        rest = self._recordings[0].recorder.calls[self.forward.calls :]
        return not any(call.site.phase == g.BACKWARD and call.site.line for call in rest)

    def same_forward(self, end: _ForwardEnd) -> bool:
        """Whether the user's part was call by call the same as the first time."""
        first, other, size = self._recordings[0].recorder, end.recorder, end.part.calls
        constants = other.constants.items()
        return (
            not self._found
            and end.part == self.forward
            and all(
                s in first.constants and equal_tensors(first.constants[s], t) for s, t in constants
            )
            and all(map(_same_call, first.calls[:size], other.calls))
        )

    def watched(self, function: Function) -> Function:
        """The function to record, watched."""

        def run(recorder: Recorder, *inputs: torch.Tensor) -> Sequence[torch.Tensor | None]:
            self._found = {}
            recorder.stranger = self._look
            ends = function(recorder, *inputs)
            self._add(recorder, tuple(range(len(inputs))), ends)
            return ends

        return run

    def _look(self, recorder: Recorder, slot: int) -> None:
        """Looks at a fake tensor that no call has made: an earlier recording may have left it."""
        tensor = recorder.tensors[slot]
        for recording in reversed(self._recordings):
            known, value = recording.kept(tensor)
            if known:
                self._found[slot] = value is None
                if value is None:
                    recorder.left_before.append(slot)
                else:
                    recorder.constants[slot] = value
                return

    def _add(
        self, recorder: Recorder, inputs: tuple[int, ...], ends: Sequence[torch.Tensor | None]
    ) -> None:
        trace = without_likes(recorder.trace(inputs, ends))
        moving = {slot for slot, moves in self._found.items() if moves}
        reread = tuple((recorder.tensors[s], recorder.constants.get(s)) for s in self._found)
        if moving:
            moving &= slots_that_matter(trace)
        begins = self.last_end
        after = {place: recorder.slot(x) for place, x in self._after.items() if place in self._live}
        self._recordings.append(
            _Recording(
                recorder, trace, FixedValues(trace, begins), after, frozenset(moving),
                bool(self._found), reread,
            )
        )  # fmt: skip


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
        self._put_back()
        # torch.jit runs a function in another way after the first time
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result = self._record(*args)
            if not self._done:
                self._done = True
                self._compare(args, self._trace_of(result))
        return result

    def _put_back(self) -> None:
        self._live.restore()
        self._watch.begin()

    def _compare(self, args: tuple[Any, ...], first: Trace) -> None:
        changes, drawn = self._live.changes(), self._live.drawn_from()
        if self._watch.decided_by_forward:
            if not drawn and self._same_forward(args):
                self.notes = tuple(_left_alone(changes))
                self._count_on(args, first, changes)
                return
            self._put_back()
            self._record(*args)
            changes = self._live.changes()
        remade = self._watch.remade
        second = self._again(args, first, seed=1)
        self._look_for_state(changes, second)
        caches = second.trace is not None and not _alike(first, second.trace)
        third = None
        if second.difference is None and caches:
            third = self._again(args, first, seed=4)
        difference = second.difference if third is None else third.difference
        if difference is None:
            counting = self._live.changes()
            self._draw_more(args, first, drawn)
            self.notes += tuple(_left_alone(changes))
            self._count_on(args, first, changes, counting)
            return
        kept = second.moving or (third is not None and third.moving)
        if third is None and second.trace is not None and not any(map(_runs_out, changes)):
            third = self._again(args, second.trace, seed=4)
        settles = third is not None and third.difference is None
        if kept:
            raise _state_kept(changes, difference, settles or remade)
        for seed in range(_SMALLEST, _SMALLEST + _DRAWS) if drawn else (_SMALLEST,):
            self._put_back()
            again = self._again(args, first, seed=seed)
            if again.difference is not None:
                raise _random(drawn, at_line(self._lines[0]) if self._lines else again.difference)
        raise _other_next_time(changes, difference, settles)

    def _look_for_state(self, changes: Sequence[LiveChange], second: _Again) -> None:
        """Raises ReplacedState for tensors that the step has replaced by others of their type and
        that it reads the next time; notes what else of the kind makes no difference."""
        read = () if second.trace is None else self._watch.last.reread
        kept = [c for c in changes if any(c.after is x and y is None for x, y in read)]
        state = [
            WrittenTensor(c.name, c.before, TensorPlace(c.get, c.put))
            for c in changes
            if c.put is not None and _same_type(c.before, c.after)
            if any(c.after is x and (y is None or not same_values(y, c.before)) for x, y in read)
        ]
        if state:
            raise ReplacedState(str(_state_kept(changes, second.difference or "", False)), state)
        if kept and not second.moving:
            self.notes += (
                f"the step keeps {kept[0].name} from one time to the next, which makes no "
                "difference to what it returns: a divided run leaves it as it is",
            )

    def _count_on(
        self,
        args: tuple[Any, ...],
        first: Trace,
        changes: Sequence[LiveChange],
        later: Sequence[LiveChange] | None = None,
    ) -> None:
        """Looks for what a step does every so often, or after so many times: numbers that it counts
        up are set far ahead, where they are divisible by most."""
        counters = list(_counters(changes, self._live.changes() if later is None else later))
        for ahead in (0, 1) if counters else ():
            self._put_back()
            for counter in counters:
                assert counter.put is not None
                counter.put(_FAR - ahead * (counter.after - counter.before))
            again = self._again(args, first, seed=1)
            if again.trace is not None and again.difference is not None:
                raise _every_so_often(counters, again.difference)

    def _same_forward(self, args: tuple[Any, ...]) -> bool:
        """Whether the user's part of the step is the same once more; the rest is not recorded."""
        watch = self._watch
        watch.stops = True
        try:
            with _other_numbers(1):
                self._record(*args)
        except _ForwardEnd as end:
            return watch.same_forward(end)
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
            self._put_back()
            again = self._again(args, first, seed)
            if again.difference is not None:
                raise _random(drawn, at_line(self._lines[0]) if self._lines else again.difference)
        if drawn:
            self.notes += (
                f"the step draws random numbers from {' and '.join(drawn)}, which made no "
                f"difference in {_DRAWS + 2} recordings",
            )

    def _again(self, args: tuple[Any, ...], first: Trace, seed: int) -> _Again:
        """Records the step once more from where it stands, and compares it with another one."""
        watch = self._watch
        begins, read_before = watch.last_end, watch.read_last
        try:
            with _other_numbers(seed) as self._lines:
                other = self._trace_of(self._record(*args))
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            return _Again(None, f"{at_line(user_line_of(error))}, where it fails: {said}", False)
        moving = bool(watch.last.moving)
        if not watch.last.found and _alike(first, other):
            return _Again(other, None, moving)
        line = line_of_difference(first, other, begins)
        if line is None and moving and watch.read_last != read_before:
            line = ""
        return _Again(other, None if line is None else at_line(line), moving)


@dataclass(frozen=True)
class _Again:
    """Another recording of a step.

    trace       None if it fails
    difference  where it is another than the one it was compared with, as ` at file.py:12`, or "";
                None if nowhere
    moving      whether it depends on a tensor that an earlier one has left and that is another
                every time
    """

    trace: Trace | None
    difference: str | None
    moving: bool


def _same_type(before: Any, after: Any) -> bool:
    """Whether a plain tensor has become another one of its shape and dtype."""
    plain = isinstance(before, torch.Tensor) and not isinstance(before, torch.nn.Parameter)
    if not plain or before.requires_grad or before.is_meta or not isinstance(after, torch.Tensor):
        return False
    return bool((before.shape, before.dtype) == (after.shape, after.dtype))


_FAR = 3_628_800_000  # divisible by all up to 10, by 100 and 1000 and by powers of two


def _counters(changes: Sequence[LiveChange], later: Sequence[LiveChange]) -> Iterator[LiveChange]:
    """Those of the changes that are whole numbers, counted up once more by the next recording."""
    after = {change.name: change.after for change in later}
    for change in changes:
        step = _step_of(change.before, change.after)
        if step and change.put is not None and _step_of(change.after, after.get(change.name)):
            yield change


def _step_of(before: Any, after: Any) -> int:
    """How much a whole number has grown."""
    return max(0, after - before) if type(before) is int and type(after) is int else 0


def _runs_out(change: LiveChange) -> bool:
    """Whether this is an iterator, which has no more to give after some time and cannot be put
    back then."""
    return change.name.endswith(".position")


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
        equal_tensors(tensor, two.constants[slot]) for slot, tensor in one.constants.items()
    )
    return same and all(map(_same_call, one.calls, two.calls))


def _same_call(one: RecordedCall, two: RecordedCall) -> bool:
    return (one.target, one.outputs) == (two.target, two.outputs) and repr(
        (one.args, one.kwargs)
    ) == repr((two.args, two.kwargs))


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


_ONE_STEP = "take one step in plain PyTorch and capture it then, as it is the same from there on"


def _state_kept(changes: Sequence[LiveChange], where: str, settles: bool) -> CaptureError:
    holders = [change.name for change in changes if isinstance(change.after, torch.Tensor)]
    place = f"in {holders[0]}" if holders else "from one time"
    remedy = (
        "a captured step begins with the same every time, so make it a buffer (register_buffer) "
        "that the step writes to with copy_, or pass it in the batch"
    )
    return CaptureError(
        f"the step keeps a tensor {place} and reads it the next time{where}; "
        f"{_ONE_STEP if settles else remedy}"
    )


def _other_next_time(changes: Sequence[LiveChange], where: str, settles: bool) -> CaptureError:
    shown = [f"{c.name} ({_short(c.before)}, then {_short(c.after)})" for c in changes[:2]]
    because = f", because it changes {' and '.join(shown)}" if shown else ""
    remedy = (
        "a captured step is the same every time, so make it a tensor in the batch or a buffer, "
        "which the step computes with and writes to as tensors, or choose a setting that does "
        "without it"
    )
    return CaptureError(
        f"the step does another thing the second time{where}{because}; "
        f"{_ONE_STEP if settles else remedy}"
    )


def _every_so_often(counters: Sequence[LiveChange], where: str) -> CaptureError:
    names = " or ".join(counter.name for counter in counters[:3])
    return CaptureError(
        f"the step does another thing{where} when {names} has counted further; a captured step is "
        "the same every time, so make the count a buffer and choose by it with torch.where, or "
        "choose a setting that does without it"
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
