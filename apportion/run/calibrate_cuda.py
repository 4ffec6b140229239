"""Measuring a CUDA device: the kernels, the host that issues them, and their memory.

Part of the room run. Programs with plans for one device come in, a CostTable goes out. What
is measured is the step itself, task by task in its own order and in the code that runs it, so that
every kernel finds the caches as it will in earnest.

device     A device that waits is made to wait first (a kernel that sleeps), so that the host is
           ahead of it: then the time between the events before and after a task is the device's
           own. Events take time too; a round without them says how much, and it is taken off.
host       The same tasks issued to an idle device, a few at a time, by the host's clock.
memory     The allocator's peak while the interpreter does a task less what is left after it; what
           is held after the step beside its tensors was taken by libraries.

Tasks that one call does together (fused updates) share its time by their bytes.
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

from apportion.capture import Program, flatten, map_tensors
from apportion.execute import Executable, Rank, worker
from apportion.lower import ASSEMBLE, COMPUTE, Storage
from apportion.machine import (
    AHEAD,
    ASSEMBLE_LINE,
    BEGIN,
    GENERATED,
    INDUCTOR,
    Condition,
    CostTable,
    KernelMeasurement,
    fits,
    kind_and_inputs,
    kind_of_signature,
    line,
)
from apportion.plan import Plan
from apportion.run.channels_last import measured_channels_last
from apportion.run.fused_line import FusedStep, fused_table
from apportion.run.runner import Runner
from apportion.run.task_clock import EventClock, HostClock, QueueClock, intervals

ROUNDS = 6
WARM, STEPS = 4, 9  # steps of what is measured as a whole
AT_ONCE = 1.5e-3  # seconds of the host's work that a sleeping device lets it be ahead
QUANTILE = 0.25  # of the device's times; of the host's, which always has other things to do, 0.5
LEAST = 1e-9  # seconds of a call that the device does not notice, such as a view
FAR, FAR_SECONDS = 0.3, 4e-6  # from the usual time of its kind's calls, for one to be listed
Floats = Sequence[float]
Note = Callable[[str], None]


@dataclass(frozen=True)
class CudaTimes:
    """Seconds of the device and of the host for every task, bytes of workspace by work (see
    Storage), bytes that libraries hold, what an event takes, how far the host can be ahead (0 if
    it never had to wait), and what a step takes it before the first task."""

    device: list[float]
    host: list[float]
    workspace: dict[int, int]
    resident: int
    event: float
    ahead: float
    begin: float


def runner_on(
    program: Program,
    executable: Executable,
    place: str = "cuda",
    mode: str = GENERATED,
    timed: bool = False,
) -> Runner:
    """A Runner of the only device of a plan, in this process; `timed`: its clock can be read
    between tasks."""
    mine = worker(executable, 0, place, mode, timed)
    mine.rank.records = False
    return Runner(program, mine)


def on_device(batch: Any, place: str = "cuda") -> Any:
    """The batch with its tensors on a device."""
    return map_tensors(lambda x: x.to(place), batch)


def step_seconds(runner: Runner, batch: Any, count: int) -> list[float]:
    """Seconds of steps, from an idle device to an idle device."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner.local_step(batch)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
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
    """Measures every task of a step on one CUDA device; the Runner is a timed one."""
    rank = runner.worker.rank
    for _ in range(2):
        runner.step(batch)  # libraries load their kernels and take their buffers
    torch.cuda.synchronize()
    resident = _resident(rank, batch)
    tasks, begins, hosts = {}, [], []
    for _ in range(rounds):
        clock = HostClock()
        begins.append(_round(runner, batch, clock))
        tasks, seconds = intervals(rank.spans), clock.seconds
        hosts.append(seconds)
    host = _quantile(hosts, 0.5)
    chunks = {chunk.start: 3 * sum(host[k] for k in chunk) + 1e-3 for chunk in _chunks(host)}
    found, apart, together = [], 0.0, 0.0
    for _ in range(rounds):
        timed, whole = (EventClock(chunks, len(host), each) for each in (True, False))
        _round(runner, batch, timed)
        found.append([timed.seconds.get(k, float("nan")) for k in range(len(host))])
        _round(runner, batch, whole)
        apart, together = apart + timed.total, together + whole.total
    event = max(apart - together, 0.0) / (rounds * max(len(host), 1))
    device = [max(seconds - event, 0.0) for seconds in _quantile(found, QUANTILE)]
    queue = QueueClock(host)
    _round(runner, batch, queue)
    shared = _shared(rank.executable, tasks, device, host)
    workspace = _memory_round(runner, batch, storage)
    begin = float(np.median(begins)) + sum(host[k] for k in range(len(host)) if k not in tasks)
    return CudaTimes(*shared, workspace, resident, event, queue.found, begin)


