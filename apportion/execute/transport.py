"""One rank per process, over torch.distributed.

Part of the room execute. An Executable and the number of a device come in, a Worker goes out, which
runs that device's tasks in this process and exchanges messages with the others.

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

from apportion.execute.executable import Executable
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.rank import Rank


class PeerLost(RuntimeError):
    """The transport failed, so another rank has; this one is not the cause."""


@contextmanager
def peer_errors() -> Iterator[None]:
    """A context in which every error of gloo is raised as PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank sends and receives at one position: (message, other rank)."""

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
                self.exchange(step)
            else:
                self.rank.run(step, context)
        self.rounds += 1
        self.progress[0] = self.rounds << 32
        return self.rank.finish()

    def exchange(self, exchange: Exchange) -> None:
        """All messages of one position, sent and received."""
        rank, began = self.rank, time.perf_counter_ns()
        self.progress[0] = (self.rounds << 32) + exchange.position
        pending = []
        messages = rank.executable.messages
        for number, source in exchange.receives:
            buffer = torch.empty(messages[number].nbytes, dtype=torch.uint8)
            rank.received[number] = buffer
            with peer_errors():
                pending.append(dist.irecv(buffer, source))
        outgoing = []
        for number, target in exchange.sends:
            packed = rank.pack(number)
            outgoing.append(packed)  # must live until it has been sent
            self.sent_bytes += packed.nbytes
            with peer_errors():
                pending.append(dist.isend(packed, target))
        with peer_errors():
            for work in pending:
                assert work is not None
                work.wait()
        ended = time.perf_counter_ns()
        for task in dict.fromkeys(messages[number].task for number, _ in exchange.sends):
            rank.free(task)
        parties = (*exchange.sends, *exchange.receives)
        for task in dict.fromkeys(messages[number].task for number, _ in parties):
            rank.spans.append((task, began, ended))


def worker(executable: Executable, device: int, place: str = "cpu") -> Worker:
    """The part of a TaskGraph that belongs to one device, ready to run in this process, its tensors
    on the device that torch calls `place`."""
    exchanges = _exchanges(executable, device)
    steps: list[int | Exchange] = []
    for task, is_message in enumerate(executable.is_message):
        if is_message:
            steps += exchanges.pop(executable.position[task], ())  # once for all of a position
        elif executable.device[task] == device:
            steps.append(task)
    return Worker(Rank(executable, device, place=place), steps)


def _exchanges(executable: Executable, device: int) -> dict[int, tuple[Exchange]]:
    """The exchanges that a device takes part in, by position."""
    sends: dict[int, list[tuple[int, int]]] = {}
    receives: dict[int, list[tuple[int, int]]] = {}
    for number, message in enumerate(executable.messages):
        position = executable.position[message.task]
        if message.sender == device:
            sends.setdefault(position, []).append((number, message.receiver))
        if message.receiver == device:
            receives.setdefault(position, []).append((number, message.sender))
    return {
        position: (
            Exchange(position, tuple(sends.get(position, ())), tuple(receives.get(position, ()))),
        )
        for position in sends.keys() | receives.keys()
    }
