"""One rank per process, over torch.distributed.

Part of the room execute. An Executable and the number of a device come in, a Worker goes out, which
runs that device's RankSteps (rank_steps.py) in this process and exchanges messages with the others.

Receives are posted first, then sends; nothing waits until what was sent is needed. Between two
ranks there is at most one message each way per position, and all ranks post in the order of
positions, so messages need no tags.

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
from apportion.execute.ladder import GENERATED, Ladder, check_mode, ladder
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Exchange, Post, RankStep, Segment, rank_steps


class PeerLost(RuntimeError):
    """The transport failed, so another rank has; this one is not the cause."""


@contextmanager
def peer_errors() -> Iterator[None]:
    """A context in which every error of gloo is raised as PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from None


@dataclass
class Worker:
    """A Rank with its own tasks in order, and the bytes it has handed to the transport.

    Segments run as `mode` says (ladder.py), which `notes` has the exceptions of. `timed`: the spans
    of tasks are recorded in every mode; without it, only by the interpreter.
    `progress[0]` says how far it has come: rounds done times 2**32, plus the position of the latest
    exchange. When nobody moves, everybody waits for the rank with the least.
    """

    rank: Rank
    steps: tuple[RankStep, ...]
    sent_bytes: int = 0
    rounds: int = 0
    progress: Any = field(default_factory=lambda: [0])
    pending: dict[int, ExchangeInFlight] = field(default_factory=dict)
    mode: str = GENERATED
    timed: bool = False
    ladder: Ladder | None = None

    @property
    def notes(self) -> list[str]:
        """What does not run as the mode says, and why."""
        return [] if self.ladder is None else self.ladder.notes

    def compiled(self) -> Ladder:
        """The functions of the segments, made at the first call."""
        if self.ladder is None:
            rank = self.rank
            how = (self.steps, self.mode, self.timed)
            self.ladder = ladder(rank.executable, rank.device, rank.place, *how)
        return self.ladder

    def run(self, context: Context) -> torch.Tensor | None:
        """One step; returns the loss if it is here."""
        self.rank.spans.clear()
        functions = self.compiled().functions
        for step in self.steps:
            if isinstance(step, Segment):
                functions[step](self.rank, context)
            elif isinstance(step, Post):
                self.post(step.exchange)
            else:
                self.wait(step.exchange)
        self.rounds += 1
        self.progress[0] = self.rounds << 32
        return self.rank.finish()

    def post(self, exchange: Exchange) -> None:
        """Begins an exchange: all that is received and sent at one position."""
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
        for task in dict.fromkeys(messages[number].task for number, _ in exchange.sends):
            rank.free(task)
        self.pending[exchange.position] = ExchangeInFlight(began, pending, outgoing)

    def wait(self, exchange: Exchange) -> None:
        """Ends an exchange."""
        flight = self.pending.pop(exchange.position)
        with peer_errors():
            for work in flight.works:
                assert work is not None
                work.wait()
        ended = time.perf_counter_ns()
        messages = self.rank.executable.messages
        parties = (*exchange.sends, *exchange.receives)
        for task in dict.fromkeys(messages[number].task for number, _ in parties):
            self.rank.spans.append((task, flight.began, ended))


@dataclass(frozen=True, slots=True)
class ExchangeInFlight:
    """An exchange that has been posted: when, what to wait for, and what must live until then."""

    began: int
    works: list[Any]
    outgoing: list[torch.Tensor]


def worker(
    executable: Executable,
    device: int,
    place: str = "cpu",
    mode: str = GENERATED,
    timed: bool = False,
) -> Worker:
    """The part of a TaskGraph that belongs to one device, ready to run in this process, its tensors
    on the device that torch calls `place`, its segments in a mode of ladder.py."""
    rank = Rank(executable, device, place=place)
    steps = rank_steps(executable, device)
    return Worker(rank, steps, mode=check_mode(mode), timed=timed)
