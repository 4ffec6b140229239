"""How a process joins others that share tables.

Part of the room servers. `join` makes a TableStore of the processes that torchrun has started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from apportion.execute import peer_errors
from apportion.quantity import BYTES_PER_SECOND, parse_quantity
from apportion.servers.messages import GlooMessages
from apportion.servers.table_store import StoreSettings, TableStore


def settings(
    staleness: int = 0,
    bandwidth: float | str | None = None,
    priority: str = "random",
    **others: Any,
) -> StoreSettings:
    """The settings of a store; a bandwidth may be a text such as "40 Mbit/s"."""
    if isinstance(bandwidth, str):
        bandwidth = parse_quantity(bandwidth, BYTES_PER_SECOND)
    return StoreSettings(staleness, bandwidth, priority, **others)


@contextmanager
def join(
    staleness: int = 0,
    bandwidth: float | str | None = None,
    priority: str = "random",
    **others: Any,
) -> Iterator[TableStore]:
    """Shares tables with the other processes that torchrun has started.

    staleness  how many clocks rows may be behind
    bandwidth  bytes a second, or a text, that this process may send: rows travel early then. None:
               everything is sent at clocks
    priority   which rows travel first: fifo, random, relative or absolute
    """
    import torch.distributed as dist

    wanted = settings(staleness, bandwidth, priority, **others)
    started = not dist.is_initialized()
    with peer_errors():
        if started:
            dist.init_process_group("gloo", timeout=timedelta(seconds=wanted.timeout))
        group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    store = TableStore(GlooMessages(dist.get_rank(), dist.get_world_size(), group), wanted)
    try:
        yield store
        store.close()
    finally:
        if started:
            dist.destroy_process_group()
