"""Messages between processes that share tables, and two ways to carry them.

Part of the room servers. A message is eight numbers and some bytes. Messages from one process to
another arrive in the order in which they were sent; sending does not wait. GlooMessages carries
them by torch.distributed in a group of its own, with a thread for each peer that receives.
LocalMessages carries them between threads of one process, with delays if wanted: for tests.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from apportion.execute import PeerLost, peer_errors

Numbers = npt.NDArray[Any]
HEADER = 8
KIND, TABLE, CLOCK, SEQUENCE, DELIVERED, ROWS, PAYLOAD = range(7)
UPDATE, TICK, ASK, PUSH, SYNC, BYE, END = range(7)
HEADER_TAG, PAYLOAD_TAG = 1, 2


@dataclass(frozen=True)
class TableMessage:
    """What arrives: numbers by the names above, and the arrays that were packed."""

    sender: int
    header: tuple[int, ...]
    payload: Numbers

    def __getitem__(self, name: int) -> int:
        return self.header[name]

    def unpack(self, *shapes: tuple[tuple[int, ...], Any]) -> list[Numbers]:
        """The arrays of a payload, by their shapes and dtypes."""
        found, at = [], 0
        for shape, dtype in shapes:
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            found.append(self.payload[at : at + size].view(dtype).reshape(shape))
            at += size
        return found


def packed(arrays: Sequence[Numbers]) -> Numbers:
    """Arrays one after the other, as bytes."""
    flat = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in arrays]
    return np.concatenate(flat) if flat else np.zeros(0, np.uint8)


Handler = Callable[[TableMessage], None]


class TableMessages(Protocol):
    """How messages are carried, seen from one process."""

    rank: int
    count: int

    def start(self, handler: Handler, failed: Callable[[str], None]) -> None:
        """Begins to receive: each message goes to `handler`, in threads of its own."""

    def send(self, to: int, header: Sequence[int], payload: Numbers) -> None:
        """Sends a message, later."""

    def close(self) -> None:
        """Ends. Everybody has said goodbye, so that nobody sends anything but that it ends."""


@dataclass
class GlooMessages:
    """Processes of a group of torch.distributed."""

    rank: int
    count: int
    group: Any
    threads: list[threading.Thread] = field(default_factory=list)
    under_way: deque[tuple[Any, Any]] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, handler: Handler, failed: Callable[[str], None]) -> None:
        for peer in range(self.count):
            if peer != self.rank:
                thread = threading.Thread(
                    target=self._receive, args=(peer, handler, failed), daemon=True
                )
                self.threads.append(thread)
                thread.start()

    def _receive(self, peer: int, handler: Handler, failed: Callable[[str], None]) -> None:
        import torch
        import torch.distributed as dist

        header = torch.zeros(HEADER, dtype=torch.int64)
        while True:
            try:
                with peer_errors():
                    dist.recv(header, peer, self.group, HEADER_TAG)
                    numbers = tuple(header.tolist())
                    payload = torch.empty(numbers[PAYLOAD], dtype=torch.uint8)
                    if numbers[PAYLOAD]:
                        dist.recv(payload, peer, self.group, PAYLOAD_TAG)
            except PeerLost as error:
                failed(f"the connection to process {peer} was lost: {error}")
                return
            if numbers[KIND] == END:
                return
            handler(TableMessage(peer, numbers, payload.numpy()))

    def send(self, to: int, header: Sequence[int], payload: Numbers) -> None:
        import torch
        import torch.distributed as dist

        numbers = torch.zeros(HEADER, dtype=torch.int64)
        numbers[: len(header)] = torch.tensor(list(header))
        numbers[PAYLOAD] = payload.nbytes
        with self.lock, peer_errors():
            while self.under_way and self.under_way[0][0].is_completed():
                self.under_way.popleft()
            work = dist.isend(numbers, to, self.group, HEADER_TAG)
            self.under_way.append((work, numbers))
            if payload.nbytes:
                content = torch.from_numpy(payload)
                self.under_way.append((dist.isend(content, to, self.group, PAYLOAD_TAG), content))

    def close(self) -> None:
        say_the_end(self)
        for thread in self.threads:
            thread.join()
        with peer_errors():
            for work, _ in self.under_way:
                work.wait()


@dataclass
class LocalMessages:
    """Threads of one process: `hub[receiver][sender]` is a queue. Each message is held back for up
    to `delay` seconds."""

    rank: int
    count: int
    hub: list[list[queue.Queue[TableMessage]]]
    delay: float = 0.0
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, handler: Handler, failed: Callable[[str], None]) -> None:
        for peer in range(self.count):
            if peer != self.rank:
                thread = threading.Thread(target=self._receive, args=(peer, handler), daemon=True)
                self.threads.append(thread)
                thread.start()

    def _receive(self, peer: int, handler: Handler) -> None:
        draw = random.Random(self.rank * self.count + peer)
        while True:
            message = self.hub[self.rank][peer].get()
            time.sleep(draw.random() * self.delay)
            if message[KIND] == END:
                return
            handler(message)

    def send(self, to: int, header: Sequence[int], payload: Numbers) -> None:
        whole = (*header, *(0,) * (HEADER - len(header)))
        self.hub[to][self.rank].put(TableMessage(self.rank, whole, payload.copy()))

    def close(self) -> None:
        say_the_end(self)
        for thread in self.threads:
            thread.join()


def say_the_end(messages: TableMessages) -> None:
    """Tells all others that this process sends no more."""
    for peer in range(messages.count):
        if peer != messages.rank:
            messages.send(peer, (END,), np.zeros(0, np.uint8))


def local_hub(count: int) -> list[list[queue.Queue[TableMessage]]]:
    """Queues for so many LocalMessages."""
    return [[queue.Queue() for _ in range(count)] for _ in range(count)]
