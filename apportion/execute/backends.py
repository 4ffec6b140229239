"""Which library carries messages between two ranks, and how a flat buffer is sent and received.

Part of the room execute. The places of all ranks come in; out go Backends, by which a rank hands
buffers to torch.distributed.

    both ends on GPUs, and not on the same one   NCCL, from device to device
    an end on a CPU, or both on one GPU          gloo; a GPU's buffer goes through pinned memory
    all ranks processes of one machine's CPUs    the memory of the other process (peer_memory.py)
    all ranks on CPUs, of several machines       a Wire, the most urgent message first (wire.py)

NCCL wants at most one rank on each GPU: where ranks share one, gloo carries everything.

NCCL takes all that is sent and received at once as one group, so that no two ranks wait for each
other in different orders; it works in the order of the device's stream, and waiting for it does not
make the host wait. Over gloo the host waits until the device has made what is sent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from apportion.execute.peer_memory import (
    GLOO,
    MEMORY,
    PeerMemory,
    carrier,
    join_peer_memory,
)
from apportion.execute.wire import NEXT, Wire
from apportion.execute.wire_sockets import join_wire

NCCL = "nccl"
NAME_BYTES = 128  # of a place's name


class Parcel(NamedTuple):
    """What is received from a rank or sent to it.

    buffer    flat, of bytes; or contiguous tensors that follow each other, as only PeerMemory and a
              Wire can send them
    key       by which a Wire knows it at both ends; else it is the next one between two ranks
    priority  on a Wire; less is sent first
    """

    buffer: torch.Tensor | list[torch.Tensor]
    other: int
    key: int = NEXT
    priority: int = 0


class PeerLost(RuntimeError):
    """The transport failed, so another rank has; this one is not the cause."""


@contextmanager
def peer_errors() -> Iterator[None]:
    """A context in which every error of the transport is raised as PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from None


class Handle(Protocol):
    """Something under way; after `wait` the buffer may be read, or written again."""

    def wait(self) -> Any:
        """Waits for it; with NCCL the device does, not the host."""


def backend_between(here: str, there: str) -> str:
    """The library for a pair of places, as `place_name` writes them."""
    gpus = here.startswith("cuda") and there.startswith("cuda")
    return NCCL if gpus and here != there else GLOO


def place_name(place: str) -> str:
    """A device of torch on this machine by a name that no other has: `cpu`, or the identity of the
    GPU, since `cuda:0` may be another one in another process."""
    if not place.startswith("cuda"):
        return "cpu"
    facts = torch.cuda.get_device_properties(torch.device(place))
    identity = getattr(facts, "uuid", None) or f"{socket.gethostname()} {torch.device(place).index}"
    return f"cuda {identity}"


@dataclass(frozen=True)
class Backends:
    """How this rank reaches every other: the library for each, and the group of NCCL's ranks."""

    place: str = "cpu"
    of_rank: tuple[str, ...] = ()  # empty: gloo for all
    nccl: Any = None
    memory: PeerMemory | None = None  # for messages without a tag, which are waited for in a step
    wire: Wire | None = None  # likewise

    @property
    def takes_pieces(self) -> bool:
        """Whether a message without a tag may be sent in pieces, from where they are."""
        return self.memory is not None or self.wire is not None

    def of(self, other: int) -> str:
        """The library that carries messages to and from a rank."""
        return self.of_rank[other] if self.of_rank else GLOO

    def post(
        self, receives: Sequence[Parcel], sends: Iterable[Parcel], tag: int = 0
    ) -> list[Handle]:
        """Begins to receive and to send; buffers are flat, of bytes, on this rank's place.

        Gloo's receives are posted before the first parcel of `sends` is asked for, so that packing
        one may take its time. What is sent must live until it has been waited for.
        """
        if self.memory is not None and not tag:
            with peer_errors():
                found: list[Handle] = [self.memory.receive(_whole(p), p.other) for p in receives]
                found.extend(self.memory.send(p.buffer, p.other) for p in sends)
            return found
        if self.wire is not None and not tag:
            with peer_errors():
                found = [self.wire.receive(_whole(p), p.other, p.key) for p in receives]
                found.extend(self.wire.send(*parcel) for parcel in sends)
            return found
        found = []
        device: list[dist.P2POp] = []
        for parcel in receives:
            if self.of(parcel.other) == NCCL:
                device.append(dist.P2POp(dist.irecv, _whole(parcel), parcel.other, self.nccl))
            else:
                found.append(_gloo_receive(_whole(parcel), parcel.other, tag))
        for parcel in sends:
            if self.of(parcel.other) == NCCL:
                device.append(dist.P2POp(dist.isend, _whole(parcel), parcel.other, self.nccl))
            else:
                found.append(_gloo_send(_whole(parcel), parcel.other, tag))
        if device:
            with peer_errors():
                found.extend(dist.batch_isend_irecv(device))
        return found


