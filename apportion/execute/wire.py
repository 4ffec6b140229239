"""Messages between ranks of different machines: slices over sockets, the most urgent first.

Part of the room execute. Sockets to the other ranks come in (wire_sockets.py), a Wire goes out, by
which a rank sends and receives flat buffers on the host.

    wire = Wire(sockets)
    wire.receive(buffer, source, key)             the same key at both ends
    wire.send(buffer, target, key, priority)      less is sent first
    wire.pace = Pace(slice_bytes, credit_bytes)

A message is cut into slices, and whenever a slice has been handed to the kernel, the most urgent
message goes on: what was posted later overtakes what is under way. What the kernel has taken is out
of reach, so its buffer is kept as small as the credit says, or as a millisecond of a link that is
so fast: to fill it more often would cost the processor more than others gain by overtaking.
Messages may be posted in any order at both ends.

There are two connections to every rank. Small messages travel by the express one, and wait for no
slice of a large one. A large message is sent once its receiver has said, by the express one, that
there is a buffer for it; a small one at once, and its receiver keeps it until there is.

One thread serves all sockets of a rank, and sleeps in between. Whoever posts a message writes it to
its socket at once, as far as that takes it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch

DATA, OPEN = 1, 2  # bytes of a message; its receiver has a buffer for it
HEADER = struct.Struct("<IIQQ")  # which of these, bytes that follow, the message's key and offset
SMALL = 1 << 15  # bytes of a message that travels by the express connection
MOST_ROOM = 1 << 22  # bytes of a buffer of the kernel, where they are not limited
AHEAD = 1e-3  # seconds for which the kernel has something to send, if it is more than the credit
SAMPLE = 1 << 21  # bytes after which it is known how fast a link is
WINDOW = 1 << 20  # bytes that may arrive before the thread reads them
WAKE = 1 << 17  # bytes that have to be there before the thread is woken to read more of a slice
PATIENCE = 1800.0  # seconds to wait for a rank that lives and does not answer, as gloo does
TURN = 1.0  # seconds between looks at the clock
ALL = 1 << 62
NEXT = -1  # the key of a message that is known by its number
NUMBERED = 1 << 63  # the first of these


@dataclass(frozen=True, slots=True)
class Pace:
    """Bytes of a slice, and of what the kernel may have taken and not yet sent; 0: all of it."""

    slice_bytes: int = 0
    credit_bytes: int = 0


@dataclass(slots=True, eq=False)
class SentMessage:
    """Bytes that are handed to the kernel slice by slice, and must not change until they are."""

    wire: _Sockets
    other: int
    key: int
    priority: int
    pieces: list[memoryview]
    nbytes: int
    keeps: object  # what owns the bytes
    taken: int = 0  # bytes of slices that were begun
    done: bool = False

    def wait(self) -> None:
        """Waits until the kernel has all of them."""
        self.wire.wait(self)

    def views(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes start to end."""
        for piece in self.pieces:
            if start < len(piece) and end > 0:
                yield piece[max(start, 0) : min(end, len(piece))]
            start, end = start - len(piece), end - len(piece)


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """A buffer that bytes of another rank are read into."""

    wire: _Sockets
    other: int
    key: int
    room: memoryview
    left: int
    keeps: object  # what owns the room
    done: bool = False

    def wait(self) -> None:
        """Waits until all of them are there."""
        self.wire.wait(self)


@dataclass(slots=True, eq=False)
class _Connection:
    """One socket to another rank, with what is being written to it and read from it."""

    socket: socket.socket
    other: int
    express: bool
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what is written
    words: deque[bytes] = field(default_factory=deque)  # headers that are sent by themselves
    queue: list[tuple[int, int, SentMessage]] = field(default_factory=list)  # a heap
    frame: list[memoryview] = field(default_factory=list)  # what is left of the slice under way
    owner: SentMessage | None = None  # the message that ends with it
    is_full: bool = False
    full_at: float = 0.0  # when; 0 if it has been empty since
    handed: int = 0  # bytes since then
    drained: int = 0  # bytes that the kernel has sent between one time it was full and the next
    seconds: float = 0.0  # of these
    room: int = 0  # bytes of the kernel's buffer, as it was asked for
    credit: int = MOST_ROOM  # what they are at least
    header: bytearray = field(default_factory=lambda: bytearray(HEADER.size))
    read: int = 0  # of the header
    body: memoryview | None = None
    target: ReceivedMessage | bytearray | None = None
    slice: tuple[int, int] = (0, 0)  # its message's key, its length
    wakes_at: int = 1


