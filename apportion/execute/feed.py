"""Batches on their way to the slots that a step reads, without waiting for the device.

Part of the room execute. Regions of a batch come in; out go the slots of a Rank, filled.

A batch is first staged, then fed. On a CPU staging copies the regions, and feeding hands the copies
over. On a GPU every input slot has one tensor for ever, so that recorded graphs find it where it
was, and a batch that lies on the host takes two hops:

    stage   the host copies it into pinned memory; a stream of its own copies that to a staging
            tensor on the device, beside whatever the device is busy with
    feed    the compute stream waits for that copy, and copies the staging tensor into the slot's

so the next batch can be staged while the step before runs. The host waits only if it is more than a
batch ahead. A batch that is on the device already is copied into the slot by the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from apportion.execute.rank import InputRegion, Rank

RegionOf = Callable[[InputRegion], torch.Tensor]
"""Where a region of the batch comes from: usually a view of the whole tensor."""


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Regions of a batch, one for each input slot of a rank, until it is fed: then there are none,
    so that nothing but the slots keeps them."""

    tensors: list[torch.Tensor]

    def taken(self) -> list[torch.Tensor]:
        """The regions, which it has no longer."""
        tensors = self.tensors.copy()
        self.tensors.clear()
        return tensors


class Feed(Protocol):
    """Takes batches to the slots of a rank; `ahead` says whether staging early is worth it."""

    ahead: bool

    def stage(self, region_of: RegionOf, keeps: bool = False) -> StagedBatch:
        """Begins to bring a batch. `keeps`: nobody will change its tensors before it is fed."""

    def feed(self, batch: StagedBatch) -> None:
        """Fills the slots with a batch, the last one that was staged."""


def feed_of(rank: Rank) -> Feed:
    """The Feed for the device that a rank is on."""
    return CudaFeed(rank) if rank.place.startswith("cuda") else HostFeed(rank)


class HostFeed:
    """Copies on the host: each step has tensors of its own, which it drops after their last use."""

    ahead = False

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def stage(self, region_of: RegionOf, keeps: bool = False) -> StagedBatch:
        """Copies the regions."""
        found = [(region.slot, region_of(region)) for region in self.rank.inputs]
        return StagedBatch([self.rank.copied(tensor, slot) for slot, tensor in found])

    def feed(self, batch: StagedBatch) -> None:
        """Hands the copies over."""
        self.rank.drop_unread()
        for region, tensor in zip(self.rank.inputs, batch.taken(), strict=True):
            self.rank.tensors[region.slot] = tensor


class CudaFeed:
    """Copies to a GPU: see above. Tensors are made when they are first needed."""

    ahead = True

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.side: Any = torch.cuda.Stream(rank.place)
        self.arrived: Any = torch.cuda.Event()  # the staged batch is on the device
        self.taken: Any = torch.cuda.Event()  # it has been copied into the slots
        self.pinned: dict[int, torch.Tensor] = {}
        self.staging: dict[int, torch.Tensor] = {}
        self.slots: dict[int, torch.Tensor] = {}

    def stage(self, region_of: RegionOf, keeps: bool = False) -> StagedBatch:
        """Begins the copies to the device."""
        regions = [(region, region_of(region)) for region in self.rank.inputs]
        if any(not tensor.is_cuda for _, tensor in regions):
            self.arrived.synchronize()  # pinned memory is free again
            self.side.wait_event(self.taken)
        staged = [
            tensor if tensor.is_cuda else self._sent(region, tensor, keeps)
            for region, tensor in regions
        ]
        self.arrived.record(self.side)
        return StagedBatch(staged)

    def _sent(self, region: InputRegion, tensor: torch.Tensor, keeps: bool) -> torch.Tensor:
        """The staging tensor of a region, which the side stream copies from pinned memory."""
        ready = keeps and tensor.is_pinned() and tensor.dtype == region.dtype
        if not ready or not tensor.is_contiguous():
            room = self.pinned.get(region.slot)
            if room is None:
                room = torch.empty(region.shape, dtype=region.dtype, pin_memory=True)
                self.pinned[region.slot] = room
            tensor = room.copy_(tensor)
        if region.slot not in self.staging:  # its memory may be another tensor's until now
            self.side.wait_stream(torch.cuda.current_stream(self.rank.place))
        staging = self._made(self.staging, region)
        with torch.cuda.stream(self.side):
            staging.copy_(tensor, non_blocking=True)
        return staging

    def feed(self, batch: StagedBatch) -> None:
        """Fills the slots, in the order of the compute stream."""
        self.rank.drop_unread()
        torch.cuda.current_stream(self.rank.place).wait_event(self.arrived)
        for region, tensor in zip(self.rank.inputs, batch.taken(), strict=True):
            self.rank.tensors[region.slot] = self._made(self.slots, region).copy_(
                tensor, non_blocking=True
            )
        self.taken.record(torch.cuda.current_stream(self.rank.place))

    def _made(self, known: dict[int, torch.Tensor], region: InputRegion) -> torch.Tensor:
        if region.slot not in known:
            known[region.slot] = torch.empty(
                region.shape, dtype=region.dtype, device=self.rank.place
            )
        return known[region.slot]
