"""What a step makes of the values that it reads: shows them, checks them, or depends on them.

    step --record--> Trace and ValueReads --record again, values changed--> the same Trace?

The same: the values were only shown. An exception: they were checked, and the check is left out.
Another Trace: the step does another thing for other data, which no Graph can, and it is refused
with the line of that read. A step that reads nothing is recorded once.

In: a function that records the step, and the live tensors behind its inputs. Out: what it recorded,
and a note per place that reads. Where there is no data (the meta device), questions of yes or no
are answered so that the step raises no exception.
"""

from __future__ import annotations

import contextlib
import dis
import io
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from apportion import graph as g
from apportion.capture.call_place import checks_shapes, source_line
from apportion.capture.data_shapes import refuse_layout
from apportion.capture.fixed_inputs import DependsOnData
from apportion.capture.normalise import NormalisedTrace, normalise
from apportion.capture.record import record
from apportion.capture.trace import CaptureError, Trace
from apportion.capture.value_origin import LeafComparison, grows
from apportion.capture.value_reads import (
    ARRAY,
    BOOL,
    NEAR,
    SHAPE,
    ReadAnswers,
    ReadValues,
    ValueRead,
    fixable,
)

MOST_RECORDINGS = 64
"""How often a step is recorded, at most, to find out what it makes of the values it reads."""

R = TypeVar("R")
_SAME, _OTHER, _CHECK, _FAILED = "same", "other", "check", "failed"


@dataclass(frozen=True)
class StepInput:
    """An input of a step: the live tensor behind it and its name, for messages.

    steady  whether no update changes it: a buffer, or a parameter that is not trained
    given   whether it is a tensor of the batch
    """

    name: str
    tensor: torch.Tensor
    steady: bool
    given: bool = False


def record_probed(
    once: Callable[[ReadValues], R],
    trace_of: Callable[[R], Trace],
    inputs: Sequence[StepInput],
    agreed: Callable[[R, R], R] = lambda first, _: first,
) -> tuple[R, tuple[str, ...]]:
    """Records a step and finds out what it makes of the values it reads: the record, and notes.

    `once` records it, with fresh fake tensors for the inputs, as the first of its slots, and leaves
    live objects as they were. `agreed` leaves out of the record what another one of the same step,
    with other values read, does not share. Raises CaptureError where the step depends on data.
    """
    for each in inputs:
        refuse_layout(each.name, each.tensor)
    recordings = _Recordings(once, trace_of, inputs)
    result, values = recordings.first()
    notes = _Probe(recordings, trace_of(result), values).notes()
    for other in recordings.others:
        result = agreed(result, other)
    return result, notes


class _Recordings(Generic[R]):
    """Records one step, again and again."""

    def __init__(
        self,
        once: Callable[[ReadValues], R],
        trace_of: Callable[[R], Trace],
        inputs: Sequence[StepInput],
    ) -> None:
        self.inputs, self.left = inputs, MOST_RECORDINGS
        self.others: list[R] = []
        self._once, self._trace_of = once, trace_of
        live = (None if x.tensor.is_meta else x.tensor for x in inputs)
        steady = frozenset(k for k, x in enumerate(inputs) if x.steady)
        batch = {k: x.name for k, x in enumerate(inputs) if x.given}
        self.answers = ReadAnswers(dict(enumerate(live)), steady, batch)

    def _run(self, values: ReadValues) -> R:
        self.left -= 1
        try:
            return self._once(values)
        finally:
            values.end()

    def first(self) -> tuple[R, ReadValues]:
        """The recording that counts. Where questions were answered by a guess and it raises, the
        last guess that has not been tried both ways is."""
        answers = self.answers
        first_error: BaseException | None = None
        while True:
            values = ReadValues(answers, record.__code__)
            try:
                result = self._run(values)
            except (CaptureError, KeyboardInterrupt):
                raise
            except (Exception, SystemExit) as error:
                first_error = first_error or error
                guesses = _next_guesses(values.guessed)
                if guesses is None or self.left == 0:
                    raise first_error from None
                answers = replace(answers, guesses=guesses)
            else:
                self.answers = replace(answers, guesses=tuple(values.guessed))
                return result, values

    def outcome(
        self, change: str, changed: frozenset[Any], trace: Trace
    ) -> tuple[str, Sequence[ValueRead]]:
        """What the step does with values changed, and what it reads then."""
        if self.left <= 0:
            raise CaptureError(
                f"the step reads values of its tensors in so many places that {MOST_RECORDINGS} "
                "recordings do not show what they are for; read fewer of them in the step"
            )
        answers = replace(self.answers, change=change, changed=changed)
        values = ReadValues(answers, record.__code__)
        try:
            with unheard():
                other = self._run(values)
        except CaptureError:
            return _OTHER, values.reads
        except SystemExit:
            return _CHECK, values.reads
        except Exception as error:
            return (_CHECK if is_raised(error) else _FAILED), values.reads
        if not same_steps(trace, self._trace_of(other)):
            return _OTHER, values.reads
        self.others.append(other)
        return _SAME, values.reads


