"""Managed rows: what is due goes first, and changes that wait go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from apportion.servers.messages import KIND, ROWS, UPDATE, LocalMessages, local_hub
from apportion.servers.table_store import StoreSettings, TableStore

FOREVER = 1e6  # seconds


class NotedMessages(LocalMessages):
    """Keeps what is sent, and delivers nothing."""

    def __init__(self) -> None:
        super().__init__(0, 2, local_hub(2))
        self.noted: list[tuple[Sequence[int], np.ndarray[Any, Any]]] = []

    def start(self, handler: Any, failed: Any) -> None:
        pass

    def send(self, to: int, header: Sequence[int], payload: np.ndarray[Any, Any]) -> None:
        self.noted.append((header, payload))

    def updates(self) -> list[tuple[list[int], list[float]]]:
        """The rows and deltas of each message with changes, and forgets them."""
        found = []
        for header, payload in self.noted:
            if header[KIND] == UPDATE:
                count = header[ROWS]
                rows = payload[: 4 * count].view(np.int32).tolist()
                found.append((rows, payload[4 * count :].view(np.float32).tolist()))
        self.noted.clear()
        return found


def lonely_store(**how: Any) -> tuple[TableStore, NotedMessages]:
    """Process 0 of two, whose background thread never has its turn: the test sends by itself. A
    message has room for one row."""
    messages = NotedMessages()
    store = TableStore(messages, StoreSettings(bandwidth=1.0, push_bytes=1, **how))
    store.budget.busy_until = store.budget.clock() + FOREVER
    table = store.table("t", 6)
    with store.changed:
        store.clients[0].has[:] = store.clients[0].asked[:] = True
        store.shard_clock = [100, 100]
    assert table.spec.rows == 6
    return store, messages


def test_rows_that_are_due_overtake_others() -> None:
    store, messages = lonely_store(staleness=2, tolerance=1, priority="absolute")
    spec = store.clients[0].spec
    store.inc(spec, np.array([1]), np.array([[0.5]], np.float32))
    store.clock()
    store.inc(spec, np.array([3, 5]), np.array([[9.0], [7.0]], np.float32))
    assert store._send_some() and messages.updates() == [([3], [9.0])], "the largest is first"
    store.clock()
    assert not messages.updates(), "a clock sends nothing by itself"
    assert store._send_some() and messages.updates() == [([1], [0.5])], "row 1 is due"
    assert store._send_some() and messages.updates() == [([5], [7.0])]
    assert not store._send_some()
    assert store.early_bytes > 0
    store._fail("the test is over")


def test_changes_that_wait_go_together() -> None:
    store, messages = lonely_store(staleness=3, tolerance=2, priority="fifo")
    spec = store.clients[0].spec
    for _ in range(4):
        store.inc(spec, np.array([1, 3]), np.array([[1.0], [2.0]], np.float32))
    assert store._send_some() and messages.updates() == [([1], [4.0])]
    store.inc(spec, np.array([1, 3]), np.array([[1.0], [2.0]], np.float32))
    assert store._send_some() and messages.updates() == [([3], [10.0])]
    assert store._send_some() and messages.updates() == [([1], [1.0])]
    store._fail("the test is over")


def test_servers_learn_of_a_clock_when_the_last_row_of_it_was_sent() -> None:
    store, messages = lonely_store(staleness=2, tolerance=2, priority="fifo")
    spec = store.clients[0].spec
    store.inc(spec, np.array([1, 3]), np.ones((2, 1), np.float32))
    store.clock()
    assert store.told_delivered == 0
    store._send_some()
    assert store.told_delivered == 0
    store._send_some()
    assert store.told_delivered == 1 and len(messages.updates()) == 2
    store._fail("the test is over")


@pytest.mark.parametrize(
    ("staleness", "tolerance", "client", "server"),
    [(2, 2, 10, 10), (2, 1, 9, 9), (4, 0, 8, 6), (4, 1, 8, 7), (1, 5, 10, 10)],
)
def test_a_client_leaves_half_of_the_time_to_the_server(
    staleness: int, tolerance: int, client: int, server: int
) -> None:
    settings = StoreSettings(staleness, 1.0, tolerance=tolerance)
    assert (settings.client_due(10), settings.due(10)) == (client, server)
