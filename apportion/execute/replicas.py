"""Whether all copies of the state are the same, bit for bit.

Part of the room execute. A rank at the end of a step comes in; if a region of the state that
several ranks have is not the same everywhere, a ReplicasDiffer names the tensor and the ranks.

Every rank digests the bytes of what it shares with others, and the digests are compared. That reads
the whole state and waits for the device: it is for tests and for whoever looks for an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from apportion.describe import Box, full
from apportion.execute.backends import peer_errors
from apportion.execute.executable import Executable
from apportion.execute.rank import Rank

DIGEST_BYTES = 8


class ReplicasDiffer(RuntimeError):
    """Two ranks have different bytes for the same part of the state."""


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A region of a Value of the state that several devices have, each in a slot of its own."""

    value: int
    box: Box
    slots: tuple[int, ...]


def shared_regions(executable: Executable) -> tuple[SharedRegion, ...]:
    """What several devices have of the state when a step ends. Regions of a Value are those of a
    grid: two are the same or have nothing in common."""
    found: dict[tuple[int, Box], list[int]] = {}
    for _, slot in executable.carry:
        meant = executable.slots[slot]
        found.setdefault((meant.value, meant.region), []).append(slot)
    return tuple(
        SharedRegion(value, box, tuple(sorted(slots)))
        for (value, box), slots in found.items()
        if len(slots) > 1
    )


def digests(rank: Rank, regions: Sequence[SharedRegion]) -> torch.Tensor:
    """A number for the bytes of each region that the rank has, 0 for others."""
    found = torch.zeros(len(regions), dtype=torch.int64)
    for number, region in enumerate(regions):
        for slot in region.slots:
            if slot in rank.tensors and rank.executable.slot_device[slot] == rank.device:
                found[number] = _digest(rank.tensors[slot])
    return found


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8)
    digest = hashlib.blake2b(flat.numpy().data, digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)


def difference(
    executable: Executable, regions: Sequence[SharedRegion], found: Sequence[torch.Tensor]
) -> str | None:
    """What is not the same everywhere, as a clause, by the digests of every rank; None if nothing
    differs."""
    for number, region in enumerate(regions):
        holders = sorted({executable.slot_device[slot] for slot in region.slots})
        first = holders[0]
        others = [d for d in holders if found[d][number] != found[first][number]]
        if others:
            value = executable.graph.values[region.value]
            whole = region.box == full(executable.space.factors(region.value))
            where = "" if whole else f" (region {list(map(list, region.box))})"
            ranks = ", ".join(map(str, others))
            return (
                f"{value.role} {value.name!r}{where} on rank{'s'[: len(others) > 1]} {ranks} is "
                f"not that of rank {first}"
            )
    return None


class ReplicaCheck:
    """Compares the copies of the state of all ranks after a step; all ranks call it together."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.regions = shared_regions(rank.executable)

    def check(self, step: int) -> None:
        """Raises ReplicasDiffer unless all copies are the same."""
        if not self.regions:
            return
        own = digests(self.rank, self.regions)
        found = [torch.empty_like(own) for _ in range(self.rank.executable.tasks.devices)]
        with peer_errors():
            dist.all_gather(found, own)
        what = difference(self.rank.executable, self.regions, found)
        if what is not None:
            raise ReplicasDiffer(f"replicas differ after step {step}: {what}")
