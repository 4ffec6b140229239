"""CallTrace: the operator calls that a task makes, recorded once for all tasks that are alike.

Part of the room execute. A task and the forms of what it reads come in; the calls that interpreting
it makes go out, in order, with the places where what they made is dropped. It is the interpreter
that is recorded (Rank.make), on tensors without data: a trace has its calls and no others.

What changes from step to step is left open: an optimizer's settings (TracedSetting) and the words
that random numbers are made of (TracedWord). Both are recorded as numbers that nothing else in the
task can be.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from apportion.capture import RANDOM_UNIFORM, key_words, torch_private
from apportion.execute.device_random import uniform_on_cuda
from apportion.execute.executable import Executable
from apportion.execute.host_random import prepare, uniform_on_host
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import messages_read
from apportion.execute.run_part import same_storage

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""

SEED, STEP = 0x5EED0BAD12345678, 0x1357924680ACE  # those that traces are recorded with


class CannotRecord(Exception):
    """A task's calls cannot be known without its data; the text is the reason."""


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """The k-th tensor of a trace: inputs first, then results in order."""

    index: int


@dataclass(frozen=True, slots=True)
class TracedSetting:
    """The number that a setting's expression has in the step at hand."""

    expression: Any


@dataclass(frozen=True, slots=True)
class TracedWord:
    """The first or second word of a random operator's key in the step at hand."""

    number: int


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call: an overload, or a function that certainly calls just that overload in less time;
    its arguments, what it makes (TracedTensors, None, or nested), and which tensors are dropped
    before it."""

    function: Any
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    result: Any
    drops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallTrace:
    """What a task calls.

    inputs   how many tensors come in: slots, then messages
    outputs  for each output slot its tensor
    forms    of the outputs
    shares   for each output the input whose storage it shares, or -1
    drops    tensors that are dropped when the last call is done
    """

    inputs: int
    calls: tuple[TracedCall, ...]
    outputs: tuple[int, ...]
    forms: tuple[Form, ...]
    shares: tuple[int, ...]
    drops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TaskCall:
    """What a task reads and makes.

    slots     that it reads, each once, in order
    messages  that it reads
    outs      slots that it makes
    key       equal for tasks that make the same calls on inputs of the same forms
    words     the random operator's key, or None
    """

    slots: tuple[int, ...]
    messages: tuple[int, ...]
    outs: tuple[int, ...]
    key: Any
    words: int | None = None


def task_call(executable: Executable, task: int) -> TaskCall:
    """What is to be recorded of a task."""
    tasks = executable.tasks
    read = tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]].tolist()
    made = tasks.out_slot[tasks.out_start[task] : tasks.out_start[task + 1]].tolist()
    outs = tuple((executable.slots[s].shape, executable.slots[s].dtype) for s in made)
    if task in executable.computes:
        work = executable.computes[task]
        slots = {slot: k for k, slot in enumerate(dict.fromkeys(s for s in work.ins if s >= 0))}
        args = work.part.args
        words: int | None = None
        if work.op.kind == RANDOM_UNIFORM:
            _, number, *_ = args
            assert isinstance(number, int)
            args, words = (args[0], *args[2:]), number
        absent = tuple(work.part.inputs[k] for k, s in enumerate(work.ins) if s < 0)
        pattern = tuple(slots.get(s, -1) for s in work.ins)
        how = (absent, work.part.pads, work.part.scales)
        called = (work.op.kind, work.op.body, args, *how, pattern, outs)
        return TaskCall(tuple(slots), (), tuple(made), called, words)
    slots = {slot: k for k, slot in enumerate(dict.fromkeys(s for s in read if s >= 0))}
    messages = {message: k for k, message in enumerate(messages_read(executable, task))}
    copies = executable.copies.get(task, [])
    for copy in copies:
        if copy.message < 0 and copy.source not in slots:
            slots[copy.source] = len(slots)
    boxes = tuple(
        (
            -1 if copy.message >= 0 else slots[copy.source],
            messages.get(copy.message, -1), copy.source_shape, _ends(copy.source_box),
            _ends(copy.target_box), copy.term, copy.offset, copy.nbytes, copy.dtype, copy.shape,
        )
        for copy in copies
    )  # fmt: skip
    meant = executable.slots[made[0]]
    reducer = executable.reducers.get(meant.value)
    sizes = tuple(executable.messages[m].nbytes for m in messages)
    whole = (meant.region, reducer, int(tasks.slot_base[made[0]]) >= 0, sizes)
    key = (executable.kind[task], boxes, whole, outs)
    return TaskCall(tuple(slots), tuple(messages), tuple(made), key)


def _ends(box: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    return tuple((side.start, side.stop) for side in box)


@dataclass
class TraceBook:
    """The traces of a device's tasks, each distinct one recorded once.

    A trace that cannot be recorded is kept as the CannotRecord that says why.
    """

    executable: Executable
    device: int
    place: str
    traces: dict[Any, CallTrace | CannotRecord] = field(default_factory=dict)
    mode: Any = field(default_factory=torch_private.FakeTensorMode)
    quick: dict[Any, Any] = field(default_factory=dict)

    def trace(
        self, task: int, call: TaskCall, forms: Mapping[int, Form]
    ) -> CallTrace | CannotRecord:
        """The calls of a task whose slots have these forms."""
        key = (call.key, tuple(forms[slot] for slot in call.slots))
        found = self.traces.get(key)
        if found is None:
            found = self._tried(task, call, forms, nullcontext(), "meta")
            if isinstance(found, CannotRecord):  # some kernels know fake tensors only
                found = self._tried(task, call, forms, self.mode, self.place)
            self.traces[key] = found
        return found

    def _tried(
        self, task: int, call: TaskCall, forms: Mapping[int, Form], mode: Any, device: str
    ) -> CallTrace | CannotRecord:
        try:
            return self._record(task, call, forms, mode, device)
        except CannotRecord as error:
            return error
        except Exception as error:  # whatever a kernel raises where there is no data
            return CannotRecord(f"{type(error).__name__}: {_first_line(error)}")

    def _record(
        self, task: int, call: TaskCall, forms: Mapping[int, Form], mode: Any, device: str
    ) -> CallTrace:
        """The calls of a task on tensors without data: on torch's `meta` device, or fake ones on
        the device that is meant."""
        if call.words is not None:
            return self._drawn(task)
        rank = Rank(self.executable, self.device, place=device)
        numbers = _OpenNumbers(call, torch.device(self.place))
        bodies = self.executable.graph.bodies
        context = Context(SEED, STEP, numbers.setting, bodies, device, self.place)
        with torch.no_grad(), mode:
            for slot in call.slots:
                shape, stride, kind = forms[slot]
                made = torch.empty_strided(shape, stride, dtype=kind, device=device)
                rank.tensors[slot] = made
            for message in call.messages:
                nbytes = self.executable.messages[message].nbytes
                rank.received[message] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            inputs = [*rank.tensors.values(), *rank.received.values()]
            recorder = CallRecorder(inputs, numbers, self.quick)
            with recorder:
                rank.make(task, context)
            results = [rank.tensors.pop(slot) for slot in call.outs]
            rank.tensors.clear()
            return recorder.trace(inputs, results)

    def _drawn(self, task: int) -> CallTrace:
        """The one call of a random operator, which is no operator of torch's."""
        work = self.executable.computes[task]
        (size, _, kind, *place), scales = work.args.fixed, work.part.scales
        if work.args.others or any(scale != 1.0 for scale in scales):
            raise CannotRecord("its random numbers are scaled")
        where = _frozen(place[0]) if place else tuple(((n, 0, n),) for n in size)
        words = (TracedWord(0), TracedWord(1))
        call = TracedCall(uniform_on_host, (*words, where, kind), (), TracedTensor(0), ())
        if self.place.startswith("cuda"):
            given = (*words, where, kind, self.place)
            call = TracedCall(uniform_on_cuda, given, (), TracedTensor(0), ())
        else:
            prepare()
        meant = self.executable.slots[work.outs[0]]
        dense = torch.empty(meant.shape, device="meta").stride()
        return CallTrace(0, (call,), (0,), ((meant.shape, dense, meant.dtype),), (-1,), ())


