"""A meeting place for torchrun that listens on one address and no other.

Part of the room run. torchrun's own store listens on every interface of the machine that hosts it.
With this one, by the name under which it is registered (the entry point `torchrun.handlers`),

    torchrun --rdzv-backend apportion --rdzv-endpoint 10.0.0.1:29400 --nnodes 2:3 ...

the machine that has the address 10.0.0.1 listens there and nowhere else, and the others connect to
it. All else is torchrun's rendezvous as it is: members may come and go.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

NAME = "apportion"
PORT = 29400  # unless the endpoint says another
BACKLOG = 1024
READ_SECONDS = 60
SECOND_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # by which torchrun is told to open none


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun asks an entry point for."""
    return meet


def meet(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous at an endpoint. Raises ValueError if there is no such address."""
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    store = open_store(host, port, float(params.get_as_int("read_timeout", READ_SECONDS) or 0))
    inner = create_handler(store, _MeetingPlace(store, params.run_id), params)
    return OneStoreHandler(inner, host, store.port)


class OneStoreHandler(RendezvousHandler):
    """torchrun's rendezvous, but that ranks use the store in which the machines meet. By itself the
    machine of rank 0 would open a second one, on all interfaces, and when that machine leaves the
    others would still be told its address."""

    def __init__(self, inner: RendezvousHandler, host: str, port: int) -> None:
        self._inner, self._host, self._port = inner, host, port

    def get_backend(self) -> str:
        """The name of the rendezvous."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to a store that is there."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the machines of the next round."""
        before = os.environ.get(SECOND_STORE)
        os.environ[SECOND_STORE] = "1"
        try:
            found = self._inner.next_rendezvous()
        finally:
            os.environ.pop(SECOND_STORE)
            if before is not None:
                os.environ[SECOND_STORE] = before
        place = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(found.store, found.rank, found.world_size, place)

    def is_closed(self) -> bool:
        """Whether nobody may join any more."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Lets nobody join any more."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many machines wait for the next round."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leaves."""
        return self._inner.shutdown()


class _MeetingPlace(C10dRendezvousBackend):
    """torchrun's own, under the name by which it was asked for."""

    @property
    def name(self) -> str:
        """As in the entry point."""
        return NAME


def open_store(host: str, port: int, timeout: float) -> Any:
    """The store at an address: hosted here if the address is this machine's and nobody else does,
    otherwise a connection to it."""
    limit = timedelta(seconds=timeout)
    listening = listen_at(host, port)
    if listening is None:
        return TCPStore(host, port, None, False, limit)
    return TCPStore(
        host, listening.getsockname()[1], None, True, limit, wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )  # fmt: skip


def listen_at(host: str, port: int) -> socket.socket | None:
    """A socket that listens at one address; None if that is not this machine's, or taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        raise ValueError(f"there is no address {host!r} to meet at") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError:
        found.close()
        return None
    return found
