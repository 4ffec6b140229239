"""Copies of rows of tables: arrays that may be a little stale.

Part of the room loops: what one rank does about a tabled array during a pass. Its rows are in a
table of servers/. Before a chunk of elements it gets the rows that they touch, no older than
staleness allows, and afterwards it adds what has been added; the table decides what travels when.
When the pass ends everybody has everything, and each rank has its part of the array as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.columns import Ints
from apportion.loops.array_layout import Block
from apportion.loops.keyed_copies import WantedRows, row_table
from apportion.loops.loop_plan import ArrayUse
from apportion.loops.peers import Peers, exchange
from apportion.loops.stored_array import StoredArray
from apportion.servers import Table, TableStore

NOBODY = np.zeros(0, np.int64)


@dataclass
class TabledCopy:
    """One tabled array of a pass."""

    peers: Peers
    use: ArrayUse
    stored: StoredArray
    table: Table
    wanted: WantedRows | None = None
    block: Block | None = None
    before: Block | None = None

    def __post_init__(self) -> None:
        self.first_bytes = self.table.store.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that the store has sent, of all its tables."""
        return self.table.store.sent_bytes - self.first_bytes

    def want(self, touched: Ints) -> WantedRows:
        """The rows that elements are going to touch."""
        numbers = np.unique(touched)
        return WantedRows(numbers, *row_table(numbers), NOBODY, ())

    def fetch(self, wanted: WantedRows) -> None:
        """Has the wanted rows at hand."""
        self.wanted = wanted
        shape = (len(wanted.numbers), *self.use.kernel.row_shape)
        self.block = self.table.get(wanted.numbers).reshape(shape)
        self.before = self.block.copy()

    def fetch_all(self) -> None:
        """Has all rows at hand."""
        kernel = self.use.kernel
        shape = tuple(kernel.shape[dim] for dim in kernel.order)
        self.block = self.table.get().reshape(shape)
        self.before = self.block.copy()

    def arguments(self) -> dict[str, Any]:
        """What the kernel is given."""
        kernel = self.use.kernel
        found: dict[str, Any] = {kernel.block: self.block}
        if kernel.keyed:
            assert self.wanted is not None
            slots, places = kernel.slots
            found |= {slots: self.wanted.slots, places: self.wanted.places}
        return found

    def put_back(self) -> None:
        """Adds what has been added."""
        if self.block is None or self.before is None:
            return
        added = (self.block - self.before).reshape(len(self.block), -1)
        rows = np.flatnonzero(added.any(axis=1))
        numbers = rows if self.wanted is None else self.wanted.numbers[rows]
        if len(rows):
            self.table.inc(numbers, added[rows])
        self.block = self.before = None

    def finish(self) -> None:
        """Has this rank's part of the array as all have left it."""
        self.table.store.synchronise()
        block = self.stored.blocks[self.peers.rank]
        if block.size:
            low, high = part_rows(self.use, self.peers.rank)
            block[...] = self.table.get(np.arange(low, high)).reshape(block.shape)


def part_rows(use: ArrayUse, part: int) -> tuple[int, int]:
    """The numbers of the rows that are in a part of a tabled array."""
    kernel, bounds = use.kernel, use.layout.bounds
    inner = 1
    for dim in kernel.keyed[1:]:
        inner *= kernel.shape[dim]
    return bounds[part] * inner, bounds[part + 1] * inner


def make_table(store: TableStore, peers: Peers, use: ArrayUse, stored: StoredArray) -> Table:
    """The table of an array's rows. The store's shards are not the array's parts, so that rows go
    from those who have them to those who serve them."""
    low, high = part_rows(use, peers.rank)
    total = part_rows(use, len(use.layout.bounds) - 2)[1]
    mine = stored.blocks[peers.rank].reshape(high - low, -1)
    numbers = np.arange(low, high)
    parcels = [mine[numbers % peers.count == rank] for rank in range(peers.count)]
    sources = exchange(peers, [numbers[numbers % peers.count == r] for r in range(peers.count)])
    values = np.concatenate(exchange(peers, parcels))
    order = np.argsort(np.concatenate(sources))
    columns = values.shape[1]
    return store.table(
        use.kernel.name, total, columns, lambda rows: values[order], stored.array.dtype
    )
