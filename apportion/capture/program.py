"""Program: a captured step, which is a Graph bound to the live model and optimizer.

What capture/ hands to the other rooms, and the way from a Value of its Graph to the live tensor
behind it, for whoever runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from apportion import graph as g
from apportion.capture import optimizer as updates
from apportion.capture.build_graph import Binding
from apportion.capture.torch_private import pytree
from apportion.capture.training_step import DtypeReplacement, StepFunction


@dataclass(frozen=True, eq=False)
class Program:
    """A captured step.

    inputs     (value index, flat position of the leaf in the batch's pytree)
    constants  tensors found in the trace, by value index
    bindings   for every state Value the step begins with, what it is bound to
    fixed      the optimizer settings that decided which operators the update has
    widened    a dtype, and the one that the step gets wherever it names the first
    """

    graph: g.Graph
    step: StepFunction
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    clip_norm: float | None
    constants: dict[int, torch.Tensor]
    inputs: tuple[tuple[int, int], ...]
    bindings: dict[int, Binding]
    fixed: tuple[updates.FixedSetting, ...]
    widened: DtypeReplacement | None = None

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
    return bound_tensor(program.model, program.optimizer, binding)


def bound_tensor(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, binding: Binding
) -> torch.Tensor:
    """The tensor of this model and optimizer that a binding names; raises ValueError if it has no
    data."""
    if binding.role == g.BUFFER:
        tensor = model.get_buffer(binding.name)
    else:
        tensor = model.get_parameter(binding.name)
    if tensor.is_meta:
        raise ValueError(
            f"{binding.role} {binding.name} has no data (meta device); materialise the model with "
            "model.to_empty(device=...) and initialise it before running"
        )
    if binding.state is None:
        return tensor.detach()
    return updates.state_value(optimizer, tensor, binding.state, binding.begin)


def batch_leaves(program: Program, batch: Any) -> dict[int, torch.Tensor]:
    """The batch's tensors by value index; raises ValueError unless the batch is as captured. A list
    may stand for a tuple, as a DataLoader makes lists of what were tuples."""
    captured, spec = pytree.tree_flatten(program.batch)
    flat, given = pytree.tree_flatten(batch)
    if given != spec:
        alike = pytree.tree_structure(_as_tuples(program.batch))
        if pytree.tree_structure(_as_tuples(batch)) != alike:
            shown = [" ".join(str(structure).split()) for structure in (given, spec)]
            raise ValueError(
                f"the batch has the structure {shown[0]}, but the step was captured with {shown[1]}"
            )
    for position, (new, old) in enumerate(zip(flat, captured, strict=True)):
        _check_leaf(position, new, old)
    return {value: flat[position] for value, position in program.inputs}


def _as_tuples(tree: Any) -> Any:
    """A batch with tuples in the place of lists."""
    if type(tree) in (list, tuple):
        return tuple(map(_as_tuples, tree))
    if type(tree) is dict:
        return {key: _as_tuples(each) for key, each in tree.items()}
    return tree


def _check_leaf(position: int, new: Any, old: Any) -> None:
    if not isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor) or new != old:
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
    updates.check_fixed(program.optimizer, program.fixed)
