"""Streams: the three queues of a device that uses its host, and events between them.

Part of the room execute. A device computes, copies to its host and copies back at the same time,
each in the order in which it was told to. An event that is recorded in one queue can be waited for
in another, or by the host. host_traffic.py says what is put into which queue; CudaStreams are those
of a GPU. A queue that waits for an event waits for the last time that it was recorded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

COMPUTE, OUT, BACK = range(3)

Event = Any
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets of copies, each with its source."""


class Streams(Protocol):
    """Queues of a device, by number."""

    def begin(self) -> None:
        """Looks up the compute queue, before it is used in a step."""

    def event(self) -> Event:
        """A new event."""

    def record(self, event: Event, queue: int) -> None:
        """Puts an event into a queue."""

    def wait(self, queue: int, event: Event) -> None:
        """Lets a queue wait for an event."""

    def copy(self, queue: int, pairs: Pairs) -> None:
        """Puts copies into a queue, each of a target and its source."""

    def is_done(self, event: Event) -> bool:
        """Whether a queue has come to where an event was recorded."""

    def synchronize(self, event: Event) -> None:
        """Lets the host wait for an event."""

    def finish(self) -> None:
        """Lets the host wait for all queues."""


class CudaStreams:
    """The current stream of a GPU, and two beside it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.queues: list[Any] = [
            torch.cuda.current_stream(place),
            *(torch.cuda.Stream(place, priority=-1) for _ in (OUT, BACK)),
        ]

    def begin(self) -> None:
        self.queues[COMPUTE] = torch.cuda.current_stream(self.place)

    def event(self) -> Event:
        return torch.cuda.Event(blocking=True)

    def record(self, event: Event, queue: int) -> None:
        event.record(self.queues[queue])

    def wait(self, queue: int, event: Event) -> None:
        self.queues[queue].wait_event(event)

    def copy(self, queue: int, pairs: Pairs) -> None:
        with torch.cuda.stream(self.queues[queue]):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def finish(self) -> None:
        self.begin()
        for queue in self.queues:
            queue.synchronize()
