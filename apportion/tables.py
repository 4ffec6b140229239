"""Tables of rows that processes share, and that may be a little stale: the room servers, by the
name that users know it by.

    import apportion.tables as tables

    with tables.join(staleness=2, bandwidth="40 Mbit/s") as store:    # in each torchrun rank
        weights = store.table("weights", rows=1000, columns=16)
        w = weights.get([3, 5])
        weights.inc([3, 5], deltas)
        store.clock()

docs/loops.md has the rest.
"""

from __future__ import annotations

from apportion.run import run_tables as run
from apportion.servers import StoreSettings, Table, TableStore, join

__all__ = ["StoreSettings", "Table", "TableStore", "join", "run"]
