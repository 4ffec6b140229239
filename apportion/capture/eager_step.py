"""eager_step: one step of a Program by plain PyTorch, on the live objects, in either form of step.

Part of capture/; reference.py calls it and has the objects' tensors copied before. A step that
returns its loss gets backward, clipping and update here, as PyTorch does them; the body of a user's
own loop is called as it is. Out go the loss and the other scalars that the step returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from apportion.capture.program import Program
from apportion.capture.step_results import returned_numbers, returned_scalars
from apportion.capture.torch_private import run_backward
from apportion.capture.training_step import check_loss, loss_name, takes_optimizer


@dataclass(frozen=True)
class EagerResult:
    """The loss of a step, and all scalars that it returned by their names."""

    loss: torch.Tensor
    scalars: dict[str, torch.Tensor]


def eager_step(program: Program, batch: Any) -> EagerResult:
    """Takes one step on the Program's live modules and optimizers."""
    for group in program.live.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    with _losses_of_backward() as losses:
        if takes_optimizer(program.step):
            result = program.step(program.model, program.optimizer, batch)
        else:
            result = program.step(program.model, batch)
    returned = returned_scalars(result)
    scalars = returned.scalars | _shown(program, result)  # what was captured as read from tensors
    name = loss_name(scalars, returned.left_out, program.step, not program.by_itself)
    if program.by_itself:
        loss = scalars[name] if name else losses[-1]
    else:
        loss = scalars[name]
        check_loss(loss, program.step)
        run_backward(loss)
        _clip_and_update(program)
    return EagerResult(loss.detach(), {n: x.detach() for n, x in scalars.items()})


def _shown(program: Program, result: Any) -> dict[str, torch.Tensor]:
    """The numbers that a step returned in the place of scalars of the captured one."""
    numbers, names = returned_numbers(result), program.returned
    return {n: torch.tensor(numbers[n], dtype=torch.float64) for n in names if n in numbers}


def _clip_and_update(program: Program) -> None:
    if program.clip_norm is not None:
        trained = [p for group in program.live.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, program.clip_norm)
    for optimizer in program.optimizers:
        optimizer.step()


@contextmanager
def _losses_of_backward() -> Iterator[list[torch.Tensor]]:
    """Notes what backward is called on."""
    found: list[torch.Tensor] = []
    plain = torch.autograd.backward

    def noting(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tensors if isinstance(tensors, torch.Tensor) else tensors[0])
        return plain(tensors, *args, **kwargs)

    torch.autograd.backward = noting
    try:
        yield found
    finally:
        torch.autograd.backward = plain