class Wire:
    """One rank's connections to all others. It ends with this object."""

    def __init__(self, sockets: Mapping[int, tuple[socket.socket, socket.socket]]) -> None:
        """`sockets`: the express and the other one of every rank."""
        self._sockets = _Sockets(sockets)
        self._pace = Pace()
        self._sent, self._received = ({rank: count(NUMBERED) for rank in sockets} for _ in range(2))
        thread = threading.Thread(target=self._sockets.serve, name="wire", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _ended, self._sockets, thread)

    @property
    def pace(self) -> Pace:
        """How messages are cut, and how much of them is out of reach."""
        return self._pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        if pace != self._pace:
            self._pace = pace
            self._sockets.set_pace(pace)

    def receive(self, buffer: torch.Tensor, source: int, key: int = NEXT) -> ReceivedMessage:
        """Begins to receive the message of that key, or the next one from that rank that has
        none."""
        if key == NEXT:
            key = next(self._received[source])
        return self._sockets.receive(buffer, source, key)

    def send(
        self,
        buffer: torch.Tensor | Sequence[torch.Tensor],
        target: int,
        key: int = NEXT,
        priority: int = 0,
    ) -> SentMessage:
        """Begins to send a buffer, or contiguous pieces that follow each other."""
        if key == NEXT:
            key = next(self._sent[target])
        pieces = [buffer] if isinstance(buffer, torch.Tensor) else buffer
        return self._sockets.send(pieces, target, key, priority)

    @property
    def received(self) -> int:
        """How many messages have been received."""
        return self._sockets.received

    def wait_for_news(self, messages: Sequence[Any], known: int) -> None:
        """Waits until one of these messages is done, or more than `known` have been received."""
        with self._sockets.changed:
            ended = sum(message.done for message in messages)
        self._sockets.wait_until(
            messages,
            lambda: (
                sum(message.done for message in messages) > ended or self._sockets.received > known
            ),
        )

    def close(self) -> None:
        """Ends the connections."""
        self._end()


