"""What a Wire writes to its sockets: slices, the most urgent first; and what it makes of theirs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from apportion.execute.wire import DATA, HEADER, MOST_ROOM, OPEN, SMALL, Pace, Wire

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="a wire needs Linux")

Frame = tuple[int, int, int, int]
"""What it is, bytes that follow, key and offset."""
OTHER = 1


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket, socket.socket]]:
    """A Wire to one other rank, and that rank's ends of its express and bulk connection."""
    express, bulk = socket.socketpair(), socket.socketpair()
    wire = Wire({OTHER: (express[0], bulk[0])})
    for link in (express[1], bulk[1]):
        link.settimeout(10)
    yield wire, express[1], bulk[1]
    wire.close()
    express[1].close()
    bulk[1].close()


def read(link: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += link.recv(count - len(found))
    return found


def frame(link: socket.socket) -> tuple[Frame, bytes]:
    head = HEADER.unpack(read(link, HEADER.size))
    return head, read(link, head[1])


def opened(link: socket.socket, *keys: int) -> None:
    """The other rank has buffers for these messages."""
    for key in keys:
        link.sendall(HEADER.pack(OPEN, 0, key, 0))


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


def numbers(count: int, start: int = 0) -> torch.Tensor:
    return (torch.arange(start, start + count) % 251).to(torch.uint8)


def test_slices_of_an_urgent_message_overtake(
    ends: tuple[Wire, socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apportion.execute.wire.AHEAD", 0.0)  # however fast this link is
    wire, express, bulk = ends
    wire.pace = Pace(1 << 16, 1 << 18)
    opened(express, 5, 3, 4, 1)
    messages = {5: numbers(4_000_000), 3: numbers(200_000, 3), 4: numbers(200_000, 4)}
    works = [wire.send(sent, OTHER, key, key) for key, sent in messages.items()]
    until(lambda: wire._sockets.bulk[OTHER].is_full)  # what the kernel has is out of reach
    messages[1] = numbers(150_000, 1)
    works.append(wire.send([messages[1][:70_001], messages[1][70_001:]], OTHER, 1, 1))
    order, found = [], {key: bytearray(len(sent)) for key, sent in messages.items()}
    for _ in range(62 + 4 + 4 + 3):
        (what, length, key, offset), body = frame(bulk)
        assert what == DATA
        order.append(key)
        found[key][offset : offset + length] = body
    taken = order.index(1)  # slices that the kernel had
    assert taken * (1 << 16) <= (1 << 18) + (1 << 17)
    assert order == [5] * taken + [1] * 3 + [3] * 4 + [4] * 4 + [5] * (62 - taken)
    assert {key: bytes(sent.tolist()) for key, sent in messages.items()} == {
        key: bytes(it) for key, it in found.items()
    }
    for work in works:
        work.wait()


@pytest.mark.parametrize(("ahead", "room"), [(0.0, 1 << 15), (1e9, MOST_ROOM)])
def test_the_buffer_follows_the_link_and_is_never_below_the_credit(
    ends: tuple[Wire, socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    ahead: float,
    room: int,
) -> None:
    monkeypatch.setattr("apportion.execute.wire.AHEAD", ahead)
    wire, express, bulk = ends
    wire.pace = Pace(1 << 14, 1 << 16)
    opened(express, 1)
    message = numbers(6_000_000)
    wire.send(message, OTHER, 1)
    found, sizes = bytearray(), []
    while len(found) < len(message):
        (what, length, _, offset), body = frame(bulk)
        assert (what, offset) == (DATA, len(found))
        found += body
        sizes.append(length)
    assert found == message.numpy().tobytes()
    assert wire._sockets.bulk[OTHER].room == room
    assert (max(sizes) > 1 << 14) == (room > 1 << 15)
    wire.pace = Pace(1 << 14, 1 << 17)
    assert wire._sockets.bulk[OTHER].room == 1 << 16


def test_a_large_message_waits_for_its_buffer_and_a_small_one_does_not(
    ends: tuple[Wire, socket.socket, socket.socket],
) -> None:
    wire, express, bulk = ends
    large = wire.send(numbers(SMALL + 1), OTHER, 8, 0)
    wire.send(numbers(SMALL), OTHER, 9, 0).wait()
    assert frame(express)[0] == (DATA, SMALL, 9, 0)
    assert not large.done
    opened(express, 8)
    assert frame(bulk) == ((DATA, SMALL + 1, 8, 0), bytes(numbers(SMALL + 1).tolist()))
    large.wait()


def test_what_arrives_is_put_where_it_belongs(
    ends: tuple[Wire, socket.socket, socket.socket],
) -> None:
    wire, express, bulk = ends
    early = bytes(range(200))
    express.sendall(HEADER.pack(DATA, 200, 2, 0) + early)
    until(lambda: bool(wire._sockets.early))
    room = torch.zeros(200, dtype=torch.uint8)
    wire.receive(room, OTHER, 2).wait()
    assert bytes(room.tolist()) == early
    whole = torch.zeros(100_000, dtype=torch.uint8)
    work = wire.receive(whole, OTHER, 3)
    assert frame(express)[0] == (OPEN, 0, 3, 0)
    body = bytes(numbers(100_000).tolist())
    for start, end in ((60_000, 100_000), (0, 60_000)):
        assert not work.done
        bulk.sendall(HEADER.pack(DATA, end - start, 3, start) + body[start:end])
    work.wait()
    assert bytes(whole.tolist()) == body


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (HEADER.pack(7, 0, 0, 0), "what is no message"),
        (HEADER.pack(DATA, SMALL + 1, 4, 0), "what nobody asked for"),
        (HEADER.pack(DATA, 100_000, 3, 1), "100001 bytes where 100000 are expected"),
        (b"", "was closed"),
    ],
)
def test_who_talks_nonsense_is_lost(
    ends: tuple[Wire, socket.socket, socket.socket], said: bytes, why: str
) -> None:
    wire, _, bulk = ends
    work = wire.receive(torch.empty(100_000, dtype=torch.uint8), OTHER, 3)
    bulk.sendall(said)
    if not said:
        bulk.shutdown(socket.SHUT_WR)
    with pytest.raises(RuntimeError, match=f"rank {OTHER} has ended .*{why}"):
        work.wait()
