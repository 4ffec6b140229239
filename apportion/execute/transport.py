"""One rank per process, over torch.distributed.

Part of the room execute. An Executable and the number of a device come in, a Worker goes out, which
runs that device's RankSteps (rank_steps.py) in this process and exchanges messages with the others.

Receives are posted first, then sends; nothing waits until what was sent is needed. Between two
ranks there is at most one message each way per position, and all ranks post in the order of
positions, so messages need no tags.

A message's bytes are where its rank's tensors are; backends.py says what carries them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from apportion.execute.backends import Backends, Handle, Parcel, peer_errors
from apportion.execute.executable import Executable
from apportion.execute.host_memory import keep_freed_memory
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.ladder import GENERATED, Ladder, check_mode, ladder
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Exchange, Post, RankStep, Segment, rank_steps


@dataclass
class Worker:
    """A Rank with its own tasks in order, and the bytes it has handed to the transport.

    Segments run as `mode` says (ladder.py), which `notes` has the exceptions of. `timed`: steps
    that are recorded have a span for each task, where the mode can.

    `progress[0]` says how far it has come: rounds done times 2**32, plus the position of the latest
    exchange. When nobody moves, everybody waits for the rank with the least.
    """

    rank: Rank
    steps: tuple[RankStep, ...]
    sent_bytes: int = 0
    rounds: int = 0
    progress: Any = field(default_factory=lambda: [0])
    pending: dict[int, ExchangeInFlight] = field(default_factory=dict)
    backends: Backends = field(default_factory=Backends)
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
        messages = rank.executable.messages
        receives: list[Parcel] = []
        for number, source in exchange.receives:
            buffer = torch.empty(messages[number].nbytes, dtype=torch.uint8, device=rank.place)
            rank.received[number] = buffer
            receives.append((buffer, source))
        outgoing: list[Parcel] = []  # must live until it has been sent
        pending = self.backends.post(receives, self._packed(exchange, outgoing))
        for task in dict.fromkeys(messages[number].task for number, _ in exchange.sends):
            rank.free(task)
        self.pending[exchange.position] = ExchangeInFlight(began, pending, outgoing)

    def _packed(self, exchange: Exchange, outgoing: list[Parcel]) -> Iterator[Parcel]:
        for number, target in exchange.sends:
            outgoing.append((self.rank.pack(number), target))
            self.sent_bytes += outgoing[-1][0].nbytes
            yield outgoing[-1]

    def wait(self, exchange: Exchange) -> None:
        """Ends an exchange."""
        flight = self.pending.pop(exchange.position)
        with peer_errors():
            for work in flight.works:
                work.wait()
        if not self.rank.records:
            return
        ended = time.perf_counter_ns()
        messages = self.rank.executable.messages
        parties = (*exchange.sends, *exchange.receives)
        for task in dict.fromkeys(messages[number].task for number, _ in parties):
            self.rank.spans.append((task, flight.began, ended))


@dataclass(frozen=True, slots=True)
class ExchangeInFlight:
    """An exchange that has been posted: when, what to wait for, and what must live until then."""

    began: int
    works: list[Handle]
    outgoing: list[Parcel]


def worker(
    executable: Executable,
    device: int,
    place: str = "cpu",
    mode: str = GENERATED,
    timed: bool = False,
) -> Worker:
    """The part of a TaskGraph that belongs to one device, ready to run in this process, its tensors
    on the device that torch calls `place`, its segments in a mode of ladder.py."""
    if place == "cpu":
        keep_freed_memory()
    rank = Rank(executable, device, place=place)
    steps = rank_steps(executable, device)
    return Worker(rank, steps, mode=check_mode(mode), timed=timed)
