"""What processes that share tables do in tests; a module of its own, so that they can import it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import numpy as np

from apportion.servers.table_store import TableStore


def count_stamps(store: TableStore, clocks: int, pause: float) -> tuple[int, float]:
    """Every process counts its clocks in a column of every row; process 1 is stopped for a while.
    Returns how old the oldest row was, and how long the process has waited."""
    table = store.table("stamps", 40, store.count, dtype=np.int64)
    oldest = 0
    for clock in range(clocks):
        seen = table.get()
        assert (seen >= clock - store.settings.staleness).all(), (store.rank, clock)
        oldest = max(oldest, int(clock - seen.min()))
        if store.rank == 1 and clock == clocks // 2:
            stop_for(pause)
        mine = np.zeros((40, store.count), np.int64)
        mine[:, store.rank] = 1
        table.inc(None, mine)
        time.sleep(0.005)
        store.clock()
    store.synchronise()
    assert (table.get() == clocks).all()
    return oldest, store.waited_seconds


def stop_for(seconds: float) -> None:
    """Stops this process, all threads of it, until somebody else lets it go on."""
    wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def fail_at_once(store: TableStore) -> None:
    """Process 1 fails."""
    table = store.table("t", 4)
    if store.rank == 1:
        raise ValueError("this one does not want to")
    for _ in range(3):
        table.get()
        store.clock()
