"""Peers: how a rank of a loop reaches the others.

Part of the room loops. TableMessages are arrays whose size both sides know; a tag tells apart those
that are under way between the same two ranks. GlooPeers are processes, on torch.distributed.
LocalPeers are threads of one process: all ranks of a small run, for tests, and the only rank of a
serial one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from apportion.execute import PeerLost, peer_errors
from apportion.servers import GlooMessages, LocalMessages, TableMessage, TableMessages, local_hub

Numbers = npt.NDArray[Any]
COUNT_TAG, DATA_TAG = 1, 2
FIRST_FREE_TAG = 16


class MessageInFlight(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Waits until the array may be used again."""

    def is_completed(self) -> bool:
        """Whether waiting would take no time."""


class Peers(Protocol):
    """The ranks of a loop, seen from one of them."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def count(self) -> int:
        """How many ranks there are."""

    def send(self, values: Numbers, to: int, tag: int) -> MessageInFlight:
        """Begins to send a contiguous array, which must not change until it has been waited for."""

    def receive(self, into: Numbers, source: int, tag: int) -> MessageInFlight:
        """Begins to receive into a contiguous array."""

    def messages(self) -> TableMessages:
        """Another way to reach the same ranks, for tables; all have to ask for it."""


def gather(peers: Peers, mine: Numbers) -> list[Numbers]:
    """Everybody's array, all of one shape, in the order of ranks."""
    own = np.ascontiguousarray(mine)
    found = [own if rank == peers.rank else np.empty_like(own) for rank in range(peers.count)]
    waits = []
    for rank, into in enumerate(found):
        if rank != peers.rank and own.size:
            waits.append(peers.receive(into, rank, DATA_TAG))
    for rank in range(peers.count):
        if rank != peers.rank and own.size:
            waits.append(peers.send(own, rank, DATA_TAG))
    for each in waits:
        each.wait()
    return found


def exchange(peers: Peers, parcels: Sequence[Numbers]) -> list[Numbers]:
    """What everybody has for this rank; parcels[r] is what it has for rank r. All parcels have one
    dtype and agree in all dims but the first."""
    counts = np.array([len(parcel) for parcel in parcels], np.int64)
    everywhere = gather(peers, counts)
    waits, found = [], []
    for rank in range(peers.count):
        shape = (int(everywhere[rank][peers.rank]), *parcels[rank].shape[1:])
        into = parcels[rank] if rank == peers.rank else np.empty(shape, parcels[rank].dtype)
        if rank != peers.rank and into.size:
            waits.append(peers.receive(into, rank, DATA_TAG))
        found.append(into)
    for rank, parcel in enumerate(parcels):
        if rank != peers.rank and parcel.size:
            waits.append(peers.send(np.ascontiguousarray(parcel), rank, DATA_TAG))
    for each in waits:
        each.wait()
    return found


@dataclass(frozen=True)
class GlooPeers:
    """Processes of torch.distributed's default group."""

    rank: int
    count: int

    def send(self, values: Numbers, to: int, tag: int) -> MessageInFlight:
        import torch.distributed as dist

        with peer_errors():
            return _GlooMessage(dist.isend(_bytes(values), to, tag=tag), values)

    def receive(self, into: Numbers, source: int, tag: int) -> MessageInFlight:
        import torch.distributed as dist

        with peer_errors():
            return _GlooMessage(dist.irecv(_bytes(into), source, tag=tag), into)

    def messages(self) -> TableMessages:
        import torch.distributed as dist

        with peer_errors():
            group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        return GlooMessages(self.rank, self.count, group)


@dataclass(frozen=True)
class _GlooMessage:
    work: Any
    values: Numbers  # lives until the message has gone

    def wait(self) -> None:
        with peer_errors():
            self.work.wait()

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


def _bytes(values: Numbers) -> Any:
    import torch

    assert values.flags.c_contiguous, "a message is a contiguous array"
    return torch.from_numpy(values.reshape(-1).view(np.uint8))


@dataclass
class LocalHub:
    """Where the messages of LocalPeers are, by (sender, receiver, tag)."""

    queues: dict[tuple[int, int, int], queue.Queue[Numbers]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    broken: threading.Event = field(default_factory=threading.Event)
    hubs: list[list[list[queue.Queue[TableMessage]]]] = field(default_factory=list)
    joined: dict[int, int] = field(default_factory=dict)

    def message_hub(self, rank: int, count: int) -> list[list[queue.Queue[TableMessage]]]:
        """The queues of the store that a rank makes; the same for all ranks that make theirs."""
        with self.lock:
            number = self.joined.get(rank, 0)
            self.joined[rank] = number + 1
            while len(self.hubs) <= number:
                self.hubs.append(local_hub(count))
            return self.hubs[number]

    def queue(self, sender: int, receiver: int, tag: int) -> queue.Queue[Numbers]:
        with self.lock:
            return self.queues.setdefault((sender, receiver, tag), queue.Queue())


@dataclass(frozen=True)
class LocalPeers:
    """Threads of this process."""

    rank: int = 0
    count: int = 1
    hub: LocalHub = field(default_factory=LocalHub)

    def send(self, values: Numbers, to: int, tag: int) -> MessageInFlight:
        self.hub.queue(self.rank, to, tag).put(values.copy())
        return _LocalMessage(None, values, self.hub)

    def receive(self, into: Numbers, source: int, tag: int) -> MessageInFlight:
        return _LocalMessage(self.hub.queue(source, self.rank, tag), into, self.hub)

    def messages(self) -> TableMessages:
        return LocalMessages(self.rank, self.count, self.hub.message_hub(self.rank, self.count))


@dataclass(frozen=True)
class _LocalMessage:
    source: queue.Queue[Numbers] | None
    values: Numbers
    hub: LocalHub

    def wait(self) -> None:
        while self.source is not None:
            if self.hub.broken.is_set():
                raise PeerLost("another rank has failed")
            try:
                found = self.source.get(timeout=0.05)
            except queue.Empty:
                continue
            assert found.nbytes == self.values.nbytes, "a message of another size was sent"
            self.values[...] = found.reshape(self.values.shape)
            return

    def is_completed(self) -> bool:
        return self.source is None