def _frozen(places: Any) -> Any:
    return tuple(map(_frozen, places)) if isinstance(places, list | tuple) else places


def quick_function(
    overload: Any, args: Any, keywords: dict[str, Any], known: dict[Any, Any]
) -> Any:
    """A function that calls the overload with these arguments and nothing else, and takes less time
    to do so; the overload itself where there is none. `known` are those found before."""
    key = (overload, tuple(map(_type, args)), tuple((n, _type(a)) for n, a in keywords.items()))
    if key not in known:
        known[key] = torch_private.equal_function(overload) or overload
        for candidate in torch_private.native_functions(overload):
            with _OneCall() as seen:
                try:
                    candidate(*args, **keywords)
                except Exception:  # it does not take these arguments
                    continue
            if seen.calls == 1 and seen.is_call(overload, args, keywords):
                known[key] = candidate
                break
    return known[key]


def _type(arg: Any) -> Any:
    """What decides which overload an argument fits."""
    if isinstance(arg, list | tuple):
        return tuple(map(_type, arg))
    return arg if arg is None or isinstance(arg, bool) else type(arg)


class _OneCall(torch_private.TorchDispatchMode):
    """Remembers the one call that is made while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.call: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        self.call = (func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def is_call(self, overload: Any, args: Any, keywords: dict[str, Any]) -> bool:
        func, given, named = self.call
        return (
            func is overload
            and _same(given, args)
            and named.keys() == keywords.keys()
            and all(_same(named[name], keywords[name]) for name in named)
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


class _OpenNumbers:
    """Numbers that stand for what changes from step to step."""

    def __init__(self, call: TaskCall, device: torch.device) -> None:
        self.device = device
        self.settings: dict[float, Any] = {}
        self.words: dict[int, int] = {}
        self.seen: set[Any] = set()
        if call.words is not None:
            words = key_words((SEED, STEP, call.words))
            self.words = {word: k for k, word in enumerate(words)}

    def setting(self, expression: Any) -> float:
        for number, known in self.settings.items():
            if known == expression:
                return number
        number = 0.731058 + len(self.settings) * 1.6180339887e-7
        self.settings[number] = expression
        return number

    def open(self, number: Any) -> Any:
        """What a number of the recording stands for; itself if nothing."""
        if number == _META:
            return self.device
        if type(number) is float and number in self.settings:
            return TracedSetting(self.settings[number])
        if type(number) is int and number in self.words:
            self.seen.add(number)
            return TracedWord(self.words[number])
        return number


_VIEWS = frozenset(
    [
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.expand.default,
    ]
)


def _same_view(x: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view is the very tensor that it is of."""
    return (
        x.shape == view.shape
        and x.stride() == view.stride()
        and x.storage_offset() == view.storage_offset()
        and same_storage(x, view)
    )


