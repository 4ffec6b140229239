"""One rank per process, over torch.distributed.

Every rank goes through its own tasks in the one global order. All messages at one position form one
exchange: receives are posted first, then sends, then all are waited for. A rank waits only for
messages of the position it is at, whose other ends post them without waiting for anything later; by
induction over positions nobody waits forever. Between two ranks there is at most one message each
way per position, so messages need no tags.

Messages are bytes on the host: gloo moves CPU tensors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from apportion.execute import Executable, Rank
from apportion.kernels import Context
from apportion.tasks import TRANSFER


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends and receives at one position: (task, other rank)."""

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


@dataclass
class Worker:
    """A Rank with its own tasks in order, and the bytes it has handed to the transport."""

    rank: Rank
    steps: list[int | Exchange]
    sent_bytes: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def run(self, context: Context) -> torch.Tensor | None:
        """One step; returns the loss if it is here."""
        for step in self.steps:
            if isinstance(step, Exchange):
                self._exchange(step)
            else:
                self.rank.run(step, context)
        return self.rank.finish()

    def _exchange(self, exchange: Exchange) -> None:
        rank, began = self.rank, time.perf_counter_ns()
        pending = []
        for task, source in exchange.receives:
            buffer = torch.empty(rank.program.nbytes[task], dtype=torch.uint8)
            rank.messages[task] = buffer
            pending.append(dist.irecv(buffer, source))
        outgoing = []
        for task, target in exchange.sends:
            message = rank.pack(task)
            outgoing.append(message)
            self.sent_bytes += message.nbytes
            pending.append(dist.isend(message, target))
        for work in pending:
            assert work is not None
            work.wait()
        ended = time.perf_counter_ns()
        for task, _ in exchange.sends:
            rank.free(task)
            rank.spans.append((task, began, ended))


def worker(executable: Executable, device: int) -> Worker:
    """The part of a TaskGraph that belongs to one device, ready to run in this process."""
    steps: list[int | Exchange] = []
    position, sends, receives = -1, [], []  # type: ignore[var-annotated]

    def close() -> None:
        if sends or receives:
            steps.append(Exchange(tuple(sends), tuple(receives)))
            sends.clear()
            receives.clear()

    for task, kind in enumerate(executable.kind):
        source, target = executable.device[task], executable.peer[task]
        if kind != TRANSFER:
            if source == device:
                close()
                steps.append(task)
            continue
        if executable.position[task] != position:
            close()
            position = executable.position[task]
        if source == device:
            sends.append((task, target))
        if target == device:
            receives.append((task, source))
    close()
    return Worker(Rank(executable, device), steps)
