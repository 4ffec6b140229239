"""Requests to a pool's processes that measure what kernels cost inside a step, and messages.

Part of the room run. A strategy, or a list of messages, comes in; seconds of tasks and of exchanges
go out, which calibrate.py puts into a CostTable.

A rehearsal runs one rank's tasks of a whole step in their order, all ranks at the same time, round
after round: every kernel finds its inputs as they are in a step, just written or long unused, and
memory is taken and given back as in a step. In every other round nothing is sent: a message arrives
as bytes just written, so that ranks never wait for each other and a round is nothing but work. In
the rounds between messages are sent, and it is those that are timed. Where a process has one
thread, its own time on the processor counts: what other programs take of the cores does not.

Tasks run in the mode that the step will run in. Compiled segments are there twice: with the clock
read after each task, for the rounds that say what tasks take, and without for those with messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from apportion.columns import (
    Floats,
    Ints,
)
from apportion.execute import (
    Backends,
    Context,
    Exchange,
    Executable,
    Parcel,
    Post,
    Segment,
    Worker,
    fused_updates,
    ladder,
    peer_errors,
    worker,
)
from apportion.lower import runnable
from apportion.machine import GENERATED, INTERPRETER, usable_cores
from apportion.run.process import PoolProcess
from apportion.run.step_source import RunnableStep, StepSource
from apportion.split import Strategy, space_of

WARM = 2  # rounds that are not counted: pages, caches and threads are new then
LEAST_ROUNDS = WARM + 2
LAUNCH_BYTES = 1 << 14  # what a task's share of a fused call costs beside its bytes, as bytes


@dataclass(frozen=True)
class RehearsalTimes:
    """One rank's answer.

    seconds    of `task` (columns) in each round (rows), what the interpreter adds included
    ends       of taking the batch and of leaving the state for the next step, in each round
    packed     (task, seconds) of packing messages
    rounds     (number, start, end, used) in nanoseconds of rounds with messages: how long one would
               take if it took nothing but what this process uses of the cores
    reference  of a kernel that should always take the same
    """

    task: Ints
    seconds: Floats
    ends: list[float]
    packed: list[tuple[int, float]]
    rounds: list[tuple[int, int, int, int]]
    reference: list[float]


@dataclass(frozen=True)
class RehearsalRequest:
    """Runs rounds of a step's tasks for about `budget` seconds."""

    source: StepSource
    strategy: Strategy
    devices: int
    rounds: int
    budget: float
    mode: str = GENERATED

    def __call__(self, process: PoolProcess) -> RehearsalTimes:
        """Runs in a process of a pool."""
        step = process.step(self.source)
        space = space_of(step.graph, self.strategy)
        executable = Executable(space, self.strategy, runnable(space, self.strategy, self.devices))
        process.progress[0] = 1
        how = (self.rounds, self.budget, process.backends, self.mode)
        return rehearse(executable, process.rank, step, *how)


