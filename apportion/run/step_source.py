"""The step that the processes of a pool run, and where each of them takes its tensors from.

Part of the room run. A captured Program comes in; out goes a StepSource, which the parent process
sends to every process of a pool, and which becomes a Program or StepTensors there. The parent sends
along what its capture has found, so that no process has to capture the same step again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from apportion.capture import (
    FixedInput,
    Program,
    batch_leaves,
    setting_of,
    setting_value,
    state_tensor,
)
from apportion.execute import dtype
from apportion.graph import INPUT, OPTIMIZER_STATE, PARAMETER, Graph
from apportion.zoo import Loaded

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CaptureFacts:
    """What a capture has found beside the Graph: those fields of a Program that are plain data, and
    its constants and fixed inputs as torch.save writes them. `default` is torch's default dtype at
    that time, `fixed_inputs` are positions and names."""

    inputs: tuple[tuple[int, int], ...]
    bindings: Mapping[int, Any]
    fixed: tuple[Any, ...]
    constants: bytes
    default: str = "float32"
    fixed_inputs: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class StepSource:
    """The step that is run: that of a model's specification, or that of a Graph with tensors for
    some of its Values and the `settings` of each group of its optimizer, as far as they are known.
    A process that gets no `facts` with a specification captures by itself."""

    graph: Graph
    spec: str = ""
    model_seed: int = 0
    given: Mapping[int, Array] = field(default_factory=dict)
    facts: CaptureFacts | None = None
    settings: tuple[Mapping[str, Any], ...] = ()

    @property
    def default_dtype(self) -> torch.dtype | None:
        """torch's default dtype when the step was captured, if that is known."""
        return None if self.facts is None else dtype(self.facts.default)


def source_of(program: Program | Graph) -> StepSource:
    """The step of a Program: its batch and constants are given, as far as they have data."""
    if isinstance(program, Graph):
        return StepSource(program)
    tensors = batch_leaves(program, program.batch) | program.constants
    known = {v: t.detach() for v, t in tensors.items() if not t.is_meta}
    wide = {v: t.float() if t.dtype == torch.bfloat16 else t for v, t in known.items()}
    given = {v: t.numpy() for v, t in wide.items()}  # NumPy has no bfloat16
    return StepSource(program.graph, given=given, settings=_settings(program.live.param_groups))


def _settings(groups: list[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The numbers among the settings of each group."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value) if value.numel() == 1 and not value.is_meta else None
        whole = value if isinstance(value, tuple) else (value,)
        return value if all(isinstance(part, int | float) for part in whole) else None

    found = [{key: plain(value) for key, value in group.items()} for group in groups]
    return tuple({k: v for k, v in group.items() if v is not None} for group in found)


def source_of_model(program: Program, spec: str, seed: int) -> StepSource:
    """The step of the model `spec`, which every process loads for itself; `program` is it, captured
    here with data or without."""
    return StepSource(program.graph, spec, seed, facts=_facts(program))


def _facts(program: Program) -> CaptureFacts | None:
    """None if a constant has no data, as in a model on the meta device, and where state lies in no
    module, which has a name in a capture only."""
    if program.written or any(constant.is_meta for constant in program.constants.values()):
        return None
    written = io.BytesIO()
    kept = {v: t.detach().clone() for v, t in program.constants.items()}
    fixed = {each.name: each.tensor for each in program.fixed_inputs}
    torch.save((kept, fixed), written)
    fields = (program.inputs, dict(program.bindings), program.fixed)
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    names = tuple((each.position, each.name) for each in program.fixed_inputs)
    return CaptureFacts(*fields, written.getvalue(), default, names)


def bound_program(graph: Graph, facts: CaptureFacts, model: Loaded) -> Program:
    """The Program of a model that was loaded here and captured elsewhere."""
    constants, kept = torch.load(io.BytesIO(facts.constants), weights_only=True)
    fixed = tuple(FixedInput(at, name, kept[name]) for at, name in facts.fixed_inputs)
    return Program(
        graph, model.step, model.model, model.optimizer, model.batch, model.clip_norm, constants,
        facts.inputs, dict(facts.bindings), facts.fixed, fixed_inputs=fixed,
    )  # fmt: skip


@dataclass(frozen=True)
class RunnableStep:
    """What tasks need of a step in order to run: its Graph, the tensor of each Value that it begins
    with, and the settings of the optimizer."""

    graph: Graph
    tensor: Callable[[int], torch.Tensor]
    setting: Callable[[Any], float]


def tensors_of_program(program: Program) -> RunnableStep:
    """The tensors of a live model."""
    leaves = batch_leaves(program, program.batch)

    def tensor(value: int) -> torch.Tensor:
        return leaves[value] if value in leaves else state_tensor(program, value)

    return RunnableStep(program.graph, tensor, lambda expression: setting_of(program, expression))


def tensors_of_graph(
    graph: Graph, given: Mapping[int, Array], settings: tuple[Mapping[str, Any], ...] = ()
) -> RunnableStep:
    """The given tensors, and made up ones for the rest: state is small and positive, parameters are
    around zero, whole numbers are zero, a count of steps is one. Without settings all are 0.1."""
    generator = torch.Generator().manual_seed(0)

    def tensor(value: int) -> torch.Tensor:
        meant = graph.values[value]
        if value in given:
            return torch.from_numpy(given[value]).to(dtype(meant.dtype or ""))
        made = torch.zeros(meant.shape or (), dtype=dtype(meant.dtype or ""))
        if made.is_floating_point():
            low = -0.05 if meant.role in (PARAMETER, INPUT) else 0.01
            made.uniform_(low, 0.05, generator=generator)
        if meant.role == OPTIMIZER_STATE and not meant.shape:
            made.fill_(1)
        return made

    def setting(expression: Any) -> float:
        if not settings:
            return 0.1
        return setting_value(cast(torch.optim.Optimizer, optimizer), expression)

    optimizer = SimpleNamespace(param_groups=settings)
    return RunnableStep(graph, tensor, setting)
