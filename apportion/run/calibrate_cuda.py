"""Measuring a CUDA device: the kernels, the host that issues them, and their memory.

Part of the room run. Programs with plans for one device come in, a CostTable goes out. What
is measured is the step itself, task by task in its own order, so that every kernel finds the caches
as it will in earnest.

device     A device that waits is made to wait first (a kernel that sleeps), so that the host is
           ahead of it: then the time between the events before and after a task is the device's
           own. Events take time too; a round without them says how much, and it is taken off.
host       The same tasks issued to an idle device, a few at a time, by the host's clock.
memory     The allocator's peak during a task less what is left after it; what is held after the
           step beside its tensors was taken by libraries.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from apportion.capture import Program
from apportion.execute import Executable, Rank, worker
from apportion.lower import ASSEMBLE, COMPUTE, Storage
from apportion.machine import (
    AHEAD,
    ASSEMBLE_LINE,
    Condition,
    CostTable,
    KernelMeasurement,
    fits,
    kind_and_inputs,
    kind_of_signature,
    line,
)
from apportion.plan import Plan
from apportion.run.runner import Runner

ROUNDS = 6
AT_ONCE = 1.5e-3  # seconds of the host's work that a sleeping device lets it be ahead
LONG = 0.4  # seconds, longer than the host takes to fill the device's queue
SLEEP_CYCLES = 2.0e9  # of a device's clock in a second, at most
QUANTILE = 0.25  # of the device's times; of the host's, which always has other things to do, 0.5
LEAST = 1e-9  # seconds of a call that the device does not notice, such as a view
FAR, FAR_SECONDS = 0.5, 1e-5  # from the usual time of its kind's calls, for one to be listed
Floats = Sequence[float]
Note = Callable[[str], None]


@dataclass(frozen=True)
class CudaTimes:
    """Seconds of the device and of the host for every task, bytes of workspace by work (see
    Storage), bytes that libraries hold, what an event takes, and how far the host can be ahead (0
    if it never had to wait)."""

    device: list[float]
    host: list[float]
    workspace: dict[int, int]
    resident: int
    event: float
    ahead: float


def runner_on(program: Program, executable: Executable, place: str = "cuda") -> Runner:
    """A Runner of the only device of a plan, in this process."""
    return Runner(program, worker(executable, 0, place))


def on_device(batch: Any, place: str = "cuda") -> Any:
    """The batch with its tensors on a device."""
    return tree_map(lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, batch)


def step_seconds(runner: Runner, batch: Any, count: int) -> list[float]:
    """Seconds of steps, from an idle device to an idle device."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner.local_step(batch)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
        runner.worker.rank.spans.clear()
    return found


def peak_bytes(runner: Runner, batch: Any) -> int:
    """The allocator's peak over a step; the batch comes from the host."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    runner.local_step(batch)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def device_kind() -> str:
    """The kind of this machine's CUDA device, as clusters call it: h200, a100."""
    return kind_of_gpu(torch.cuda.get_device_name())


def kind_of_gpu(name: str) -> str:
    """The kind of a GPU that the driver calls so: `NVIDIA H100 80GB HBM3` is an h100."""
    words = [word.split("-")[0] for word in name.removeprefix("NVIDIA ").split()]
    found = next((w for w in words if re.fullmatch(r"[A-Za-z]{0,3}\d+[A-Za-z]{0,2}", w)), "gpu")
    return found.lower()


def measured(runner: Runner, storage: Storage, batch: Any, rounds: int = ROUNDS) -> CudaTimes:
    """Measures every task of a step on one CUDA device."""
    for _ in range(2):
        runner.step(batch)  # libraries load their kernels and take their buffers
    torch.cuda.synchronize()
    resident = _resident(runner.worker.rank, batch)
    host = _quantile([_host_round(runner, batch) for _ in range(rounds)], 0.5)
    chunks = _chunks(host)
    found, apart, together = [], 0.0, 0.0
    for _ in range(rounds):
        times, total = _device_round(runner, batch, chunks, host, each=True)
        found.append(times)
        apart += total
        together += _device_round(runner, batch, chunks, host, each=False)[1]
    event = max(apart - together, 0.0) / (rounds * max(len(host), 1))
    device = [max(seconds - event, 0.0) for seconds in _quantile(found, QUANTILE)]
    workspace = _memory_round(runner, batch, storage)
    return CudaTimes(device, host, workspace, resident, event, _ahead(runner, batch, host))


