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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from apportion.execute import Executable, Rank
from apportion.kernels import Context
from apportion.tasks import TRANSFER


class PeerLost(RuntimeError):
    """The transport failed, so another rank has; this one is not the cause."""


@contextmanager
def talking() -> Iterator[None]:
    """Whatever gloo raises here is PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends and receives at one position: (task, other rank)."""

    position: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


@dataclass
class Worker:
    """A Rank with its own tasks in order, and the bytes it has handed to the transport.

    `progress[0]` says how far it has come: rounds done times 2**32, plus the position of the latest
    exchange. When nobody moves, everybody waits for the rank with the least.
    """

    rank: Rank
    steps: list[int | Exchange]
    sent_bytes: int = 0
    rounds: int = 0
    progress: Any = field(default_factory=lambda: [0])
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def run(self, context: Context) -> torch.Tensor | None:
        """One step; returns the loss if it is here."""
        for step in self.steps:
            if isinstance(step, Exchange):
                self._exchange(step)
            else:
                self.rank.run(step, context)
        self.rounds += 1
        self.progress[0] = self.rounds << 32
        return self.rank.finish()

    def _exchange(self, exchange: Exchange) -> None:
        rank, began = self.rank, time.perf_counter_ns()
        self.progress[0] = (self.rounds << 32) + exchange.position
        pending = []
        for task, source in exchange.receives:
            buffer = torch.empty(rank.program.nbytes[task], dtype=torch.uint8)
            rank.messages[task] = buffer
            with talking():
                pending.append(dist.irecv(buffer, source))
        outgoing = []
        for task, target in exchange.sends:
            message = rank.pack(task)
            outgoing.append(message)
            self.sent_bytes += message.nbytes
            with talking():
                pending.append(dist.isend(message, target))
        with talking():
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
            steps.append(Exchange(position, tuple(sends), tuple(receives)))
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
