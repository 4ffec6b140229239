"""FlowRequest: what the Flow of a Value is to be worked out from. A part of lower/.

In: regions on devices, as lower.py finds them in Choices and Layouts. Out: one array of regions and
one of requests, both of integers, which serve_flows.py reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from apportion.columns import Ints, compiled
from apportion.describe import Box, Factors

# What a reader asks for, where a made piece has its term: a region on a device; the term that is
# on a device; a region wherever it is
REGION, TERM, ANYWHERE = -1, -2, -3

Reference = tuple[int, int]
"""Where in a RegionTable there are rows, and where the devices of their parts are."""


class RegionTable:
    """Regions that Ops make and read, in one array that grows. Rows are (part, term, box) or (part,
    REGION or TERM or ANYWHERE, box); apart from these there are the devices that parts are on."""

    def __init__(self, devices: int) -> None:
        self.flat = np.empty(1024, np.int64)
        self.used, self.devices = 0, devices
        self.everywhere = self.add_devices(range(devices))
        self.none: Reference = self.add_placed(np.empty((0, 2), np.int64))

    def add(self, rows: Ints, parts: int) -> int:
        """Adds rows of so many parts; where they are."""
        at = self._room(2 + rows.size)
        self.flat[at], self.flat[at + 1] = len(rows), parts
        self.flat[at + 2 : self.used] = rows.reshape(-1)
        return at

    def add_placed(self, rows: Ints) -> Reference:
        """Adds rows that have devices instead of parts."""
        return self.add(rows, self.devices), self.everywhere

    def add_devices(self, devices: Sequence[int]) -> int:
        """Adds the devices of all parts, then those of their replicas; where they are."""
        at = self._room(1 + len(devices))
        self.flat[at], self.flat[at + 1 : self.used] = len(devices), devices
        return at

    def add_dims(self, dims: Sequence[Factors]) -> int:
        """Adds for every atom the dimension that it is of; where that is."""
        found = [number for number, atoms in enumerate(dims) for _ in atoms]
        at = self._room(len(found))
        self.flat[at : self.used] = found
        return at

    def _room(self, count: int) -> int:
        at = self.used
        self.used += count
        if self.used > len(self.flat):
            larger = np.empty(2 * self.used, np.int64)
            larger[:at] = self.flat[:at]
            self.flat = larger
        return at

    def placed(self, references: Sequence[int], atoms: int) -> Ints:
        """The rows of one or more References, with devices instead of parts."""
        found: Ints = placed_rows(self.flat, np.array(references, np.int64), 2 + 2 * atoms)
        return found


class FlowRequest(NamedTuple):
    """How a Value gets from its pieces to its readers."""

    dims: int  # where the dimensions of its atoms are in the RegionTable
    atoms: int
    itemsize: int
    terms: int
    made: Reference
    layout: Reference | tuple[()]
    reads: list[int]  # References, one after another: of every reader, then of the end of the step
    again: int = 0  # the stage of the first reader that has nothing of what was fetched before it


# In the array of requests each one has these numbers, and then its References
DIMS, ATOMS, ITEMSIZE, TERMS, HAS_LAYOUT, AGAIN, LENGTH, REFERENCES = range(8)


def request_array(requests: Sequence[FlowRequest]) -> Ints:
    """The requests in one array."""
    flat: list[int] = []
    for it in requests:
        references = (*it.made, *it.layout, *it.reads)
        flat += (it.dims, it.atoms, it.itemsize, it.terms, len(it.layout) // 2, it.again)
        flat += (len(references), *references)
    return np.array(flat, np.int64)


def table(first: Sequence[int] | Ints, second: int | Ints, box: Ints) -> Ints:
    """Rows (first, second, box)."""
    rows = np.empty((len(box), 2 + box.shape[1]), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2:] = first, second, box
    return rows


def boxes(regions: Sequence[Box], atoms: int) -> Ints:
    """Boxes in columns."""
    flat = [*chain.from_iterable(chain.from_iterable(regions))]
    return np.array(flat, np.int64).reshape(len(regions), 2 * atoms)


@compiled
def stage_counts(regions: Ints, references: Ints, has_layout: int) -> Ints:
    """By stage: how many pieces are made, how many are laid out, how much is read by each."""
    counts = np.zeros(len(references) // 2 + 1 - has_layout, np.int64)
    for k in range(0, len(references), 2):
        where = references[k]
        stage = k // 2 + (k > 0 and not has_layout)
        counts[stage] = regions[where] * (regions[references[k + 1]] // regions[where + 1])
    return counts


@compiled
def placed_rows(regions: Ints, references: Ints, wide: int) -> Ints:
    """All rows that are referred to, on the devices of their parts, replica by replica."""
    counts = stage_counts(regions, references, np.int64(1))
    found, row = np.empty((counts.sum(), wide), np.int64), 0
    for k in range(0, len(references), 2):
        at, devices = references[k], references[k + 1] + 1
        for first in range(0, regions[devices - 1], regions[at + 1]):
            for there in range(at + 2, at + 2 + wide * regions[at], wide):
                found[row, 0] = regions[devices + first + regions[there]]
                for column in range(1, wide):
                    found[row, column] = regions[there + column]
                row += 1
    return found
