"""The reference that divided runs are compared with: plain PyTorch, in its own precision and wide.

`eager_steps` runs a captured Program without its Graph, on the user's own objects with copies of
their tensors (borrow.py); with `wide` in float64. `disturbed_changes` does it with all numbers
slightly wrong, which shows how much of a difference is rounding. `capture_as` captures the same
step in another precision. run/ compares with the first two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from apportion.capture.batch_tree import map_tensors
from apportion.capture.borrow import Copying, borrowed
from apportion.capture.capture import capture_with
from apportion.capture.eager_step import EagerResult, eager_step
from apportion.capture.loss_scale import other_scale
from apportion.capture.optimizer_copy import copied_with
from apportion.capture.program import Program, state_tensor
from apportion.capture.random_rules import CounterRandom
from apportion.capture.training_step import with_dtype_replaced
from apportion.capture.wide_mode import computing_wide, wide_dtype

EagerState = dict[int, torch.Tensor]
"""By the index of the Value that it begins a step with: a parameter, buffer or optimizer state."""


def eager_steps(
    program: Program, batches: Iterable[Any], seed: int, *, wide: bool = False
) -> tuple[list[float], EagerState]:
    """Runs the steps by plain PyTorch; the n-th batch is step n, counted from what the live state
    has behind it. Model and optimizer are as before when it is done.

    Returns the losses and what every parameter, buffer and optimizer state ends with. Random
    operators draw what the Graph draws. With `wide` all of it is in float64.
    """
    for value in program.bindings:
        state_tensor(program, value)  # raises ValueError if it has no data
    copying = _wide_copy if wide else torch.Tensor.clone
    with borrowed(program, copying):
        return _eager_run(program, batches, seed, copying, wide)


def disturbed_changes(
    program: Program,
    batches: Iterable[Any],
    seed: int,
    size: float,
    draw: int,
    *,
    wide: bool = False,
) -> tuple[list[float], EagerState]:
    """The same with every floating number of the batch, the model and the optimizer's state changed
    at first by `size` of itself, up or down.

    Returns the losses and, for each Value, the difference of its end and its disturbed begin, in
    float64.
    """
    copying = _disturbing(size, draw, wide)
    with borrowed(program, copying):
        begins = {v: _double(state_tensor(program, v)).clone() for v in program.bindings}
        losses, ends = _eager_run(program, batches, seed, copying, wide)
    return losses, {v: _double(ends[v]) - begins[v] for v in begins}


@contextmanager
def at_loss_scale(program: Program, factor: float, least: float = 1.0) -> Iterator[int]:
    """A context in which the GradScalers of the step have another scale, and its state so too;
    gives how many there are."""
    with other_scale([module for _, module in program.live.modules], factor, least) as count:
        yield count


def begun_from(program: Program, state: EagerState) -> EagerState:
    """The same changes for what `eager_steps` returned: its ends without the live begins."""
    return {v: _double(end) - _double(state_tensor(program, v)) for v, end in state.items()}


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _wide_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide_dtype(tensor.dtype), copy=True)


def _disturbing(size: float, draw: int, wide: bool) -> Copying:
    """A function that copies tensors with an error in every floating number that is not a whole
    one: those are labels, masks and counts, which are exact, and a label of 1 is the largest."""
    generator = torch.Generator().manual_seed(draw)

    def copying(tensor: torch.Tensor) -> torch.Tensor:
        made = _wide_copy(tensor) if wide else tensor.clone()
        if not made.is_floating_point():
            return made
        signs = torch.randint(0, 2, made.shape, generator=generator) * 2 - 1
        exact = made.to(torch.float64)
        up = signs.to(exact)  # a number times a tensor of integers would be in float32
        return torch.where(exact.frac() == 0, exact, exact * (1.0 + size * up)).to(made.dtype)

    return copying


def _eager_run(
    program: Program, batches: Iterable[Any], seed: int, copying: Copying, wide: bool
) -> tuple[list[float], EagerState]:
    """The losses, and the state that borrowed objects end with; scalars that the last step returned
    are part of it."""
    steps = [
        _eager_step(program, map_tensors(copying, batch), seed, number, wide)
        for number, batch in enumerate(batches, program.steps_done)
    ]
    ends = {value: state_tensor(program, value).clone() for value in program.bindings}
    for name, value in program.returned.items():
        if value is not None and steps:
            ends[value] = steps[-1].scalars[name]
    return [float(step.loss) for step in steps], ends


def _only_floating_dtype(program: Program) -> torch.dtype | None:
    """The floating dtype of all that a program computes; None if there are several, or none."""
    names = {value.dtype for value in program.graph.values if value.dtype is not None}
    found = [d for d in (getattr(torch, name) for name in names) if d.is_floating_point]
    return found[0] if len(found) == 1 else None


def _eager_step(program: Program, batch: Any, seed: int, number: int, wide: bool) -> EagerResult:
    shown = _only_floating_dtype(program)
    precision = computing_wide(shown) if wide else with_dtype_replaced(program.widened)
    with (
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        CounterRandom(seed, number),
        precision,
    ):
        return eager_step(program, batch)


def capture_as(program: Program, dtype: torch.dtype) -> Program:
    """The step captured again with model, optimizer state and floating batch cast to `dtype`.

    Where the step itself names the precision of the model (`logits.float()` in a float32 model), it
    gets `dtype` as well: such a cast does nothing in the model's own precision, nor may it here.
    """
    cast = cast_program(program, dtype)
    how = (cast.step, cast.model, cast.optimizer, cast.batch, cast.clip_norm, cast.widened)
    return capture_with(*how, [each.name for each in program.fixed_inputs])


def cast_program(program: Program, dtype: torch.dtype) -> Program:
    """The Program with model, optimizer state and floating batch cast to `dtype`, not captured
    again: its Graph is still the one in the model's own precision. `eager_steps`, which runs no
    Graph, needs no more than this."""
    own = _precision(program.model)
    model, optimizer = copied_with(program.model, program.optimizer)
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
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