def _next_guesses(guessed: Sequence[bool]) -> tuple[bool, ...] | None:
    """The guesses before, with the last one that was False made True."""
    for position in reversed(range(len(guessed))):
        if not guessed[position]:
            return (*guessed[:position], True)
    return None


@contextmanager
def unheard() -> Iterator[None]:
    """What a step prints, and torch logs, while something is tried is nobody's business."""
    nowhere, logged = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with (
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logged)


def is_raised(error: BaseException) -> bool:
    """Whether a statement of the program raised the exception on purpose: `raise` or `assert` that
    is not in torch's own checks of shapes."""
    frames = list(traceback.walk_tb(error.__traceback__))
    frame, _ = frames[-1]
    position = _last_instruction(error)
    code = frame.f_code
    raising = code.co_code[position] == dis.opmap["RAISE_VARARGS"]
    return raising and not checks_shapes(code.co_filename)


def _last_instruction(error: BaseException) -> int:
    entry = error.__traceback__
    assert entry is not None
    while entry.tb_next is not None:
        entry = entry.tb_next
    return entry.tb_lasti


class _Probe:
    """Finds out, place by place, what a step makes of the values it reads.

    groups  the open reads of each place
    found   what is known of a place: shown, checked, or a sentence
    """

    def __init__(self, recordings: _Recordings[Any], trace: Trace, values: ReadValues) -> None:
        reads = values.reads
        self._recordings, self._trace, self._taken = recordings, trace, frozenset(values.taken)
        self._shapes = [read for read in reads if read.kind == SHAPE and read.origin.leaves]
        self._groups: dict[Any, list[ValueRead]] = {}
        self._found: dict[Any, str] = {}
        self._meet(reads)

    def _meet(self, reads: Sequence[ValueRead]) -> list[Any]:
        """Adds reads to the groups; returns the places that are new."""
        new = []
        for read in reads:
            if not read.is_open:
                continue
            if read.place.stack not in self._groups:
                self._groups[read.place.stack] = []
                new.append(read.place.stack)
            self._groups[read.place.stack].append(read)
        return new

    def notes(self) -> tuple[str, ...]:
        """A sentence per place; raises CaptureError where the step depends on data."""
        sentences = [self._dependence([read]) for read in self._shapes]
        self._try_numbers([s for s, group in self._groups.items() if group[0].kind != BOOL])
        self._try_choices([s for s, group in self._groups.items() if group[0].kind == BOOL])
        checked = {self._text(s) for s, found in self._found.items() if found == _CHECK}
        for stack, found in self._found.items():
            at = self._groups[stack][0].place.at
            drawn = self._groups[stack][0].origin
            if found == _CHECK:
                sentences.append(f"the check{at} is left out: all it does is raise an exception")
            elif found != _SAME:
                sentences.append(found)
            elif stack in self._taken:
                continue
            elif self._text(stack) not in checked and not (drawn.draws and not drawn.leaves):
                sentences.append(f"the value read{at} is only shown: a run does not compute it")
        return tuple(dict.fromkeys(sentences))

    def _text(self, stack: Any) -> str:
        return self._groups[stack][0].place.text

    def _outcome(self, change: str, changed: Iterable[Any]) -> tuple[str, Sequence[ValueRead]]:
        return self._recordings.outcome(change, frozenset(changed), self._trace)

    def _try_numbers(self, stacks: Sequence[Any]) -> None:
        """Changes numbers: all at once, and one place after the other unless nothing came of it."""
        enough = dict.fromkeys(c for s in stacks for c in self._groups[s][0].enough)
        if all(self._outcome(change, stacks)[0] == _SAME for change in enough):
            self._found.update(dict.fromkeys(stacks, _SAME))
            return
        for stack in stacks:
            outcomes = []
            for change in self._groups[stack][0].changes:
                outcomes.append(self._outcome(change, [stack])[0])
                if outcomes[-1] == _OTHER:
                    break
            if _OTHER in outcomes or (_FAILED in outcomes and _SAME not in outcomes):
                self._found[stack] = self._dependence(self._groups[stack])
            else:
                self._found[stack] = _CHECK if _CHECK in outcomes else _SAME

    def _try_choices(self, stacks: Sequence[Any]) -> None:
        """Answers questions of yes or no the other way: one after the other, together with those
        that are only asked then, and at last all at once that did nothing alone."""
        pending: list[tuple[Any, ...]] = [(stack,) for stack in stacks]
        while pending:
            changed = pending.pop(0)
            outcome, reads = self._outcome(NEAR, changed)
            if outcome == _OTHER:
                self._found[changed[-1]] = self._dependence(self._groups[changed[-1]])
                continue
            done = outcome in (_CHECK, _FAILED)
            self._found[changed[-1]] = _CHECK if done else _SAME
            new = [] if done else self._meet(reads)
            numbers = [s for s in new if self._groups[s][0].kind != BOOL]
            self._found.update(dict.fromkeys(numbers, _SAME))
            pending.extend((*changed, s) for s in new if s not in numbers)
        alone = [s for s in stacks if self._found[s] == _SAME]
        if len(alone) > 1 and self._outcome(NEAR, alone)[0] == _OTHER:
            for stack in alone:
                self._found[stack] = self._dependence(self._groups[stack])

    def _dependence(self, group: Sequence[ValueRead]) -> str:
        """The note on a value that decides what the step does; raises unless it is steady."""
        read = group[0]
        inputs = self._recordings.inputs
        leaves = sorted({leaf for each in group for leaf in each.origin.leaves})
        names = [inputs[leaf].name for leaf in leaves]
        free = any(each.origin.draws or each.origin.opaque or each.guessed for each in group)
        kept = set(self._trace.outputs)
        if not free and all(inputs[leaf].steady and leaf in kept for leaf in leaves):
            return (
                f"what the step does{read.place.at} follows from {_shortened(names)}, taken to "
                "stay as now"
            )
        counter = self._counter(group)
        if counter is not None and counter.stays(float(inputs[counter.leaf].tensor.item())):
            return (
                f"what the step does{read.place.at} follows from {names[0]}, which only grows and "
                f"is past {counter.bound:g}"
            )
        if counter is not None:
            raise CaptureError(
                f"the step branches on {names[0]}, which counts steps{read.place.at}; a captured "
                f"step must do the same every time, so {_remedy(read, counter.bound)}"
            )
        known = fixable([each.origin for each in group], self._recordings.answers)
        raise DependsOnData(_refusal(read, names), read.place.text, known)

    def _counter(self, group: Sequence[ValueRead]) -> LeafComparison | None:
        """The comparison that reads of one place are, if it is of a counter that only grows."""
        counter, inputs = group[0].counter, self._recordings.inputs
        if counter is None or any(each.counter != counter for each in group):
            return None
        own = inputs[counter.leaf]
        alone = group[0].origin.leaves == {counter.leaf} and not group[0].guessed
        if not alone or not own.steady or own.tensor.numel() != 1:
            return None
        return counter if grows(counter.leaf, self._trace.calls, self._trace.outputs) else None


