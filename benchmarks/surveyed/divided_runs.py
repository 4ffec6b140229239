"""A planned step run on all its devices in one process: a Program, a Plan and batches come in,
losses and the state that every device ends with go out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from apportion.capture.program import (
    batch_leaves,
    bound_tensor,
    live_state_of,
    setting_of,
    state_tensor,
)
from apportion.capture.torch_private import note_step
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank, run_together
from apportion.run.check_run import gather_copies
from apportion.run.training import TrainingResult
from surveyed.plain_runs import SEED, Built


def ends_of(program: Any, built: Built) -> dict[int, torch.Tensor]:
    """What the Values that the step begins with are bound to, in these objects."""
    live = live_state_of(built.step, built.model, built.optimizer)
    kept = {each.name for each in program.live.written}
    return {
        v: (_attribute(built, b.name) if b.name in kept else bound_tensor(live, b)).detach()
        for v, b in program.bindings.items()
    }


def _attribute(built: Built, name: str) -> torch.Tensor:
    """State in an attribute, `model.hidden`, or in what the step names, `average.means.0`, which
    only a capture finds."""
    first, *path = name.split(".")
    known = {"model": built.model, "optimizer": built.optimizer}
    found: Any = (inspect.getclosurevars(built.step).nonlocals | known)[first]
    for each in path:
        if isinstance(found, Mapping):
            found = found[each]
        else:
            found = found[int(each)] if isinstance(found, Sequence) else getattr(found, each)
    assert isinstance(found, torch.Tensor)
    return found


def divided(
    program: Any, plan: Any, batches: list[Any], after: Callable[[], Any] | None = None
) -> tuple[list[float], dict[int, Any]]:
    """The losses, and by Value the copies that the devices end with; `after` is called after every
    step."""
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    ranks = [Rank(executable, d) for d in range(len(plan.cluster.devices))]
    for rank in ranks:
        rank.load(lambda v: state_tensor(program, v))
    losses = []
    for number, batch in enumerate(batches):
        leaves = batch_leaves(program, batch)
        for rank in ranks:
            rank.feed(leaves.__getitem__)
        context = Context(SEED, number, lambda e: setting_of(program, e), program.graph.bodies)
        loss = run_together(ranks, context)
        losses.append(float("nan") if loss is None else float(loss))
        if after is not None:
            for optimizer in program.optimizers:
                note_step(optimizer)
            after()
    results = [
        TrainingResult(
            losses, [], [], 0, None, [(s, _array(t)) for s, (_, t) in r.state().items()], []
        )
        for r in ranks
    ]
    return losses, gather_copies(plan.space, plan.tasks, results)


def _array(tensor: torch.Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