class _Sockets:
    """What the thread of a Wire and its owner share."""

    def __init__(self, sockets: Mapping[int, tuple[socket.socket, socket.socket]]) -> None:
        self.express = {rank: _Connection(pair[0], rank, True) for rank, pair in sockets.items()}
        self.bulk = {rank: _Connection(pair[1], rank, False) for rank, pair in sockets.items()}
        self.lock = threading.Lock()  # of the tables below
        self.changed = threading.Condition(self.lock)
        self.is_awaited = False
        self.received = 0
        # by the other rank and the key
        self.expected: dict[tuple[int, int], ReceivedMessage] = {}
        self.early: dict[tuple[int, int], deque[bytearray]] = defaultdict(deque)
        self.closed: dict[tuple[int, int], SentMessage] = {}  # there is no buffer for it yet
        self.opened: set[tuple[int, int]] = set()  # there is, and it is not posted yet
        self.ended: dict[int, str] = {}
        self.number = 0
        self.slice = ALL
        self.poll = select.epoll()
        self.stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poll.register(self.stop, select.EPOLLIN)
        self.by_file: dict[int, _Connection] = {}
        for connection in (*self.express.values(), *self.bulk.values()):
            connection.socket.setblocking(False)
            self.by_file[connection.socket.fileno()] = connection
            events = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
            self.poll.register(connection.socket.fileno(), events)
        for connection in self.bulk.values():  # Linux makes room for what it is told to wait for,
            for least in (WINDOW, 1):  # and does not take it back
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    # What the owner does

    def set_pace(self, pace: Pace) -> None:
        self.slice = pace.slice_bytes or ALL
        for connection in self.bulk.values():
            with connection.lock:
                connection.credit = pace.credit_bytes // 2 or MOST_ROOM
                self._give_room(connection, connection.credit)

    def _give_room(self, connection: _Connection, room: int) -> None:
        """Has the kernel take so many bytes, which it doubles, but not less than the credit."""
        room = max(min(room, MOST_ROOM), connection.credit)
        if room != connection.room:
            connection.room = room
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)

    def receive(self, buffer: torch.Tensor, source: int, key: int) -> ReceivedMessage:
        found = ReceivedMessage(self, source, key, _bytes_of(buffer), buffer.nbytes, buffer)
        place = source, key
        with self.lock:
            early = self.early.get(place)
            if early or not found.left:
                if early:
                    _copy(early.popleft(), found.room)
                if early is not None and not early:
                    del self.early[place]
                found.done, found.left = True, 0
                self.received += 1
                return found
            self.expected[place] = found
        if buffer.nbytes > SMALL:
            connection = self.express[source]
            with connection.lock:
                connection.words.append(HEADER.pack(OPEN, 0, key, 0))
                self._write(connection)
        return found

    def send(
        self, pieces: Sequence[torch.Tensor], target: int, key: int, priority: int
    ) -> SentMessage:
        views, total = [_bytes_of(piece) for piece in pieces], sum(p.nbytes for p in pieces)
        found = SentMessage(self, target, key, priority, views, total, pieces)
        if not total:
            found.done = True
            return found
        if total > SMALL:
            with self.lock:
                if (target, key) not in self.opened:
                    self.closed[target, key] = found
                    return found
                self.opened.remove((target, key))
        self._post(found)
        return found

    def _post(self, message: SentMessage) -> None:
        small = message.nbytes <= SMALL
        connection = (self.express if small else self.bulk)[message.other]
        with connection.lock:
            self.number += 1
            heappush(connection.queue, (message.priority, self.number, message))
            if not connection.is_full:
                self._write(connection)

    def wait(self, message: SentMessage | ReceivedMessage) -> None:
        self.wait_until((message,), lambda: message.done)

    def wait_until(
        self, messages: Sequence[SentMessage | ReceivedMessage], true: Callable[[], bool]
    ) -> None:
        """Waits until something is true, which may be so when a message is done; RuntimeError if
        the other end of one of these has ended."""
        deadline = time.monotonic() + PATIENCE
        with self.changed:
            while not true():
                for message in messages:
                    if not message.done and message.other in self.ended:
                        raise RuntimeError(self.ended[message.other])
                if time.monotonic() > deadline:
                    named = ", ".join(str(k) for k in sorted({m.other for m in messages}))
                    raise RuntimeError(f"rank {named} did not answer within {PATIENCE:g} s")
                self.is_awaited = True
                self.changed.wait(TURN)
            self.is_awaited = False

    # What the thread does

    def serve(self) -> None:
        """Reads and writes until the Wire ends."""
        while True:
            for number, event in self.poll.poll():
                if number == self.stop:
                    return
                connection = self.by_file[number]
                if connection.other in self.ended:
                    continue
                try:
                    if event & select.EPOLLOUT:
                        with connection.lock:
                            connection.is_full = False
                            self._write(connection)
                    if event & ~select.EPOLLOUT:
                        self._read(connection)
                except (OSError, RuntimeError) as error:
                    self._lose(connection.other, str(error))

    def _lose(self, rank: int, why: str) -> None:
        with self.changed:
            self.ended.setdefault(rank, f"rank {rank} has ended ({why})")
            self.changed.notify_all()

    def _finish(self, message: SentMessage | ReceivedMessage) -> None:
        with self.changed:
            message.done = True
            self.received += isinstance(message, ReceivedMessage)
            if self.is_awaited:
                self.changed.notify_all()

    def _is_full(self, connection: _Connection) -> None:
        """Notes that the kernel takes no more; its buffer follows how fast the link is."""
        now = time.monotonic()
        if connection.full_at:
            connection.drained += connection.handed
            connection.seconds += now - connection.full_at
        connection.is_full, connection.full_at, connection.handed = True, now, 0
        if connection.drained >= SAMPLE:
            if connection.credit < MOST_ROOM:
                rate = connection.drained / max(connection.seconds, 1e-9)
                self._give_room(connection, int(rate * AHEAD) // 2)
            connection.drained, connection.seconds = 0, 0.0

    def _write(self, connection: _Connection) -> None:
        """Writes slices until the socket takes no more; its lock is held."""
        try:
            while connection.frame or self._next_frame(connection):
                sent = connection.socket.sendmsg(connection.frame)
                connection.handed += sent
                frame = connection.frame
                while frame and sent >= len(frame[0]):
                    sent -= len(frame.pop(0))
                if sent:
                    frame[0] = frame[0][sent:]
                if not frame and connection.owner is not None:
                    message, connection.owner = connection.owner, None
                    self._finish(message)
            connection.full_at = 0.0
        except BlockingIOError:
            self._is_full(connection)
        except OSError as error:
            self._lose(connection.other, str(error))

    def _next_frame(self, connection: _Connection) -> bool:
        """Takes up what is to be written next, if there is something."""
        if connection.words:
            connection.frame = [memoryview(connection.words.popleft())]
            return True
        if not connection.queue:
            return False
        message = connection.queue[0][2]
        start = message.taken
        more = connection.room if connection.room > connection.credit else 0
        most = message.nbytes if connection.express else start + max(self.slice, more)
        end = message.taken = min(most, message.nbytes)
        header = HEADER.pack(DATA, end - start, message.key, start)
        connection.frame = [memoryview(header), *message.views(start, end)]
        if end == message.nbytes:
            heappop(connection.queue)
            connection.owner = message
        return True

    def _read(self, connection: _Connection) -> None:
        """Reads until there is no more."""
        while True:
            try:
                if connection.body is None:
                    self._read_header(connection)
                else:
                    self._read_body(connection)
            except BlockingIOError:
                self._wake_later(connection)
                return

    def _wake_later(self, connection: _Connection) -> None:
        """Lets the thread sleep until enough of a slice is there that it is worth to be woken."""
        if connection.express:
            return
        wakes_at = 1 if connection.body is None else min(len(connection.body), WAKE)
        if wakes_at != connection.wakes_at:
            connection.wakes_at = wakes_at
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _read_header(self, connection: _Connection) -> None:
        """Reads a header, or more of it."""
        room = memoryview(connection.header)[connection.read :]
        got = connection.socket.recv_into(room)
        if not got:
            raise RuntimeError("the connection was closed")
        connection.read += got
        if connection.read < HEADER.size:
            return
        connection.read = 0
        what, length, key, offset = HEADER.unpack(connection.header)
        if what == OPEN:
            self._open(connection.other, key)
        elif what == DATA:
            self._begin_body(connection, key, offset, length)
        else:
            raise RuntimeError("it sends what is no message")

    def _begin_body(self, connection: _Connection, key: int, offset: int, length: int) -> None:
        with self.lock:
            target = self.expected.get((connection.other, key))
        connection.slice = key, length
        if target is not None:
            if offset + length > len(target.room):
                raise RuntimeError(
                    f"it sends {offset + length} bytes where {len(target.room)} are expected"
                )
            connection.target = target
            connection.body = target.room[offset : offset + length]
        elif length > SMALL or offset:
            raise RuntimeError("it sends what nobody asked for")
        else:
            connection.target = bytearray(length)
            connection.body = memoryview(connection.target)

    def _read_body(self, connection: _Connection) -> None:
        body, target = connection.body, connection.target
        assert body is not None
        got = connection.socket.recv_into(body)
        if not got:
            raise RuntimeError("the connection was closed")
        if got < len(body):
            connection.body = body[got:]
            return
        connection.body = connection.target = None
        key, length = connection.slice
        if isinstance(target, bytearray):
            target = self._keep(connection.other, key, target)
        if target is not None:
            target.left -= length
            if not target.left:
                with self.lock:
                    del self.expected[connection.other, key]
                self._finish(target)

    def _keep(self, rank: int, key: int, found: bytearray) -> ReceivedMessage | None:
        """Keeps what arrived before there was a buffer for it; the message, if there is one by
        now."""
        with self.lock:
            target = self.expected.get((rank, key))
            if target is None:
                self.early[rank, key].append(found)
                return None
        _copy(found, target.room)
        return target

    def _open(self, rank: int, key: int) -> None:
        """There is a buffer for a message, which may be sent from now on."""
        with self.lock:
            message = self.closed.pop((rank, key), None)
            if message is None:
                self.opened.add((rank, key))
        if message is not None:
            self._post(message)


def _copy(found: bytearray, room: memoryview) -> None:
    if len(found) != len(room):
        raise RuntimeError(f"{len(found)} bytes arrived where {len(room)} are expected")
    room[:] = found


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _ended(sockets: _Sockets, thread: threading.Thread) -> None:
    os.eventfd_write(sockets.stop, 1)
    if thread is not threading.current_thread():
        thread.join(5.0)
    for connection in (*sockets.express.values(), *sockets.bulk.values()):
        connection.socket.close()
    sockets.poll.close()
    os.close(sockets.stop)
