"""DividedStep: a training step of somebody else's loop, captured when its first batch comes.

Part of the room adapters. A step function, a model, an optimizer and batches come in; the first one
is captured and divided by the plan, and this and all others run on the ranks of the job. A batch of
another shape than the first is refused: loops have to drop the last, smaller one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from apportion.capture import capture
from apportion.machine import Cluster
from apportion.plan import Plan
from apportion.run import Runner, distribute, join_job

TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""What torchrun tells a process of the job that it is part of."""
JOIN_SECONDS = 600.0

StepFunction = Callable[[Any, Any, Any], Any]
"""The body of a loop: step(model, optimizer, batch)."""


@contextmanager
def one_process() -> Iterator[None]:
    """A context in which a library takes this rank for the only process there is: it then leaves
    dividing to us."""
    hidden = {name: os.environ.pop(name) for name in TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class DividedStep:
    """Runs a step by a plan; see `ap.distribute` for what a plan may be, and for `settings`. The
    ranks of the job have joined when it is made."""

    def __init__(
        self, plan: Plan | str | Path, cluster: Cluster | str | None = None, **settings: Any
    ) -> None:
        self._plan, self._cluster, self._settings = plan, cluster, settings
        timeout = float(settings.get("timeout", JOIN_SECONDS))
        self._round = join_job(plan, timeout, settings.get("interface"))
        self.runner: Runner | None = None
        self._of: tuple[int, int] | None = None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return torch.distributed.get_rank()

    def run(
        self, step: StepFunction, model: Any, optimizer: Any, batch: Any, number: int = 0
    ) -> Any:
        """The step of that number, which counts when it is the first one here; what the step
        function returns, the same on every rank."""
        return self._runner(step, model, optimizer, batch, number).step(batch)

    def _runner(
        self, step: StepFunction, model: Any, optimizer: Any, batch: Any, number: int
    ) -> Runner:
        known = (id(model), id(optimizer))
        if self.runner is None or self._of != known:
            program = capture(step, model, optimizer, batch)
            program = replace(program, steps_done=number)
            made = distribute(program, self._plan, cluster=self._cluster, **self._settings)
            if not isinstance(made, Runner):
                raise ValueError(
                    "a plan by ssp trains on stale parameters, which Trainers cannot do; use "
                    "ap.distribute in a loop of your own, or plan by another method"
                )
            self.runner = made
            self._of = known
        return self.runner

    def forget(self) -> None:
        """The next step begins anew from the live model and optimizer."""
        self.finish()
        self.runner, self._of = None, None

    def finish(self) -> None:
        """Does what is left of the last step."""
        if self.runner is not None:
            self.runner.finish()

    def update_model(self) -> None:
        """Gives the live model and optimizer what was trained; all ranks call it."""
        if self.runner is not None:
            self.runner.update_model()
