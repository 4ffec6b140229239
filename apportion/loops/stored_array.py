"""StoredArray: the parts of a dense array that a rank has, and how they get there.

Part of the room loops. Ranks make their own parts of a new array; those of an array that is to lie
elsewhere go from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apportion.loops.array import DenseArray, beginning_of
from apportion.loops.array_layout import (
    ArrayLayout,
    Block,
    Box,
    box_shape,
    inside,
    intersection,
    reordered,
)
from apportion.loops.peers import MessageInFlight, Peers

MOVE_TAG = 3


@dataclass
class StoredArray:
    """The parts of an array that a rank has, by their numbers, in the order of dims of the
    layout."""

    array: DenseArray
    layout: ArrayLayout
    blocks: dict[int, Block] = field(default_factory=dict)

    def box(self, part: int) -> Box:
        """The indices of a part."""
        return self.layout.box(part, self.array.shape)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    def parts(self) -> list[tuple[Box, Block]]:
        """The parts that this rank has, with the dims in the user's order."""
        natural = range(len(self.array.shape))
        return [
            (self.box(part), reordered(block, self.layout.order, natural))
            for part, block in sorted(self.blocks.items())
        ]


def new_array(array: DenseArray, layout: ArrayLayout, rank: int) -> StoredArray:
    """A rank's parts of an array that nobody has yet."""
    made = StoredArray(array, layout)
    for part in layout.parts_of(rank):
        first = beginning_of(array, layout.box(part, array.shape))
        made.blocks[part] = np.ascontiguousarray(first.transpose(layout.order))
    return made


def moved_array(peers: Peers, old: StoredArray, layout: ArrayLayout) -> StoredArray:
    """The same array in another layout; all ranks have to call it. Parts go over one at a time, so
    that little more memory is needed than the array's own."""
    shape = old.array.shape
    new = StoredArray(old.array, layout)
    for part in layout.parts_of(peers.rank):
        block_shape = box_shape(layout.box(part, shape), layout.order)
        new.blocks[part] = np.empty(block_shape, old.array.dtype)
    for part, owner, box in old.layout.parts(shape):
        _move_part(peers, old, new, part, owner, box)
        if peers.rank == owner:
            del old.blocks[part]
    return new


def _move_part(
    peers: Peers, old: StoredArray, new: StoredArray, part: int, owner: int, box: Box
) -> None:
    """Sends one part of the old layout to wherever the new one has its elements."""
    layout, rank = new.layout, peers.rank
    waits: list[tuple[MessageInFlight, Block | None, Block | None]] = []
    there: Block | None
    here: Block | None
    for target, receiver, wanted in layout.parts(old.array.shape):
        shared = intersection(box, wanted)
        if shared is None or rank not in (owner, receiver):
            continue
        there = here = None
        if rank == receiver:
            there = inside(new.blocks[target], wanted, shared, layout.order)
        if rank == owner:
            whole = inside(old.blocks[part], box, shared, old.layout.order)
            here = reordered(whole, old.layout.order, layout.order)
        if there is not None and here is not None:
            there[...] = here
        elif there is not None:
            buffer = np.empty(there.shape, there.dtype)
            waits.append((peers.receive(buffer, owner, MOVE_TAG), buffer, there))
        elif here is not None:
            waits.append((peers.send(np.ascontiguousarray(here), receiver, MOVE_TAG), None, None))
    for message, arrived, target_view in waits:
        message.wait()
        if target_view is not None and arrived is not None:
            np.copyto(target_view, arrived)