def _remedy(read: ValueRead, bound: float) -> str:
    """What to do about a count of steps that is compared with a number."""
    past = f"take steps in plain PyTorch until it is past {bound:g}, and capture then"
    if not read.setting:
        return past
    return (
        f"set {read.setting} to None or switch off what it is for; or, if nothing resets the "
        + (f"count, {past}")
    )


def _refusal(read: ValueRead, names: Sequence[str]) -> str:
    if read.draw is not None:
        return (
            f"the step chooses by a random number{read.place.at} whether to run a part, with "
            f"probability {read.draw.bound:g}; a captured step must do the same every time, so set "
            f"{read.setting or 'that probability (layerdrop in transformers)'} to 0"
        )
    if read.kind == BOOL and read.origin.draws and not read.origin.leaves:
        return (
            f"the step chooses by random numbers{read.place.at} what to run; a captured step must "
            "do the same every time, so set the probability of it to 0 (dropout of layers, "
            "stochastic depth), or weigh the results by the random numbers, as tensors"
        )
    if read.kind == SHAPE:
        return (
            f"the step changes {_shortened(names)}, which decides the shape of a tensor"
            f"{read.place.at}; a captured step has fixed shapes, so leave it as it is"
        )
    source = f" that depends on {_shortened(names)}" if names else ""
    if read.kind == BOOL:
        remedy = read.place.remedy(
            "use torch.where instead of if or move it out of the step",
            "no check of values, a fixed number of iterations",
        )
        return (
            f"the step branches on a value{source}{read.place.at}; a captured step must do the "
            f"same for every batch, so {remedy}"
        )
    if "one_hot(" in source_line(read.place):
        remedy = read.place.remedy(
            "give it num_classes, the same for every batch, and clamp indices that may be larger"
        )
        return (
            f"one_hot() takes the number of classes from data{read.place.at}; a captured step has "
            f"fixed shapes, so {remedy}"
        )
    what = "converts a tensor to NumPy"
    if read.kind != ARRAY:
        what = "reads a tensor's value as a Python number"
    remedy = read.place.remedy(
        "keep it a tensor (without item(), int(), float(), tolist() or numpy()) or move it out of "
        "the step"
    )
    return (
        f"the step {what} and computes with it{read.place.at}; a captured step must not depend on "
        f"data, so {remedy}"
    )


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