def _round(runner: Runner, batch: Any, clock: Callable[[], int]) -> float:
    """One step with this clock between its tasks; the host's seconds before the first."""
    rank, before = runner.worker.rank, runner.worker.rank.clock
    torch.cuda.synchronize()
    began = time.perf_counter()
    context = runner.begin(batch)
    seconds = time.perf_counter() - began
    rank.spans.clear()
    rank.clock, rank.records = clock, True
    try:
        runner.worker.run(context)
    finally:
        rank.clock, rank.records = before, False
        torch.cuda.synchronize()
    return seconds


def _shared(
    executable: Executable, tasks: dict[int, list[int]], device: Floats, host: Floats
) -> tuple[list[float], list[float]]:
    """Seconds of intervals as seconds of the tasks that ran in them."""
    count = len(executable.tasks)
    found: tuple[list[float], list[float]] = ([0.0] * count, [0.0] * count)
    for number, some in tasks.items():
        nbytes = [float(executable.tasks.nbytes[task]) or 1.0 for task in some]
        for task, own in zip(some, nbytes, strict=True):
            found[0][task] = device[number] * own / sum(nbytes)
            found[1][task] = host[number] / len(some)
    return found


def _quantile(rounds: Sequence[Floats], share: float) -> list[float]:
    return [float(x) for x in np.nanquantile(np.array(rounds), share, axis=0)]


def _end(rank: Rank) -> None:
    rank.finish()
    torch.cuda.synchronize()


