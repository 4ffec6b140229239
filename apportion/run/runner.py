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

import atexit
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
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
from apportion.checkpoint import Resumed
from apportion.execute import (
    Context,
    Executable,
    ReplicaCheck,
    StagedBatch,
    Worker,
    feed_of,
    join_backends,
    peer_errors,
    replica_notes,
    worker,
)
from apportion.machine import GENERATED, Cluster, check_mode
from apportion.plan import Plan
from apportion.run.liveness import (
    Heartbeat,
    begin_heartbeat,
    end_with_parent,
    join_torchrun,
    say_losses_briefly,
    under_torchrun,
)
from apportion.run.network_interface import choose_interface
from apportion.run.plan_for_ranks import plan_for_ranks
from apportion.run.planned_program import planned_program
from apportion.run.returned_results import ReturnedResults
from apportion.run.runner_checkpoints import RunnerCheckpoints, TrainingPosition
from apportion.run.stale_training import StaleRunner, stale_runner
from apportion.run.step_meter import StepMeter, expected_step, timeline_of
from apportion.run.step_metrics import StepMetrics, open_sinks
from apportion.simulate import Timeline

_END = object()
MetricNames = str | Path | Sequence[str | Path] | None


class Runner:
    """One rank's side of a divided step. State is loaded from the live model and optimizer when it
    is made.

    Where the plan lets steps overlap, a step returns before all parameters are new: `finish` does
    what is left, before state is read or the ranks go apart; `train` ends with it, unless its
    caller stops early.

    No step waits for the device: a loss is a tensor that float() waits for. On a GPU a batch is
    copied beside what the device is busy with.

    With `check_replicas` every step ends with a comparison of what several ranks have of the state,
    bit for bit, which does wait; it raises ReplicasDiffer, naming the first tensor that differs.
    """

    def __init__(
        self,
        program: Program,
        worker: Worker,
        seed: int = 0,
        check_replicas: bool = False,
        plan: Plan | None = None,
        metrics: MetricNames = None,
    ) -> None:
        self.program = program
        self.worker = worker
        self._position = TrainingPosition(seed, program.steps_done)
        rank = worker.rank
        rank.load(lambda value: state_tensor(program, value))
        self._feed = feed_of(rank)
        self._results = ReturnedResults(program, worker)
        self._replicas = ReplicaCheck(rank) if check_replicas else None
        self._notes = replica_notes(rank.executable, rank.place.startswith("cuda"))
        self._checkpoints = RunnerCheckpoints(program, rank, self._position)
        self.heartbeat: Heartbeat | None = None
        self.plan = plan
        self._meter: StepMeter | None = None
        self._records_next = False
        if plan is not None and metrics is not None:
            sinks = open_sinks(metrics) if rank.device == 0 else []
            expected = expected_step(plan, rank.device, rank.place)
            self._meter = StepMeter(program, worker, sinks, expected, plan)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.worker.rank.device

    @property
    def model_name(self) -> str:
        """What checkpoints call the model."""
        return self._checkpoints.model

    @model_name.setter
    def model_name(self, name: str) -> None:
        self._checkpoints.model = name

    @property
    def seed(self) -> int:
        """What random operators draw from."""
        return self._position.seed

    @property
    def steps_done(self) -> int:
        """How many steps were begun, those before a checkpoint included."""
        return self._position.steps_done

    def step(self, batch: Any) -> Any:
        """One training step; returns what the user's step returns, the same on every rank: the
        loss, or a tuple, dict or object with scalars. Larger tensors in it are None, and a step
        that returns nothing gives its loss.

        A callable batch is asked `batch(name, region)` for the input of that name, region a slice
        per dimension.
        """
        return self._shared(self.local_step(batch))

    def _shared(self, loss: torch.Tensor | None) -> Any:
        """What the step returns, on every rank."""
        found = self._results.everywhere(loss)
        if self._meter is not None:
            self._meter.returned(self._results.loss)
            self._meter.compare()
        return found

    def train(self, batches: Iterable[Any]) -> Iterator[Any]:
        """A training step for each batch of a DataLoader, or of whatever can be iterated; yields
        the losses, or what else `step` returns.

        On a GPU the next batch is taken and copied to the device while it is still busy with the
        last one; who stops early has taken one batch more than steps. A batch's tensors must not
        be changed until the next one is asked for.

        After `load` the batches are skipped that the pass had come to when it was saved, unless the
        loader's own state was given to `load`.
        """
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"train wants batches that can be iterated, such as a DataLoader, and got a "
                f"{type(batches).__name__}; call step for a single batch"
            )
        position, coming = self._position, iter(batches)
        ahead = self._feed.ahead and not hasattr(batches, "state_dict")  # its state is to be saved
        for _ in range(position.skipped()):
            next(coming, _END)
        staged, first = self._staged_next(coming), True
        while staged is not None:
            loss = self._shared(self._run(staged))
            position.batches += 1
            first, failure, staged = False, None, None
            if ahead:
                try:
                    staged = self._staged_next(coming)
                except Exception as error:  # after the loss of the step that is under way
                    failure = error
            yield loss
            if failure is not None:
                raise failure
            if not ahead:
                staged = self._staged_next(coming)
        self.finish()
        first = first and not position.batches
        position.passes, position.batches = position.passes + 1, 0
        if first:
            raise ValueError("there is no batch to train with; was the iterator used before?")

    def _staged_next(self, coming: Iterator[Any]) -> StagedBatch | None:
        batch = next(coming, _END)
        return None if batch is _END else self._staged(batch, keeps=True)

    def local_step(self, batch: Any) -> torch.Tensor | None:
        """One training step; returns the loss where the plan leaves it, None on other ranks."""
        return self._run(self._staged(batch))

    def _run(self, staged: StagedBatch) -> torch.Tensor | None:
        number, meter, rank = self.steps_done, self._meter, self.worker.rank
        if rank.records:
            rank.spans.clear()
        if meter is not None:
            meter.begin()
        loss = self.worker.run(self._fed(staged))
        if meter is not None:
            meter.end(number)
        if self._records_next:
            self._records_next, rank.records = False, False
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
        if self._meter is not None:
            self._meter.flush()

    @property
    def metrics(self) -> StepMetrics | None:
        """Those of the last step but one, on rank 0, if they are measured; after `finish` of the
        last."""
        return None if self._meter is None else self._meter.last

    def record_next_step(self) -> None:
        """Lets the next step note when each of its tasks ran, for `timeline`. All ranks call it."""
        self.worker.rank.spans.clear()
        self.worker.rank.records = self._records_next = True

    def timeline(self) -> Timeline:
        """The Timeline of the step that was recorded last (`record_next_step`, before it), of all
        ranks, which all call it. `plan.trace(path, timeline)` writes it for Perfetto. Raises
        ValueError if no step was recorded."""
        if self.plan is None:
            raise ValueError("this Runner knows no plan, so that it cannot say what its tasks were")
        if not self.worker.rank.spans:
            raise ValueError("no step was recorded; call record_next_step() before one")
        return timeline_of(self.plan, self.worker)

    def save(self, folder: str | Path, keep: int = 3, wait: bool = False, **others: Any) -> None:
        """Saves all state into `folder`, as `step-N`, and goes on training meanwhile: the tensors
        are copied, and files are written by a thread. All ranks call it, after the same step, with
        a folder that all of them see. A folder gets its name when all of it is on the disk, and
        only the last `keep` of a run stay. With `wait` it returns when that is done.

        `others` are kept beside the model: schedulers, stateful loaders, whatever has a
        `state_dict()` of plain data, or plain data itself; give `load` the same names.

        Raises ValueError if it cannot begin, RuntimeError on all ranks if the save before failed.
        """
        self.finish()
        self._checkpoints.save(Path(folder), keep, others)
        if wait:
            self._checkpoints.saver.saved()

    def saved(self) -> Path | None:
        """Waits until the last save is done on all ranks, which all have to call; returns where it
        is. Raises RuntimeError on all of them if it failed."""
        return self._checkpoints.saver.saved()

    def stage(self) -> int:
        """Copies what this rank writes of a checkpoint, as `save` does before it returns, and
        writes nothing; how many bytes that copy holds from then on."""
        self.finish()
        return self._checkpoints.stage()

    def load(self, path: str | Path, optimizer: bool = True, **others: Any) -> Resumed:
        """Goes on from a checkpoint, saved under any plan, by any number of ranks: `path` is its
        folder, or that of a training run, whose last one is taken; or a safetensors file, or a
        folder of such, with the tensors of the model and, if there are some, of its optimizer.
        Without `optimizer` its state begins anew and its settings stay.

        `others` are objects to be given what was kept of them by `save`, under the same names.
        Raises ValueError on all ranks, and changes nothing, if it is of another model or damaged.
        """
        self.finish()
        return self._checkpoints.load(Path(path), optimizer, others)

    def resume(self, folder: str | Path, **others: Any) -> Resumed | None:
        """Loads the last checkpoint in a folder, or does nothing and returns None if there is none
        yet: what a program does that may have been restarted."""
        self.finish()
        return self._checkpoints.resume(Path(folder), others)

    def state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """`model` and `optimizer`, as `model.state_dict()` and `optimizer.state_dict()` would be if
        one device had trained: whole tensors on the CPU, on every rank or only on `rank`. All ranks
        call it."""
        self.finish()
        return self._checkpoints.state_dict(rank)

    def export(self, path: str | Path, optimizer: bool = True) -> Path:
        """Writes all state to one safetensors file, which `load` and `ap.load_checkpoint` take.
        Without `optimizer` it has the weights alone, under the model's own names, as transformers
        and others read them. Rank 0 writes; all ranks call it. Raises ValueError if it cannot."""
        self.finish()
        return self._checkpoints.export(Path(path), optimizer)

    def update_model(self) -> None:
        """Gives the live model and optimizers what was trained, on every rank, to evaluate or to
        go on without apportion. All ranks call it."""
        self.finish()
        self._checkpoints.update_model()

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
        if self.worker.overlaps or self.worker.traffic is not None:  # updates may be done later
            setting = settings_now(self.program)
        context = Context(
            self.seed,
            self.steps_done,
            setting,
            self.program.graph.bodies,
            self.worker.rank.place,
        )
        self._position.steps_done += 1
        return context

    @property
    def notes(self) -> list[str]:
        """What capture has left out, what does not run as `compile` says, and why, known after the
        first step; and which copies of the state may differ in their last bits."""
        return [*self.program.notes, *self._notes, *self.worker.notes]


