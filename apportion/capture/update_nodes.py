"""An update as a list of operators: all paths of an optimizer's step, merged into one.

Part of capture/. An optimizer's step that branches on data (RAdam: `if rho > 5`) is traced once for
every way it can go. Equal operators of the paths become one; where the paths end differently,
`torch.where` chooses by the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from apportion import graph as g
from apportion.capture.decompose import decompose
from apportion.capture.normalise import NormalisedTrace, normalise
from apportion.capture.record import Recorder, record
from apportion.capture.torch_private import FakeTensorMode
from apportion.capture.trace import (
    RANDOM_UNIFORM,
    CaptureError,
    TensorType,
    Trace,
    dtype_name,
)

MOST_PATHS = 32


class DeadPath(CaptureError):
    """A way through a step on which it fails, as it would in PyTorch: nobody comes along it."""


Step = Callable[[Callable[[torch.Tensor], bool], Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function of `decide`, which answers a branch on data, and of the fake inputs."""


@dataclass(frozen=True, slots=True)
class UpdateNode:
    """One operator of an update. `Ref(k)` is tensor k of the update: its inputs, then the results
    of its nodes. `outputs` are numbers of tensors; None is a result that nobody reads."""

    kind: str
    args: tuple[g.Arg, ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True)
class UpdateNodes:
    """An update. Its first `inputs` tensors are given.

    types    shape and dtype of every tensor
    outputs  the tensors that are its results
    """

    inputs: int
    nodes: tuple[UpdateNode, ...]
    types: tuple[TensorType, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Path:
    """One way through a step: how its branches came out, and what it computes. The results are
    those of the step and then the conditions."""

    outcomes: tuple[bool, ...]
    trace: NormalisedTrace
    inputs: tuple[int, ...]
    constants: dict[int, torch.Tensor]

    @property
    def results(self) -> tuple[int, ...]:
        count = len(self.trace.outputs) - len(self.outcomes)
        return tuple(s for s in self.trace.outputs[:count] if s is not None)

    def condition(self, depth: int) -> int:
        """The slot of a branch's condition."""
        slot = self.trace.outputs[len(self.trace.outputs) - len(self.outcomes) + depth]
        assert slot is not None
        return slot


def paths(step: Step, kinds: Sequence[TensorType], mode: FakeTensorMode, name: str) -> list[Path]:
    """All paths of a step on inputs of these shapes and dtypes."""
    found: list[Path] = []
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        given = waiting.pop()
        taken: list[tuple[torch.Tensor, bool]] = []
        try:
            trace = _traced(step, kinds, mode, given, taken)
        except DeadPath:
            trace = None
        outcomes = tuple(outcome for _, outcome in taken)
        for depth in range(len(given), len(outcomes)):
            waiting.append((*outcomes[:depth], not outcomes[depth]))
        if trace is None:
            if not found and not waiting:
                raise CaptureError(f"{name} cannot take a step: it divides by zero")
            continue
        if any(call.target == RANDOM_UNIFORM for call in trace.calls):
            raise CaptureError(
                f"the update of {name} draws random numbers, which cannot be captured; use an "
                "optimizer that is a function of parameter, gradient and state"
            )
        found.append(Path(outcomes, decompose(normalise(trace)), trace.inputs, trace.constants))
        if len(found) + len(waiting) > MOST_PATHS:
            raise CaptureError(
                f"the update of {name} branches on data in more than {MOST_PATHS} ways, which "
                "cannot be captured; use torch.where"
            )
    return found


def _traced(
    step: Step,
    kinds: Sequence[TensorType],
    mode: FakeTensorMode,
    given: Sequence[bool],
    taken: list[tuple[torch.Tensor, bool]],
) -> Trace:
    with mode:
        inputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]

    def run(recorder: Recorder, *fakes: torch.Tensor) -> list[torch.Tensor | None]:
        known: dict[int, bool] = {}

        def decide(tensor: torch.Tensor) -> bool:
            slot = recorder.slot(tensor)
            if slot not in known:
                place = len(taken)
                known[slot] = given[place] if place < len(given) else True
                # a copy, because the tensor may be written to
                taken.append(((tensor.reshape(()) != 0).clone(), known[slot]))
            return known[slot]

        results = step(decide, fakes)
        return [*results, *(condition for condition, _ in taken)]

    return record(run, inputs, mode)


