"""Messages between processes of one machine: the receiver reads them out of the sender's memory.

Part of the room execute. The ranks of a process group come in; PeerMemory goes out, by which a rank
sends and receives flat buffers on the host, or None where not all ranks can read each other.

A sender offers the address and the length of a buffer over a local socket; the receiver copies it
into its own buffer in one system call (`process_vm_readv`) and says that it has. So a message is
copied once and no thread serves it, where gloo's goes through the kernel twice, by way of a thread
at each end. A rank reads whatever is offered to it while it waits for anything at all, so that two
that wait for each other go on.

This is for ranks of one user on one Linux, in one network (a namespace with a network of its own is
another machine), and where one process may read another. The environment variable
APPORTION_TRANSPORT, `wire` or `gloo`, turns it off. Where the kernel keeps processes from looking
at each other (Yama's `ptrace_scope` is not 0, some containers) it is found not to work, and a Wire
(wire.py) carries all.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OFFER, TAKEN = 1, 2  # a buffer may be read; it has been
SIGN = struct.Struct("=B")  # which of these
SPAN = struct.Struct("=QQ")  # address and bytes: as many as the buffer has pieces follow an offer
LONGEST = 1 << 18  # bytes of a packet
CARD = struct.Struct("=32sqQ16s")  # what a rank tells the others: machine, process, address, words
PATIENCE = 1800.0  # seconds to wait for a rank that lives and does not answer, as gloo does
TURN = 1000  # milliseconds between looks at the clock
TOGETHER, MOST = 64, 1 << 24  # spans that one call copies, bytes of each
BACKLOG = 256
SWITCH = "APPORTION_TRANSPORT"
MEMORY, WIRE, GLOO = "memory", "wire", "gloo"
MEETING = 30.0  # seconds for ranks to connect
CREDENTIALS = struct.Struct("=iII")  # process, user, group

Spans = list[tuple[int, int]]
"""Addresses and lengths in bytes."""


class _Span(ctypes.Structure):
    """C's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass(slots=True, eq=False)
class BufferToFill:
    """A buffer that another rank's bytes are to be copied into."""

    memory: PeerMemory
    buffer: torch.Tensor
    source: int
    done: bool = False

    def wait(self) -> None:
        """Waits until they have been."""
        self.memory.take_all()
        while not self.done or self.memory.unsaid:
            self.memory.serve(self.source)


@dataclass(slots=True, eq=False)
class BufferOnOffer:
    """Pieces that another rank may read, and that must not change until it has."""

    memory: PeerMemory
    pieces: Sequence[torch.Tensor]
    target: int
    done: bool = False

    def wait(self) -> None:
        """Waits until it has."""
        self.memory.take_all()
        while not self.done or self.memory.unsaid:
            self.memory.serve(self.target)


