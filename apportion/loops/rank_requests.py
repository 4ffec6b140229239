"""What a session asks of the ranks of a loop; the same of all of them.

Part of the room loops. A request is plain data. `on` does it on a LoopRank; called with a process
of a pool it does so on the LoopRank that the process keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from apportion.loops.array import DenseArray, Shards
from apportion.loops.array_layout import ArrayLayout, Block, Box
from apportion.loops.elements import DealFacts, DealRequest, Elements, joined
from apportion.loops.loop_plan import LoopPlan
from apportion.loops.loop_rank import LoopRank
from apportion.loops.peers import GlooPeers, gather
from apportion.loops.run_pass import PassReport, run_pass

KEPT = "loops"


class RankRequest:
    """Something that every rank does."""

    def on(self, rank: LoopRank) -> Any:
        """Does it; returns the rank's answer."""
        raise NotImplementedError

    def __call__(self, process: Any) -> Any:
        rank = process.kept.get(KEPT)
        if rank is None:
            peers = GlooPeers(process.rank, dist.get_world_size())
            rank = process.kept[KEPT] = LoopRank(peers)
        return self.on(rank)


@dataclass(frozen=True)
class PlaceArray(RankRequest):
    """Give an array a layout."""

    array: DenseArray
    layout: ArrayLayout

    def on(self, rank: LoopRank) -> None:
        rank.place(self.array, self.layout)


@dataclass(frozen=True)
class CollectArray(RankRequest):
    """The parts of an array that each rank has."""

    number: int

    def on(self, rank: LoopRank) -> list[tuple[Box, Block]]:
        return [
            (box, np.ascontiguousarray(block)) for box, block in rank.arrays[self.number].parts()
        ]


@dataclass(frozen=True)
class DropArray(RankRequest):
    """Forget an array, dense or sparse."""

    number: int

    def on(self, rank: LoopRank) -> None:
        for known in (rank.arrays, rank.raw, rank.dealt):
            known.pop(self.number, None)


@dataclass(frozen=True)
class TakeElements(RankRequest):
    """Read a share of the elements of a sparse array: from files of columns in NumPy's format, from
    arrays in this process, or by reading shards."""

    number: int
    keys: tuple[str | npt.NDArray[Any], ...] = ()
    fields: tuple[str | npt.NDArray[Any], ...] = ()
    starts: str | npt.NDArray[Any] | None = None
    ragged: tuple[str | npt.NDArray[Any], ...] = ()
    shards: Shards | None = None

    def on(self, rank: LoopRank) -> int:
        if self.shards is not None:
            rank.raw[self.number] = self._read(rank)
        else:
            rank.raw[self.number] = self._share(rank)
        return len(rank.raw[self.number])

    def _share(self, rank: LoopRank) -> Elements:
        keys = [_column(each) for each in self.keys]
        total = len(keys[0])
        me, count = rank.peers.rank, rank.peers.count
        share = slice(total * me // count, total * (me + 1) // count)
        numbers = np.arange(share.start, share.stop, dtype=_number_type(total))
        starts, ragged = None, []
        if self.starts is not None:
            whole = _column(self.starts)
            starts = np.array(whole[share.start : share.stop + 1])
            ragged = [np.array(_column(each)[starts[0] : starts[-1]]) for each in self.ragged]
            starts = starts - starts[0]
        return Elements(
            tuple(np.array(each[share]) for each in keys),
            tuple(np.array(_column(each)[share]) for each in self.fields),
            numbers,
            starts,
            tuple(ragged),
        )

    def _read(self, rank: LoopRank) -> Elements:
        assert self.shards is not None
        items = self.shards.items[rank.peers.rank :: rank.peers.count]
        found = [self._shard(item) for item in items]
        if not found:
            found = [_none_of(self._shard(self.shards.items[0]))]
        mine = joined(found)
        counts = np.concatenate(gather(rank.peers, np.array([len(mine)])))
        first = int(counts[: rank.peers.rank].sum())
        kind = _number_type(int(counts.sum()))
        return replace(mine, numbers=np.arange(first, first + len(mine), dtype=kind))

    def _shard(self, item: Any) -> Elements:
        assert self.shards is not None
        columns = [np.asarray(each) for each in self.shards.read(item)]
        return Elements(tuple(columns[:-1]), (columns[-1],), np.arange(len(columns[-1])))


def _none_of(elements: Elements) -> Elements:
    return elements.take(np.zeros(0, np.int64))


def _number_type(total: int) -> type[np.signedinteger[Any]]:
    return np.int32 if total < 2**31 else np.int64


def _column(where: str | npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.load(where, mmap_mode="r") if isinstance(where, str) else where


@dataclass(frozen=True)
class DealElements(RankRequest):
    """Deal the elements of a sparse array."""

    number: int
    request: DealRequest

    def on(self, rank: LoopRank) -> DealFacts:
        return rank.deal(self.number, self.request)


@dataclass(frozen=True)
class SampleElements(RankRequest):
    """Some elements that each rank runs: the first ones, which are neighbours, and others."""

    number: int
    count: int

    def on(self, rank: LoopRank) -> Elements:
        elements = rank.dealt[self.number].elements
        near = np.arange(min(self.count // 2, len(elements)))
        far = np.linspace(0, len(elements) - 1, self.count - len(near)).astype(np.int64)
        return elements.take(np.unique([*near, *far]) if len(elements) else near)


@dataclass(frozen=True)
class RunPass(RankRequest):
    """One pass of a loop."""

    plan: LoopPlan

    def on(self, rank: LoopRank) -> PassReport:
        return run_pass(rank, self.plan)


@dataclass(frozen=True)
class CollectValues(RankRequest):
    """The numbers and values of the elements of a sparse array that each rank has."""

    number: int

    def on(self, rank: LoopRank) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        dealt = rank.dealt.get(self.number)
        elements = dealt.elements if dealt is not None else rank.raw[self.number]
        return elements.numbers, elements.fields[0]


@dataclass(frozen=True)
class Accumulated(RankRequest):
    """A rank's part of an accumulated number, None if it has none; with `reset` it begins anew."""

    name: str
    reset: bool

    def on(self, rank: LoopRank) -> tuple[str, float] | None:
        found = rank.sums.get(self.name)
        if self.reset:
            rank.sums.pop(self.name, None)
        return found


@dataclass(frozen=True)
class CloseTables(RankRequest):
    """End the tables, if there are some."""

    def on(self, rank: LoopRank) -> None:
        rank.close_store()


@dataclass(frozen=True)
class CountBytes(RankRequest):
    """Bytes of the parts of arrays that each rank has."""

    def on(self, rank: LoopRank) -> int:
        return rank.nbytes


def reduced(parts: list[tuple[str, float] | None]) -> float | None:
    """An accumulated number of all ranks; None if nobody has it."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    how, numbers = known[0][0], [number for _, number in known]
    if how == "sum":
        return math.fsum(numbers)
    return max(numbers) if how == "max" else min(numbers)
