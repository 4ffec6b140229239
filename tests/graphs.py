"""Small Graphs made by hand, and Graphs of one real operator call, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from apportion import zoo
from apportion.capture.capture import (
    capture,
)
from apportion.capture.optimizer import (
    setting_value,
)
from apportion.capture.program import (
    Program,
    batch_leaves,
    state_tensor,
)
from apportion.capture.reference import (
    capture_as,
)
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    LEFT_OUT,
    Context,
    resolve,
)
from apportion.execute.rank import Rank, run_together
from apportion.graph import ACTIVATION, INPUT, Dtype, Graph, Op, Ref, Value, nbytes_of, verify
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.problem import Problem
from apportion.split.space import Space
from apportion.split.strategy import Strategy
from apportion.verify.run_split import run_op

CONTEXT = Context(seed=3, step=1, setting=float)


@dataclass(frozen=True)
class Tensor:
    """A Value of a Graph in the making."""

    index: int


@dataclass
class Maker:
    """Collects Values and Ops; `op` returns the Tensor (or Tensors) that the Op makes."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    state: list[tuple[int, int]] = field(default_factory=list)

    def value(self, *shape: int, role: str = INPUT, dtype: str = "float32") -> Tensor:
        self.values.append(
            Value(f"v{len(self.values)}", role, shape, dtype, nbytes_of(shape, dtype))
        )
        return Tensor(len(self.values) - 1)

    def op(self, kind: str, *args: Any, out: tuple[int, ...], dtype: str = "float32") -> Tensor:
        (made,) = self.several(kind, *args, outs=[out], dtype=dtype)
        return made

    def several(
        self, kind: str, *args: Any, outs: Sequence[tuple[int, ...]], dtype: str = "float32"
    ) -> list[Tensor]:
        inputs: list[int] = []
        plain = tuple(_graph_arg(arg, inputs) for arg in args)
        made = [self.value(*shape, role=ACTIVATION, dtype=dtype) for shape in outs]
        outputs = tuple(t.index for t in made)
        self.ops.append(Op(f"op{len(self.ops)}", kind, tuple(inputs), outputs, plain))
        return made

    def survives(self, before: Tensor, after: Tensor) -> None:
        """State that begins the step as the one and ends it as the other."""
        self.state.append((before.index, after.index))

    def graph(self, loss: Tensor | None = None) -> Graph:
        made = Graph(tuple(self.values), tuple(self.ops), tuple(self.state), loss and loss.index)
        verify(made)
        return made

    def space(self) -> Space:
        return Space(self.graph())


def _graph_arg(arg: Any, inputs: list[Any]) -> Any:
    """A Graph's argument; tensors are collected in `inputs`, each once."""
    if isinstance(arg, Tensor):
        arg = arg.index
        if arg not in inputs:
            inputs.append(arg)
        return Ref(inputs.index(arg))
    if isinstance(arg, torch.Tensor):
        known = [k for k, t in enumerate(inputs) if t is arg]
        if not known:
            inputs.append(arg)
        return Ref(known[0] if known else len(inputs) - 1)
    if isinstance(arg, torch.dtype):
        return Dtype(str(arg).removeprefix("torch."))
    if isinstance(arg, list | tuple):
        return tuple(_graph_arg(item, inputs) for item in arg)
    return arg


@dataclass(frozen=True)
class One:
    """A Graph of one Op, and tensors to run it on."""

    space: Space
    tensors: tuple[torch.Tensor, ...]

    def cuttable(self) -> set[str]:
        """The names of the axes that can be cut."""
        axes = zip(self.space.axes(0), self.space.cuttable(0), strict=True)
        return {axis.name for axis, able in axes if able}

    def parts(self, **parts: int) -> tuple[int, ...]:
        """Parts for a Choice from parts by name of axis; the others stay whole."""
        names = [axis.name for axis in self.space.axes(0)]
        assert parts.keys() <= set(names), names
        return tuple(parts.get(name, 1) for name in names)


def one(kind: str, *args: Any, **keywords: Any) -> One:
    """The Graph of one call of a real kernel, its arguments completed from the schema."""
    tensors: list[Any] = []
    plain = tuple(_graph_arg(arg, tensors) for arg in _completed(kind, args, keywords))
    op = Op("op", kind, tuple(range(len(tensors))), (), plain)
    results = list(run_op(op, plain, tensors, CONTEXT))
    while results[-1].shape == (0,):  # left out by the kernel, and by capture if it is the last
        results.pop()
    make = Maker()
    for tensor in tensors:
        _like(make, tensor, INPUT)
    outputs = tuple(_like(make, result, ACTIVATION).index for result in results)
    made = Op("op", kind, op.inputs, outputs, plain)
    return One(Space(Graph(tuple(make.values), (made,))), tuple(tensors))


def _like(make: Maker, tensor: torch.Tensor, role: str) -> Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return make.value(*tensor.shape, role=role, dtype=dtype)


def _completed(kind: str, args: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
    """All arguments in schema order, as capture writes them."""
    if not kind.startswith("aten."):
        return [*args, *keywords.values()]
    names = [a for a in resolve(kind)._schema.arguments if a.name not in LEFT_OUT]
    given = dict(zip([a.name for a in names], args, strict=False)) | keywords
    assert given.keys() <= {a.name for a in names}, kind
    return [given.get(a.name, a.default_value) for a in names]


# Captured steps, run by all ranks in this process


@cache
def captured(spec: str) -> tuple[Program, Space]:
    """A model of the zoo in float64."""
    it = zoo.load(spec, seed=0)
    program = capture_as(
        capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm), torch.float64
    )
    return program, Space(program.graph)


def problem(devices: int, spec: str = "mlp:tiny") -> Problem:
    """What a search is given to plan a model for processes on this machine."""
    machine = cluster(f"local:{devices}")
    return Problem(captured(spec)[1], machine, default_cost(machine))


@dataclass
class Watched(Rank):
    """A rank that remembers its copy of the loss."""

    loss: torch.Tensor | None = None

    def finish(self) -> torch.Tensor | None:
        self.loss = super().finish()
        return self.loss


def start(
    program: Program, space: Space, strategy: Strategy, devices: int
) -> tuple[TaskGraph, list[Watched]]:
    """The tasks of a strategy, and ranks that have loaded their state."""
    tasks = runnable(space, strategy, devices)
    executable = Executable(space, strategy, tasks)
    ranks = [Watched(executable, device) for device in range(devices)]
    constants = program.constants
    for rank in ranks:
        rank.load(lambda v: constants[v] if v in constants else state_tensor(program, v))
    return tasks, ranks


def context_of(program: Program, seed: int, step: int) -> Context:
    return Context(seed, step, lambda e: setting_value(program.optimizers, e), program.graph.bodies)


def step(
    program: Program, ranks: Sequence[Watched], batch: Any, seed: int, number: int
) -> list[float]:
    """One step of all ranks; returns every copy of the loss."""
    leaves = batch_leaves(program, batch)
    for rank in ranks:
        rank.feed(lambda value: leaves[value])
    run_together(ranks, context_of(program, seed, number))
    return [float(rank.loss) for rank in ranks if rank.loss is not None]