def distribute(
    program: Program,
    plan: Plan | str | Path,
    seed: int = 0,
    device: str = "cpu",
    compile: str = GENERATED,
    check_replicas: bool = False,
    timeout: float = 600.0,
    patience: float = 60.0,
    interface: str | None = None,
    metrics: MetricNames = None,
    cluster: Cluster | str | None = None,
) -> Runner | StaleRunner:
    """A Runner for this rank, its tensors on torch's `device`; starts the process group unless
    somebody has. `cuda` is the GPU of the rank's own number on its machine (LOCAL_RANK), so that
    torchrun gives each its own; `cuda:0` lets all share one.

    `plan` may be the path of a saved one, or of a plan book (`apportion plan --devices 8,6,4 --out
    DIR`), of which the plan for as many devices as there are ranks is taken; if it has none, one is
    searched for, for a few seconds. Or it is the name of a method, which makes a plan now, for
    `cluster`, or for processes of this machine.

    `compile` says how the work between exchanges runs: "generated" as straight-line code with fused
    updates in place, "graph" and "inductor" on top of that, "auto" as the fastest that works here,
    "none" task by task. `runner.notes` has what does not run so, and why.

    `check_replicas` compares the copies of the state after every step (see Runner).

    A plan by ssp, which trains on stale parameters, gets a StaleRunner: it has `step`, `train` and
    `finish`, on CPUs, and returns the loss of the rank's own part of the batch.

    Ranks give up waiting for a message after `timeout` seconds. Under torchrun a rank that has not
    been heard of for `patience` seconds, because it is stopped or its machine is gone, ends the
    job, which --max-restarts starts again; 0: never. `interface` is the network interface that
    ranks talk over, `eth0`; the loopback one if all are on this machine, unless given.

    `metrics` says where rank 0 writes those of each step: "print", a file of JSON lines that ends
    in .jsonl, "tensorboard:DIR", or a list of such. Then a DriftWarning also says when steps take
    another time than predicted, by a fifth, and which tasks do.

    Raises ValueError for an unknown way to compile, or if the plan is for another step or another
    number of ranks.
    """
    check_mode(compile)
    planned = planned_program(program, plan) if isinstance(plan, Plan) else program
    place = own_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    joined = join_job(plan, timeout, interface)
    if not isinstance(plan, Plan):
        plan = plan_for_ranks(program, plan, cluster)
        planned = planned_program(program, plan)
    if dist.get_world_size() != len(plan.cluster.devices):
        raise ValueError(
            f"the plan is for {len(plan.cluster.devices)} devices, torchrun started "
            f"{dist.get_world_size()} processes; start as many or plan again"
        )
    if plan.staleness is not None:
        return stale_runner(program, plan)
    executable = Executable(plan.space, plan.strategy, plan.tasks)
    mine = worker(executable, dist.get_rank(), place, compile, timed=metrics is not None)
    mine.rank.records = False
    mine.backends = join_backends(place)
    runner = Runner(planned, mine, seed, check_replicas, plan, metrics)
    if joined is not None and patience > 0:
        runner.heartbeat = begin_heartbeat(joined, patience)
    return runner


