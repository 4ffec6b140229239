"""ArrayLayout: which process has which part of a dense array, and in which order of dims.

Part of the room loops. A part is all of the array between two bounds of one dim. Boxes are ranges
of indices, one for each dim of the array as its user knows it; blocks in memory have their dims in
the layout's order, which puts next to each other what an iteration reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Box = tuple[tuple[int, int], ...]
Block = npt.NDArray[Any]


@dataclass(frozen=True)
class ArrayLayout:
    """Part p is between bounds[p] and bounds[p + 1] of dim `dim`, at process owners[p]."""

    dim: int
    bounds: tuple[int, ...]
    owners: tuple[int, ...]
    order: tuple[int, ...]

    def box(self, part: int, shape: Sequence[int]) -> Box:
        """The indices of a part."""
        return tuple(
            (self.bounds[part], self.bounds[part + 1]) if dim == self.dim else (0, extent)
            for dim, extent in enumerate(shape)
        )

    def parts_of(self, process: int) -> list[int]:
        """The parts that a process has."""
        return [part for part, owner in enumerate(self.owners) if owner == process]

    def parts(self, shape: Sequence[int]) -> Iterator[tuple[int, int, Box]]:
        """(part, process, box) of every part that has elements."""
        for part, owner in enumerate(self.owners):
            if self.bounds[part] < self.bounds[part + 1]:
                yield part, owner, self.box(part, shape)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    found = tuple(
        (max(low, other), min(high, end)) for (low, high), (other, end) in zip(a, b, strict=True)
    )
    return found if all(low < high for low, high in found) else None


def box_shape(box: Box, order: Sequence[int]) -> tuple[int, ...]:
    """The shape of a block with these indices."""
    return tuple(box[dim][1] - box[dim][0] for dim in order)


def box_size(box: Box) -> int:
    """How many elements a box has."""
    return int(np.prod([high - low for low, high in box], dtype=np.int64))


def inside(block: Block, box: Box, part: Box, order: Sequence[int]) -> Block:
    """The view of a part of a block; the block has the indices of `box`."""
    return block[tuple(slice(part[d][0] - box[d][0], part[d][1] - box[d][0]) for d in order)]


def reordered(block: Block, old: Sequence[int], new: Sequence[int]) -> Block:
    """A view of a block whose dims are in another order."""
    return block.transpose([list(old).index(dim) for dim in new])
