"""Runner: a divided step inside one rank of a torchrun job.

Part of the room run. A Program and a Plan come in; batches go in and losses come out.

    runner = ap.distribute(program, plan)
    loss = runner.step(batch)

or, with a DataLoader,

    for loss in runner.train(loader):
        ...

Each rank passes the whole batch, or a function that makes the region it is asked for; it keeps what
the plan gives it. The optimizer's settings are read from its groups at every step, so that
schedulers work as usual.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from apportion.capture import (
    Program,
    batch_leaves,
    check_settings,
    setting_of,
    settings_now,
    state_tensor,
    torch_private,
)
from apportion.execute import (
    Context,
    Executable,
    ReplicaCheck,
    StagedBatch,
    Worker,
    feed_of,
    join_backends,
    replica_notes,
    worker,
)
from apportion.machine import GENERATED, check_mode
from apportion.plan import Plan
from apportion.run.planned_program import planned_program
from apportion.run.returned_results import ReturnedResults

_END = object()


class Runner:
    """One rank's side of a divided step. State is loaded from the live model and optimizer when it
    is made.

    Where the plan lets steps overlap, a step returns before all parameters are new: `finish` does
    what is left, before state is read or the ranks go apart; `train` ends with it.

    No step waits for the device: a loss is a tensor that float() waits for. On a GPU a batch is
    copied beside what the device is busy with.

    With `check_replicas` every step ends with a comparison of what several ranks have of the state,
    bit for bit, which does wait; it raises ReplicasDiffer, naming the first tensor that differs.
    """

    def __init__(
        self, program: Program, worker: Worker, seed: int = 0, check_replicas: bool = False
    ) -> None:
        self.program = program
        self.worker = worker
        self.seed = seed
        self.steps_done = 0
        rank = worker.rank
        rank.load(lambda value: state_tensor(program, value))
        self._feed = feed_of(rank)
        self._results = ReturnedResults(program, worker)
        self._replicas = ReplicaCheck(rank) if check_replicas else None
        self._notes = replica_notes(rank.executable, rank.place.startswith("cuda"))

    def step(self, batch: Any) -> Any:
        """One training step; returns what the user's step returns, the same on every rank: the
        loss, or a tuple, dict or object with scalars. Larger tensors in it are None, and a step
        that returns nothing gives its loss.

        A callable batch is asked `batch(name, region)` for the input of that name, region a slice
        per dimension.
        """
        return self._results.everywhere(self.local_step(batch))

    def train(self, batches: Iterable[Any]) -> Iterator[Any]:
        """A training step for each batch of a DataLoader, or of whatever can be iterated; yields
        the losses, or what else `step` returns.

        On a GPU the next batch is taken and copied to the device while it is still busy with the
        last one; who stops early has taken one batch more than steps. A batch's tensors must not
        be changed until the next one is asked for.
        """
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"train wants batches that can be iterated, such as a DataLoader, and got a "
                f"{type(batches).__name__}; call step for a single batch"
            )
        coming = iter(batches)
        staged, first = self._staged_next(coming), True
        while staged is not None:
            loss = self._results.everywhere(self._run(staged))
            first, failure, staged = False, None, None
            if self._feed.ahead:
                try:
                    staged = self._staged_next(coming)
                except Exception as error:  # after the loss of the step that is under way
                    failure = error
            yield loss
            if failure is not None:
                raise failure
            if not self._feed.ahead:
                staged = self._staged_next(coming)
        self.finish()
        if first:
            raise ValueError("there is no batch to train with; was the iterator used before?")

    def _staged_next(self, coming: Iterator[Any]) -> StagedBatch | None:
        batch = next(coming, _END)
        return None if batch is _END else self._staged(batch, keeps=True)

    def local_step(self, batch: Any) -> torch.Tensor | None:
        """One training step; returns the loss where the plan leaves it, None on other ranks."""
        return self._run(self._staged(batch))

    def _run(self, staged: StagedBatch) -> torch.Tensor | None:
        loss = self.worker.run(self._fed(staged))
        for optimizer in self.program.optimizers:
            torch_private.note_step(optimizer)
        if self._replicas is not None:
            self.finish()
            self._replicas.check(self.steps_done)
        return loss

    def finish(self) -> None:
        """Does what is left of the last step, if steps overlap. All ranks have to call it before
        the state is read, or this rank's part in the job ends."""
        self.worker.finish()

    def begin(self, batch: Any) -> Context:
        """Takes this rank's regions of the batch; what its tasks need to run the step."""
        return self._fed(self._staged(batch))

    def _staged(self, batch: Any, keeps: bool = False) -> StagedBatch:
        if callable(batch):
            values = self.program.graph.values
            return self._feed.stage(
                lambda region: region.asked(lambda v, spans: batch(values[v].name, spans))
            )
        leaves = batch_leaves(self.program, batch)
        return self._feed.stage(lambda region: region.of(leaves[region.value]), keeps)

    def _fed(self, staged: StagedBatch) -> Context:
        check_settings(self.program)
        self._feed.feed(staged)
        setting: Callable[[Any], float] = partial(setting_of, self.program)
        if self.worker.overlaps:  # the next step updates with the settings of this one
            setting = settings_now(self.program)
        context = Context(
            self.seed,
            self.steps_done,
            setting,
            self.program.graph.bodies,
            self.worker.rank.place,
        )
        self.steps_done += 1
        return context

    @property
    def notes(self) -> list[str]:
        """What capture has left out, what does not run as `compile` says, and why, known after the
        first step; and which copies of the state may differ in their last bits."""
        return [*self.program.notes, *self._notes, *self.worker.notes]


