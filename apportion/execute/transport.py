"""One rank per process, over torch.distributed.

Part of the room execute. An Executable and the number of a device come in, a Worker goes out, which
runs that device's RankSteps (rank_steps.py) in this process and exchanges messages with the others.

Receives are posted first, then sends; nothing waits until what was sent is needed. All ranks post
the messages between two of them in the same order, so messages need no tags.

A message's bytes are in buffers that persist (rank_buffers.py), where its rank's tensors are;
backends.py says what carries them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from apportion.execute.backends import Backends, Handle, OpenParcel, Parcel, peer_errors
from apportion.execute.cuda_clock import shared_out
from apportion.execute.device_memory import let_segments_grow
from apportion.execute.direct_sends import lasting_slots
from apportion.execute.executable import Executable
from apportion.execute.host_memory import keep_freed_memory
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.ladder import Ladder, ladder
from apportion.execute.rank import Rank
from apportion.execute.rank_buffers import RankBuffers, rank_buffers
from apportion.execute.rank_steps import (
    Exchange,
    Post,
    RankStep,
    Segment,
    period,
    rank_steps,
)
from apportion.execute.segment_function import SegmentFunction
from apportion.machine import GENERATED, check_mode

NO_OVERLAP = (
    "steps do not overlap as the plan says: ranks that read each other's memory, or are on GPUs, "
    "finish each step"
)


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
    buffers: RankBuffers | None = None
    direct: dict[int, frozenset[int]] | None = None
    mode: str = GENERATED
    timed: bool = False
    ladder: Ladder | None = None
    period: tuple[tuple[int, bool], ...] | None = None

    @property
    def notes(self) -> list[str]:
        """What does not run as the mode or the plan says, and why."""
        told = [] if self.overlaps or self.rank.executable.tasks.late_start < 0 else [NO_OVERLAP]
        return told if self.ladder is None else [*told, *self.ladder.notes]

    def compiled(self) -> Ladder:
        """The functions of the segments, made at the first call."""
        if self.ladder is None:
            rank = self.rank
            how = (self.steps, self.mode, self.timed)
            self.ladder = ladder(rank.executable, rank.device, rank.place, *how)
        return self.ladder

    def run(self, context: Context) -> torch.Tensor | None:
        """One step; returns the loss if it is here. Where steps overlap, its late work is left to
        the next one, or to `finish`."""
        functions = self.compiled().functions
        self.own_buffers()
        rank, overlaps = self.rank, self.overlaps
        for number, late in self.order():
            step = self.steps[number]
            if late:
                if rank.last is not None:
                    self._do_late(step, begun=True)
            elif isinstance(step, Segment):
                self._segment(step, functions[step], context)
            elif isinstance(step, Post):
                self.post(step.exchange)
            else:
                self.wait(step.exchange)
        rank.last = None
        self.rounds += 1
        self.progress[0] = self.rounds << 32
        if not overlaps:
            return rank.finish()
        loss = rank.put_off(context)
        if rank.records:
            self.finish()
        return loss

    def finish(self) -> None:
        """Does what is left of the last step. All ranks have to."""
        rank = self.rank
        if rank.last is None:
            return
        for number, late in self.order():
            if late:
                self._do_late(self.steps[number], begun=False)
        rank.last = None

    @property
    def overlaps(self) -> bool:
        """Whether the next step begins before the late work of this one is done. Not where ranks
        read each other's memory: a rank that is elsewhere between two steps serves nobody, and
        there is no wire that could be busy meanwhile. Nor on GPUs, so far."""
        tasks, rank = self.rank.executable.tasks, self.rank
        return tasks.late_start >= 0 and self.backends.memory is None and rank.place == "cpu"

    def order(self) -> tuple[tuple[int, bool], ...]:
        """The order of `steps`, and which of them are the last step's; found at the first call."""
        if self.period is None:
            one_by_one = tuple((number, False) for number in range(len(self.steps)))
            executable = self.rank.executable
            self.period = period(executable, self.steps) if self.overlaps else one_by_one
        return self.period

    def _do_late(self, step: RankStep, begun: bool) -> None:
        """Does a late step of the training step before this one, or of the last one."""
        made = step.outs if isinstance(step, Segment) else ()
        self.rank.do_late(partial(self._do, step), made, self._last_task(step), begun)

    def _last_task(self, step: RankStep) -> int:
        """The last task that is done when a step is; -1 for a Wait, which is none."""
        if isinstance(step, Segment):
            return step.tasks[-1]
        messages = self.rank.executable.messages
        sends = step.exchange.sends if isinstance(step, Post) else ()
        return max((messages[number].task for number, _ in sends), default=-1)

    def _do(self, step: RankStep, context: Context) -> None:
        if isinstance(step, Segment):
            self._segment(step, self.compiled().functions[step], context)
        elif isinstance(step, Post):
            self.post(step.exchange)
        else:
            self.wait(step.exchange)

    def _segment(self, segment: Segment, function: SegmentFunction, context: Context) -> None:
        """One segment; where its function notes no spans though they are wanted, one for all."""
        rank = self.rank
        if not rank.records:
            function(rank, context)
            return
        known, began = len(rank.spans), rank.clock()
        function(rank, context)
        if len(rank.spans) == known:
            rank.spans += shared_out(segment.tasks, began, rank.clock())

    def post(self, exchange: Exchange) -> None:
        """Begins an exchange: all that is received and sent at one position."""
        rank, buffers = self.rank, self.own_buffers()
        began = rank.clock() if rank.records else 0
        self.progress[0] = (self.rounds << 32) + exchange.position
        receives: list[Parcel] = []
        for number, source in exchange.receives:
            buffer = rank.received[number] = buffers.incoming[number]
            receives.append((buffer, source))
        pending = self.backends.post(receives, self._packed(exchange, buffers))
        messages = rank.executable.messages
        for task in dict.fromkeys(messages[number].task for number, _ in exchange.sends):
            rank.free(task)
        self.pending[exchange.position] = ExchangeInFlight(began, pending)

    def lasting(self) -> dict[int, frozenset[int]]:
        """The slots that may be sent as they are, by message; found at the first call."""
        if self.direct is None:
            self.direct = lasting_slots(self.rank.executable, self.steps)
        return self.direct

    def own_buffers(self) -> RankBuffers:
        """The buffers of this rank's messages, made at the first call."""
        if self.buffers is None:
            rank = self.rank
            self.buffers = rank_buffers(rank.executable, rank.device, rank.place)
        return self.buffers

    def _packed(self, exchange: Exchange, buffers: RankBuffers) -> Iterator[OpenParcel]:
        rank = self.rank
        in_place = self.backends.memory is not None and rank.corrupt is None
        for number, target in exchange.sends:
            if in_place:
                self.sent_bytes += rank.executable.messages[number].nbytes
                yield buffers.parts(number, rank.tensors, self.lasting()[number]), target
                continue
            packed = buffers.pack(number, rank.tensors)
            if rank.corrupt is not None:
                packed.copy_(rank.corrupt(number, packed))
            self.sent_bytes += packed.nbytes
            yield packed, target

    def wait(self, exchange: Exchange) -> None:
        """Ends an exchange."""
        flight = self.pending.pop(exchange.position)
        with peer_errors():
            for work in flight.works:
                work.wait()
        if self.buffers is not None and self.buffers.unaligned:
            for number, _ in exchange.receives:
                self.rank.received[number] = self.buffers.readable(number)
        if not self.rank.records:
            return
        ended = self.rank.clock()
        messages = self.rank.executable.messages
        parties = (*exchange.sends, *exchange.receives)
        for task in dict.fromkeys(messages[number].task for number, _ in parties):
            self.rank.spans.append((task, flight.began, ended))


@dataclass(frozen=True, slots=True)
class ExchangeInFlight:
    """An exchange that has been posted: when, and what to wait for."""

    began: int
    works: list[Handle]


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
    elif place.startswith("cuda"):
        let_segments_grow()
    rank = Rank(executable, device, place=place, records=timed)
    steps = rank_steps(executable, device)
    return Worker(rank, steps, mode=check_mode(mode), timed=timed)
