"""One rank per process, over torch.distributed.

Part of the room execute. An Executable and the number of a device come in, a Worker goes out, which
runs that device's RankSteps (rank_steps.py) in this process and exchanges messages with the others.

Receives are posted first, then sends; nothing waits until what was sent is needed. All ranks post
the messages between two of them in the same order, so messages need no tags.

A message's bytes are in buffers that persist (rank_buffers.py), where its rank's tensors are;
backends.py says what carries them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from apportion.execute.backends import Backends, Parcel, peer_errors
from apportion.execute.cuda_clock import shared_out
from apportion.execute.device_memory import let_segments_grow
from apportion.execute.device_streams import CudaStreams
from apportion.execute.direct_sends import lasting_slots
from apportion.execute.executable import Executable
from apportion.execute.host_memory import keep_freed_memory
from apportion.execute.host_traffic import HostTraffic
from apportion.execute.kernels.base import (
    Context,
)
from apportion.execute.ladder import Ladder, ladder
from apportion.execute.late_work import late_schedule
from apportion.execute.overlapped_run import ExchangeInFlight, OverlappedRun
from apportion.execute.pace_search import PaceSearch, slowest
from apportion.execute.rank import Rank
from apportion.execute.rank_buffers import RankBuffers, rank_buffers
from apportion.execute.rank_steps import (
    Exchange,
    HostStep,
    Post,
    RankStep,
    Segment,
    rank_steps,
)
from apportion.execute.segment_function import SegmentFunction
from apportion.execute.wire import Pace
from apportion.machine import GENERATED, check_mode
from apportion.split import AUTO, BYTESCHEDULER

MEASURED = (AUTO, BYTESCHEDULER)  # policies whose slices and credits are tuned by measurement
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

    `pending` are exchanges under way, by training step and position. `pace`: how a wire cuts
    messages, if not as the plan says; `search`: what tries others in the first steps, where the
    plan's policy lets it.
    """

    rank: Rank
    steps: tuple[RankStep, ...]
    sent_bytes: int = 0
    rounds: int = 0
    progress: Any = field(default_factory=lambda: [0])
    pending: dict[tuple[int, int], ExchangeInFlight] = field(default_factory=dict)
    backends: Backends = field(default_factory=Backends)
    buffers: RankBuffers | None = None
    direct: dict[int, frozenset[int]] | None = None
    mode: str = GENERATED
    timed: bool = False
    ladder: Ladder | None = None
    overlap: OverlappedRun | None = None
    pace: Pace | None = None
    search: PaceSearch | None = None
    traffic: HostTraffic | None = None

    @property
    def notes(self) -> list[str]:
        """What does not run as the mode or the plan says, and why."""
        told = [] if self.overlaps or self.rank.executable.tasks.late_start < 0 else [NO_OVERLAP]
        how, pace = self.rank.executable.strategy.communication, self.pace
        if pace is not None and pace != Pace(how.slice_bytes, how.credit_bytes):
            now = replace(how, slice_bytes=pace.slice_bytes, credit_bytes=pace.credit_bytes)
            told.append(f"{now}: that was measured to be quicker than what the plan says")
        return told if self.ladder is None else [*told, *self.ladder.notes]

    def compiled(self) -> Ladder:
        """The functions of the segments, made at the first call."""
        if self.ladder is None:
            rank = self.rank
            how = (self.steps, self.mode, self.timed)
            self.ladder = ladder(rank.executable, rank.device, rank.place, *how)
            if self.traffic is not None:
                self.ladder.record(rank, self.steps, self.traffic)
        return self.ladder

    def run(self, context: Context) -> torch.Tensor | None:
        """One step; returns the loss if it is here. Where steps overlap, its late work is left to
        the next one, or to `finish`."""
        functions, recorder = self.compiled().functions, self.compiled().recorder
        self.own_buffers()
        self._set_pace()
        if recorder is not None and recorder.begin(context):
            self.rounds += 1
            return recorder.run(context)
        rank = self.rank
        if self.overlaps:
            began = time.perf_counter()
            loss = self.overlapped().run(context)
            if self.search is not None:
                self.search.note(time.perf_counter() - began)
        else:
            for step in self.steps:
                if isinstance(step, Segment):
                    self.do_segment(step, functions[step], context)
                elif isinstance(step, Post):
                    self.post(step.exchange, self.rounds)
                elif isinstance(step, HostStep):
                    self.at_host(step, context)
                else:
                    self.wait(step.exchange, self.rounds)
            loss = rank.finish()
            if self.traffic is not None:
                self.traffic.end_step()
        self.rounds += 1
        self.progress[0] = self.rounds << 32
        if rank.records:
            self.finish()
        return loss

    def finish(self) -> None:
        """Does what is left of the last step. All ranks have to."""
        if self.traffic is not None:
            self.traffic.finish()
        if self.rank.last is not None:
            self.overlapped().finish()

    @property
    def overlaps(self) -> bool:
        """Whether the next step begins before the late work of this one is done. Not where ranks
        read each other's memory: a rank that is elsewhere between two steps serves nobody, and
        there is no wire that could be busy meanwhile. Nor on GPUs, so far."""
        tasks, rank = self.rank.executable.tasks, self.rank
        return tasks.late_start >= 0 and self.backends.memory is None and rank.place == "cpu"

    def overlapped(self) -> OverlappedRun:
        """What runs steps that overlap, made at the first call."""
        if self.overlap is None:
            schedule = late_schedule(self.rank.executable, self.steps)
            self.overlap = OverlappedRun(self, schedule, self.backends.wire)
        return self.overlap

    def measure_pace(self) -> None:
        """Lets the next steps find the quickest pace, where the plan's policy wants that; all ranks
        have to. It is done when training begins, and worth repeating over another link."""
        how = self.rank.executable.strategy.communication
        self.pace = self.search = None
        if self.backends.wire is not None and self.overlaps and how.policy in MEASURED:
            self.search = PaceSearch(Pace(how.slice_bytes, how.credit_bytes), slowest)

    def _set_pace(self) -> None:
        """Tells the wire how messages are cut."""
        if self.backends.wire is None:
            return
        how = self.rank.executable.strategy.communication
        planned = Pace(how.slice_bytes, how.credit_bytes)
        if self.rounds == 0 and self.search is None and self.pace is None:
            self.measure_pace()
        if self.search is not None and self.search.is_over:
            self.finish()  # whoever waits for this rank would wait forever while it agrees
            self.pace, self.search = self.search.decide(), None
        wanted = self.pace if self.search is None else self.search.pace
        self.backends.wire.pace = wanted or planned

    def at_host(self, step: HostStep, context: Context) -> None:
        """What happens between the device and its host."""
        if self.traffic is not None:
            self.traffic.run(step.tasks, context)
            return
        for task in step.tasks:
            self.rank.run(task, context)

    def do_segment(self, segment: Segment, function: SegmentFunction, context: Context) -> None:
        """One segment; where its function notes no spans though they are wanted, one for all."""
        rank = self.rank
        if self.traffic is not None:
            self.traffic.need(segment.ins)
        if not rank.records:
            function(rank, context)
            return
        known, began = len(rank.spans), rank.clock()
        function(rank, context)
        if len(rank.spans) == known:
            rank.spans += shared_out(segment.tasks, began, rank.clock())

    def post(self, exchange: Exchange, step: int) -> None:
        """Begins an exchange: all that is received and sent at one position, in the training step
        of that number."""
        began = self._begun(exchange)
        works = self.backends.post(self._rooms(exchange, step), self._packed(exchange, step))
        self._free_sent(exchange)
        self.pending[step, exchange.position] = ExchangeInFlight(exchange, began, works)

    def open(self, exchange: Exchange, step: int) -> None:
        """Begins to receive what is received at one position."""
        began = self._begun(exchange)
        works = self.backends.post(self._rooms(exchange, step), ())
        self.pending[step, exchange.position] = ExchangeInFlight(exchange, began, works)

    def send(self, exchange: Exchange, step: int) -> None:
        """Begins to send what is sent there."""
        began = self._begun(exchange)
        works = self.backends.post((), self._packed(exchange, step))
        self._free_sent(exchange)
        key = step, exchange.position
        known = self.pending.setdefault(key, ExchangeInFlight(exchange, began, []))
        known.works.extend(works)

    def _begun(self, exchange: Exchange) -> int:
        if self.traffic is not None:
            packed = self.rank.executable.packed
            sent = (copy for number, _ in exchange.sends for copy in packed[number])
            self.traffic.need(copy.source for copy in sent)
        self.progress[0] = (self.rounds << 32) + exchange.position
        return self.rank.clock() if self.rank.records else 0

    def _rooms(self, exchange: Exchange, step: int) -> list[Parcel]:
        rank, buffers = self.rank, self.own_buffers()
        buffers.take((number for number, _ in exchange.receives), False)
        found: list[Parcel] = []
        for number, source in exchange.receives:
            buffer = rank.received[number] = buffers.incoming[number]
            found.append(Parcel(buffer, source, _key(step, number)))
        return found

    def _free_sent(self, exchange: Exchange) -> None:
        messages = self.rank.executable.messages
        for task in dict.fromkeys(messages[number].task for number, _ in exchange.sends):
            self.rank.free(task)

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

    def _packed(self, exchange: Exchange, step: int) -> Iterator[Parcel]:
        rank, buffers = self.rank, self.own_buffers()
        buffers.take((number for number, _ in exchange.sends), True)
        in_place = self.backends.takes_pieces and rank.corrupt is None
        for number, target in exchange.sends:
            how = _key(step, number), self._priority(step, number)
            if in_place:
                self.sent_bytes += rank.executable.messages[number].nbytes
                parts = buffers.parts(number, rank.tensors, self.lasting()[number])
                yield Parcel(parts, target, *how)
                continue
            packed = buffers.pack(number, rank.tensors)
            if rank.corrupt is not None:
                packed.copy_(rank.corrupt(number, packed))
            self.sent_bytes += packed.nbytes
            yield Parcel(packed, target, *how)

    def _priority(self, step: int, number: int) -> int:
        """When what a message brings is read, in the order of all training steps."""
        tasks = self.rank.executable.tasks
        if not len(tasks.priority):
            return 0  # as they are posted
        task = self.rank.executable.messages[number].task
        return 2 * len(tasks) * step + int(tasks.priority[task])

    def wait(self, exchange: Exchange, step: int) -> None:
        """Ends an exchange, if that has not been done."""
        key = step, exchange.position
        if key in self.pending:
            self.end(key)

    def end(self, key: tuple[int, int]) -> None:
        """Ends the exchange that is under way at a position of a training step."""
        flight = self.pending.pop(key)
        with peer_errors():
            for work in flight.works:
                work.wait()
        if self.buffers is not None and self.buffers.unaligned:
            for number, _ in flight.exchange.receives:
                self.rank.received[number] = self.buffers.readable(number)
        if self.buffers is not None:  # of what was received it is the rank's now
            self.buffers.drop((number for number, _ in flight.exchange.sends), True)
            self.buffers.drop((number for number, _ in flight.exchange.receives), False)
        if not self.rank.records:
            return
        ended = self.rank.clock()
        messages = self.rank.executable.messages
        parties = (*flight.exchange.sends, *flight.exchange.receives)
        for task in dict.fromkeys(messages[number].task for number, _ in parties):
            self.rank.spans.append((task, flight.began, ended))


def _key(step: int, number: int) -> int:
    """By which both ends know a message of a training step."""
    return (step << 32) + number


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
    found = Worker(rank, steps, mode=check_mode(mode), timed=timed)
    if place.startswith("cuda") and any(isinstance(step, HostStep) for step in steps):
        found.traffic = HostTraffic(rank, CudaStreams(place))
        rank.settle_host = found.traffic.finish
    return found