def distribute(
    program: Program,
    plan: Plan,
    seed: int = 0,
    device: str = "cpu",
    compile: str = GENERATED,
    check_replicas: bool = False,
) -> Runner:
    """A Runner for this rank, its tensors on torch's `device`; starts the process group unless
    somebody has. `cuda` is the GPU of the rank's own number on its machine (LOCAL_RANK), so that
    torchrun gives each its own; `cuda:0` lets all share one.

    `compile` says how the work between exchanges runs: "generated" as straight-line code with fused
    updates in place, "graph" and "inductor" on top of that, "auto" as the fastest that works here,
    "none" task by task. `runner.notes` has what does not run so, and why.

    `check_replicas` compares the copies of the state after every step (see Runner).

    Raises ValueError for an unknown way to compile, or if the plan is for another step or another
    number of ranks.
    """
    check_mode(compile)
    program = planned_program(program, plan)
    place = own_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                "ap.distribute runs inside torchrun: torchrun --standalone --nproc-per-node "
                f"{len(plan.cluster.devices)} your_script.py"
            )
        dist.init_process_group("gloo")  # backends.py adds NCCL where there are several GPUs
    if dist.get_world_size() != len(plan.cluster.devices):
        raise ValueError(
            f"the plan is for {len(plan.cluster.devices)} devices, torchrun started "
            f"{dist.get_world_size()} processes; start as many or plan again"
        )
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    mine = worker(executable, dist.get_rank(), place, compile)
    mine.backends = join_backends(place)
    return Runner(program, mine, seed, check_replicas)


def own_device(device: str, number: int) -> str:
    """torch's device for a rank that wants `device`, made the current one: `cuda` is the GPU of
    that number. Raises ValueError if there is none."""
    if device == "cpu":
        return device
    if device.partition(":")[0] != "cuda":
        raise ValueError(f"there are no ranks on {device!r}; choose 'cpu', 'cuda' or 'cuda:NUMBER'")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device[5:]) if device[5:].isdecimal() else number
    if index >= count:
        raise ValueError(
            f"a rank wants GPU {index}, but torch sees {count} here; start fewer processes on a "
            "machine, or let them share one with device='cuda:0', or use device='cpu'"
        )
    torch.cuda.set_device(index)
    return f"cuda:{index}"
