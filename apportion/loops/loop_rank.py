"""LoopRank: one process of a loop, with its parts of arrays and its elements.

Part of the room loops. Requests come in, the same ones to all ranks; each does its part
(run_pass.py has a pass over the elements), and they send each other what the schedule says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from apportion.loops.array import DenseArray
from apportion.loops.array_layout import ArrayLayout
from apportion.loops.elements import DealFacts, DealRequest, DealtElements, Elements, deal
from apportion.loops.keyed_copies import WantedRows
from apportion.loops.loop_plan import ArrayUse
from apportion.loops.peers import Peers
from apportion.loops.stored_array import StoredArray, moved_array, new_array
from apportion.loops.tabled_copies import make_table
from apportion.servers import Table, TableStore


@dataclass
class LoopRank:
    """What a rank has: parts of dense arrays, elements that it has read (`raw`) or was dealt, and
    its share of accumulated numbers, each with the way in which they are put together. `rows` are
    those of keyed arrays that repeated loops touch, by loop, step and chunk."""

    peers: Peers
    arrays: dict[int, StoredArray] = field(default_factory=dict)
    raw: dict[int, Elements] = field(default_factory=dict)
    dealt: dict[int, DealtElements] = field(default_factory=dict)
    sums: dict[str, tuple[str, float]] = field(default_factory=dict)
    rows: dict[tuple[int, str, int, int], list[WantedRows]] = field(default_factory=dict)
    store: TableStore | None = None
    tables: dict[int, Table] = field(default_factory=dict)

    def table(self, use: ArrayUse) -> Table:
        """The table of a tabled array; the one of the last pass if it still holds."""
        assert use.settings is not None
        if self.store is None or self.store.settings != use.settings:
            self.close_store()
            self.store = TableStore(self.peers.messages(), use.settings)
        known = self.tables.get(use.number)
        if known is None or not use.is_kept:
            stored = self.arrays[use.number]
            known = self.tables[use.number] = make_table(self.store, self.peers, use, stored)
        return known

    def end_clock(self) -> None:
        """Ends a clock of the tables."""
        assert self.store is not None
        self.store.clock()

    def close_store(self) -> None:
        """Ends the tables."""
        if self.store is not None:
            self.store.close()
        self.store = None
        self.tables = {}

    def place(self, array: DenseArray, layout: ArrayLayout) -> None:
        """Gives an array a layout: makes its parts, or moves them."""
        stored = self.arrays.get(array.number)
        if stored is None:
            self.arrays[array.number] = new_array(array, layout, self.peers.rank)
        elif stored.layout != layout:
            self.arrays[array.number] = moved_array(self.peers, stored, layout)

    def deal(self, number: int, request: DealRequest) -> DealFacts:
        """Gives every rank the elements that it runs."""
        old = self.dealt.pop(number, None)
        mine = old.elements if old is not None else self.raw.pop(number)
        del old
        self.rows = {key: rows for key, rows in self.rows.items() if key[0] != number}
        self.dealt[number] = deal(self.peers, mine, request)
        return self.dealt[number].facts

    @property
    def nbytes(self) -> int:
        """Bytes of all parts of arrays that this rank has."""
        return sum(stored.nbytes for stored in self.arrays.values())