def rehearse(
    executable: Executable,
    device: int,
    step: RunnableStep,
    rounds: int,
    budget: float,
    backends: Backends,
    mode: str = GENERATED,
) -> RehearsalTimes:
    """Rounds of one device's tasks, together with the other ranks if there are any."""
    mine = worker(executable, device, mode=mode)
    mine.backends = backends
    rank = mine.rank
    clock, crowd = _clock(executable.tasks.devices)
    rank.clock, rank.records = clock, True
    rank.load(step.tensor)
    timed = TimedWorker(mine, clock)
    found = RehearsalTimes(timed.tasks, np.zeros((0, 0)), [], [], [], [])
    seconds: list[Floats] = []
    began = time.perf_counter()
    sends_any = any(isinstance(step, Post) for step in mine.steps)
    for number in range(max(rounds, LEAST_ROUNDS)):
        spent = longest_of_all(time.perf_counter() - began)
        if number >= LEAST_ROUNDS and spent * (number + 1) / number > budget:
            break
        context = Context(0, number, step.setting, executable.graph.bodies)
        found.reference.append(_reference())
        longest_of_all(0.0)
        fed = clock()
        rank.feed(step.tensor)
        begun = clock()
        seconds.append(crowd * timed.round(context, found.packed))
        ended = clock()
        rank.finish()
        found.ends.append(crowd * (clock() - ended + begun - fed) / 1e9)
        if _any(sends_any):
            begun, before = time.perf_counter_ns(), time.process_time_ns()
            rank.feed(step.tensor)
            rank.spans.clear()
            mine.run(context)
            used = int(crowd * (time.process_time_ns() - before) / torch.get_num_threads())
            found.rounds.append((number, begun, time.perf_counter_ns(), used))
    counted = np.array(seconds[WARM:]).reshape(len(seconds) - WARM, len(found.task))
    packed = [(task, crowd * each) for task, each in found.packed]
    return replace(
        found,
        seconds=counted,
        packed=packed,
        ends=found.ends[WARM:],
        reference=found.reference[WARM:],
        rounds=[row for row in found.rounds if row[0] >= WARM],
    )


class TimedWorker:
    """A Worker whose tasks are timed, in rounds without messages.

    tasks    of its segments, in order
    reading  nanoseconds that reading the clock after a task adds; 0 for the interpreter, which
             always does
    """

    def __init__(self, worker: Worker, clock: Callable[[], int]) -> None:
        rank = worker.rank
        self.worker, self.clock = worker, clock
        self.ladder = ladder(
            rank.executable, rank.device, rank.place, worker.steps, worker.mode, timed=True
        )
        segments = [step for step in worker.steps if isinstance(step, Segment)]
        self.tasks = np.array([task for step in segments for task in step.tasks], np.int64)
        self.place = {task: k for k, task in enumerate(self.tasks.tolist())}
        self.reading = 0.0 if worker.mode == INTERPRETER else _reading(clock)
        fused = fused_updates(rank.executable) if worker.mode != INTERPRETER else {}
        self.fused = np.array([task in fused for task in self.tasks.tolist()], bool)

    def round(self, context: Context, packed: list[tuple[int, float]]) -> Floats:
        """Seconds of each task in a round, what is between them shared out; adds (task, seconds) of
        packing to `packed`."""
        rank, aside = self.worker.rank, 0.0
        rank.spans.clear()
        begun = self.clock()
        for step in self.worker.steps:
            if isinstance(step, Post):
                before = self.clock()
                packed += _without_messages(self.worker, step.exchange, self.clock)
                aside += self.clock() - before
            elif isinstance(step, Segment):
                self.ladder.functions[step](rank, context)
        whole = self.clock() - begun - aside
        took = np.zeros(len(self.tasks))
        for task, start, end in rank.spans:
            took[self.place[task]] += end - start
        took = np.maximum(took - self.reading, 0.0)
        if self.fused.any():
            took[self.fused] = shared_by_bytes(
                took[self.fused], rank.executable.tasks.nbytes[self.tasks[self.fused]]
            )
        between = max(whole - self.reading * len(took) - took.sum(), 0.0) / max(len(took), 1)
        seconds: Floats = (took + between) / 1e9
        return seconds


def shared_by_bytes(seconds: Floats, nbytes: Ints) -> Floats:
    """The same seconds in all, each task's share by what it reads and writes: of tasks that one
    call computes nobody knows more."""
    weight = nbytes + float(LAUNCH_BYTES)
    shared: Floats = seconds.sum() * weight / weight.sum()
    return shared


def _reading(clock: Callable[[], int]) -> float:
    """Nanoseconds for reading a clock and keeping what it says."""
    marks: list[int] = []
    for _ in range(401):
        marks.append(clock())
    return float(np.quantile(np.diff(marks), 0.25))