def _chunks(host: Floats) -> list[range]:
    """Runs of intervals that the host issues in about AT_ONCE."""
    found, first, total = [], 0, 0.0
    for number, seconds in enumerate(host):
        if total + seconds > AT_ONCE and number > first:
            found.append(range(first, number))
            first, total = number, 0.0
        total += seconds
    return [*found, range(first, len(host))]


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
    """Bytes on the device that are neither the step's tensors nor its batch, which has slots of its
    own there for good (feed.py)."""
    given = [x for _, _, x in flatten(batch).tensors if x.is_cuda]
    found = [tensor.untyped_storage() for tensor in (*rank.tensors.values(), *given)]
    storages = {storage._cdata: storage for storage in found}
    sizes = [storage.nbytes() for storage in storages.values()]
    slots = rank.executable.tasks.slot_nbytes
    sizes += [int(slots[region.slot]) for region in rank.inputs]
    own = sum(-(-size // 512) * 512 for size in sizes)
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
        runner = runner_on(program, executable, timed=True)
        figures = measured(runner, plan.storage, on_device(program.batch), rounds)
        samples.add(executable, plan.storage, figures)
        note(f"measured {len(executable.tasks)} tasks, {len(plan.storage.works)} different calls")
        del runner
        torch.cuda.empty_cache()
    return samples.table(kind, time.strftime("%Y-%m-%d"))


def calibrate_fused(
    steps: Iterable[tuple[Program, Plan]], generated: CostTable, note: Note = lambda text: None
) -> CostTable:
    """Measures whole steps that torch's compiler makes kernels for, and their convolutions in the
    order that it gives them, beside a table of the same steps in generated code. Steps that fall
    back to that are left out, and ValueError is raised if all do."""
    found, told = [], []
    turned: dict[str, KernelMeasurement] = {}
    for program, plan in steps:
        executable = Executable(plan.space, plan.strategy, plan.tasks)
        turned |= measured_channels_last(executable, plan.storage)
        torch.cuda.empty_cache()
        runner, batch = runner_on(program, executable, mode=INDUCTOR), on_device(program.batch)
        step_seconds(runner, batch, WARM)
        if runner.worker.notes:
            told += runner.worker.notes
            note(runner.worker.notes[0])
        else:
            seconds = float(np.median(step_seconds(runner, batch, STEPS)))
            found.append(FusedStep(plan.tasks, plan.cluster, seconds))
            note(f"a step of {len(executable.tasks)} tasks took {seconds * 1e3:.2f} ms, fused")
        del runner
        torch.cuda.empty_cache()
    if not found:
        raise ValueError(f"no step could be compiled: {told[0] if told else 'there is none'}")
    return fused_table(generated, found, time.strftime("%Y-%m-%d"), turned)


UPDATE = "apportion.update"  # fused ones need no room beside their state
RENEWED = (UPDATE, "apportion.channel", "apportion.batch_norm", "apportion.nothing")
"""Calls that generated code makes otherwise than the interpreter of earlier tables."""


class CudaSamples:
    """Measured steps, put together by kernel call. Calls that are not measured again take what an
    earlier table says."""

    def __init__(self, before: CostTable | None = None) -> None:
        self.before = before
        self.passing: set[str] = set()  # calls that only fits are made from
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.host: dict[str, list[float]] = defaultdict(list)
        self.passing_host: dict[str, list[float]] = defaultdict(list)
        self.works: dict[str, KernelMeasurement] = {}
        self.assembled: list[tuple[int, int, float]] = []
        self.resident: list[int] = []
        self.ahead: list[float] = []
        self.begin: list[float] = []

    def add(
        self, executable: Executable, storage: Storage, figures: CudaTimes, keep: bool = True
    ) -> None:
        """Takes in one measured step; if it is not to be kept, its calls take part in fits only."""
        tasks = executable.tasks
        self.resident.append(figures.resident)
        self.ahead += [figures.ahead] if figures.ahead else []
        self.begin.append(figures.begin)
        for task, kind in enumerate(executable.kind):
            if np.isnan(figures.device[task]):
                continue  # the host was never ahead of it
            if kind == ASSEMBLE:
                boxes, nbytes = len(executable.copies[task]), int(tasks.nbytes[task])
                if nbytes:
                    seconds = max(figures.device[task], LEAST)
                    self.assembled.append((boxes, nbytes, seconds))
                self.host[ASSEMBLE_LINE].append(figures.host[task])
            elif kind == COMPUTE:
                work = storage.work[task]
                text = storage.works[work]
                if keep:
                    self.passing.discard(text)
                elif text not in self.works:
                    self.passing.add(text)
                self.seconds[text].append(figures.device[task])
                (self.host if keep else self.passing_host)[text].append(figures.host[task])
                known = 0 if text.startswith(UPDATE) else figures.workspace.get(work, 0)
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
        earlier = {} if self.before is None else self.before.works
        renewed = {w: x for w, x in earlier.items() if w not in works and not w.startswith(RENEWED)}
        works = renewed | works
        found = {text: work for text, work in works.items() if text not in self.passing}
        lines = {ASSEMBLE_LINE: line(self.assembled)} if self.assembled else {}
        # Beside what libraries hold, remainders of the blocks that state lies in: most have few.
        resident = int(np.quantile(self.resident, 2 / 3)) if self.resident else 0
        return CostTable(
            Condition(kind, mode=GENERATED),
            day,
            0.0,
            found,
            fits(works),
            lines,
            self._issue(),
            resident,
        )

    def _issue(self) -> dict[str, float]:
        """The host's seconds by kind of Op, by kind and number of inputs, and by call where that is
        far from those alike."""
        kinds: dict[str, list[float]] = defaultdict(list)
        for text, seconds in self.host.items():
            for name in {kind_of_signature(text), kind_and_inputs(text), ""}:
                kinds[name] += seconds
        for text, seconds in self.passing_host.items():  # where nothing else is known
            name = kind_and_inputs(text)
            if not any(kind_and_inputs(other) == name for other in self.host):
                kinds[name] += seconds
        usual = {kind: _rounded(float(np.median(seconds))) for kind, seconds in kinds.items()}
        own = {text: _rounded(float(np.median(seconds))) for text, seconds in self.host.items()}
        far = {
            text: seconds
            for text, seconds in own.items()
            if abs(seconds - usual[kind_and_inputs(text)])
            > FAR * usual[kind_and_inputs(text)] + FAR_SECONDS
        }
        # A queue holds so many kernels: the fewest seconds are those of tasks that are all kernels.
        ahead = {AHEAD: _rounded(min(self.ahead))} if self.ahead else {}
        begin = {BEGIN: _rounded(float(np.median(self.begin)))} if self.begin else {}
        return usual | far | ahead | begin


def _rounded(seconds: float) -> float:
    """Four digits: the file is small, and nothing is known better."""
    return float(f"{seconds:.4g}")
