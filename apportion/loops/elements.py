"""The elements that a loop goes over, dealt to the processes that run them.

Part of the room loops. Raw elements (keys, values, numbers in the order given) come in from
wherever they are; each rank gets those of its part of space, sorted by tile. Bounds between parts
are chosen so that every part has about as many elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints
from apportion.loops.balanced_bounds import balanced_bounds, counts_by_group
from apportion.loops.peers import LocalPeers, Peers, exchange, gather
from apportion.loops.schemes import ONE_D, Scheme

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Elements:
    """Some elements in columns. `numbers` says where each was among all that were given."""

    keys: tuple[Numbers, ...]
    fields: tuple[Numbers, ...]
    numbers: Numbers
    starts: Numbers | None = None
    ragged: tuple[Numbers, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        starts = () if self.starts is None else (self.starts,)
        columns = (*self.keys, *self.fields, self.numbers, *starts, *self.ragged)
        return sum(column.nbytes for column in columns)

    def take(self, which: Ints) -> Elements:
        """Some of them, in another order."""
        starts, ragged = self.starts, self.ragged
        if starts is not None:
            lengths = np.diff(starts)[which]
            new = np.concatenate(([0], np.cumsum(lengths)))
            entries = np.repeat(starts[:-1][which] - new[:-1], lengths) + np.arange(new[-1])
            starts, ragged = new, tuple(column[entries] for column in ragged)
        return replace(
            self,
            keys=tuple(column[which] for column in self.keys),
            fields=tuple(column[which] for column in self.fields),
            numbers=self.numbers[which],
            starts=starts,
            ragged=ragged,
        )


def joined(parts: Sequence[Elements]) -> Elements:
    """All elements of several parts, one after the other."""
    first = parts[0]

    def columns(name: str) -> tuple[Numbers, ...]:
        rows = zip(*(getattr(part, name) for part in parts), strict=True)
        return tuple(np.concatenate(each) for each in rows)

    starts = None
    if first.starts is not None:
        lengths = np.concatenate([np.diff(_starts(part)) for part in parts])
        starts = np.concatenate(([0], np.cumsum(lengths)))
    numbers = np.concatenate([part.numbers for part in parts])
    return Elements(columns("keys"), columns("fields"), numbers, starts, columns("ragged"))


def _starts(elements: Elements) -> Numbers:
    assert elements.starts is not None, "these elements have single values only"
    return elements.starts


@dataclass(frozen=True)
class DealRequest:
    """How elements are dealt: by which scheme, into how many parts of space and of time, and
    whether a tile is in the order of keys. If it is not, elements whose indices of space are in one
    block of so many are taken together; 0: all in the order in which they were given."""

    scheme: Scheme
    shape: tuple[int, ...]
    space_parts: int
    time_parts: int
    ordered: bool
    block: int = 0


@dataclass(frozen=True)
class DealFacts:
    """What all ranks know of dealt elements: the bounds, and how many elements each tile has, by
    part of space and part of time. Bounds of time are those of skewed indices."""

    space_bounds: tuple[int, ...]
    time_bounds: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    key_ranges: tuple[tuple[int, int], ...]


@dataclass
class DealtElements:
    """The elements of one rank: those of tile t are from tile_starts[t] to tile_starts[t + 1]."""

    elements: Elements
    tile_starts: Ints
    facts: DealFacts


def skewed_extent(request: DealRequest) -> int:
    """How many skewed indices of time there are."""
    scheme, shape = request.scheme, request.shape
    if scheme.kind == ONE_D:
        return 1
    return shape[scheme.time] + scheme.skew * (shape[scheme.space] - 1)


def skewed_time(elements: Elements, scheme: Scheme) -> Ints:
    """The index of time of each element."""
    if scheme.kind == ONE_D:
        return np.zeros(len(elements), np.int64)
    time = elements.keys[scheme.time].astype(np.int64)
    return time + scheme.skew * elements.keys[scheme.space] if scheme.skew else time


def deal(peers: Peers, mine: Elements, request: DealRequest) -> DealtElements:
    """Sends every element to the rank that runs it; all ranks have to call it."""
    scheme = request.scheme
    space, time = mine.keys[scheme.space], skewed_time(mine, scheme)
    extents = (request.shape[scheme.space], skewed_extent(request))
    counts = [counts_by_group(i, n) for i, n in zip((space, time), extents, strict=True)]
    space_counts, time_counts = (np.sum(gather(peers, each), axis=0) for each in counts)
    space_bounds = balanced_bounds(space_counts, extents[0], request.space_parts)
    time_bounds = balanced_bounds(time_counts, extents[1], request.time_parts)
    owners = part_of(space, space_bounds)
    order = sorted_order(owners)
    edges = np.searchsorted(owners[order], np.arange(peers.count + 1))
    held = _exchanged(peers, mine, order, edges)
    held, tiles = _sorted_by_tile(held, request, time_bounds)
    tile_starts = np.searchsorted(tiles, np.arange(request.time_parts + 1)).astype(np.int64)
    everywhere = gather(peers, np.diff(tile_starts))
    ranges = _key_ranges(peers, held)
    facts = DealFacts(
        space_bounds, time_bounds, tuple(tuple(map(int, row)) for row in everywhere), ranges
    )
    return DealtElements(held, tile_starts, facts)


def facts_of(elements: Elements, request: DealRequest) -> DealFacts:
    """What would be known if all these elements were dealt."""
    scheme = request.scheme
    space, time = elements.keys[scheme.space], skewed_time(elements, scheme)
    extents = (request.shape[scheme.space], skewed_extent(request))
    bounds = [
        balanced_bounds(counts_by_group(index, extent), extent, parts)
        for index, extent, parts in zip(
            (space, time), extents, (request.space_parts, request.time_parts), strict=True
        )
    ]
    tiles = part_of(space, bounds[0]) * request.time_parts + part_of(time, bounds[1])
    counts = np.bincount(tiles, minlength=request.space_parts * request.time_parts)
    table = counts.reshape(request.space_parts, request.time_parts)
    ranges = _key_ranges(LocalPeers(), elements)
    return DealFacts(bounds[0], bounds[1], tuple(tuple(map(int, row)) for row in table), ranges)


def part_of(indices: Numbers, bounds: Sequence[int]) -> Ints:
    """The part that each index is in; parts may be empty."""
    return np.searchsorted(np.asarray(bounds[1:-1]), indices, side="right")


def _exchanged(peers: Peers, mine: Elements, order: Ints, edges: Ints) -> Elements:
    """What everybody has for this rank, in the order of ranks."""
    if peers.count == 1:
        return mine.take(order)
    parcels = [mine.take(order[a:b]) for a, b in pairwise(edges)]

    def swap(column: Any) -> list[Numbers]:
        return exchange(peers, [column(parcel) for parcel in parcels])

    keys = [swap(lambda p, k=k: p.keys[k]) for k in range(len(mine.keys))]
    fields = [swap(lambda p, k=k: p.fields[k]) for k in range(len(mine.fields))]
    numbers = swap(lambda p: p.numbers)
    lengths: list[Numbers] = []
    ragged: list[list[Numbers]] = []
    if mine.starts is not None:
        lengths = swap(lambda p: np.diff(_starts(p)))
        ragged = [swap(lambda p, k=k: p.ragged[k]) for k in range(len(mine.ragged))]
    found = []
    for rank in range(peers.count):
        starts = np.concatenate(([0], np.cumsum(lengths[rank]))) if lengths else None
        found.append(
            Elements(
                tuple(column[rank] for column in keys),
                tuple(column[rank] for column in fields),
                numbers[rank],
                starts,
                tuple(column[rank] for column in ragged),
            )
        )
    return joined(found)


def _sorted_by_tile(
    held: Elements, request: DealRequest, time_bounds: Sequence[int]
) -> tuple[Elements, Ints]:
    """The elements by tile, and within a tile in the order of the loop; and the tile of each."""
    tiles = part_of(skewed_time(held, request.scheme), time_bounds)
    places = tiles
    if request.block and not request.ordered:
        blocks = held.keys[request.scheme.space] // request.block
        places = tiles * (int(blocks.max(initial=0)) + 1) + blocks
    if request.ordered:
        order = np.lexsort([held.numbers, *reversed(held.keys), tiles])
    elif (np.diff(held.numbers) > 0).all():
        order = sorted_order(places)
    else:
        order = np.lexsort([held.numbers, places])
    return held.take(order), tiles[order]


def sorted_order(parts: Ints) -> Ints:
    """The elements by part, otherwise as they were. Small numbers are sorted by their digits."""
    small = parts.astype(np.uint16) if parts.max(initial=0) < 1 << 16 else parts
    return np.argsort(small, kind="stable")


def _key_ranges(peers: Peers, held: Elements) -> tuple[tuple[int, int], ...]:
    """The least and the largest index of all elements, for each dim; (0, -1) if there are none."""
    mine = [(int(c.min()), int(c.max())) if len(c) else (2**62, -1) for c in held.keys]
    everywhere = np.stack(gather(peers, np.array(mine, np.int64)))
    low, high = everywhere[:, :, 0].min(axis=0), everywhere[:, :, 1].max(axis=0)
    return tuple((int(a), int(b)) if b >= 0 else (0, -1) for a, b in zip(low, high, strict=True))
