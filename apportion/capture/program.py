"""Program: a captured step, which is a Graph bound to the live model and optimizer.

What capture/ hands to the other rooms, and the way from a Value of its Graph to the live tensor
behind it, for whoever runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from apportion import graph as g
from apportion.capture import optimizer as updates
from apportion.capture.all_updates import check_all_fixed
from apportion.capture.batch_tree import flatten
from apportion.capture.build_graph import RESULT, Binding
from apportion.capture.discover import discover
from apportion.capture.fixed_inputs import FixedInput, check_fixed
from apportion.capture.live_state import LiveState, live_state
from apportion.capture.setting_number import expression_value, parameter_groups
from apportion.capture.step_results import StepResults
from apportion.capture.training_step import DtypeReplacement, StepFunction
from apportion.capture.written_tensors import WrittenTensor


@dataclass(frozen=True, eq=False)
class Program:
    """A captured step.

    model      as the user gave it: a Module, or a sequence or dict of such
    optimizer  likewise
    inputs     (value index, flat position of the leaf in the batch's pytree)
    constants  tensors found in the trace, by value index
    bindings   for every state Value the step begins with, what it is bound to
    fixed      the optimizer settings that decided which operators the update has
    widened    a dtype, and the one that the step gets wherever it names the first
    notes      sentences about what capture has left out or taken for fixed
    results    what the step returns; None where nobody has seen it run
    returned   the Value of each scalar in it, by name, which the step ends with as with state; None
               for the loss
    by_itself  whether the step calls backward and its optimizers itself
    fixed_inputs  tensors of the batch that are no inputs: the same in every step
    written    tensors in no module that the step writes to, or replaces by others
    steps_done  steps that the live state has behind it: the number of the next one
    """

    graph: g.Graph
    step: StepFunction
    model: Any
    optimizer: Any
    batch: Any
    clip_norm: float | None
    constants: dict[int, torch.Tensor]
    inputs: tuple[tuple[int, int], ...]
    bindings: dict[int, Binding]
    fixed: tuple[updates.FixedSetting, ...]
    widened: DtypeReplacement | None = None
    notes: tuple[str, ...] = ()
    results: StepResults | None = None
    returned: dict[str, int | None] = field(default_factory=dict)
    by_itself: bool = False
    fixed_inputs: tuple[FixedInput, ...] = ()
    written: tuple[WrittenTensor, ...] = ()
    steps_done: int = 0

    @cached_property
    def live(self) -> LiveState:
        """The modules and optimizers of the step, those that it refers to by itself included."""
        return live_state_of(self.step, self.model, self.optimizer, self.written)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers of the step, in the order in which their groups are numbered."""
        return self.live.optimizers

    @property
    def fixed_positions(self) -> frozenset[int]:
        """The positions among the leaves of the batch of those that are the same in every step."""
        return frozenset(each.position for each in self.fixed_inputs)

    def __repr__(self) -> str:
        return f"<Program {type(self.model).__name__}, {len(self.graph.ops)} ops>"


def state_tensor(program: Program, value_index: int) -> torch.Tensor:
    """The live tensor behind a parameter, buffer, constant or optimizer state at the step's begin.

    Optimizer state that the optimizer has not made yet is what it begins with.
    """
    if value_index in program.constants:
        return program.constants[value_index]
    binding = program.bindings.get(value_index)
    if binding is None:
        name = program.graph.values[value_index].name
        raise ValueError(
            f"value {name!r} is not a parameter, buffer or optimizer state the step begins with"
        )
    return bound_tensor(program.live, binding)


def live_state_of(
    step: StepFunction,
    model: Any,
    optimizer: Any,
    written: tuple[WrittenTensor, ...] = (),
) -> LiveState:
    """The modules and optimizers that a step is given, and those that it refers to by itself; and
    the tensors that it writes to."""
    given = live_state(model, optimizer)
    found = live_state(model, optimizer, discover(step, *given.optimizers))
    return replace(found, written=written) if written else found


def setting_of(program: Program, expression: Any) -> float:
    """The number that a Setting's expression has now, from the groups of all optimizers."""
    return updates.setting_value(program.optimizers, expression)


def settings_now(program: Program) -> Callable[[Any], float]:
    """What gives the number that a Setting's expression has now, whatever the groups become."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in parameter_groups(program.optimizers)
    ]
    kept = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        for group in groups
    ]
    return lambda expression: expression_value(kept, expression)


def bound_tensor(live: LiveState, binding: Binding) -> torch.Tensor:
    """The live tensor that a binding names; raises ValueError if it has no data."""
    if binding.role == RESULT:
        return torch.zeros((), dtype=getattr(torch, binding.state or "float32"))
    tensor = live.tensor(binding.name)
    if tensor.is_meta:
        raise ValueError(
            f"{binding.role} {binding.name} has no data (meta device); materialise the model with "
            "model.to_empty(device=...) and initialise it before running"
        )
    if binding.state is None:
        return tensor.detach()
    return updates.state_value(live.optimizer_of(tensor), tensor, binding.state, binding.begin)


def batch_leaves(program: Program, batch: Any) -> dict[int, torch.Tensor]:
    """The batch's tensors by value index; raises ValueError unless the batch is as captured,
    fixed tensors with the same values. A list
    may stand for a tuple, as a DataLoader makes lists of what were tuples, and any Mapping for
    another."""
    captured = flatten(program.batch)
    flat = flatten(batch).in_order_of(captured)
    for position, (new, old) in enumerate(zip(flat, captured.leaves, strict=True)):
        _check_leaf(position, new, old)
    check_fixed(program.fixed_inputs, flat)
    return {value: flat[position] for value, position in program.inputs}


def _check_leaf(position: int, new: Any, old: Any) -> None:
    if not isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor) or (new is not old and new != old):
            raise ValueError(
                f"leaf {position} of the batch is {new!r}, but the step was captured with {old!r}, "
                "which is part of the graph; capture again"
            )
    elif not isinstance(new, torch.Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
        shown = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, torch.Tensor) else repr(new)
        raise ValueError(
            f"leaf {position} of the batch is {shown}, but the step was captured with {old.dtype} "
            f"{tuple(old.shape)}; give every batch the same shape or capture again"
        )


def check_settings(program: Program) -> None:
    """Raises ValueError if an optimizer setting that shaped the captured update has changed."""
    check_all_fixed(program.live, program.fixed)
