"""Copies of rows: arrays that lie elsewhere, as far as the next elements are going to touch them.

Part of the room loops: what one rank does about a keyed array during a pass. The slice of the body
(index_slice.py) says which rows the elements need. They are asked of those who have them, all at
once, and what was written or added goes back the same way; in the order of ranks, as tiles count.
Where the rows are the same in every pass they are found out once, and then everybody knows what to
send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.columns import Ints
from apportion.loops.array_layout import Block
from apportion.loops.kernel_arrays import mask_name
from apportion.loops.kernel_parts import fill_slots
from apportion.loops.loop_plan import ADDED, READ, WRITTEN, ArrayUse
from apportion.loops.peers import Peers, exchange
from apportion.loops.stored_array import StoredArray

Apply = Callable[..., None]


@dataclass(frozen=True)
class WantedRows:
    """Rows that some elements need: their numbers, rising; the table that finds them; how many are
    with each rank; and which rows the other ranks want of this one."""

    numbers: Ints
    slots: Ints
    places: npt.NDArray[np.int32]
    edges: Ints
    asked: tuple[Ints, ...]


def row_table(numbers: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
    """The table of open addresses that finds rows by their numbers."""
    size = 1 << max(4, int(2 * len(numbers)).bit_length())
    slots, places = np.full(size, -1, np.int64), np.zeros(size, np.int32)
    fill_slots(slots, places, numbers)
    return slots, places


def wanted_rows(peers: Peers, use: ArrayUse, touched: Ints) -> WantedRows:
    """The rows of an array that this rank needs, and those that it is asked for."""
    numbers = np.unique(touched)
    slots, places = row_table(numbers)
    ends = [_row_number(use, use.layout.bounds[part + 1]) for part in range(peers.count)]
    edges = np.concatenate(([0], np.searchsorted(numbers, ends)))
    parcels = [numbers[a:b] for a, b in pairwise(edges)]
    return WantedRows(numbers, slots, places, edges, tuple(exchange(peers, parcels)))


def _row_number(use: ArrayUse, index: int) -> int:
    """The number of the first row whose first keyed dim has an index."""
    inner = 1
    for dim in use.kernel.keyed[1:]:
        inner *= use.kernel.shape[dim]
    return index * inner


@dataclass
class KeyedCopy:
    """One keyed array of a pass: the rows at hand, and what there was before something was
    added."""

    peers: Peers
    use: ArrayUse
    stored: StoredArray
    apply: Apply | None = None
    states: tuple[StoredArray, ...] = ()
    wanted: WantedRows | None = None
    block: Block | None = None
    mask: Block | None = None
    before: Block | None = None
    sent_bytes: int = 0

    def want(self, touched: Ints) -> WantedRows:
        """The rows that elements are going to touch."""
        return wanted_rows(self.peers, self.use, touched)

    def fetch(self, wanted: WantedRows) -> None:
        """Has the wanted rows at hand."""
        self.wanted = wanted
        shape = (len(wanted.numbers), *self.use.kernel.row_shape)
        if self.use.change not in (READ, WRITTEN, ADDED):
            self.block = np.zeros(shape, self.stored.array.dtype)
            return
        answers = exchange(self.peers, [self._own_rows()[self._local(a)] for a in wanted.asked])
        self._count(len(a) for r, a in enumerate(wanted.asked) if r != self.peers.rank)
        self.block = np.concatenate(answers).reshape(shape)
        if self.use.change == WRITTEN:
            self.mask = np.zeros(shape, np.bool_)
        elif self.use.change == ADDED:
            self.before = self.block.copy()

    def _count(self, rows: Any) -> None:
        row = int(np.prod(self.use.kernel.row_shape, dtype=np.int64))
        self.sent_bytes += sum(rows) * row * self.stored.array.dtype.itemsize

    def _own_rows(self, stored: StoredArray | None = None) -> Block:
        """This rank's part, a row a row."""
        block = (stored or self.stored).blocks[self.peers.rank]
        return block.reshape(-1, *self.use.kernel.row_shape)

    def _local(self, numbers: Ints) -> Ints:
        return numbers - _row_number(self.use, self.use.layout.bounds[self.peers.rank])

    def arguments(self) -> dict[str, Any]:
        """What the kernel is given."""
        kernel, wanted = self.use.kernel, self.wanted
        assert wanted is not None
        slots, places = kernel.slots
        found = {kernel.block: self.block, slots: wanted.slots, places: wanted.places}
        if kernel.masked:
            found[mask_name(kernel.name)] = self.mask
        return found

    def put_back(self) -> None:
        """Sends what has been changed to those who have the rows."""
        if self.use.change == READ:
            return
        assert self.wanted is not None and self.block is not None
        changed = [self.block] if self.before is None else [self.block - self.before]
        if self.use.change == WRITTEN:
            assert self.mask is not None
            changed.append(self.mask)
        edges = self.wanted.edges
        spans = list(pairwise(edges))
        found = [exchange(self.peers, [each[a:b] for a, b in spans]) for each in changed]
        self._count(int(b - a) for r, (a, b) in enumerate(spans) if r != self.peers.rank)
        rows = self._own_rows()
        for rank, numbers in enumerate(self.wanted.asked):
            where = self._local(numbers)
            if self.use.change == WRITTEN:
                new = rows[where]
                np.copyto(new, found[0][rank], where=found[1][rank])
                rows[where] = new
            elif self.use.change == ADDED:
                rows[where] += found[0][rank]
            else:
                self._update(where, found[0][rank])

    def _update(self, where: Ints, added: Block) -> None:
        """Lets the user's function make new elements."""
        assert self.apply is not None
        states = [_flat(self._own_rows(each)) for each in self.states]
        self.apply(_flat(self._own_rows()), where, _flat(added), *states)


def _flat(rows: Block) -> Block:
    return rows.reshape(len(rows), -1)
