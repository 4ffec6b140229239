"""The connections of a Wire: every rank to every other, two of them.

Part of the room execute. The running process group comes in, whose ranks call `join_wire` together;
a Wire goes out, or None for all of them where one cannot reach another.

A rank listens on the address by which it reaches the others: that of the interface that
GLOO_SOCKET_IFNAME names, or else the one from which MASTER_ADDR is reached, which is the loopback
address where all run on one machine. It tells the others by way of the group, with a word that
nobody else knows, and listens no longer than it takes them to connect.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
from typing import Any

import torch
import torch.distributed as dist

from apportion.execute.wire import Wire

HELLO = struct.Struct("<II")  # rank, and which of its connections; the word follows
WORD_BYTES = 32
CARD_BYTES = 256
BACKLOG = 256
MEETING = 30.0  # seconds for ranks to connect
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
EXPRESS, BULK = 0, 1


def join_wire(wanted: bool = True) -> Wire | None:
    """The Wire of this rank in the running process group, or None for all ranks; also if one of
    them has not `wanted` it."""
    word, door = secrets.token_bytes(WORD_BYTES), _door() if wanted else None
    where = None if door is None else door.getsockname()[:2]
    cards = _told_by_all({"where": where, "word": word.hex()})
    links: dict[tuple[int, int], socket.socket] = {}
    joined = all(card["where"] for card in cards)
    try:
        if joined:
            assert door is not None
            _connect(links, cards)
            _accept(links, door, word, dist.get_world_size() - 1 - dist.get_rank())
    except OSError:
        joined = False
    finally:
        if door is not None:
            door.close()
    if not _by_all(joined):
        for link in links.values():
            link.close()
        return None
    ranks = {rank for rank, _ in links}
    return Wire({rank: (links[rank, EXPRESS], links[rank, BULK]) for rank in ranks})


def _door() -> socket.socket | None:
    """A socket that other ranks can connect to; None where there can be none."""
    if not hasattr(select, "epoll") or not hasattr(os, "eventfd"):
        return None
    try:
        address = own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        door = socket.create_server((address, 0), family=family, backlog=BACKLOG)
    except OSError:
        return None
    door.settimeout(MEETING)
    return door


def own_address() -> str:
    """The address by which this rank reaches the others; OSError if there is none."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if named:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("256s", named.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)[20:24])
    master, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), 9
    family, kind, _, _, where = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: the kernel chooses a route
        found: str = probe.getsockname()[0]
        return found


def _connect(links: dict[tuple[int, int], socket.socket], cards: list[dict[str, Any]]) -> None:
    """Connects to all ranks before this one."""
    me = dist.get_rank()
    for rank in range(me):
        for which in (EXPRESS, BULK):
            host, port = cards[rank]["where"]
            link = socket.create_connection((host, port), MEETING)
            links[rank, which] = link
            link.sendall(HELLO.pack(me, which) + bytes.fromhex(cards[rank]["word"]))
            _prepare(link)


def _accept(
    links: dict[tuple[int, int], socket.socket], door: socket.socket, word: bytes, ranks: int
) -> None:
    """Waits for all ranks after this one."""
    me, left = dist.get_rank(), 2 * ranks
    while left:
        link, _ = door.accept()
        link.settimeout(MEETING)
        said = _read(link, HELLO.size + WORD_BYTES)
        rank, which = HELLO.unpack(said[: HELLO.size]) if said else (-1, -1)
        known = hmac.compare_digest(said[HELLO.size :], word)
        if not known or rank <= me or which not in (EXPRESS, BULK) or (rank, which) in links:
            link.close()  # whoever that is, it is no rank
            continue
        links[rank, which] = link
        _prepare(link)
        left -= 1


def _read(link: socket.socket, count: int) -> bytes:
    """So many bytes; fewer if the other end says no more."""
    found = b""
    while len(found) < count:
        try:
            more = link.recv(count - len(found))
        except OSError:
            return b""
        if not more:
            return b""
        found += more
    return found


def _prepare(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _told_by_all(card: dict[str, Any]) -> list[dict[str, Any]]:
    own = torch.tensor(list(json.dumps(card).encode().ljust(CARD_BYTES)), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [json.loads(bytes(each.tolist()).decode()) for each in found]


def _by_all(true: bool) -> bool:
    """Whether it is true of all ranks."""
    flag = torch.tensor([int(true)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
