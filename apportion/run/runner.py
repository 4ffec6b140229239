"""Runner: a divided step inside one rank of a torchrun job.

Part of the room run. A Program and a Plan come in; batches go in and losses come out.

    runner = ap.distribute(program, plan)
    loss = runner.step(batch)

Each rank passes the whole batch, or a function that makes the region it is asked for; it keeps what
the plan gives it. The optimizer's settings are read from its groups at every step, so that
schedulers work as usual.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from apportion.capture import Program, batch_leaves, check_settings, setting_value, state_tensor
from apportion.execute import GENERATED, Context, Executable, Worker, check_mode, worker
from apportion.plan import Plan

Region = tuple[slice, ...]


class Runner:
    """One rank's side of a divided step. State is loaded from the live model and optimizer when it
    is made."""

    def __init__(self, program: Program, worker: Worker, seed: int = 0) -> None:
        self.program = program
        self.worker = worker
        self.seed = seed
        self.steps_done = 0
        worker.rank.load(lambda value: state_tensor(program, value))

    def step(self, batch: Any) -> torch.Tensor:
        """One training step; returns the loss, the same on every rank.

        A callable batch is asked `batch(name, region)` for the input of that name, region a slice
        per dimension.
        """
        loss = self.local_step(batch)
        return self._everywhere(loss)

    def local_step(self, batch: Any) -> torch.Tensor | None:
        """One training step; returns the loss where the plan leaves it, None on other ranks."""
        return self.worker.run(self.begin(batch))

    def begin(self, batch: Any) -> Context:
        """Takes this rank's regions of the batch; what its tasks need to run the step."""
        check_settings(self.program)
        rank = self.worker.rank
        if callable(batch):
            rank.feed_regions(self._asked(batch))
        else:
            leaves = batch_leaves(self.program, batch)
            rank.feed(lambda value: leaves[value])
        context = Context(
            self.seed,
            self.steps_done,
            lambda expression: setting_value(self.program.optimizer, expression),
            self.program.graph.bodies,
            rank.place,
        )
        self.steps_done += 1
        return context

    @property
    def notes(self) -> list[str]:
        """What does not run as `compile` says, and why; known after the first step."""
        return self.worker.notes

    def _asked(self, batch: Callable[[str, Region], torch.Tensor]) -> Any:
        values = self.program.graph.values
        return lambda value, region: batch(values[value].name, region)

    def _everywhere(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The loss on every rank. These few bytes are for the caller and not part of the plan."""
        executable = self.worker.rank.executable
        holders = sorted({executable.slot_device[s] for s in executable.loss_slots})
        if len(holders) < executable.tasks.devices:
            if loss is None:
                slot = executable.slots[executable.loss_slots[0]]
                loss = torch.empty(slot.shape, dtype=slot.dtype, device=self.worker.rank.place)
            dist.broadcast(loss, holders[0])
        assert loss is not None
        return loss


def distribute(
    program: Program,
    plan: Plan,
    seed: int = 0,
    device: str = "cpu",
    compile: str = GENERATED,
) -> Runner:
    """A Runner for this rank, its tensors on torch's `device`; starts the process group unless
    somebody has.

    `compile` says how the work between exchanges runs: "generated" as straight-line code with fused
    updates in place, "graph" and "inductor" on top of that, "auto" as the fastest that works here,
    "none" task by task. `runner.notes` has what does not run so, and why.

    Raises ValueError for an unknown way to compile, or if the plan is for another step or another
    number of ranks.
    """
    check_mode(compile)
    check_plan(program, plan)
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                "ap.distribute runs inside torchrun: torchrun --standalone --nproc-per-node "
                f"{len(plan.cluster.devices)} your_script.py"
            )
        dist.init_process_group("gloo")
    if dist.get_world_size() != len(plan.cluster.devices):
        raise ValueError(
            f"the plan is for {len(plan.cluster.devices)} devices, torchrun started "
            f"{dist.get_world_size()} processes; start as many or plan again"
        )
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    return Runner(program, worker(executable, dist.get_rank(), device, compile), seed)


def check_plan(program: Program, plan: Plan) -> None:
    """Raises ValueError unless the plan was made for this step."""
    if program.graph.fingerprint != plan.graph.fingerprint:
        what = f" (it is for {plan.model})" if plan.model else ""
        raise ValueError(
            f"the plan was made for another step{what}: it has {len(plan.graph.ops)} operators, "
            f"this one {len(program.graph.ops)}, or their shapes differ; plan this step again"
        )