@dataclass
class UpdateMerger:
    """Puts paths into one list of nodes.

    table  the expression of a number that stands for a setting
    """

    inputs: int
    kinds: Sequence[TensorType]
    table: Mapping[float, Any]
    name: str
    nodes: list[UpdateNode] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    known: dict[Any, tuple[int | None, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.types.extend(self.kinds)

    def update(self, outputs: Sequence[int]) -> UpdateNodes:
        """The update with these results, without nodes that nobody reads."""
        needed, kept = set(outputs), []
        for node in reversed(self.nodes):
            if needed.intersection(s for s in node.outputs if s is not None):
                needed.update(g.refs(node.args))
                kept.append(node)
        return _renumbered(self.inputs, kept[::-1], self.types, outputs)

    def merged(self, paths: Sequence[Path], places: Sequence[int], depth: int = 0) -> list[int]:
        """The results of several paths whose inputs are the tensors `places`."""
        if len(paths) == 1:
            return self._ends(paths[0], places)
        sides = [[p for p in paths if p.outcomes[depth] is outcome] for outcome in (True, False)]
        if not all(sides):  # the other one is dead
            return self.merged(paths, places, depth + 1)
        condition = self._slots(paths[0], places)[paths[0].condition(depth)]
        ends = [self.merged(side, places, depth + 1) for side in sides]
        return self.chosen(condition, *ends)

    def chosen(self, condition: int, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """The first results where a condition holds, else the second."""
        return [
            a if a == b else self.add("aten.where.self", (condition, a, b), self.types[a])
            for a, b in zip(first, second, strict=True)
        ]

    def add(self, kind: str, tensors: Sequence[int], out: TensorType, *rest: g.Arg) -> int:
        """A node of tensors with one result."""
        (made,) = self._node(kind, (*map(g.Ref, tensors), *rest), [out])
        assert made is not None
        return made

    def _node(
        self, kind: str, args: tuple[g.Arg, ...], out: Sequence[TensorType | None]
    ) -> tuple[int | None, ...]:
        key = (kind, repr(args))
        if key not in self.known:
            made: list[int | None] = []
            for each in out:
                made.append(None if each is None else len(self.types))
                if each is not None:
                    self.types.append(each)
            self.known[key] = tuple(made)
            self.nodes.append(UpdateNode(kind, args, tuple(made)))
        return self.known[key]

    def _ends(self, path: Path, places: Sequence[int]) -> list[int]:
        slots = self._slots(path, places)
        return [slots[s] for s in path.results]

    def _slots(self, path: Path, places: Sequence[int]) -> dict[int, int]:
        """The tensor of every slot of a path."""
        slots = dict(zip(path.inputs, places, strict=True))
        trace = path.trace
        read = {s for node in trace.nodes for s in g.refs(node.args)} | {*trace.outputs}
        for slot, tensor in path.constants.items():
            if slot in read:
                slots[slot] = self._constant(tensor)
        for node in trace.nodes:
            args = self._args(node.args, slots)
            out = [None if s is None else trace.types[s] for s in node.outputs]
            made = self._node(node.kind, args, out)
            slots.update({s: m for s, m in zip(node.outputs, made, strict=True)
                          if s is not None and m is not None})  # fmt: skip
        return slots

    def _constant(self, tensor: torch.Tensor) -> int:
        flat = None if tensor.is_meta else tensor.detach().reshape(-1)
        if flat is None or not flat.numel() or not bool((flat == flat[0]).all()):
            raise CaptureError(
                f"the update of {self.name} reads a tensor that is no parameter, gradient or "
                "state; keep it in self.state[parameter]"
            )
        number, kind = flat[0].item(), (tuple(tensor.shape), tensor.dtype)
        args = (kind[0], number, g.Dtype(dtype_name(tensor.dtype)))
        (made,) = self._node("aten.full.default", args, [kind])
        assert made is not None
        return made

    def _args(self, arg: Any, slots: Mapping[int, int]) -> Any:
        if isinstance(arg, g.Ref):
            return g.Ref(slots[arg.index])
        if isinstance(arg, tuple):
            return tuple(self._args(x, slots) for x in arg)
        if isinstance(arg, float) and arg in self.table:
            return g.Setting(self.table[arg])
        return arg


def _renumbered(
    inputs: int, nodes: Sequence[UpdateNode], types: Sequence[TensorType], outputs: Sequence[int]
) -> UpdateNodes:
    numbers = {k: k for k in range(inputs)}
    kinds = list(types[:inputs])
    made = []
    for node in nodes:
        args = g.substitute(node.args, {k: g.Ref(n) for k, n in numbers.items()})
        outs: list[int | None] = []
        for slot in node.outputs:
            outs.append(None if slot is None else len(kinds))
            if slot is not None:
                numbers[slot] = len(kinds)
                kinds.append(types[slot])
        made.append(UpdateNode(node.kind, args, tuple(outs)))
    return UpdateNodes(inputs, tuple(made), tuple(kinds), tuple(numbers[k] for k in outputs))


# elementwise updates

_LIKE_POINTWISE = frozenset(
    f"aten.{name}.default"
    for name in ("clone", "copy", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like")
)
_SCALARS = ("aten.full.default", "aten.zeros.default", "aten.ones.default")


def is_elementwise(update: UpdateNodes) -> bool:
    """Whether every element of the results depends on the elements at its place, and on scalars."""
    own = update.types[0][0]
    if any(shape not in ((), own) for shape, _ in update.types):
        return False
    return all(_is_pointwise(node) for node in update.nodes)


def _is_pointwise(node: UpdateNode) -> bool:
    if len(node.outputs) != 1 or not node.kind.startswith("aten."):
        return False
    if node.kind in _SCALARS:
        return node.args[0] == ()
    if node.kind in _LIKE_POINTWISE:
        return True
    _, name, overload = node.kind.split(".")
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, name), overload).tags


def body_of(update: UpdateNodes) -> g.Body:
    """An elementwise update as the Body of update Ops."""
    ops = tuple(g.BodyOp(node.kind, node.args) for node in update.nodes)
    return g.Body(update.inputs, ops, update.outputs)