@dataclass
class PeerMemory:
    """This rank's sockets to all others, and what is under way."""

    processes: dict[int, int]
    sockets: dict[int, socket.socket]
    read: Any
    to_fill: dict[int, deque[BufferToFill]] = field(default_factory=lambda: defaultdict(deque))
    offered: dict[int, deque[Spans]] = field(default_factory=lambda: defaultdict(deque))
    on_offer: dict[int, deque[BufferOnOffer]] = field(default_factory=lambda: defaultdict(deque))
    unsaid: dict[int, deque[bytes]] = field(default_factory=dict)  # a full socket did not take it
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ranks = {link.fileno(): rank for rank, link in self.sockets.items()}
        self.inbox = bytearray(LONGEST)
        self.poll = select.poll()
        for number in self.ranks:
            self.poll.register(number, select.POLLIN)

    def receive(self, buffer: torch.Tensor, source: int) -> BufferToFill:
        """Begins to receive; messages of one rank arrive in the order in which they are sent."""
        found = BufferToFill(self, buffer, source)
        self.to_fill[source].append(found)
        return found

    def send(self, buffer: torch.Tensor | Sequence[torch.Tensor], target: int) -> BufferOnOffer:
        """Begins to send a buffer, or contiguous pieces that follow each other."""
        pieces = [buffer] if isinstance(buffer, torch.Tensor) else buffer
        found = BufferOnOffer(self, pieces, target)
        self.on_offer[target].append(found)
        spans = [SPAN.pack(piece.data_ptr(), piece.nbytes) for piece in pieces]
        self._tell(target, b"".join([SIGN.pack(OFFER), *spans]))
        return found

    def serve(self, wanted: int) -> None:
        """Waits until some rank says something, and does what follows from it. Raises RuntimeError
        if the rank that is waited for has ended or says nothing."""
        deadline = time.monotonic() + PATIENCE
        while True:
            if wanted in self.ended:
                raise RuntimeError(f"rank {wanted} has ended")
            if self._listen(TURN):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {wanted} did not answer within {PATIENCE:g} s")

    def take_all(self) -> None:
        """Copies what was offered before there were buffers for it. Whoever waits does so first:
        the rank that offers may wait for it, and others for that rank."""
        for source in tuple(self.offered):
            self.take(source)

    def take(self, source: int) -> None:
        """Copies what the rank has offered, as far as there are buffers for it."""
        offered, to_fill = self.offered[source], self.to_fill[source]
        while offered and to_fill:
            spans, target = offered.popleft(), to_fill.popleft()
            nbytes = sum(length for _, length in spans)
            if nbytes != target.buffer.nbytes:
                raise RuntimeError(
                    f"rank {source} sends {nbytes} bytes where {target.buffer.nbytes} are expected"
                )
            try:
                copy_from(self.read, self.processes[source], spans, target.buffer)
            except OSError as error:
                raise RuntimeError(f"rank {source}: {error}") from None
            target.done = True
            self._tell(source, SIGN.pack(TAKEN))

    def _listen(self, milliseconds: int) -> bool:
        """Hears what the ranks say; whether one did."""
        events = self.poll.poll(milliseconds)
        for number, event in events:
            rank = self.ranks[number]
            if event & select.POLLOUT:
                self._say(rank)
            if not event & ~select.POLLOUT:
                continue
            try:
                length = self.sockets[rank].recv_into(self.inbox)
            except ConnectionError:
                length = 0
            if not length:
                self.ended.add(rank)
                self.unsaid.pop(rank, None)
                self.poll.unregister(number)
                continue
            if self.inbox[0] == TAKEN:
                self.on_offer[rank].popleft().done = True
            else:
                self.offered[rank].append(list(SPAN.iter_unpack(self.inbox[SIGN.size : length])))
                self.take(rank)
        return bool(events)

    def _tell(self, rank: int, packet: bytes) -> None:
        """Says something to a rank, at once or as soon as its socket takes it."""
        packets = self.unsaid.get(rank)
        if packets is not None:
            packets.append(packet)
        elif not self._sent(rank, packet):
            self.unsaid[rank] = deque([packet])
            self.poll.modify(self.sockets[rank].fileno(), select.POLLIN | select.POLLOUT)

    def _sent(self, rank: int, packet: bytes) -> bool:
        """Sends a packet, unless the rank has too many to read; whether it did."""
        try:
            self.sockets[rank].send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            raise RuntimeError(f"rank {rank} has ended") from None
        return True

    def _say(self, rank: int) -> None:
        packets = self.unsaid[rank]
        while packets and self._sent(rank, packets[0]):
            packets.popleft()
        if not packets:
            del self.unsaid[rank]
            self.poll.modify(self.sockets[rank].fileno(), select.POLLIN)

    def close(self) -> None:
        """Ends the connections."""
        for link in self.sockets.values():
            link.close()


def reader() -> Any:
    """C's `process_vm_readv`; OSError or AttributeError where there is none."""
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    return read


