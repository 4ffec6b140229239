"""Which indices of an array a tile may touch: boxes, from the classes of subscripts.

Part of the room loops. For an array that neither stays nor rotates with the parts of a loop. The
box of a tile holds every element that its iterations can touch; what subscripts do not say is taken
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.loops.array_layout import Box
from apportion.loops.elements import DealFacts
from apportion.loops.references import ArrayReference
from apportion.loops.schemes import ONE_D, Scheme
from apportion.loops.subscripts import Fixed, Index

Range = tuple[int, int]


@dataclass(frozen=True)
class TileBoxes:
    """The boxes of one array; `touched` are the ranges of subscripts by dim of the array, each the
    classes that its references have there, without repetition."""

    shape: tuple[int, ...]
    touched: tuple[tuple[object, ...], ...]
    scheme: Scheme

    def box(self, facts: DealFacts, space: int, time: int) -> Box | None:
        """The box of a tile; None if it has no elements, or none that is in the array."""
        if facts.counts[space][time] == 0:
            return None
        loop = [self._loop_range(facts, dim, space, time) for dim in range(len(facts.key_ranges))]
        found = []
        for extent, classes in zip(self.shape, self.touched, strict=True):
            ranges = [_touched_range(each, loop, extent) for each in classes]
            low = min((low for low, high in ranges if low < high), default=0)
            high = max((high for low, high in ranges if low < high), default=0)
            found.append((low, high))
        return tuple(found) if all(low < high for low, high in found) else None

    def _loop_range(self, facts: DealFacts, dim: int, space: int, time: int) -> Range:
        """The indices that a dim of the loop has in a tile."""
        scheme = self.scheme
        low, high = facts.key_ranges[dim][0], facts.key_ranges[dim][1] + 1
        rows = (facts.space_bounds[space], facts.space_bounds[space + 1])
        if dim == scheme.space:
            return max(low, rows[0]), min(high, rows[1])
        if scheme.kind != ONE_D and dim == scheme.time:
            first, last = facts.time_bounds[time], facts.time_bounds[time + 1]
            return (
                max(low, first - scheme.skew * (rows[1] - 1)),
                min(high, last - scheme.skew * rows[0]),
            )
        return low, high


def tile_boxes(
    references: Sequence[ArrayReference], shape: tuple[int, ...], scheme: Scheme
) -> TileBoxes:
    """The boxes of an array with these references."""
    touched = tuple(
        tuple(dict.fromkeys(each.subscript(dim) for each in references))
        for dim in range(len(shape))
    )
    return TileBoxes(shape, touched, scheme)


def _touched_range(subscript: object, loop: Sequence[Range], extent: int) -> Range:
    if isinstance(subscript, Fixed):
        return subscript.number, min(subscript.number + 1, extent)
    if isinstance(subscript, Index):
        low, high = loop[subscript.dim]
        return max(low + subscript.offset, 0), min(high + subscript.offset, extent)
    return 0, extent
