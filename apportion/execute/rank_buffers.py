"""RankBuffers: the bytes of one rank's messages, in buffers that persist over steps, but for those
of large messages, which are taken when the message is posted.

Part of the room execute. An Executable and the number of a device come in; out go, for every
message that the device sends or receives, a view of one of its buffers (lower/message_buffers.py),
and what packs the message: views of the buffer that boxes of slots are copied into, made once.

Of a COLLECTIVE a device has one buffer to send from and one to receive in, in which the others
follow each other in rising order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from apportion.execute.executable import BoxCopy, Executable, Message
from apportion.execute.run_part import same_storage

DIRECT = 16384  # bytes from which on another address costs less than a copy
PIECES = 4096  # at most, so that their addresses fit into a packet


@dataclass(frozen=True, slots=True)
class PackedBox:
    """A box of a slot and where it goes. No `source_box`: all of the slot's tensor."""

    room: torch.Tensor
    slot: int
    source_shape: tuple[int, ...]
    source_box: tuple[slice, ...] | None


@dataclass(frozen=True, slots=True)
class LargeBuffer:
    """Where a message lies in a buffer that is taken when it is posted."""

    buffer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankBuffers:
    """Views of buffers by message.

    outgoing   all bytes of a message that is sent
    incoming   all bytes of one that is received
    large      by message that has no buffer but when it is under way: the other messages of its
               buffer with it, and where each begins; and how many bytes the buffer has
    unaligned  of all of them those that do not begin at a multiple of their largest item's size, as
               a view by its dtype has to
    boxes      what is packed into a message that is sent
    """

    outgoing: dict[int, torch.Tensor]
    incoming: dict[int, torch.Tensor]
    unaligned: frozenset[int]
    boxes: dict[int, tuple[PackedBox, ...]]
    large: Mapping[tuple[int, bool], LargeBuffer]
    executable: Executable
    place: str

    def take(self, numbers: Iterable[int], sends: bool) -> None:
        """Takes the buffers of large messages among these, which are about to be posted."""
        made: dict[int, torch.Tensor] = {}
        for number in numbers:
            large = self.large.get((number, sends))
            if large is None:
                continue
            if large.buffer not in made:
                made[large.buffer] = torch.empty(large.nbytes, dtype=torch.uint8, device=self.place)
            size = self.executable.messages[number].nbytes
            view = made[large.buffer][large.offset : large.offset + size]
            (self.outgoing if sends else self.incoming)[number] = view
            if sends:
                apart = number in self.unaligned
                self.boxes[number] = _boxes(self.executable, number, view, apart)

    def drop(self, numbers: Iterable[int], sends: bool) -> None:
        """Gives the buffers of large messages among these back; what was received lives on in the
        tensor that was handed out."""
        for number in numbers:
            if (number, sends) in self.large:
                (self.outgoing if sends else self.incoming).pop(number, None)
                if sends:
                    self.boxes.pop(number, None)

    def pack(self, number: int, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Packs a message; its bytes."""
        rooms, sources = [], []
        for box in self.boxes[number]:
            source = tensors[box.slot]
            if box.source_box is not None:
                source = source.reshape(box.source_shape)[box.source_box]
            rooms.append(box.room)
            sources.append(source)
        torch._foreach_copy_(rooms, sources)
        packed = self.outgoing[number]
        if number in self.unaligned:
            packed.copy_(self._whole(number))
        return packed

    def parts(
        self, number: int, tensors: Mapping[int, torch.Tensor], lasting: Collection[int]
    ) -> list[torch.Tensor]:
        """The bytes of a message in pieces: large boxes of `lasting` slots where they are, others
        packed."""
        if number in self.unaligned or len(self.boxes[number]) > PIECES:
            return [self.pack(number, tensors)]
        found, rooms, sources = [], [], []
        for box in self.boxes[number]:
            source = tensors[box.slot]
            if box.source_box is not None:
                source = source.reshape(box.source_shape)[box.source_box]
            lasts = box.slot in lasting and source.is_contiguous() and source.nbytes >= DIRECT
            lasts = lasts and source.dtype == box.room.dtype
            if lasts and same_storage(source, tensors[box.slot]):
                found.append(source)
            else:
                found.append(box.room)
                rooms.append(box.room)
                sources.append(source)
        if rooms:
            torch._foreach_copy_(rooms, sources)
        return found

    def readable(self, number: int) -> torch.Tensor:
        """All bytes of a message that has been received, so that a view by any dtype begins at a
        multiple of its size."""
        arrived = self.incoming[number]
        return arrived.clone() if number in self.unaligned else arrived

    def _whole(self, number: int) -> torch.Tensor:
        """The aligned bytes that a message is packed into first."""
        room = self.boxes[number][0].room
        whole = torch.empty(0, dtype=torch.uint8, device=room.device)
        return whole.set_(room.untyped_storage())


def rank_buffers(executable: Executable, device: int, place: str) -> RankBuffers:
    """New buffers of one device, on the device that torch calls `place`."""
    ends, found = executable.tasks.ends, executable.message_buffers
    rows = {
        key: row
        for row, key in enumerate(zip(ends.task.tolist(), ends.device.tolist(), strict=True))
        if key[1] == device
    }
    made = {
        buffer: torch.empty(int(found.nbytes[buffer]), dtype=torch.uint8, device=place)
        for buffer, where in enumerate(found.device.tolist())
        if where == device and found.begin[buffer] < 0
    }
    large: dict[tuple[int, bool], LargeBuffer] = {}
    made[-1] = torch.empty(0, dtype=torch.uint8, device=place)  # of messages of nothing
    outgoing: dict[int, torch.Tensor] = {}
    incoming: dict[int, torch.Tensor] = {}
    unaligned: set[int] = set()
    ends_at: dict[int, int] = {}  # by buffer's message and direction
    for number, message in _in_order(executable.messages, device):
        sends = message.sender == device
        row = rows[message.task, device]
        buffer = int((found.sent if sends else found.received)[row])
        key = 2 * message.task + sends
        offset = ends_at.get(key, 0)
        ends_at[key] = offset + message.nbytes
        if buffer in made:
            view = made[buffer][offset : offset + message.nbytes]
            (outgoing if sends else incoming)[number] = view
        else:
            large[number, sends] = LargeBuffer(buffer, offset, int(found.nbytes[buffer]))
        if offset % executable.packed[number][0].dtype.itemsize:  # large items come first
            unaligned.add(number)
    boxes = {
        number: _boxes(executable, number, view, number in unaligned)
        for number, view in outgoing.items()
    }
    return RankBuffers(outgoing, incoming, frozenset(unaligned), boxes, large, executable, place)


def _in_order(messages: list[Message], device: int) -> list[tuple[int, Message]]:
    """The messages of a device, those of one task by the other end."""
    mine = [(k, m) for k, m in enumerate(messages) if device in (m.sender, m.receiver)]
    return sorted(mine, key=lambda each: (each[1].task, each[1].sender + each[1].receiver))


def _boxes(
    executable: Executable, number: int, view: torch.Tensor, unaligned: bool
) -> tuple[PackedBox, ...]:
    if unaligned:
        view = torch.empty_like(view)
    return tuple(_box(executable, copy, view) for copy in executable.packed[number])


def _box(executable: Executable, copy: BoxCopy, view: torch.Tensor) -> PackedBox:
    room = view[copy.offset : copy.offset + copy.nbytes].view(copy.dtype)
    whole = all(
        span.start == 0 and span.stop == size
        for span, size in zip(copy.source_box, copy.source_shape, strict=True)
    )
    if whole:
        room = room.reshape(executable.slots[copy.source].shape)
        return PackedBox(room, copy.source, copy.source_shape, None)
    return PackedBox(room.reshape(copy.shape), copy.source, copy.source_shape, copy.source_box)