def copy_from(read: Any, process: int, spans: Spans, target: torch.Tensor) -> None:
    """Fills a contiguous tensor on the host with bytes of another process: those at (address,
    length), one after the other. Raises OSError if the kernel does not allow it."""
    place, cut = target.data_ptr(), _cut(spans)
    while several := list(islice(cut, TOGETHER)):
        length = sum(nbytes for _, nbytes in several)
        here = _Span(place, length)
        there = (_Span * len(several))(*(_Span(*span) for span in several))
        done = read(
            ctypes.c_int(process), ctypes.byref(here), ctypes.c_ulong(1), there,
            ctypes.c_ulong(len(several)), ctypes.c_ulong(0),
        )  # fmt: skip
        if done != length:
            raise OSError(ctypes.get_errno(), f"the memory of process {process} cannot be read")
        place += length


def _cut(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans of which TOGETHER make no more than one call copies."""
    for address, nbytes in spans:
        for start in range(0, nbytes, MOST):
            yield address + start, min(MOST, nbytes - start)


def carrier() -> str:
    """What carries messages on this machine if it can: measured costs depend on it. MEMORY, WIRE or
    GLOO; where the first cannot the next does."""
    if not sys.platform.startswith("linux"):
        return GLOO
    wanted = os.environ.get(SWITCH)
    return wanted if wanted in (WIRE, GLOO) else MEMORY


def join_peer_memory(wanted: bool = True) -> PeerMemory | None:
    """The PeerMemory of this rank in the running process group, whose ranks call it together, or
    None for all of them; also if one of them has not `wanted` it."""
    words = torch.tensor(list(os.urandom(16)), dtype=torch.uint8)
    told = bytes(words.tolist())
    door = _door(told) if wanted else None
    machine = _machine() if door is not None else os.urandom(32)
    cards = _told_by_all(CARD.pack(machine, os.getpid(), words.data_ptr(), told))
    if door is None or len({machine for machine, *_ in cards}) > 1:
        return None
    with door:
        found = _connected(door, cards)
    if _by_all(found is not None):
        return found
    if found is not None:
        found.close()
    return None


def _door(words: bytes) -> socket.socket | None:
    """A socket that other ranks can connect to; None where this is not for this process."""
    try:
        reader()
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(_address(words))
        door.listen(BACKLOG)
    except (AttributeError, OSError):
        return None
    door.settimeout(MEETING)
    return door


def _address(words: bytes) -> str:
    """The name of a rank's socket, which is in no file system."""
    return f"\0apportion-{words.hex()}"


def _machine() -> bytes:
    """The machine, its network and processes as this one sees them, and the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    facts = (boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid"), os.geteuid())
    return sha256(repr(facts).encode()).digest()


def _connected(door: socket.socket, cards: Sequence[tuple[Any, ...]]) -> PeerMemory | None:
    """Sockets to all ranks, if the memory of all can be read."""
    me, links, read = dist.get_rank(), dict[int, socket.socket](), reader()
    processes = {rank: process for rank, (_, process, *_) in enumerate(cards)}
    try:
        for rank in range(me):
            links[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            links[rank].connect(_address(cards[rank][3]))
        ranks = {process: rank for rank, process in processes.items() if rank > me}
        while ranks:
            link, _ = door.accept()
            link.setblocking(True)
            credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            rank = ranks.pop(CREDENTIALS.unpack(credentials)[0], -1)
            if rank < 0:
                link.close()  # whoever that is, it is no rank
            else:
                links[rank] = link
        for rank, (_, process, address, told) in enumerate(cards):
            probe = torch.empty(len(told), dtype=torch.uint8)
            if rank != me:
                copy_from(read, process, [(address, len(told))], probe)
                if bytes(probe.tolist()) != told:
                    raise OSError("not the process that it seems to be")
    except OSError:
        for link in links.values():
            link.close()
        return None
    return PeerMemory(processes, links, read)


def _told_by_all(card: bytes) -> list[tuple[Any, ...]]:
    own = torch.tensor(list(card), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [CARD.unpack(bytes(each.tolist())) for each in found]


def _by_all(true: bool) -> bool:
    """Whether it is true of all ranks; all of them have read what they had to when it returns."""
    flag = torch.tensor([int(true)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
