"""Processes that share tables, as threads of one process, with messages that are held back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from apportion.servers.messages import LocalMessages, local_hub
from apportion.servers.table_store import StoreSettings, TableStore


def run_threads(
    count: int,
    settings: StoreSettings,
    work: Callable[[TableStore], Any],
    delay: float = 0.0,
) -> list[Any]:
    """What `work` returns for each of so many stores; raises what the first one raises."""
    hub, found, errors = local_hub(count), [None] * count, []

    def one(rank: int) -> None:
        store = TableStore(LocalMessages(rank, count, hub, delay), settings)
        try:
            found[rank] = work(store)
            store.close()
        except BaseException as error:
            errors.append(error)
            store._fail("a test failed")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a store hangs"
    return found
