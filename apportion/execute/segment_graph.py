"""A Segment as one graph of ATen operators, traced from the kernels that the interpreter calls.

Part of the room execute. An Executable, a Segment and the forms of the tensors that it reads come
in; its SegmentGraph goes out: inputs, outputs, and the operators between. Tracing runs the kernels
on tensors without data, so there is no second description of what a task does.

What differs from step to step is an input and never a constant:

    slots     the segment's `ins`
    boxes     what its assemblies read of messages, already seen as tensors of the right dtype
    words     two int32 words for each random operator, a row each, in the order of the tasks

`segment_key` says what a graph depends on: segments with equal keys, such as equal layers, have
equal graphs, and one compiled artefact serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from apportion.capture import RANDOM_UNIFORM
from apportion.execute.dry_run import Form, dense_stride
from apportion.execute.executable import BoxCopy, Executable, local_shape
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment
from apportion.execute.torch_compiler import fake_mode, traced
from apportion.graph import Arg, Setting
from apportion.lower import ASSEMBLE, CALLING

_LONGEST = 160  # letters of a reason


class CannotTrace(Exception):
    """A task's kernel does not run on tensors without data. `task` says which; the text, why."""

    def __init__(self, task: int, reason: str) -> None:
        super().__init__(reason)
        self.task = task


@dataclass(frozen=True)
class SegmentGraph:
    """A Segment as a graph.

    graph   its inputs are the slots, the boxes and the words, its outputs the segment's `outs`
    inputs  tensors without data, in that order
    outs    the form of each output
    """

    graph: torch.fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    outs: tuple[Form, ...]


def form_of(tensor: torch.Tensor) -> Form:
    """Shape, strides and dtype of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def boxes_read(executable: Executable, segment: Segment) -> list[BoxCopy]:
    """What the assemblies of a segment read of messages, in their order."""
    return [
        copy
        for task in segment.tasks
        for copy in executable.copies.get(task, ())
        if copy.message >= 0
    ]


def random_operators(executable: Executable, segment: Segment) -> list[int]:
    """The keys of the random operators of a segment, in the order of its tasks."""
    found: list[int] = []
    for task in segment.tasks:
        call = executable.computes.get(task)
        if call is not None and call.op.kind == RANDOM_UNIFORM:
            found.append(int(call.args.fixed[1]))
    return found


def has_setting(arg: Arg) -> bool:
    """Whether an argument has a setting of the optimizer inside, which is another at every step."""
    if isinstance(arg, tuple):
        return any(map(has_setting, arg))
    return isinstance(arg, Setting)


def trace_segment(
    executable: Executable, segment: Segment, forms: Mapping[int, Form], place: str
) -> SegmentGraph:
    """The graph of a segment whose `ins` have these forms; raises CannotTrace."""
    boxes = boxes_read(executable, segment)
    words = len(random_operators(executable, segment))
    kinds: list[Form] = [forms[slot] for slot in segment.ins]
    kinds += [(copy.shape, dense_stride(copy.shape), copy.dtype) for copy in boxes]
    if words:
        kinds.append(((words, 2), (2, 1), torch.int32))
    made: list[Form] = []

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        rank = _TracedRank(executable, executable.device[segment.tasks[0]], place=place)
        rank.tensors.update(zip(segment.ins, inputs, strict=False))
        given = inputs[len(segment.ins) : len(segment.ins) + len(boxes)]
        rank.boxes = {id(copy): box for copy, box in zip(boxes, given, strict=True)}
        rank.received = _Everything()
        rows = iter(range(words))

        def words_of(key: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = inputs[-1].select(0, next(rows))
            return row.select(0, 0), row.select(0, 1)

        context = Context(0, 0, _no_setting, executable.graph.bodies, place, words=words_of)
        for task in segment.tasks:
            try:
                rank.make(task, context)
            except Exception as error:
                raise CannotTrace(task, first_line(error)) from error
            rank.free(task)
        outs = [rank.tensors[slot] for slot in segment.outs]
        made.extend(map(form_of, outs))
        return outs

    with fake_mode():
        fakes = tuple(_empty(form, place) for form in kinds)
        graph = traced(run, fakes)
    return SegmentGraph(graph, fakes, tuple(made))


def first_line(error: BaseException) -> str:
    """The beginning of what an error says, or its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    return said if len(said) <= _LONGEST else said[:_LONGEST] + " ..."


