"""HostTraffic: copies between a GPU and its host beside what it computes, and work of the host.

Part of the room execute. The tasks of HostSteps (rank_steps.py) come in one by one, in the order of
the plan, and so does what a segment reads before it runs. Nobody waits unless the plan does:

    from host  its memory on the device is taken in the order of the compute queue, and the copy
               begins when that queue has come to where the task stands, since until then something
               else may lie there. If the host is still busy with the state that is to be copied, a
               thread waits for that and then begins the copy
    to host    the copy begins when the compute queue has come to where the task stands
    on host    the compute queue waits for the copy; from here on the memory can be used again
    host work  handed to a thread (host_jobs.py), which begins when the copies that it reads are
               complete

So memory is given back and taken in the order of one queue, and no queue uses it outside of what
the plan says: nothing needs to be recorded with the allocator. What lies on the host when a step
ends is what the next one begins with; who reads it there waits for whoever makes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch

from apportion.execute.cuda_clock import CudaClock
from apportion.execute.device_streams import BACK, COMPUTE, OUT, Streams
from apportion.execute.executable import Executable
from apportion.execute.host_jobs import HostJob, HostJobs, InOrder
from apportion.execute.host_update import update_parts
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment, rank_steps
from apportion.lower import FROM_HOST, HOST_WORK, TO_HOST
from apportion.simulate import needed_at


@dataclass
class Departure:
    """Copies to the host, which are complete when `event` has passed."""

    ready: Any
    event: Any


@dataclass
class Arrival:
    """Copies from the host, which begin when `gate` has passed. `events` say when so many of them
    are complete; `issued` once all are in their queue."""

    gate: Any
    events: list[Any]
    issued: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self) -> None:
        """Waits until the copies are in their queue."""
        self.issued.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


@dataclass(frozen=True)
class CopyBatch:
    """Copies of some tasks at one place of the order, which go together.

    pairs   target and source of each
    groups  how many of them, one after the other, are first read by the same segment
    """

    tasks: tuple[int, ...]
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    groups: tuple[int, ...]


class HostTraffic:
    """What is under way between a rank's device and its host.

    arrivals    by the first task of their CopyBatch
    coming      what nobody has waited for: by slot, the first task and the group of its CopyBatch
    departures  by the first task of their CopyBatch
    made        whoever made what lies on the host, by slot: a Departure or a HostJob
    readers     the last job that read a slot on the host
    """

    def __init__(self, rank: Rank, streams: Streams) -> None:
        self.rank, self.streams = rank, streams
        self.jobs = HostJobs(streams.is_done, streams.synchronize)
        self.issuer = InOrder()
        self.arrivals: dict[int, Arrival] = {}
        self.coming: dict[int, tuple[int, int]] = {}
        self.departures: dict[int, Departure] = {}
        self.made: dict[int, Departure | HostJob] = {}
        self.readers: dict[int, HostJob] = {}
        self.needed: list[int] = needed_at(rank.executable.tasks).tolist()
        self.steps = 0

    # What a plan says, in its order

    def run(self, tasks: Sequence[int], context: Context) -> None:
        """Begins the tasks of a HostStep, on the rank's tensors."""
        for kind, some in runs_of_a_kind(self.rank.executable, tasks):
            self._begin(kind, some, context)
            for task in some:
                self.rank.free(task)

    def _begin(self, kind: int, tasks: tuple[int, ...], context: Context) -> None:
        rank, computes = self.rank, self.rank.executable.computes
        if kind == FROM_HOST:
            for task in tasks:
                work = computes[task]
                source = rank.tensors[work.ins[0]]
                target = torch.empty(source.shape, dtype=source.dtype, device=rank.place)
                rank.tensors[work.outs[0]] = target
            self.arrive(self.copies(tasks))
        elif kind == TO_HOST:
            for task in tasks:
                slot = computes[task].outs[0]
                rank.tensors[slot] = rank.room(slot)
            self.depart(self.copies(tasks))
        elif kind == HOST_WORK:
            for task in tasks:
                work = computes[task]
                ins = [rank.tensors[slot] for slot in work.ins]
                outs = [rank.room(slot) for slot in work.outs]
                rank.tensors.update(zip(work.outs, outs, strict=True))
                self.work(task, ins, outs, context)
        else:
            self.gone(tasks)
            for task in tasks:
                work = computes[task]
                rank.tensors[work.outs[0]] = rank.tensors[work.ins[0]].detach()

    def copies(
        self, tasks: tuple[int, ...], alias: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> CopyBatch:
        """The copies of tasks whose tensors are there; `alias` of those on the device."""
        rank, pairs = self.rank, []
        same = alias or (lambda tensor: tensor)
        for task in tasks:
            work, comes = rank.executable.computes[task], rank.executable.kind[task] == FROM_HOST
            source, target = rank.tensors[work.ins[0]], rank.tensors[work.outs[0]]
            pairs.append((same(target), source) if comes else (target, same(source)))
        return CopyBatch(tasks, tuple(pairs), self._groups(tasks))

    def _groups(self, tasks: tuple[int, ...]) -> tuple[int, ...]:
        segment = self._first_segments
        slots = [self.rank.executable.computes[task].outs[0] for task in tasks]
        return tuple(len(list(some)) for _, some in groupby(slots, lambda s: segment.get(s, -1)))

    @cached_property
    def _first_segments(self) -> dict[int, int]:
        """The first segment that reads each slot, by number."""
        found: dict[int, int] = {}
        steps = rank_steps(self.rank.executable, self.rank.device)
        for number, step in enumerate(steps):
            for slot in step.ins if isinstance(step, Segment) else ():
                found.setdefault(slot, number)
        return found

    def need(self, slots: Iterable[int]) -> None:
        """Lets the device wait for what comes from the host, before it reads these slots."""
        for which in self.waited(slots):
            self.await_arrival(*which)

    def waited(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        """What is still to be waited for before these slots are read: CopyBatches by their
        first task, and groups of these."""
        found: dict[tuple[int, int], None] = {}
        for slot in slots:
            which = self.coming.pop(slot, None)
            if which is not None:
                found[which] = None
        return list(found)

    def end_step(self) -> None:
        """What the host has now is what the next step begins with."""
        made = self.made
        self.made = {b: made[a] for a, b in self.rank.executable.carry if a in made}
        self.coming.clear()
        self.steps += 1

    def finish(self) -> None:
        """Waits until everything is done; raises RuntimeError if something failed."""
        for arrival in self.arrivals.values():
            if arrival.issued.is_set() or not self.issuer.idle:
                arrival.wait()
        for each in (*self.made.values(), *self.readers.values()):
            if isinstance(each, HostJob):
                each.wait()
        self.streams.finish()

    # The same, on given tensors

    def arrive(self, copies: CopyBatch) -> None:
        """Begins copies from the host."""
        streams, first, computes = self.streams, copies.tasks[0], self.rank.executable.computes
        arrival = self.arrivals.get(first)
        if arrival is None:
            events = [streams.event() for _ in copies.groups]
            arrival = self.arrivals[first] = Arrival(streams.event(), events)
        arrival.issued.clear()
        streams.record(arrival.gate, COMPUTE)
        group, left = 0, copies.groups[0]
        makers = []
        for task in copies.tasks:
            if left == 0:
                group, left = group + 1, copies.groups[group + 1]
            left -= 1
            work = computes[task]
            self.coming[work.outs[0]] = (first, group)
            makers.append(self.made.get(work.ins[0]))
        jobs = [made for made in makers if isinstance(made, HostJob) and not made.done.is_set()]
        left_before = [made for made in makers if isinstance(made, Departure)]
        if jobs:
            self.issuer.submit(lambda: self._issue(arrival, copies, jobs, left_before))
        else:
            self._issue(arrival, copies, (), left_before)

    def _issue(
        self,
        arrival: Arrival,
        copies: CopyBatch,
        jobs: Iterable[HostJob],
        departures: Iterable[Departure],
    ) -> None:
        streams = self.streams
        try:
            for job in jobs:
                job.wait()
            for departure in {id(each): each for each in departures}.values():
                streams.wait(BACK, departure.event)
            streams.wait(BACK, arrival.gate)
            at = 0
            for count, event in zip(copies.groups, arrival.events, strict=True):
                self._copy(BACK, copies, slice(at, at + count))
                streams.record(event, BACK)
                at += count
        except BaseException as error:  # whoever waits for it hears of it
            arrival.error = error
        arrival.issued.set()

    def _copy(self, queue: int, copies: CopyBatch, which: slice) -> None:
        """Puts copies into a queue; notes when they were made, if that is wanted."""
        rank, streams, pairs = self.rank, self.streams, copies.pairs[which]
        if not rank.records or not isinstance(rank.clock, CudaClock):
            streams.copy(queue, pairs)
            return
        record = partial(streams.record, queue=queue)
        for task, pair in zip(copies.tasks[which], pairs, strict=True):
            began = rank.clock.moment(record)
            streams.copy(queue, [pair])
            rank.spans.append((task, began, rank.clock.moment(record)))

    def await_arrival(self, first: int, group: int) -> None:
        """Lets the device wait for a group of copies from the host."""
        arrival = self.arrivals[first]
        arrival.wait()
        self.streams.wait(COMPUTE, arrival.events[group])

    def depart(self, copies: CopyBatch) -> None:
        """Begins copies to the host."""
        streams, first, computes = self.streams, copies.tasks[0], self.rank.executable.computes
        departure = self.departures.get(first)
        if departure is None:
            departure = self.departures[first] = Departure(streams.event(), streams.event())
        for task in copies.tasks:
            slot = computes[task].outs[0]
            if slot in self.readers:
                self.readers[slot].wait()  # of the step before, which read what lies there
            self.made[slot] = departure
        streams.record(departure.ready, COMPUTE)
        streams.wait(OUT, departure.ready)
        self._copy(OUT, copies, slice(None))
        streams.record(departure.event, OUT)

    def gone(self, tasks: Iterable[int]) -> None:
        """Lets the device wait for copies to the host."""
        computes = self.rank.executable.computes
        found: dict[int, Departure] = {}
        for task in tasks:
            made = self.made[computes[task].ins[1]]
            assert isinstance(made, Departure)
            found[id(made)] = made
        for made in found.values():
            self.streams.wait(COMPUTE, made.event)

    def work(
        self, task: int, ins: list[torch.Tensor], outs: list[torch.Tensor], context: Context
    ) -> None:
        """Hands an update to the host."""
        executable = self.rank.executable
        call = executable.computes[task]
        before = [self.made.get(slot) for slot in call.ins]
        copies = [each for each in before if isinstance(each, Departure)]
        assert copies, "an update on the host reads a gradient that comes from its device"
        event = copies[-1].event  # they are in one queue
        bodies, records = executable.graph.bodies, self.rank.records
        span = [0]

        def begin() -> list[Callable[[], None]]:
            for each in before:
                assert not isinstance(each, HostJob) or each.done.is_set(), "state is not there yet"
            span[0] = time.perf_counter_ns()
            return update_parts(bodies, call.op, ins, outs, context)

        def end() -> None:
            if records:
                self.rank.spans.append((task, span[0], time.perf_counter_ns()))

        urgency = self.needed[task] + self.steps * len(executable.kind)
        job = HostJob(urgency, event, begin, end)
        for slot in call.outs:
            self.made[slot] = job
        for slot in call.ins:
            self.readers[slot] = job
        self.jobs.submit(job)


def runs_of_a_kind(
    executable: Executable, tasks: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The tasks of a HostStep, those of one kind that follow each other together."""
    for kind, some in groupby(tasks, lambda task: executable.kind[task]):
        yield kind, tuple(some)
