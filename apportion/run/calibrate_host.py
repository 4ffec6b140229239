"""Measuring the host of a GPU: copies to it and back, its own updates, and how they disturb each
other.

Part of the room run. Nothing comes in but the device's name; lines of costs go out, for a table of
measurements (machine/host_links.py says what they mean).

copies    of several sizes out and back, each way alone: what a copy takes by its bytes. Then both
          ways at once, while the host computes.
updates   Adam on parameters of some millions of numbers with gradients and shadows in bfloat16, as
          memory/host_state.py has them, by the bytes that it reads and writes; then beside copies.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from apportion.execute import (
    BACK,
    OUT,
    AdamSettings,
    CudaStreams,
    HostJob,
    HostJobs,
    PinnedMemory,
    adam_parts,
)
from apportion.machine import (
    BESIDE,
    HOST_BACK_LINE,
    HOST_OUT_LINE,
    HOST_WORK_LINE,
    CostLine,
)

SIZES = (1 << 20, 4 << 20, 16 << 20, 48 << 20)
NUMBERS = 4 << 20  # of a parameter
PARAMETERS = 12
PASSES = 6  # over all parameters in a row, so that it does not matter how threads begin and end
BYTES = 28  # that an update reads and writes of each number, gradient and shadow in bfloat16
ROUNDS = 7
SECONDS = 0.5  # of disturbance


def host_lines(place: str = "cuda") -> dict[str, CostLine]:
    """What copies and updates take, alone and beside each other."""
    work = _Updates(place)
    copies = _CopyTimer(place)
    found = {name: copies.line(queue) for name, queue in QUEUES.items()}
    found[HOST_WORK_LINE] = work.line()
    found |= _beside(copies, work)
    return found


QUEUES = {HOST_OUT_LINE: OUT, HOST_BACK_LINE: BACK}


@dataclass
class _Repeated:
    """Something that is done again and again in a thread, until it is told to stop."""

    work: Callable[[], None]

    def __enter__(self) -> _Repeated:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def _run(self) -> None:
        while not self.stop.is_set():
            self.work()

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()


class _CopyTimer:
    def __init__(self, place: str) -> None:
        self.streams = CudaStreams(place)
        self.memory = PinnedMemory(2 * max(SIZES), place)
        rooms = {OUT: self.memory, BACK: self.memory}
        self.host = {queue: rooms[queue].take((max(SIZES),), torch.uint8) for queue in rooms}
        self.device = {
            queue: torch.zeros(max(SIZES), dtype=torch.uint8, device=place) for queue in rooms
        }

    def put(self, queue: int, size: int) -> None:
        """Puts one copy of so many bytes into its queue."""
        ends = self.host[queue][:size], self.device[queue][:size]
        target, source = ends if queue == OUT else ends[::-1]
        self.streams.copy(queue, [(target, source)])

    def seconds(self, queue: int, size: int, many: int) -> float:
        """Seconds of one copy, of many in a row."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.streams.record(begin, queue)
        for _ in range(many):
            self.put(queue, size)
        self.streams.record(end, queue)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / many

    def line(self, queue: int) -> CostLine:
        """What a copy takes by its bytes."""
        rows = []
        for size in SIZES:
            many = max(4, min(50, (256 << 20) // size))
            took = [self.seconds(queue, size, many) for _ in range(ROUNDS)]
            rows.append((size, statistics.median(took)))
        return _fitted(rows)


class _Updates:
    def __init__(self, place: str) -> None:
        count = NUMBERS * PARAMETERS
        self.memory = PinnedMemory(count * 16 + (1 << 20), place)
        self.rows = []
        for _ in range(PARAMETERS):
            wide = [self.memory.take((NUMBERS,), torch.float32) for _ in range(3)]
            narrow = [self.memory.take((NUMBERS,), torch.bfloat16) for _ in range(2)]
            for tensor in (*wide, *narrow):
                tensor.fill_(0.01)
            self.rows.append((wide, narrow))
        self.jobs = HostJobs(lambda event: True, lambda event: None)
        self.settings = AdamSettings(1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5, 0.5, True, False)

    def once(self) -> None:
        """Updates all parameters PASSES times, as the host does beside its device."""
        jobs = [HostJob(0, None, partial(self._parts, *row)) for row in self.rows * PASSES]
        for job in jobs:
            self.jobs.submit(job)
        for job in jobs:
            job.wait()

    def _parts(
        self, wide: Sequence[torch.Tensor], narrow: Sequence[torch.Tensor]
    ) -> list[Callable[[], None]]:
        parameter, first, second = wide
        gradient, shadow = narrow
        return adam_parts(parameter, gradient, first, second, shadow, self.settings)

    def seconds(self) -> float:
        """Seconds of updating all parameters PASSES times."""
        began = time.perf_counter()
        self.once()
        return time.perf_counter() - began

    def line(self, rounds: int = ROUNDS) -> CostLine:
        """What an update takes by the bytes that it reads and writes."""
        self.once()
        took = statistics.median(self.seconds() for _ in range(rounds))
        return CostLine(0.0, 0.0, took / (BYTES * NUMBERS * PARAMETERS * PASSES), 0.0, rounds)


def _beside(copies: _CopyTimer, work: _Updates) -> dict[str, CostLine]:
    """All three at once, each measured while the other two go on."""
    size, found = max(SIZES), {}

    def both() -> None:
        for queue in QUEUES.values():
            copies.put(queue, size)
        copies.streams.finish()

    with _Repeated(both):
        found[HOST_WORK_LINE + BESIDE] = work.line()
    for name, queue in QUEUES.items():
        other = OUT + BACK - queue

        def opposite(other: int = other) -> None:
            copies.seconds(other, size, 8)

        with _Repeated(opposite), _Repeated(work.once):
            time.sleep(0.05)
            took = statistics.median(copies.seconds(queue, size, 8) for _ in range(ROUNDS))
        found[name + BESIDE] = CostLine(0.0, 0.0, took / size, 0.0, ROUNDS)
    return found


def _fitted(rows: Sequence[tuple[int, float]]) -> CostLine:
    """Seconds for each copy and for each byte, least squares of relative errors."""
    size, took = (np.array(column, float) for column in zip(*rows, strict=True))
    matrix = np.stack([1 / took, size / took], axis=1)
    each, per_byte = np.linalg.lstsq(matrix, np.ones(len(took)), rcond=None)[0]
    each = max(float(each), 0.0)
    error = float(np.abs((each + size * per_byte) / took - 1).max())
    return CostLine(each, 0.0, float(per_byte), error, len(rows))
