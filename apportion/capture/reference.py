"""The reference that divided runs are compared with: plain PyTorch, and the step in float64.

`eager_steps` runs a captured Program without its Graph, on a copy of the model and the optimizer.
`capture_as` captures the same step in another precision, in which differences by rounding are
smaller. run/ compares with both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from apportion.capture.batch_tree import map_tensors
from apportion.capture.capture import capture_with
from apportion.capture.eager_step import EagerResult, eager_step
from apportion.capture.program import Program, bound_tensor
from apportion.capture.random_rules import CounterRandom
from apportion.capture.training_step import with_dtype_replaced


def eager_steps(
    program: Program, batches: Iterable[Any], seed: int
) -> tuple[list[float], dict[int, torch.Tensor]]:
    """Runs the steps by plain PyTorch on a copy of model and optimizer; the n-th batch is step n.

    Returns the losses and, by the index of the Value it begins with, the tensor that every
    parameter, buffer and optimizer state ends with. Random operators draw what the Graph draws.
    """
    for binding in program.bindings.values():
        bound_tensor(program.live, binding)
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    copied = replace(program, model=model, optimizer=optimizer)
    steps = [_eager_step(copied, batch, seed, number) for number, batch in enumerate(batches)]
    losses = [float(step.loss) for step in steps]
    ends = {v: bound_tensor(copied.live, b) for v, b in program.bindings.items()}
    returned = {v: name for name, v in program.returned.items() if v is not None}
    ends |= {v: steps[-1].scalars[name] for v, name in returned.items() if steps}
    return losses, ends


def _eager_step(copied: Program, batch: Any, seed: int, number: int) -> EagerResult:
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        CounterRandom(seed, number),
        with_dtype_replaced(copied.widened),
    ):
        return eager_step(copied, batch)


def capture_as(program: Program, dtype: torch.dtype) -> Program:
    """The step captured again with model, optimizer state and floating batch cast to `dtype`.

    Where the step itself names the precision of the model (`logits.float()` in a float32 model), it
    gets `dtype` as well: such a cast does nothing in the model's own precision, nor may it here.
    """
    cast = cast_program(program, dtype)
    how = (cast.step, cast.model, cast.optimizer, cast.batch, cast.clip_norm, cast.widened)
    return capture_with(*how)


def cast_program(program: Program, dtype: torch.dtype) -> Program:
    """The Program with model, optimizer state and floating batch cast to `dtype`, not captured
    again: its Graph is still the one in the model's own precision. `eager_steps`, which runs no
    Graph, needs no more than this."""
    own = _precision(program.model)
    model, optimizer = copy.deepcopy((program.model, program.optimizer))
    model.to(dtype)
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                state[name] = value.to(dtype)
    batch = cast_batch(program.batch, dtype)
    widened = None if own == dtype else (own, dtype)
    return replace(program, model=model, optimizer=optimizer, batch=batch, widened=widened)


def _precision(model: torch.nn.Module) -> torch.dtype:
    """The widest dtype of the floating parameters."""
    return max(
        (p.dtype for p in model.parameters() if p.is_floating_point()),
        key=lambda dtype: torch.finfo(dtype).bits,
        default=torch.get_default_dtype(),
    )


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors in `dtype`."""

    def cast(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return map_tensors(cast, batch)
