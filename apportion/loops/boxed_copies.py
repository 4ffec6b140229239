"""Copies of boxes: arrays that lie elsewhere, as far as a tile may touch them.

Part of the room loops: what one rank does about a boxed array during a pass. Before a tile every
rank fetches the box of its own tile from those who have its parts, and sends the others what they
want of its parts; all of them know all boxes. Afterwards what was written or added goes back the
same way, and is put in place in the order of ranks: the order of tiles that the pass is equal to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apportion.loops.apply_updates import Apply
from apportion.loops.array_layout import Block, Box, box_shape, inside, intersection
from apportion.loops.elements import DealFacts
from apportion.loops.kernel_arrays import mask_name
from apportion.loops.loop_plan import ADDED, READ, UPDATED, WRITTEN, ArrayUse
from apportion.loops.peers import MessageInFlight, Peers
from apportion.loops.stored_array import StoredArray
from apportion.loops.tile_schedule import TileSchedule

FETCH_TAG, BACK_TAG = 4, 5


@dataclass
class BoxedCopy:
    """One boxed array of a pass: the box of this rank's tile, a block with its elements, and where
    the tile has written, or what there was before it added. `boxes` are those of all ranks."""

    peers: Peers
    use: ArrayUse
    stored: StoredArray
    schedule: TileSchedule
    facts: DealFacts
    apply: Apply | None = None
    states: tuple[StoredArray, ...] = ()
    boxes: list[Box | None] = field(default_factory=list)
    block: Block | None = None
    mask: Block | None = None
    before: Block | None = None
    sent_bytes: int = 0

    def fetch(self, step: int) -> None:
        """Has the box of a step's tile at hand."""
        assert self.use.boxes is not None
        row = self.schedule.table[step]
        new = [
            self.use.boxes.box(self.facts, process, time) if time >= 0 else None
            for process, time in enumerate(row)
        ]
        lasting = self.use.change == READ and not self.use.is_volatile and bool(self.boxes)
        wanted = [
            None if lasting and self.boxes[rank] == box else box for rank, box in enumerate(new)
        ]
        self.boxes = [
            old if box is None and lasting else box
            for old, box in zip(self.boxes or new, new, strict=True)
        ]
        mine, order = wanted[self.peers.rank], self.use.layout.order
        if mine is not None:
            self.block = np.empty(box_shape(mine, order), self.stored.array.dtype)
        if self.use.change == UPDATED:
            self.block = None if mine is None else np.zeros_like(self.block)
            return
        self._exchange(wanted)
        if self.use.change == WRITTEN and self.block is not None:
            self.mask = np.zeros(self.block.shape, np.bool_)
        elif self.use.change == ADDED and self.block is not None:
            self.before = self.block.copy()

    def _exchange(self, wanted: list[Box | None]) -> None:
        waits: list[tuple[MessageInFlight, Block, Block | None]] = []
        for rank, owner, box, part, shared in self._pairs(wanted):
            order = self.use.layout.order
            if rank == self.peers.rank:
                assert self.block is not None
                there = inside(self.block, box, shared, order)
                if owner == rank:
                    there[...] = self._own(part, shared)
                else:
                    buffer = np.empty(there.shape, there.dtype)
                    waits.append((self.peers.receive(buffer, owner, FETCH_TAG), buffer, there))
            else:
                values = np.ascontiguousarray(self._own(part, shared))
                waits.append((self.peers.send(values, rank, FETCH_TAG), values, None))
                self.sent_bytes += values.nbytes
        for message, buffer, target in waits:
            message.wait()
            if target is not None:
                np.copyto(target, buffer)

    def _pairs(self, boxes: list[Box | None]) -> Iterator[tuple[int, int, Box, int, Box]]:
        """(rank, owner, its box, part, what they share) of all pairs that this rank is one of."""
        for rank, box in enumerate(boxes):
            if box is None:
                continue
            for part, owner, held in self.use.layout.parts(self.stored.array.shape):
                shared = intersection(box, held)
                if shared is not None and self.peers.rank in (rank, owner):
                    yield rank, owner, box, part, shared

    def _own(self, part: int, shared: Box) -> Block:
        """What this rank's part has of a box."""
        return inside(
            self.stored.blocks[part], self.stored.box(part), shared, self.use.layout.order
        )

    def arguments(self) -> dict[str, Any]:
        """What the kernel is given."""
        kernel, box = self.use.kernel, self.boxes[self.peers.rank]
        assert box is not None and self.block is not None
        found: dict[str, Any] = {kernel.block: self.block}
        for dim in kernel.origins:
            found[kernel.origin(dim)] = box[dim][0]
        if kernel.masked:
            found[mask_name(kernel.name)] = self.mask
        return found

    def put_back(self) -> None:
        """Sends back what the tiles of this step have changed."""
        if self.use.change == READ:
            return
        changed = self._changed()
        waits: list[tuple[MessageInFlight, tuple[Block, ...], tuple[int, Box] | None]] = []
        order = self.use.layout.order
        for rank, owner, box, part, shared in self._pairs(self.boxes):
            if rank == self.peers.rank:
                values = tuple(
                    np.ascontiguousarray(inside(each, box, shared, order)) for each in changed
                )
                if owner == rank:
                    waits.append((DONE, values, (part, shared)))
                    continue
                for each in values:
                    waits.append((self.peers.send(each, owner, BACK_TAG), (each,), None))
                    self.sent_bytes += each.nbytes
            else:
                values = tuple(
                    np.empty(box_shape(shared, order), dtype) for dtype in self._dtypes()
                )
                messages = [self.peers.receive(each, rank, BACK_TAG) for each in values]
                waits.append((AllOf(messages), values, (part, shared)))
        for message, values, place in waits:
            message.wait()
            if place is not None:
                self._apply(values, *place)

    def _changed(self) -> tuple[Block, ...]:
        if self.boxes[self.peers.rank] is None or self.block is None:
            return ()
        if self.use.change == WRITTEN:
            assert self.mask is not None
            return self.block, self.mask
        return (self.block if self.before is None else self.block - self.before,)

    def _dtypes(self) -> tuple[Any, ...]:
        dtype = self.stored.array.dtype
        return (dtype, np.dtype(np.bool_)) if self.use.change == WRITTEN else (dtype,)

    def _apply(self, values: tuple[Block, ...], part: int, shared: Box) -> None:
        target = self._own(part, shared)
        if self.use.change == WRITTEN:
            np.copyto(target, values[0], where=values[1])
        elif self.use.change == ADDED:
            target += values[0]
        else:
            self._update(target, values[0], part, shared)

    def _update(self, target: Block, added: Block, part: int, shared: Box) -> None:
        """Lets the user's function make new elements."""
        assert self.apply is not None
        order = self.use.layout.order
        views = [inside(each.blocks[part], each.box(part), shared, order) for each in self.states]
        copies = [each.reshape(1, -1).copy() for each in (target, *views)]
        self.apply(copies[0], np.zeros(1, np.int64), added.reshape(1, -1), *copies[1:])
        for view, copy in zip((target, *views), copies, strict=True):
            view[...] = copy.reshape(view.shape)


@dataclass(frozen=True)
class AllOf:
    """Several messages as one."""

    messages: list[MessageInFlight]

    def wait(self) -> None:
        """Waits for all of them."""
        for each in self.messages:
            each.wait()

    def is_completed(self) -> bool:
        """Whether all of them are."""
        return all(each.is_completed() for each in self.messages)


DONE = AllOf([])