# whether two recordings are of the same step


def same_steps(one: Trace, other: Trace) -> bool:
    """Whether two Traces compute the same, call by call, whatever their slots are numbered."""
    first, second = normalise(one), normalise(other)
    sizes = [(len(t.inputs), len(n.nodes)) for t, n in ((one, first), (other, second))]
    if sizes[0] != sizes[1]:
        return False
    return _Matching(one, other, first, second).holds()


class _Matching:
    """The slot of one Trace for each slot of another, as far as they have been compared."""

    def __init__(
        self, one: Trace, other: Trace, first: NormalisedTrace, second: NormalisedTrace
    ) -> None:
        self._constants = (one.constants, other.constants)
        self._sides = (first, second)
        self._of = dict(zip(one.inputs, other.inputs, strict=True))

    def holds(self) -> bool:
        """Whether all nodes and results are the same."""
        first, second = self._sides
        for a, b in zip(first.nodes, second.nodes, strict=True):
            if a.kind != b.kind or not self._same(a.args, b.args):
                return False
            if len(a.outputs) != len(b.outputs):
                return False
            for x, y in zip(a.outputs, b.outputs, strict=True):
                if (x is None) != (y is None):
                    return False
                if x is not None and y is not None:
                    if first.types[x] != second.types[y]:
                        return False
                    self._of[x] = y
        ends = [_as_ref(slot) for slot in first.outputs], [_as_ref(slot) for slot in second.outputs]
        return self._same(tuple(ends[0]), tuple(ends[1]))

    def _same(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, tuple):
            return len(a) == len(b) and all(map(self._same, a, b))
        if isinstance(a, g.Ref):
            return self._same_slot(a.index, b.index)
        if isinstance(a, float) and math.isnan(a):
            return math.isnan(b)
        return bool(a == b)

    def _same_slot(self, a: int, b: int) -> bool:
        if a in self._of:
            return self._of[a] == b
        one, other = (c.get(s) for c, s in zip(self._constants, (a, b), strict=True))
        if one is None or other is None or not _equal(one, other):
            return False
        self._of[a] = b
        return True


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    alike = (a.shape, a.dtype, a.is_meta) == (b.shape, b.dtype, b.is_meta)
    return alike and (a.is_meta or torch.equal(a.cpu(), b.cpu()))


def _as_ref(slot: int | None) -> g.Ref | None:
    return None if slot is None else g.Ref(slot)
