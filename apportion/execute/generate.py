"""Segments as straight-line Python: the interpreter's own calls, one line each, and nothing else.

Part of the room execute. A Segment comes in, a SegmentFunction goes out. The calls of each task are
those that call_trace.py recorded; here they are put one after the other, with every tensor dropped
where the plan frees it. Updates that fused_update.py names are gathered into calls of fused
kernels. A task that cannot be recorded is one line that lets the interpreter make it.

The text of a function has names and integers of our own only; functions, numbers and types are
bound to names, and slots are passed in, so that segments that are alike share one code object.

    def segment(x, s, w, context, clock, mark):
        x0, x1, x2 = x
        x.clear()
        x3 = f0(x0, x1)
        del x0
        ...
        return x7, x9
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from apportion.capture import key_words, torch_private
from apportion.execute.call_trace import (
    CallTrace,
    CannotRecord,
    Form,
    TaskCall,
    TraceBook,
    TracedSetting,
    TracedTensor,
    TracedWord,
    task_call,
)
from apportion.execute.cuda_clock import shared_out
from apportion.execute.dry_run import dense_stride
from apportion.execute.executable import Executable
from apportion.execute.fused_update import (
    FusedUpdate,
    UpdateBatch,
    count_kernel,
    fused_kernel,
    fused_settings,
    fused_updates,
    overwritten_slots,
    update_batches,
)
from apportion.execute.kernels.base import Context
from apportion.execute.plain_sum import TOGETHER, MessageBox, MessageViews, PlainSum, plain_sum
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import HostStep, RankStep, Segment
from apportion.execute.segment_function import CannotCompile, SegmentFunction
from apportion.lower import COMPUTE

NAME = "segment"


@dataclass
class SegmentGenerator:
    """Makes the functions of one device's segments, in their order.

    forms  of the slots that have been made so far, as traces say
    roots  the slot whose storage a slot shares
    notes  one for each kind of task that cannot be recorded
    """

    executable: Executable
    device: int
    place: str
    timed: bool = False
    fuse: bool = True
    book: TraceBook = field(init=False)
    forms: dict[int, Form] = field(default_factory=dict)
    roots: dict[int, int] = field(default_factory=dict)
    codes: dict[str, CodeType] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        executable = self.executable
        self.book = TraceBook(executable, self.device, self.place)
        self.fused = fused_updates(executable) if self.fuse else {}
        self.overwritten = overwritten_slots(executable, self.fused) if self.fuse else {}
        for slot in executable.begin:
            if executable.slot_device[slot] == self.device:
                self.forms[slot] = dense_form(executable, slot)
        self.last_of_root: dict[int, int] = {}

    def segments(self, steps: Sequence[RankStep]) -> list[SegmentSource]:
        """The sources of all segments; of all, because what shares a storage is known only then."""
        plans = []
        for step in steps:
            if isinstance(step, Segment):
                plans.append(self._traced(step))
            elif isinstance(step, HostStep):
                self._copied(step)
        for slot in self.forms:
            root = self._root(slot)
            last = int(self.executable.tasks.slot_last[slot])
            self.last_of_root[root] = max(self.last_of_root.get(root, -1), last)
        return [
            SegmentSource(
                SegmentWriter(self, plan).write(),
                SegmentWriter(self, plan, timed=True).write() if self.timed else None,
                plan.segment,
            )
            for plan in plans
        ]

    def _copied(self, step: HostStep) -> None:
        """Notes what copies leave: dense tensors; what waits for one leaves what it was given."""
        for task in step.tasks:
            call = self.executable.computes[task]
            waits = self.executable.kind[task] == COMPUTE
            for out in call.outs:
                self.forms[out] = dense_form(self.executable, out)
                if waits:
                    self.forms[out] = self.forms[call.ins[0]]
                    self.roots[out] = call.ins[0]

    def _root(self, slot: int) -> int:
        while slot in self.roots:
            slot = self.roots[slot]
        return slot

    def _traced(self, segment: Segment) -> TracedSegment:
        rows = []
        for task in segment.tasks:
            if task in self.fused:
                for out in self.fused[task].outs:
                    self.forms[out] = dense_form(self.executable, out)
                rows.append(TracedTask(task, None, None))
                continue
            call = task_call(self.executable, task)
            total = plain_sum(self.executable, task, self.forms)
            if total is not None:
                self.forms[call.outs[0]] = dense_form(self.executable, call.outs[0])
                rows.append(TracedTask(task, call, total))
                continue
            trace = self.book.trace(task, call, self.forms)
            if isinstance(trace, CannotRecord):
                self._note(task, trace)
                for out in call.outs:
                    self.forms[out] = dense_form(self.executable, out)
            else:
                for out, form, shared in zip(call.outs, trace.forms, trace.shares, strict=True):
                    self.forms[out] = form
                    if 0 <= shared < len(call.slots):
                        self.roots[out] = call.slots[shared]
            rows.append(TracedTask(task, call, trace))
        return TracedSegment(segment, rows)

    def _note(self, task: int, why: CannotRecord) -> None:
        computes = self.executable.computes
        what = computes[task].op.kind if task in computes else "putting a region together"
        note = f"{what} is interpreted within its segment: {why}"
        if note not in self.notes:
            self.notes.append(note)

    def may_overwrite(self, old: int, new: int, task: int) -> bool:
        """Whether a fused update may write over its old state: nothing that shares its storage is
        needed later."""
        return self.overwritten.get(new) == old and self.last_of_root[self._root(old)] <= task

    def code(self, text: str) -> CodeType:
        """The code of a source; sources that are alike share it."""
        if text not in self.codes:
            self.codes[text] = compile(text, "<segment>", "exec")
        return self.codes[text]


def dense_form(executable: Executable, slot: int) -> Form:
    """The form of a slot whose tensor is dense."""
    meant = executable.slots[slot]
    return meant.shape, dense_stride(meant.shape), meant.dtype


@dataclass(frozen=True, slots=True)
class TracedTask:
    """A task with its calls; those of a fused update are None."""

    task: int
    call: TaskCall | None
    trace: CallTrace | PlainSum | CannotRecord | None


@dataclass(frozen=True, slots=True)
class TracedSegment:
    """A segment with the calls of its tasks."""

    segment: Segment
    tasks: list[TracedTask]


@dataclass(frozen=True, slots=True)
class SegmentText:
    """The text of a segment's function, and what goes in and out.

    names     what the text's names are bound to
    settings  expressions that are evaluated when the function is called
    words     keys of random operators, whose words are made then
    ins       slots, each with whether it dies in the segment
    messages  likewise
    outs      slots
    frees     slots that nobody in the segment reads and that die there
    spans     tasks between one reading of the clock and the next, where it is read
    """

    text: str
    code: CodeType
    names: dict[str, Any]
    settings: tuple[Any, ...]
    words: tuple[int, ...]
    ins: tuple[tuple[int, bool], ...]
    messages: tuple[tuple[int, bool], ...]
    outs: tuple[int, ...]
    frees: tuple[int, ...]
    spans: tuple[tuple[int, ...], ...]

    def function(self) -> SegmentFunction:
        """The SegmentFunction."""
        names = dict(self.names)
        exec(self.code, names)  # our own text: names and integers
        call: Callable[..., tuple[torch.Tensor, ...]] = names[NAME]
        ins, messages, settings, words = self.ins, self.messages, self.settings, self.words
        outs, frees, spans = self.outs, self.frees, self.spans

        def run(rank: Rank, context: Context) -> None:
            tensors, received = rank.tensors, rank.received
            given: list[torch.Tensor | None] = [
                tensors.pop(slot) if dies else tensors[slot] for slot, dies in ins
            ]
            given += [received.pop(m) if dies else received[m] for m, dies in messages]
            given += [tensors.pop(slot) if slot in tensors else None for slot in frees]
            numbers = [context.setting(expression) for expression in settings]
            seed, step = context.seed, context.step
            drawn = [word for key in words for word in key_words((seed, step, key))]
            marks = [rank.clock()] if spans else []
            with torch_private.below_autograd():
                made = call(given, numbers, drawn, context, rank.clock, marks.append)
            tensors.update(zip(outs, made, strict=True))
            for tasks, began, ended in zip(spans, marks, marks[1:], strict=False):
                rank.spans += shared_out(tasks, began, ended)

        return run


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A segment as text; in `timed` the clock is read after every task."""

    plain: SegmentText
    timed: SegmentText | None
    segment: Segment

    def function(self) -> SegmentFunction:
        """The SegmentFunction; in steps that are recorded it notes a span of every task if there
        is a `timed`, else none."""
        plain = self.plain.function()
        if self.timed is None:
            return plain
        timed = self.timed.function()

        def run(rank: Rank, context: Context) -> None:
            function = timed if rank.records else plain
            function(rank, context)

        return run


