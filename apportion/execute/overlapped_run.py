"""Training steps that overlap, on one rank: what is late is done as soon as it can be.

Part of the room execute. A Worker whose plan lets steps overlap comes in; its steps run one after
the other, each with what is left of the one before (late_work.py). Between two of its own steps a
rank does what other ranks wait for and what is ready; while it would have to wait, all that is
ready. Where the transport cannot say what has arrived (gloo), late work is done where it is due.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from apportion.execute.backends import Handle, peer_errors
from apportion.execute.kernels.base import Context
from apportion.execute.ladder import Ladder
from apportion.execute.late_work import OPENS, SENDS, LateNode, LateSchedule
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Exchange, HostStep, Post, Segment
from apportion.execute.segment_function import SegmentFunction
from apportion.execute.wire import Wire


@dataclass(frozen=True, slots=True)
class ExchangeInFlight:
    """An exchange that has been posted: when, and what to wait for."""

    exchange: Exchange
    began: int
    works: list[Handle]


class StepWorker(Protocol):
    """What does the pieces of a training step: a Worker (transport.py)."""

    rank: Rank
    rounds: int
    pending: dict[tuple[int, int], ExchangeInFlight]

    def compiled(self) -> Ladder: ...

    def do_segment(self, segment: Segment, function: SegmentFunction, context: Context) -> None: ...

    def at_host(self, step: HostStep, context: Context) -> None: ...

    def post(self, exchange: Exchange, step: int) -> None: ...

    def open(self, exchange: Exchange, step: int) -> None: ...

    def send(self, exchange: Exchange, step: int) -> None: ...

    def wait(self, exchange: Exchange, step: int) -> None: ...

    def end(self, key: tuple[int, int]) -> None: ...


class UndoneNodes:
    """The nodes of a training step that are not done: by number, and of those that no other one
    has to come before the numbers in their order."""

    def __init__(self, nodes: Sequence[LateNode], followers: Sequence[Sequence[int]]) -> None:
        self.nodes = dict(enumerate(nodes))
        self._followers = followers
        self._before = [len(node.needs) for node in nodes]
        self.free = [number for number, count in enumerate(self._before) if not count]

    def remove(self, number: int) -> None:
        """Takes one out, which is done."""
        del self.nodes[number]
        self.free.remove(number)
        for other in self._followers[number]:
            self._before[other] -= 1
            if not self._before[other]:
                insort(self.free, other)


class OverlappedRun:
    """One rank's steps.

    left   the number of a training step -> its nodes that are not done
    at     how many of the steps that are not late are done, of the training step at hand
    heard  how many messages the wire had received when it was last looked at
    leading  from where on a node that others wait for may be ready
    """

    def __init__(self, worker: StepWorker, schedule: LateSchedule, wire: Wire | None) -> None:
        self.worker, self.schedule, self.wire = worker, schedule, wire
        self.left: dict[int, UndoneNodes] = {}
        self.followers: list[list[int]] = [[] for _ in schedule.nodes]
        for number, node in enumerate(schedule.nodes):
            for before in node.needs:
                self.followers[before].append(number)
        self.context: Context | None = None
        self.at, self.heard = 0, -1
        self.leading = {node.after for node in schedule.nodes if node.leads}

    def run(self, context: Context) -> torch.Tensor | None:
        """One training step but for its late work; returns the loss if it is here."""
        worker, schedule = self.worker, self.schedule
        now = worker.rounds
        functions = worker.compiled().functions
        self.context = context
        if worker.rank.last is None:
            self.left.clear()  # that step was finished, or is forgotten
        self.left[now] = UndoneNodes(schedule.nodes, self.followers)
        for k, step in enumerate(schedule.main):
            self.at = k
            self._do_due(now - 1, schedule.due[k])
            if k == schedule.clears:
                self._clear(now - 1)
            if self.leading:
                self._do_leading()
            if isinstance(step, Segment):
                worker.do_segment(step, functions[step], context)
            elif isinstance(step, Post):
                worker.post(step.exchange, now)
            elif isinstance(step, HostStep):
                worker.at_host(step, context)
            else:
                self._wait(step.exchange, now)
        self.at = len(schedule.main)
        if schedule.clears == self.at:  # none of its own messages needs their buffers
            self._clear(now - 1)
        assert now - 1 not in self.left, "late work was not due before the step ended"
        return worker.rank.put_off(context, self.left[now].nodes.values())

    def finish(self) -> None:
        """Does what is left of the last training step."""
        self._clear(self.worker.rounds - 1)

    def _clear(self, step: int) -> None:
        """Does all that is left of a training step, and waits until what it sent has left."""
        if step not in self.left:
            return
        self._do_due(step, len(self.schedule.nodes))
        del self.left[step]
        for key in [key for key in self.worker.pending if key[0] == step]:
            self.worker.end(key)
        self.worker.rank.last = None

    def _do_due(self, step: int, count: int) -> None:
        """Does the first so many nodes of a training step, in their order, as far as that has not
        been done; waits for what they read."""
        if step not in self.left:
            return
        left = self.left[step].nodes
        while left:
            number = next(iter(left))
            if number >= count:
                return
            for exchange in left[number].waits:
                self._wait(exchange, step)
            if number in left:  # it may have been done meanwhile
                self._do(step, number)

    def _wait(self, exchange: Exchange, step: int) -> None:
        """Waits for an exchange, and does what is ready meanwhile."""
        key = step, exchange.position
        if self.wire is not None and key in self.worker.pending:
            flight = self.worker.pending[key]
            while not _has_ended(flight):
                if not self._do_one(only_leading=False):
                    with peer_errors():
                        self.wire.wait_for_news(flight.works, self.heard)
        self.worker.wait(exchange, step)

    def _do_leading(self) -> None:
        """Does what other ranks wait for, if something may have become ready."""
        wire = self.wire
        if wire is not None and (wire.received > self.heard or self.at in self.leading):
            while self._do_one(only_leading=True):
                pass

    def _do_one(self, only_leading: bool) -> bool:
        """Does a node that is ready; whether there was one."""
        assert self.wire is not None
        self.heard = self.wire.received
        for step, number in self._ready(only_leading):
            self._do(step, number)
            return True
        return False

    def _ready(self, only_leading: bool) -> Iterator[tuple[int, int]]:
        now = self.worker.rounds
        for step, left in self.left.items():
            for number in left.free:
                node = left.nodes[number]
                if only_leading and not node.leads:
                    continue
                if step == now and node.after > self.at:
                    continue
                if self._has_arrived(step, node):
                    yield step, number

    def _has_arrived(self, step: int, node: LateNode) -> bool:
        """Whether all that a node reads of other ranks is there."""
        flights = (self.worker.pending.get((step, x.position)) for x in node.waits)
        return all(flight is not None and _has_ended(flight) for flight in flights)

    def _do(self, step: int, number: int) -> None:
        worker, node = self.worker, self.left[step].nodes[number]
        for exchange in node.waits:
            worker.wait(exchange, step)
        work = partial(self._act, node, step)
        if step == worker.rounds:
            assert self.context is not None
            work(self.context)
        else:
            worker.rank.do_late(work, node, begun=self.at < len(self.schedule.main))
        self.left[step].remove(number)

    def _act(self, node: LateNode, step: int, context: Context) -> None:
        worker = self.worker
        if isinstance(node.segment, HostStep):
            worker.at_host(node.segment, context)
        elif node.segment is not None:
            worker.do_segment(node.segment, worker.compiled().functions[node.segment], context)
        elif node.does == OPENS:
            assert node.exchange is not None
            worker.open(node.exchange, step)
        elif node.does == SENDS:
            assert node.exchange is not None
            worker.send(node.exchange, step)


def _has_ended(flight: ExchangeInFlight) -> bool:
    works: list[Any] = flight.works  # of a wire
    return all(work.done for work in works)
