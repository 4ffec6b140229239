"""What a pool's process does: it answers requests from the parent, one at a time.

A request names a model and a strategy. The model is loaded and captured once per specification,
seed and precision; the strategy runs for some steps; what was measured is the answer.

Requests and answers go through a pipe between parent and child; tensors between children through
gloo on the loopback address. A child that fails answers with the reason and leaves the rest to the
parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

# The profiler writes a line about itself to standard error unless this is set before torch loads.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import numpy as np
import torch
import torch.distributed as dist

from apportion import zoo
from apportion.capture import Program, capture, capture_as
from apportion.execute import Executable, PeerLost, allocated_peak, talking, worker
from apportion.lower import lower
from apportion.run.runner import Runner
from apportion.split import Space, Strategy, space_of

PR_SET_PDEATHSIG = 1
PATIENCE = 60.0  # seconds that gloo waits beyond the parent's timeout: the parent decides


@dataclass(frozen=True)
class TrainingRequest:
    """A request to run a strategy, on the device that torch calls `place`."""

    spec: str
    model_seed: int
    double: bool
    strategy: Strategy
    devices: int
    steps: int
    seed: int
    state: bool = False
    profile: bool = False
    place: str = "cpu"


@dataclass(frozen=True)
class TrainingResult:
    """One rank's answer. `steps` are (start, end) of steps in seconds, by a clock that all have;
    `cpu_seconds` is what the process used of its cores in each step, all its threads together;
    `state` is (slot, tensor) pairs; `spans` are (task, start, end) of the last step."""

    losses: list[float | None]
    steps: list[tuple[float, float]]
    cpu_seconds: list[float]
    sent_bytes: int
    peak_bytes: int | None
    state: list[tuple[int, Any]]
    spans: list[tuple[int, int, int]]


def step_seconds(ranks: Sequence[TrainingResult]) -> list[float]:
    """How long each step took: from when the last rank began it to when the last was done."""
    found = []
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        found.append(max(end for _, end in steps) - max(start for start, _ in steps))
    return found


@dataclass(frozen=True)
class RankFailure:
    """The answer of a rank that failed; with `lost_peer` because another one has."""

    reason: str
    lost_peer: bool = False


@dataclass
class _PoolProcess:
    rank: int
    progress: Any
    programs: dict[tuple[str, int, bool], tuple[Program, Space]] = field(default_factory=dict)

    def program(self, spec: str, seed: int, double: bool) -> tuple[Program, Space]:
        key = (spec, seed, double)
        if key not in self.programs:
            it = zoo.load(spec, seed)
            made = capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm)
            if double:
                made = capture_as(made, torch.float64)
            self.programs[key] = (made, Space(made.graph))
        return self.programs[key]

    def answer(self, job: Any) -> Any:
        """What a request asks for: to train, or what it does itself, given this process."""
        return self.train(job) if isinstance(job, TrainingRequest) else job(self)

    def train(self, job: TrainingRequest) -> TrainingResult:
        program, space = self.program(job.spec, job.model_seed, job.double)
        if (space.digits, space.opening) != (job.strategy.digits, job.strategy.opening):
            space = space_of(program.graph, job.strategy)
        tasks = lower(space, job.strategy, job.devices)
        mine = worker(Executable(space, job.strategy, tasks), self.rank, job.place)
        mine.progress = self.progress
        mine.progress[0] = 1
        losses: list[float | None] = []
        steps: list[tuple[float, float]] = []
        used: list[float] = []
        with _allocations(job) as allocations:
            runner = Runner(program, mine, job.seed)
            _meet()
            allocations.mark()
            losses.append(_timed(runner, vary(program.batch, job.seed, 0), steps, used))
        for step in range(1, job.steps):
            mine.rank.spans.clear()
            batch = vary(program.batch, job.seed, step)
            _meet()
            losses.append(_timed(runner, batch, steps, used))
        held = mine.rank.state().items() if job.state else ()
        state = [(slot, tensor.cpu().numpy()) for slot, (_, tensor) in held]
        peak = allocations.peak
        spans = list(mine.rank.spans)
        return TrainingResult(losses, steps, used, mine.sent_bytes, peak, state, spans)


def _meet() -> None:
    """Waits for all ranks, so that none counts another's lateness as its own step."""
    with talking():
        dist.barrier()


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


def vary(batch: Any, seed: int, step: int) -> Any:
    """The batch of a step: the given one at first, then with each tensor's elements shuffled."""
    if step == 0:
        return batch
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)

    def shuffled(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        order = torch.randperm(leaf.numel(), generator=generator)
        return leaf.reshape(-1)[order].reshape(leaf.shape)

    return torch.utils._pytree.tree_map(shuffled, batch)


def _allocations(job: TrainingRequest) -> _HostPeak | _CudaPeak:
    return _HostPeak(job.profile) if job.place == "cpu" else _CudaPeak()


class _CudaPeak:
    """Peak bytes by the allocator of a CUDA device, from `mark` to the end."""

    def __init__(self) -> None:
        self.peak: int | None = None

    def __enter__(self) -> _CudaPeak:
        return self

    def mark(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *error: Any) -> None:
        self.peak = int(torch.cuda.max_memory_allocated())


class _HostPeak:
    """Peak bytes of live tensors by the allocator's own events, from `mark` to the end."""

    def __init__(self, wanted: bool) -> None:
        self.peak: int | None = None
        self.from_ns = 0
        self.profile = (
            torch.profiler.profile(profile_memory=True, acc_events=True) if wanted else None
        )

    def __enter__(self) -> _HostPeak:
        if self.profile is not None:
            self.profile.__enter__()
        return self

    def mark(self) -> None:
        self.from_ns = time.time_ns()

    def __exit__(self, *error: Any) -> None:
        if self.profile is None:
            return
        self.profile.__exit__(*error)
        self.peak = allocated_peak(self.profile, self.from_ns)


def main(
    rank: int, world: int, folder: str, threads: int, timeout: float, pipe: Connection
) -> None:
    """The child's loop: answer until the pipe closes. `folder` holds the pool's two files: `store`,
    where ranks find each other, and `progress`, a number per rank."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    warnings.simplefilter("ignore")  # the parent loads the same model and has shown them
    torch.set_num_threads(threads)
    try:
        cells = np.memmap(os.path.join(folder, "progress"), dtype=np.int64, mode="r+")
    except FileNotFoundError:
        return  # the parent was interrupted while it started us, and has cleaned up
    process = _PoolProcess(rank, cells[rank : rank + 1])
    failed = _attempt(_join, rank, world, os.path.join(folder, "store"), timeout)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has closed the pipe
        while True:
            job = pipe.recv()
            pipe.send(failed or _attempt(process.answer, job))


def _join(rank: int, world: int, store: str, timeout: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with talking():
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
            timeout=timedelta(seconds=timeout + PATIENCE),
        )  # fmt: skip


def _attempt(verb: Callable[..., Any], *given: Any) -> Any:
    """What the verb returns, or how it failed."""
    try:
        return verb(*given)
    except PeerLost as error:
        return RankFailure(str(error), lost_peer=True)
    except ValueError as error:
        return RankFailure(str(error))
    except Exception as error:
        return RankFailure(f"{type(error).__name__}: {error}")


def _die_with_parent() -> None:
    """However the parent dies, so does this process, even if it is stopped.

    A thread sees the parent's end at once. For a process that runs no threads any more: on Linux it
    is killed when the one that forked it dies, which is multiprocessing's server. That ends when
    nobody holds its pipe, so that its children must not hold it either.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    threading.Thread(target=_outlive_nobody, daemon=True).start()


def _outlive_nobody() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
