"""Training steps on the processes of a pool: the request, and what each rank answers.

Part of the room run. A TrainingRequest comes in; every process runs its rank of the strategy for
some steps and answers with a TrainingResult: losses, times, bytes and, if asked for, the state.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from apportion.capture import Program
from apportion.collector import older_objects_set_aside
from apportion.execute import (
    CudaClock,
    Executable,
    ReplicaCheck,
    Worker,
    allocated_peak,
    join_backends,
    memory_profile,
    mode_of,
    peer_errors,
    worker,
)
from apportion.lower import runnable
from apportion.machine import GENERATED, INTERPRETER
from apportion.run.process import PoolProcess
from apportion.run.runner import Runner, own_device
from apportion.run.step_meter import ExpectedStep, StepMeter
from apportion.run.step_metrics import open_sinks
from apportion.run.step_source import StepSource
from apportion.run.vary_batch import FREE, vary
from apportion.split import Space, Strategy, space_of


@dataclass(frozen=True)
class SavingOrder:
    """Checkpoints into a folder, of which the last `keep` stay: after every so many steps (0: none)
    and after the last one; `model` is what it is called, `others` is kept beside it."""

    folder: str
    every: int = 0
    keep: int = 3
    model: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingRequest:
    """A request to run a strategy, on the device that torch calls `place`: `cuda` is each rank's
    own GPU, `cuda:0` the same one for all.

    double   in float64, by the Graph widened
    state    the answer is to have the state after the last step
    profile  the answer is to have the peak of memory in a step, for which steps are taken and
             forgotten before the others
    mode     how segments run, of execute/ladder.py
    replicas  the copies of the state are compared after every step
    freedom  how much the batch is varied from step to step, of vary_batch.py
    resume   the checkpoint that it goes on from, or ""
    saving   where to save, and how often; None: nowhere
    metrics  where the metrics of each step are written, by a rank that has the loss
    expected  what is predicted of each rank's step, for them
    """

    source: StepSource
    strategy: Strategy
    devices: int
    steps: int
    seed: int
    double: bool = False
    state: bool = False
    profile: bool = False
    place: str = "cpu"
    mode: str = GENERATED
    replicas: bool = False
    freedom: int = FREE
    resume: str = ""
    saving: SavingOrder | None = None
    metrics: tuple[str, ...] = ()
    expected: tuple[ExpectedStep | None, ...] = ()

    def __call__(self, process: PoolProcess) -> TrainingResult:
        """Runs in a process of a pool."""
        loaded = process.program(self.source, self.double)
        with default_dtype(torch.float64 if self.double else self.source.default_dtype):
            return self._trained(process, *loaded)

    def _trained(self, process: PoolProcess, program: Program, space: Space) -> TrainingResult:
        if (space.digits, space.opening) != (self.strategy.digits, self.strategy.opening):
            space = space_of(program.graph, self.strategy)
        tasks = runnable(space, self.strategy, self.devices)
        executable = Executable(space, self.strategy, tasks)
        place = own_device(self.place, process.rank)
        mine = worker(executable, process.rank, place, self.mode, timed=True)
        mine.backends = process.backends if place == "cpu" else join_backends(place)
        mine.rank.records = False
        mine.progress = process.progress
        mine.progress[0] = 1
        losses: list[float | None] = []
        steps: list[tuple[float, float]] = []
        used: list[float] = []
        clock: CudaClock | None = None
        peak_bytes = self._peak(program, mine) if self.profile else None
        runner = self._runner(program, mine)
        check = ReplicaCheck(mine.rank) if self.replicas else None
        mine.sent_bytes, saves = 0, _Saves(runner, self.saving, self.steps)
        meter = self._meter(program, mine)
        for step in range(self.steps):
            mine.rank.records = step == self.steps - 1
            mine.rank.spans.clear()
            number, fixed = runner.steps_done, program.fixed_positions
            batch = vary(program.batch, self.seed, number, self.freedom, fixed)
            if step == self.steps - 1:
                clock = _device_clock(mine)
            _wait_for_all()
            losses.append(_timed(runner, batch, steps, used))
            if meter is not None:
                meter.took(number, losses[-1], steps[-1][1] - steps[-1][0], used[-1])
            if check is not None:
                runner.finish()
                check.check(number + 1)
            saves.after_step(step)
        runner.finish()
        held = mine.rank.state().items() if self.state else ()
        state = [(slot, state_array(tensor)) for slot, (_, tensor) in held]
        spans = clock.times(mine.rank.spans) if clock else list(mine.rank.spans)
        figures = (mine.sent_bytes, peak_bytes, state, spans, process.captures, mine.notes)
        if meter is not None:
            meter.close()
        return TrainingResult(losses, steps, used, *figures, saves.seconds, saves.finish())

    def _meter(self, program: Program, mine: Worker) -> StepMeter | None:
        """What writes metrics, on the first rank that has the loss."""
        executable, device = mine.rank.executable, mine.rank.device
        holders = [executable.slot_device[slot] for slot in executable.loss_slots]
        if not self.metrics or device != min(holders, default=0):
            return None
        return StepMeter(program, mine, open_sinks(self.metrics), self.expected[device])

    def _runner(self, program: Program, mine: Worker) -> Runner:
        runner = Runner(program, mine, self.seed)
        if self.resume:
            runner.load(self.resume)
        return runner

    def _peak(self, program: Program, mine: Worker) -> int | None:
        """Peak bytes in a step, beside a checkpoint that is being saved if there will be such; in
        the step before, or two where steps overlap, what is compiled was compared with the
        interpreter, whose results take room of their own."""
        with _peak_of(self) as memory:
            runner = Runner(program, mine, self.seed)
            compares = mode_of(self.mode, self.place) != INTERPRETER
            for _ in range(compares + mine.overlaps):
                runner.local_step(program.batch)
            if self.saving is not None:
                runner.stage()
            _wait_for_all()
            memory.mark()
            runner.local_step(program.batch)
            runner.finish()
        return memory.peak_bytes


@dataclass(frozen=True)
class TrainingResult:
    """One rank's answer.

    steps        (start, end) of each step in seconds, by a clock that all ranks have
    cpu_seconds  what the process used of its cores in each step, all its threads together
    state        (slot, array) pairs
    spans        (task, start, end) of the last step
    captures     how often the process has captured a step since it began
    notes        what does not run in the mode asked for, and why
    save_seconds  how long each save held the steps up
    saved        the last checkpoint, or ""
    """

    losses: list[float | None]
    steps: list[tuple[float, float]]
    cpu_seconds: list[float]
    sent_bytes: int
    peak_bytes: int | None
    state: list[tuple[int, Any]]
    spans: list[tuple[int, int, int]]
    captures: int = 0
    notes: list[str] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)
    saved: str = ""


class _Saves:
    """The checkpoints of a run of so many steps."""

    def __init__(self, runner: Runner, order: SavingOrder | None, steps: int) -> None:
        self.runner, self.order, self.steps = runner, order, steps
        self.seconds: list[float] = []

    def after_step(self, step: int) -> None:
        """Begins to save, if it is time to."""
        if self.order is None:
            return
        done, every = self.runner.steps_done, self.order.every
        if step == self.steps - 1 or (every and done % every == 0):
            began = time.perf_counter()
            order = self.order
            self.runner.model_name = order.model
            self.runner.save(order.folder, order.keep, **order.others)
            self.seconds.append(time.perf_counter() - began)

    def finish(self) -> str:
        """Waits for the last one; its path."""
        return "" if self.order is None else str(self.runner.saved() or "")


def step_seconds(ranks: Sequence[TrainingResult]) -> list[float]:
    """How long each step took: from when the last rank began it to when the last was done."""
    seconds = []
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        seconds.append(max(end for _, end in steps) - max(start for start, _ in steps))
    return seconds


def losses_of(ranks: list[TrainingResult]) -> list[float]:
    """The loss of each step, from a rank that has it."""
    holder = next(r for r in ranks if r.losses[0] is not None)
    return [float(loss) for loss in holder.losses if loss is not None]


def _wait_for_all() -> None:
    """Waits for all ranks, so that none counts another's lateness as its own step."""
    with peer_errors():
        dist.barrier()