def join_job(plan: Plan | str | Path, timeout: float, interface: str | None) -> str | None:
    """Joins the process group of a torchrun job, unless somebody has; the name of its round, if it
    has one. Raises ValueError if there is no job."""
    if dist.is_initialized():
        return None
    if "RANK" not in os.environ:
        count = len(plan.cluster.devices) if isinstance(plan, Plan) else "N"
        raise ValueError(
            "ap.distribute runs inside torchrun: torchrun --standalone --nproc-per-node "
            f"{count} your_script.py"
        )
    if under_torchrun():
        end_with_parent()
        say_losses_briefly()
    choose_interface(interface)
    limit = timedelta(seconds=timeout)
    if not under_torchrun():  # backends.py adds NCCL where there are several GPUs
        dist.init_process_group("gloo", timeout=limit)
        atexit.register(leave_job)
        return None
    joined = join_torchrun(timeout)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with peer_errors():
        dist.init_process_group(
            "gloo", store=joined.store, rank=rank, world_size=ranks, timeout=limit
        )
    atexit.register(leave_job)
    return joined.name


def leave_job() -> None:
    """Ends gloo's threads before Python ends.

    Such a thread lets go of a message's tensors some time after the message has been waited for. If
    it is the last one to hold a tensor's Python object, it needs the interpreter, and a thread that
    waits for an interpreter that ends is ended inside of a destructor: C++ then aborts the process
    with "terminate called without an active exception".
    """
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


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