class SegmentWriter:
    """Writes the source of one segment."""

    def __init__(
        self, generator: SegmentGenerator, traced: TracedSegment, timed: bool = False
    ) -> None:
        self.generator = generator
        self.timed = timed
        self.executable = generator.executable
        self.segment = traced.segment
        self.tasks = traced.tasks
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.bound: dict[Any, str] = {}
        self.settings: dict[Any, str] = {}
        self.words: dict[int, int] = {}  # key of a random operator -> its place
        self.count = 0
        self.slot: dict[int, str] = {}  # the name of a slot's tensor
        self.holders: dict[str, int] = {}  # how many slots a name holds
        self.message: dict[int, str] = {}
        self.box: dict[MessageBox, str] = {}
        self.boxes: dict[int, dict[MessageBox, None]] = {}
        for row in self.tasks:
            for term in row.trace.terms if isinstance(row.trace, PlainSum) else ():
                if isinstance(term, MessageBox):
                    self.boxes.setdefault(term.message, {})[term] = None
        self.batches = update_batches(self.executable, self.segment.tasks, generator.fused)
        self.spans: list[tuple[int, ...]] = []

    def write(self) -> SegmentText:
        """The source."""
        segment, executable = self.segment, self.executable
        ins = [(slot, slot in segment.frees) for slot in segment.ins]
        readers, tasks = executable.readers, set(segment.tasks)
        messages = [(m, readers[m] in tasks) for m in segment.messages]
        for slot, _ in ins:
            self._hold(slot, self._new())
        names = list(self.slot.values())
        for number, _ in messages:
            self.message[number] = self._new()
        names += self.message.values()
        unread = tuple(s for s in segment.frees if s not in segment.ins)
        for slot in unread:  # kept until the task after which the plan frees it
            self._hold(slot, self._new())
            names.append(self.slot[slot])
        first = ", ".join(names)
        for row in self.tasks:
            self._task(row)
        outs = ", ".join(self.slot[slot] for slot in segment.outs)
        lines = [f"def {NAME}(x, s, w, context, clock, mark):"]
        if first:
            lines += [f" {first}, = x", " x.clear()"]
        if self.settings:
            lines.append(f" {', '.join(self.settings.values())}, = s")
        if self.words:
            lines.append(f" {', '.join(f'w{k}' for k in range(2 * len(self.words)))}, = w")
        lines += [*self.lines, f" return ({outs}{',' if outs else ''})"]
        text = "\n".join(lines) + "\n"
        return SegmentText(
            text, self.generator.code(text), self.names, tuple(self.settings), tuple(self.words),
            tuple(ins), tuple(messages), segment.outs, unread, tuple(self.spans),
        )  # fmt: skip

    def _new(self) -> str:
        self.count += 1
        return f"x{self.count - 1}"

    def _hold(self, slot: int, name: str) -> None:
        self.slot[slot] = name
        self.holders[name] = self.holders.get(name, 0) + 1

    def _task(self, row: TracedTask) -> None:
        if row.call is not None:
            if isinstance(row.trace, CallTrace):
                self._trace(row.call, row.trace)
            elif isinstance(row.trace, PlainSum):
                self._sum(row.call.outs[0], row.trace)
            else:
                self._interpreted(row.task, row.call)
            gone = [self.message.pop(m) for m in row.call.messages if self._read_last(m, row.task)]
            self._drop([*self._let_go(self.executable.frees[row.task]), *gone])
            self._mark((row.task,))
        if row.task in self.batches:
            self._batch(self.batches[row.task])

    def _mark(self, tasks: tuple[int, ...]) -> None:
        if self.timed:
            self.lines.append(" mark(clock())")
            self.spans.append(tasks)

    def _read_last(self, message: int, task: int) -> bool:
        return self.executable.readers[message] == task

    def _let_go(self, slots: Sequence[int]) -> list[str]:
        """Names that hold nothing any more."""
        gone = []
        for slot in slots:
            name = self.slot.pop(slot, None)
            if name is not None:
                self.holders[name] -= 1
                if not self.holders[name]:
                    gone.append(name)
        return gone

    def _drop(self, names: Sequence[str]) -> None:
        if names:
            self.lines.append(f" del {', '.join(names)}")

    # calls

    def _trace(self, call: TaskCall, trace: CallTrace) -> None:
        names: dict[int, str] = {}
        for k, name in enumerate(
            [*(self.slot[s] for s in call.slots), *(self.message[m] for m in call.messages)]
        ):
            names[k] = name
        if call.words is not None:
            self.words.setdefault(call.words, len(self.words))

        def written(arg: Any) -> str:
            if isinstance(arg, TracedTensor):
                return names[arg.index]
            if isinstance(arg, TracedSetting):
                return self._setting(arg.expression)
            if isinstance(arg, TracedWord):
                assert call.words is not None
                return f"w{2 * self.words[call.words] + arg.number}"
            if isinstance(arg, tuple) and _open(arg):
                inside = ", ".join(map(written, arg))
                return f"[{inside}]"
            return self._constant(arg)

        for each in trace.calls:
            self._drop([names.pop(k) for k in each.drops if k in names])
            given = [*map(written, each.args)]
            for key, arg in each.keywords:
                if not key.isidentifier() or keyword.iskeyword(key):
                    raise CannotCompile(f"an operator has an argument that is named {key!r}")
                given.append(f"{key}={written(arg)}")
            called = f"{self._bind(each.function, 'f')}({', '.join(given)})"
            self._assign(each.result, called, names)
        for slot, place in zip(call.outs, trace.outputs, strict=True):
            self._hold(slot, names[place])
        kept = {names[place] for place in trace.outputs}
        dropped = [names[k] for k in trace.drops if k in names and names[k] not in kept]
        self._drop(dropped)

    def _assign(self, result: Any, called: str, names: dict[int, str]) -> None:
        fresh = [t for t in _tensors(result) if t not in names]
        if not fresh:
            self.lines.append(f" {called}")
            return
        unread: list[str] = []

        def target(part: Any) -> str:
            if isinstance(part, TracedTensor) and part.index not in names:
                names[part.index] = self._new()
                return names[part.index]
            if isinstance(part, tuple):
                return f"({', '.join(map(target, part))},)"
            unread.append(self._new())
            return unread[-1]

        made = target(result)
        self.lines.append(f" {made} = {called}")
        self._drop(unread)

    def _sum(self, slot: int, total: PlainSum) -> None:
        first, further = (self._bind(f, "f") for f in TOGETHER[total.reducer])
        terms = [
            self._message_box(term) if isinstance(term, MessageBox) else self.slot[term]
            for term in total.terms
        ]
        name = self._new()
        self.lines.append(f" {name} = {first}({terms[0]}, {terms[1]})")
        self.lines += [f" {further}({name}, {term})" for term in terms[2:]]
        self._hold(slot, name)
        self._drop([self.box.pop(term) for term in total.terms if isinstance(term, MessageBox)])

    def _message_box(self, box: MessageBox) -> str:
        """The name of a tensor in a message; all that are taken out of it are made together."""
        if box not in self.box:
            wanted = self.boxes[box.message]
            names = [self._new() for _ in wanted]
            views = self._bind(MessageViews(tuple(wanted)), "f")
            given = self.message[box.message]
            self.lines.append(f" {', '.join(names)}, = {views}({given})")
            self.box |= dict(zip(wanted, names, strict=True))
        return self.box[box]

    def _interpreted(self, task: int, call: TaskCall) -> None:
        given = [self.slot[s] for s in call.slots] + [self.message[m] for m in call.messages]
        generator = self.generator
        function = interpreted_task(self.executable, generator.device, generator.place, task, call)
        names = [self._new() for _ in call.outs]
        called = f"{self._bind(function, 'f')}(context, {', '.join(given)})"
        self.lines.append(f" {', '.join(names)}, = {called}" if names else f" {called}")
        for slot, name in zip(call.outs, names, strict=True):
            self._hold(slot, name)

    # fused updates

    def _batch(self, batch: UpdateBatch) -> None:
        """The fused calls of a batch, and the frees of its tasks."""
        calls: dict[Any, list[FusedUpdate]] = {}
        for update in batch.updates:
            calls.setdefault(update.batch, []).append(update)
        for updates in calls.values():
            self._fused(updates)
        tasks = tuple(update.task for update in batch.updates)
        self._drop(self._let_go([slot for t in tasks for slot in self.executable.frees[t]]))
        self._mark(tasks)

    def _fused(self, updates: Sequence[FusedUpdate]) -> None:
        recipe = updates[0].recipe
        columns: list[list[str]] = [[] for _ in (0, *recipe.state)]  # parameters, then each state
        gradients: list[str] = []
        dropped: list[str] = []
        for update in updates:
            gradient = self.slot[update.gradient]
            if self.generator.forms[update.gradient] != dense_form(
                self.executable, update.gradient
            ):
                name = self._new()
                self.lines.append(f" {name} = {self._bind(_contiguous, 'f')}({gradient})")
                dropped.append(name)
                gradient = name
            gradients.append(gradient)
            before = (update.ins[0], *update.ins[2:])
            for column, old, new in zip(columns, before, update.outs, strict=True):
                name = self.slot[old]
                if not self.generator.may_overwrite(old, new, update.task):
                    name = self._new()
                    self.lines.append(f" {name} = {self._bind(_copied, 'f')}({self.slot[old]})")
                self._hold(new, name)
                column.append(name)
        lists = dict(zip(("parameter", *recipe.state), columns, strict=True))
        if "step" in lists:
            add = self._bind(count_kernel(), "f")
            self.lines.append(f" {add}([{', '.join(lists['step'])}], 1)")
        if recipe.kind == "sgd":
            tensors = [lists["parameter"], gradients, lists.get("momentum_buffer", [])]
        else:
            states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
            tensors = [lists["parameter"], gradients, *(lists.get(name, []) for name in states)]
        given = [f"[{', '.join(names)}]" for names in tensors]
        for key, value in fused_settings(recipe).items():
            live = isinstance(value, tuple)
            given.append(f"{key}={self._setting(value) if live else self._constant(value)}")
        self.lines.append(f" {self._bind(fused_kernel(recipe), 'f')}({', '.join(given)})")
        self._drop(dropped)

    # names

    def _setting(self, expression: Any) -> str:
        return self.settings.setdefault(expression, f"s{len(self.settings)}")

    def _constant(self, value: Any) -> str:
        if value is None or isinstance(value, bool) or type(value) is int:
            return repr(value)
        if isinstance(value, tuple) and all(type(v) is int for v in value):
            return repr(value)
        return self._bind(value, "c")

    def _bind(self, value: Any, letter: str) -> str:
        """A name for something that the text does not say itself."""
        key = (type(value), repr(value)) if isinstance(value, float | complex) else _key(value)
        if key not in self.bound:
            self.bound[key] = f"{letter}{len(self.bound)}"
            self.names[self.bound[key]] = value
        return self.bound[key]


def _key(value: Any) -> Any:
    if isinstance(value, str | tuple | torch.dtype | torch.device | torch.layout):
        return (type(value), repr(value))
    return id(value)


def _open(arg: tuple[Any, ...]) -> bool:
    """Whether an argument has tensors or numbers inside that differ from call to call."""
    return any(
        _open(a)
        if isinstance(a, tuple)
        else isinstance(a, TracedTensor | TracedSetting | TracedWord)
        for a in arg
    )


def _tensors(result: Any) -> list[int]:
    if isinstance(result, TracedTensor):
        return [result.index]
    return [t for part in result or () for t in _tensors(part)]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def interpreted_task(
    executable: Executable, device: int, place: str, task: int, call: TaskCall
) -> Callable[..., list[torch.Tensor]]:
    """A function that lets the interpreter make what a task makes, of the tensors it reads."""

    def make(context: Context, *given: torch.Tensor) -> list[torch.Tensor]:
        rank = Rank(executable, device, place=place)
        rank.tensors = dict(zip(call.slots, given, strict=False))
        rank.received = dict(zip(call.messages, given[len(call.slots) :], strict=True))
        rank.make(task, context)
        return [rank.tensors[slot] for slot in call.outs]

    return make