class _Everything(dict[int, Any]):
    """Messages of which only the boxes are given."""

    def __delitem__(self, message: int) -> None:
        pass


class _TracedRank(Rank):
    """A Rank whose boxes of messages are given, by identity of the copies."""

    boxes: Mapping[int, torch.Tensor] = MappingProxyType({})

    def _box(self, copy: BoxCopy) -> torch.Tensor:
        return self.boxes[id(copy)] if copy.message >= 0 else super()._box(copy)


def _no_setting(expression: Any) -> float:
    raise ValueError("its argument is a setting of the optimizer")


def _empty(form: Form, place: str) -> torch.Tensor:
    shape, stride, kind = form
    return torch.empty_strided(shape, stride, dtype=kind, device=place)


def segment_key(
    executable: Executable, segment: Segment, forms: Mapping[int, Form] | None, place: str
) -> tuple[Any, ...]:
    """What the graph of a segment depends on; without `forms`, what is known of it before any
    tensor is there."""
    numbers: dict[int, int] = {}
    for slot in segment.ins:
        numbers[slot] = len(numbers)
    rows: list[Any] = []
    for task in segment.tasks:
        row = _KEYS[executable.kind[task]](executable, task, numbers)
        rows.append(row)
    given = tuple(forms[slot] if forms else _meant(executable, slot) for slot in segment.ins)
    return (place, given, tuple(rows), tuple(numbers[slot] for slot in segment.outs))


def _meant(executable: Executable, slot: int) -> tuple[Any, ...]:
    spec = executable.slots[slot]
    return spec.shape, spec.dtype


def _compute_key(executable: Executable, task: int, numbers: dict[int, int]) -> tuple[Any, ...]:
    call, space = executable.computes[task], executable.space
    part = call.part
    args = part.args
    if call.op.kind == RANDOM_UNIFORM:
        args = (args[0], None, *args[2:])  # the words are an input
    ins: list[Any] = []
    for k, slot in enumerate(call.ins):
        value = call.op.inputs[k]
        zeros = (local_shape(space, value, part.inputs[k]), space.graph.values[value].dtype)
        ins.append(numbers[slot] if slot >= 0 else zeros)
    for slot in call.outs:
        numbers[slot] = len(numbers)
    made = tuple(_meant(executable, slot) for slot in call.outs)
    return (call.op.kind, call.op.body, args, part.scales, part.pads, tuple(ins), made)


def _assembly_key(executable: Executable, task: int, numbers: dict[int, int]) -> tuple[Any, ...]:
    tasks = executable.tasks
    slot = int(tasks.out_slot[tasks.out_start[task]])
    meant = executable.slots[slot]
    copies = tuple(
        (
            numbers[c.source] if c.message < 0 else None,
            c.source_shape, _ends(c.source_box), _ends(c.target_box), c.term, c.dtype, c.shape,
        )
        for c in executable.copies[task]
    )  # fmt: skip
    numbers[slot] = len(numbers)
    reducer = executable.reducers.get(meant.value) or "sum"
    view = bool(tasks.slot_base[slot] >= 0)
    return (meant.shape, tuple(high - low for low, high in meant.region), meant.dtype, view,
            reducer, copies)  # fmt: skip


def _ends(box: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in box)


# By kind of task: a registry, so that a kind that is added to the table is known by an entry here.
_KEYS = {**dict.fromkeys(CALLING, _compute_key), ASSEMBLE: _assembly_key}