def _device_clock(mine: Worker) -> CudaClock | None:
    """The clock by which a step on a CUDA device is noted; before it, none is read there."""
    if mine.rank.place == "cpu":
        return None
    clock = CudaClock(mine.rank.place)
    clock.start()
    mine.rank.clock, mine.rank.records = clock, True
    return clock


def _timed(
    runner: Runner, batch: Any, steps: list[tuple[float, float]], used: list[float]
) -> float | None:
    began, before = time.perf_counter(), time.process_time()
    loss = runner.local_step(batch)
    if runner.worker.rank.place != "cpu":
        torch.cuda.synchronize()
    steps.append((began, time.perf_counter()))
    used.append(time.process_time() - before)
    return None if loss is None else float(loss)


@contextmanager
def default_dtype(kind: torch.dtype | None) -> Iterator[None]:
    """A context with torch's default dtype, which numbers made of whole ones get; None: as it
    is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def state_array(tensor: torch.Tensor) -> Any:
    """The tensor for NumPy, which has no bfloat16: all of its numbers are in float32 too."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _peak_of(request: TrainingRequest) -> _HostPeak | _CudaPeak:
    return _HostPeak(request.profile) if request.place == "cpu" else _CudaPeak()


class _CudaPeak:
    """Peak bytes by the allocator of a CUDA device, from `mark` to the end."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None

    def __enter__(self) -> _CudaPeak:
        gc.collect()  # what an earlier request left behind is not of this step
        return self

    def mark(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *error: Any) -> None:
        self.peak_bytes = int(torch.cuda.max_memory_allocated())


class _HostPeak:
    """Peak bytes of live tensors by the allocator's own events, from `mark` to the end."""

    def __init__(self, wanted: bool) -> None:
        self.peak_bytes: int | None = None
        self.from_ns = 0
        self.profile = memory_profile() if wanted else None
        self._contexts = ExitStack()

    def __enter__(self) -> _HostPeak:
        if self.profile is not None:
            gc.collect()  # else what is garbage now is freed meanwhile, and counted as this step's
            self._contexts.enter_context(older_objects_set_aside())
            self._contexts.enter_context(self.profile)
        return self

    def mark(self) -> None:
        if self.profile is not None:
            gc.collect()
        self.from_ns = time.time_ns()

    def __exit__(self, *error: Any) -> None:
        self._contexts.close()
        if self.profile is None:
            return
        self.peak_bytes = allocated_peak(self.profile, self.from_ns)