def _quantile(rounds: Sequence[Floats], share: float) -> list[float]:
    return [float(x) for x in np.nanquantile(np.array(rounds), share, axis=0)]


def _host_round(runner: Runner, batch: Any) -> list[float]:
    """Seconds of the host for each task, the device being idle or nearly so."""
    rank, context = runner.worker.rank, runner.begin(batch)
    seconds = []
    for task in range(len(rank.executable.tasks)):
        if task % 8 == 0:
            torch.cuda.synchronize()
        began = time.perf_counter()
        rank.run(task, context)
        seconds.append(time.perf_counter() - began)
    _end(rank)
    return seconds


def _end(rank: Rank) -> None:
    rank.spans.clear()
    rank.finish()
    torch.cuda.synchronize()


def _chunks(host: Floats) -> list[range]:
    """Runs of tasks that the host issues in about AT_ONCE."""
    found, first, total = [], 0, 0.0
    for task, seconds in enumerate(host):
        if total + seconds > AT_ONCE and task > first:
            found.append(range(first, task))
            first, total = task, 0.0
        total += seconds
    return [*found, range(first, len(host))]


def _device_round(
    runner: Runner, batch: Any, chunks: Sequence[range], host: Floats, each: bool
) -> tuple[list[float], float]:
    """Seconds of the device for each task (not a number where the host fell behind), and of all
    chunks; without `each` events stand only around chunks."""
    rank, context = runner.worker.rank, runner.begin(batch)
    seconds, total = [float("nan")] * len(host), 0.0
    for chunk in chunks:
        marks = [_event() for _ in range(len(chunk) + 1 if each else 2)]
        ahead = 3 * sum(host[k] for k in chunk) + 1e-3
        torch.cuda.synchronize()
        torch.cuda._sleep(int(ahead * SLEEP_CYCLES))
        marks[0].record()
        for place, task in enumerate(chunk):
            rank.run(task, context)
            if each:
                marks[place + 1].record()
        if not each:
            marks[1].record()
        waiting = not marks[0].query()
        torch.cuda.synchronize()
        total += marks[0].elapsed_time(marks[-1]) / 1e3
        if each and waiting:
            for place, task in enumerate(chunk):
                seconds[task] = marks[place].elapsed_time(marks[place + 1]) / 1e3
    _end(rank)
    return seconds, total


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def _ahead(runner: Runner, batch: Any, host: Floats) -> float:
    """How much of its work the host can do while the device does nothing: then the queue is
    full."""
    rank, context = runner.worker.rank, runner.begin(batch)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(LONG * SLEEP_CYCLES))
    found, done = 0.0, 0.0
    for task, seconds in enumerate(host):
        began = time.perf_counter()
        rank.run(task, context)
        if not found and time.perf_counter() - began > LONG / 4:
            found = done
        done += seconds
    _end(rank)
    return found


def _memory_round(runner: Runner, batch: Any, storage: Storage) -> dict[int, int]:
    """Workspace of every distinct work, the largest of its first few calls."""
    rank, context = runner.worker.rank, runner.begin(batch)
    found: dict[int, int] = {}
    calls: dict[int, int] = defaultdict(int)
    for task in range(len(rank.executable.tasks)):
        work = storage.work[task]
        if work < 0 or calls[work] >= 3:
            rank.run(task, context)
            continue
        calls[work] += 1
        torch.cuda.reset_peak_memory_stats()
        rank.make(task, context)
        left, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        found[work] = max(found.get(work, 0), peak - left)
        rank.free(task)
    _end(rank)
    return found