def _clock(processes: int) -> tuple[Callable[[], int], float]:
    """How the time of a task is taken, and what it is multiplied with.

    Time on the processor where a kernel runs in the one thread that calls it; processes that share
    cores take turns of some milliseconds, longer than most tasks, so that each takes as many times
    longer as there are processes to a core. Wall time where kernels have threads of their own.
    """
    if torch.get_num_threads() > 1:
        return time.perf_counter_ns, 1.0
    return time.thread_time_ns, max(1.0, processes / usable_cores())


def longest_of_all(spent: float) -> float:
    """Waits for all ranks; returns the longest of their times, so that all of them decide alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return spent
    longest = torch.tensor([spent])
    with peer_errors():
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _any(mine: bool) -> bool:
    """Whether it is so for any rank."""
    return longest_of_all(float(mine)) > 0


def _without_messages(
    mine: Worker, exchange: Exchange, clock: Callable[[], int]
) -> list[tuple[int, float]]:
    """An exchange without anybody else; (task, seconds) of packing what would be sent."""
    found = []
    rank, buffers = mine.rank, mine.own_buffers()
    messages = rank.executable.messages
    buffers.take((number for number, _ in exchange.receives), False)
    buffers.take((number for number, _ in exchange.sends), True)
    for number, _ in exchange.receives:
        buffers.incoming[number].fill_(0)
        rank.received[number] = buffers.readable(number)
    for number, _ in exchange.sends:
        began = clock()
        buffers.pack(number, rank.tensors)
        found.append((messages[number].task, (clock() - began) / 1e9))
    for task in dict.fromkeys(messages[number].task for number, _ in exchange.sends):
        rank.free(task)
    buffers.drop((number for number, _ in exchange.sends), True)
    buffers.drop((number for number, _ in exchange.receives), False)
    return found


_REFERENCE = 192


def _reference() -> float:
    """Seconds of a kernel that should always take the same: how noisy the machine is."""
    x = torch.full((_REFERENCE, _REFERENCE), 0.5)
    began = time.perf_counter()
    for _ in range(8):
        x.mm(x)
    return time.perf_counter() - began


# Messages


@dataclass(frozen=True)
class ExchangeTimes:
    """One rank's answer: (start, end) in nanoseconds of each exchange in each round; negative where
    it took no part."""

    times: Ints  # rounds, exchanges, 2


@dataclass(frozen=True)
class ExchangeRequest:
    """Exchanges of given messages: each is ((sender, receiver, bytes), ...)."""

    exchanges: tuple[tuple[tuple[int, int, int], ...], ...]
    rounds: int
    budget: float
    between: int = 128  # size of the matrices multiplied between two exchanges

    def __call__(self, process: PoolProcess) -> ExchangeTimes:
        """Runs in a process of a pool."""
        process.progress[0] = 1
        found = []
        work = torch.full((self.between, self.between), 0.01)
        began = time.perf_counter()
        for number in range(max(self.rounds, LEAST_ROUNDS)):
            spent = longest_of_all(time.perf_counter() - began)
            if number >= LEAST_ROUNDS and spent * (number + 1) / number > self.budget:
                break
            row = []
            for messages in self.exchanges:
                longest_of_all(0.0)
                for _ in range(4):
                    work.mm(work)
                row.append(_exchange(process, messages))
            found.append(row)
        return ExchangeTimes(np.array(found[1:], np.int64))


def _exchange(process: PoolProcess, messages: tuple[tuple[int, int, int], ...]) -> tuple[int, int]:
    """One exchange, as a step does it (execute/transport.py)."""
    me = process.rank
    full = [(torch.empty(n, dtype=torch.uint8).fill_(1), to) for a, to, n in messages if a == me]
    out = [Parcel(*each) for each in full]
    began = time.perf_counter_ns()
    into = [Parcel(torch.empty(n, dtype=torch.uint8), a) for a, to, n in messages if to == me]
    pending = process.backends.post(into, out)
    with peer_errors():
        for work in pending:
            work.wait()
    return (began, time.perf_counter_ns()) if pending else (-1, -1)
