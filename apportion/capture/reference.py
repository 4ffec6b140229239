"""The reference that divided runs are compared with: plain PyTorch, in its own precision and wide.

`eager_steps` runs a captured Program without its Graph, on the user's own objects with copies of
their tensors (borrow.py); with `wide` in float64. `disturbed_changes` does it with all numbers
slightly wrong, which shows how much of a difference is rounding. `capture_as` captures the same
step in another precision. run/ compares with the first two.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from apportion.capture.batch_tree import map_tensors
from apportion.capture.borrow import Copying, borrowed
from apportion.capture.capture import capture_with
from apportion.capture.program import Program, state_tensor
from apportion.capture.random_rules import CounterRandom
from apportion.capture.torch_private import run_backward
from apportion.capture.training_step import scalar_loss, with_dtype_replaced
from apportion.capture.wide_mode import computing_wide, wide_dtype

EagerState = dict[int, torch.Tensor]
"""By the index of the Value that it begins a step with: a parameter, buffer or optimizer state."""


def eager_steps(
    program: Program, batches: Iterable[Any], seed: int, *, wide: bool = False
) -> tuple[list[float], EagerState]:
    """Runs the steps by plain PyTorch; the n-th batch is step n. Model and optimizer are as before
    when it is done.

    Returns the losses and what every parameter, buffer and optimizer state ends with. Random
    operators draw what the Graph draws. With `wide` all of it is in float64.
    """
    for value in program.bindings:
        state_tensor(program, value)  # raises ValueError if it has no data
    copying = _wide_copy if wide else torch.Tensor.clone
    with borrowed(program, copying):
        losses = _losses(program, batches, seed, copying, wide)
        ends = {value: state_tensor(program, value).clone() for value in program.bindings}
    return losses, ends


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
        losses = _losses(program, batches, seed, copying, wide)
        ends = {v: _double(state_tensor(program, v)) for v in program.bindings}
        changes = {v: ends[v] - begins[v] for v in begins}
    return losses, changes


def begun_from(program: Program, state: EagerState) -> EagerState:
    """The same changes for what `eager_steps` returned: its ends without the live begins."""
    return {v: _double(end) - _double(state_tensor(program, v)) for v, end in state.items()}


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _wide_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide_dtype(tensor.dtype), copy=True)


def _disturbing(size: float, draw: int, wide: bool) -> Copying:
    """A function that copies tensors with an error in every floating number."""
    generator = torch.Generator().manual_seed(draw)

    def copying(tensor: torch.Tensor) -> torch.Tensor:
        made = _wide_copy(tensor) if wide else tensor.clone()
        if not made.is_floating_point():
            return made
        up = torch.randint(0, 2, made.shape, generator=generator).to(made.device) * 2 - 1
        return (made.to(torch.float64) * (1.0 + size * up)).to(made.dtype)

    return copying


def _losses(
    program: Program, batches: Iterable[Any], seed: int, copying: Copying, wide: bool
) -> list[float]:
    return [
        _eager_step(program, map_tensors(copying, batch), seed, number, wide)
        for number, batch in enumerate(batches)
    ]


@contextmanager
def _precision_of(program: Program, wide: bool) -> Iterator[None]:
    with computing_wide() if wide else with_dtype_replaced(program.widened):
        yield


def _eager_step(program: Program, batch: Any, seed: int, number: int, wide: bool) -> float:
    optimizers = program.optimizers
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    random = CounterRandom(seed, number)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), _precision_of(program, wide):
        with random:
            loss = scalar_loss(program.step(program.model, batch), program.step)
            run_backward(loss)
        if program.clip_norm is not None:
            trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, program.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
    return float(loss.detach())


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
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