_META = torch.device("meta")
_FACTS = (bool, int, float, str, torch.device, torch.dtype, torch.layout, torch.Size)


class CallRecorder(torch_private.TorchDispatchMode):
    """Writes down the calls that are made while it is active."""

    def __init__(
        self, inputs: Sequence[torch.Tensor], numbers: _OpenNumbers, quick: dict[Any, Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[TracedCall] = []
        self.quick = quick
        self.numbers = numbers
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.dead: list[int] = []  # to be told with the next call
        self.count = 0
        for tensor in inputs:
            self._new(tensor)
        self.inputs = self.count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.dead += self._dead()
        given = tuple(self._arg(a) for a in args)
        keywords = tuple((name, self._arg(a)) for name, a in (kwargs or {}).items())
        result = func(*args, **(kwargs or {}))
        if isinstance(result, _FACTS):
            return result  # a fact about a tensor without data: the same in every step
        if func in _VIEWS and _same_view(args[0], result):
            self.known[id(result)] = (weakref.ref(result), given[0].index)
            return result  # nothing but another name
        function = quick_function(func, args, kwargs or {}, self.quick)
        drops, self.dead = tuple(self.dead), []
        self.calls.append(TracedCall(function, given, keywords, self._result(result), drops))
        return result

    def _new(self, tensor: torch.Tensor) -> int:
        self.known[id(tensor)] = (weakref.ref(tensor), self.count)
        self.count += 1
        return self.count - 1

    def _place(self, tensor: torch.Tensor) -> int | None:
        found = self.known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _dead(self) -> Iterator[int]:
        """Results that nobody holds any more; each is told once."""
        gone = [key for key, (ref, _) in self.known.items() if ref() is None]
        if not gone:
            return
        dead = dict.fromkeys(self.known.pop(key)[1] for key in gone)
        alive = {index for _, index in self.known.values()}
        yield from (i for i in dead if i >= self.inputs and i not in alive)

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            place = self._place(arg)
            if place is None:
                raise CannotRecord("it reads a tensor that is made outside of operators")
            return TracedTensor(place)
        if isinstance(arg, list | tuple):
            return tuple(self._arg(a) for a in arg)
        return self.numbers.open(arg)

    def _result(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            place = self._place(result)
            return TracedTensor(self._new(result) if place is None else place)
        if isinstance(result, list | tuple):
            return tuple(self._result(r) for r in result)
        if result is None or isinstance(result, int):  # without data a number is one of shapes
            return None
        raise CannotRecord(f"an operator returned {type(result).__name__}")

    def trace(self, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> CallTrace:
        """What was recorded, with the results at its end."""
        if self.numbers.seen != self.numbers.words.keys():
            raise CannotRecord("its random words are not used as they are")
        places = []
        for result in results:
            place = self._place(result)
            if place is None:
                raise CannotRecord("it returns a tensor that is made outside of operators")
            places.append(place)
        kept = set(places)
        left = dict.fromkeys((*self.dead, *(index for _, index in self.known.values())))
        drops = [i for i in left if i >= self.inputs and i not in kept]
        forms = tuple((tuple(r.shape), tuple(r.stride()), r.dtype) for r in results)
        shares = tuple(
            next((k for k, x in enumerate(inputs) if same_storage(x, r)), -1) for r in results
        )
        return CallTrace(self.inputs, tuple(self.calls), tuple(places), forms, shares, tuple(drops))