def _whole(parcel: Parcel) -> torch.Tensor:
    assert isinstance(parcel.buffer, torch.Tensor), "it is in pieces"
    return parcel.buffer


@dataclass(frozen=True, slots=True)
class _ReceiveOnHost:
    """Bytes for a GPU that arrive on the host."""

    work: Any
    host: torch.Tensor
    device: torch.Tensor

    def wait(self) -> None:
        """Waits for the bytes, then lets the device copy them."""
        self.work.wait()
        self.device.copy_(self.host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _SendFromHost:
    """Bytes of a GPU that leave from the host, and live until they have."""

    work: Any
    host: torch.Tensor

    def wait(self) -> None:
        """Waits until they have left."""
        self.work.wait()


def _gloo_receive(buffer: torch.Tensor, source: int, tag: int) -> Handle:
    if not buffer.is_cuda:
        return _begun(dist.irecv, buffer, source, tag)
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    return _ReceiveOnHost(_begun(dist.irecv, host, source, tag), host, buffer)


def _gloo_send(buffer: torch.Tensor, target: int, tag: int) -> Handle:
    if not buffer.is_cuda:
        return _begun(dist.isend, buffer, target, tag)
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    host.copy_(buffer, non_blocking=True)
    torch.cuda.current_stream(buffer.device).synchronize()
    return _SendFromHost(_begun(dist.isend, host, target, tag), host)


def _begun(operation: Callable[..., Any], buffer: torch.Tensor, other: int, tag: int) -> Handle:
    with peer_errors():
        work: Handle | None = operation(buffer, other, tag=tag)
    assert work is not None, "this process is not in the group"
    return work


def join_backends(place: str, wanted: str | None = None) -> Backends:
    """The Backends of this rank in the running process group, of which the default backend is gloo;
    all ranks call it together. `wanted`: what carries messages between CPUs, if it can; unless
    given, what the environment says."""
    wanted = wanted or carrier()
    places = _names_of_all(place_name(place))
    gpus = [rank for rank, name in enumerate(places) if name.startswith("cuda")]
    group = None
    if 1 < len(gpus) == len({places[rank] for rank in gpus}):
        with peer_errors():
            group = dist.new_group(gpus, backend=NCCL)
    here = places[dist.get_rank()]
    named = tuple(backend_between(here, there) if group else GLOO for there in places)
    memory, wire = None, None
    if set(places) == {"cpu"} and len(places) > 1:
        with peer_errors():
            memory = join_peer_memory(wanted == MEMORY)
            wire = join_wire(wanted != GLOO) if memory is None else None
    return Backends(place, named, group, memory, wire)


def _names_of_all(name: str) -> list[str]:
    """What each rank calls its place."""
    own = torch.tensor(list(name.encode().ljust(NAME_BYTES)[:NAME_BYTES]), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    with peer_errors():
        dist.all_gather(found, own)
    return [bytes(each.tolist()).decode().rstrip() for each in found]