def _resident(rank: Rank, batch: Any) -> int:
    """Bytes on the device that are neither the step's tensors nor its batch."""
    given = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.is_cuda]
    found = [tensor.untyped_storage() for tensor in (*rank.tensors.values(), *given)]
    storages = {storage._cdata: storage for storage in found}
    own = sum(-(-storage.nbytes() // 512) * 512 for storage in storages.values())
    return int(max(torch.cuda.memory_allocated() - own, 0))


# tables


def calibrate(
    steps: Iterable[tuple[Program, Plan]], rounds: int = ROUNDS, note: Note = lambda text: None
) -> CostTable:
    """Measures the steps of plans for one device on this machine's CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that torch can use")
    samples, kind = CudaSamples(), device_kind()
    for program, plan in steps:
        if len(plan.cluster.devices) != 1:
            raise ValueError(f"a plan for {len(plan.cluster.devices)} devices is not for one GPU")
        kind = plan.cluster.devices[0].kind
        executable = Executable(plan.space, plan.strategy, plan.tasks)
        runner = runner_on(program, executable)
        figures = measured(runner, plan.storage, on_device(program.batch), rounds)
        samples.add(executable, plan.storage, figures)
        note(f"measured {len(executable.tasks)} tasks, {len(plan.storage.works)} different calls")
        del runner
        torch.cuda.empty_cache()
    return samples.table(kind, time.strftime("%Y-%m-%d"))


class CudaSamples:
    """Measured steps, put together by kernel call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.host: dict[str, list[float]] = defaultdict(list)
        self.works: dict[str, KernelMeasurement] = {}
        self.assembled: list[tuple[int, int, float]] = []
        self.resident: list[int] = []
        self.ahead: list[float] = []

    def add(self, executable: Executable, storage: Storage, figures: CudaTimes) -> None:
        """Takes in one measured step."""
        tasks = executable.tasks
        self.resident.append(figures.resident)
        self.ahead += [figures.ahead] if figures.ahead else []
        for task, kind in enumerate(executable.kind):
            if kind == ASSEMBLE:
                boxes, nbytes = len(executable.copies[task]), int(tasks.nbytes[task])
                if nbytes:
                    seconds = max(figures.device[task], LEAST)
                    self.assembled.append((boxes, nbytes, seconds))
                self.host[ASSEMBLE_LINE].append(figures.host[task])
            elif kind == COMPUTE:
                work = storage.work[task]
                text = storage.works[work]
                self.seconds[text].append(figures.device[task])
                self.host[text].append(figures.host[task])
                known = figures.workspace.get(work, 0)
                before = self.works[text].workspace if text in self.works else 0
                self.works[text] = KernelMeasurement(
                    0.0, float(tasks.flops[task]), int(tasks.nbytes[task]),
                    int(tasks.itemsize[task]), max(known, before),
                )  # fmt: skip

    def table(self, kind: str, day: str = "") -> CostTable:
        """What was measured, as the CostTable of a kind of device."""
        works = {
            text: work._replace(seconds=_rounded(max(float(np.mean(self.seconds[text])), LEAST)))
            for text, work in self.works.items()
        }
        lines = {ASSEMBLE_LINE: line(self.assembled)} if self.assembled else {}
        # Beside what libraries hold, remainders of the blocks that state lies in: most have few.
        resident = int(np.quantile(self.resident, 2 / 3)) if self.resident else 0
        return CostTable(
            Condition(kind), day, 0.0, works, fits(works), lines, self._issue(), resident
        )

    def _issue(self) -> dict[str, float]:
        """The host's seconds by kind of Op, by kind and number of inputs, and by call where that is
        far from those alike."""
        kinds: dict[str, list[float]] = defaultdict(list)
        for text, seconds in self.host.items():
            for name in {kind_of_signature(text), kind_and_inputs(text), ""}:
                kinds[name] += seconds
        usual = {kind: _rounded(float(np.mean(seconds))) for kind, seconds in kinds.items()}
        usual[""] = _rounded(float(np.median(kinds[""])))
        own = {text: _rounded(float(np.mean(seconds))) for text, seconds in self.host.items()}
        far = {
            text: seconds
            for text, seconds in own.items()
            if abs(seconds - usual[kind_and_inputs(text)])
            > FAR * usual[kind_and_inputs(text)] + FAR_SECONDS
        }
        # A queue holds so many kernels: the fewest seconds are those of tasks that are all kernels.
        ahead = {AHEAD: _rounded(min(self.ahead))} if self.ahead else {}
        return usual | far | ahead


def _rounded(seconds: float) -> float:
    """Four digits: the file is small, and nothing is known better."""
    return float(f"{seconds:.4g}")
