"""StagedPart: a copy of what one rank writes of a checkpoint, so that training can go on meanwhile.

Part of the room checkpoint. The tensors of a rank come in at the end of a step; they are copied
into buffers that persist, from which files are written while the next steps change the tensors. The
buffers hold what this rank writes and nothing else: of regions that several ranks have, one writes.
On a GPU they are pinned memory of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from apportion.capture import Program, live_tensors, saved_names
from apportion.checkpoint.chunks import whole_chunk
from apportion.checkpoint.state_regions import StateRegion, key_of, state_regions, writers
from apportion.checkpoint.tensor_file import StoredChunk
from apportion.execute import Executable

_ALIGNED = 16  # bytes at whose multiples the tensors of a buffer begin


@dataclass(frozen=True, slots=True)
class PartChunk:
    """A Chunk that a rank writes: where it is in the slot's tensor, or the whole of a live tensor
    that has no slot (-1)."""

    stored: StoredChunk
    slot: int
    place: tuple[slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the Chunk."""
        return self.stored.chunk.volume * self.stored.dtype.itemsize


def part_of(
    chosen: Sequence[tuple[StateRegion, int]],
    executable: Executable,
    device: int,
    live: Mapping[str, torch.Tensor],
) -> tuple[PartChunk, ...]:
    """What a device writes: its share of all regions, and of the first one also the `live` tensors
    that are in no region."""
    found = [
        PartChunk(StoredChunk(region.of.key, chunk, region.of.dtype), slot, place)
        for region, slot in chosen
        if executable.slot_device[slot] == device
        for chunk, place in region.chunks
    ]
    if device == 0:
        for key, tensor in live.items():
            whole = whole_chunk(tensor.shape)
            found.append(PartChunk(StoredChunk(key, whole, tensor.dtype), -1, whole.slices))
    return tuple(found)


class StagedPart:
    """The buffers of a part, one tensor for each Chunk; made once."""

    def __init__(self, part: Sequence[PartChunk], pinned: bool) -> None:
        self.part = tuple(part)
        self._flat = torch.empty(staged_bytes(part), dtype=torch.uint8, pin_memory=pinned)
        self._pinned = pinned
        self.tensors: list[torch.Tensor] = []
        place = 0
        for each in self.part:
            room = self._flat[place : place + each.nbytes].view(each.stored.dtype)
            self.tensors.append(room.reshape(each.stored.chunk.sizes))
            place += _room(each)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._flat.nbytes

    def take(self, tensors: Mapping[int, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
        """Copies what the tensors are now; returns when that is done."""
        for each, room in zip(self.part, self.tensors, strict=True):
            source = tensors[each.slot] if each.slot >= 0 else live[each.stored.key].detach()
            room.copy_(source[each.place], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()


def staged_bytes(part: Sequence[PartChunk]) -> int:
    """Bytes of the buffers that a part takes."""
    return sum(map(_room, part))


def bytes_beside_steps(program: Program, executable: Executable, place: str) -> tuple[int, ...]:
    """What each device holds beside its steps from the first save on: the copy that is written. On
    GPUs it is in the memory of the host."""
    if place.startswith("cuda"):
        return (0,) * executable.tasks.devices
    chosen = writers(state_regions(program, executable), executable)
    live = live_beside(program, [region for region, _ in chosen])
    parts = [part_of(chosen, executable, d, live) for d in range(executable.tasks.devices)]
    return tuple(map(staged_bytes, parts))


def live_beside(program: Program, regions: Sequence[StateRegion]) -> dict[str, torch.Tensor]:
    """The tensors of the live model that have no region, by key: the step does not change them."""
    known = {region.of.key for region in regions}
    saved = saved_names(program.live)
    return {
        key_of(name, None): tensor
        for name, tensor in live_tensors(program.live).items()
        if name in saved and key_of(name, None) not in known and not tensor.is_meta
    }


def _room(chunk: PartChunk) -> int:
    return -(-chunk.nbytes // _ALIGNED) * _ALIGNED
