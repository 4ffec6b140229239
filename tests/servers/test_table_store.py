"""Tables: no row is too old, nothing is lost, and staleness 0 is bulk-synchronous."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from table_threads import run_threads

from apportion.servers.adaptive_revision import first_state, revise
from apportion.servers.messages import LocalMessages, local_hub
from apportion.servers.table_store import StoreSettings, TableStore

ROWS, CLOCKS = 29, 12


def stamped(store: TableStore) -> tuple[int, int]:
    """Every process counts its clocks in a column of its own, in every row. Returns how old the
    oldest row was that it saw, and the bytes that were sent early."""
    table = store.table("stamps", ROWS, store.count, dtype=np.int64)
    draw = np.random.default_rng(store.rank)
    oldest = 0
    for clock in range(CLOCKS):
        rows = np.unique(draw.integers(0, ROWS, 10))
        seen = table.get(rows)
        assert (seen >= clock - store.settings.staleness).all(), (store.rank, clock, seen.min())
        assert (seen[:, store.rank] == clock).all(), "a process does not see its own changes"
        oldest = max(oldest, int(clock - seen.min()))
        mine = np.zeros((ROWS, store.count), np.int64)
        mine[:, store.rank] = 1
        for some in np.array_split(draw.permutation(ROWS), 3):
            table.inc(some, mine[some])
            time.sleep(draw.random() * 0.002)
        store.clock()
    store.synchronise()
    assert (table.get() == CLOCKS).all(), "a change was lost or made twice"
    return oldest, store.early_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "bandwidth", "priority", "tolerance"),
    [
        (0, None, "random", 2),
        (1, None, "fifo", 2),
        (2, 2e6, "relative", 0),
        (3, 2e5, "absolute", 1),
        (2, 1e5, "fifo", 2),
        (4, 1e6, "random", 0),
    ],
)
def test_no_row_is_older_than_allowed_and_nothing_is_lost(
    staleness: int, bandwidth: float | None, priority: str, tolerance: int
) -> None:
    settings = StoreSettings(staleness, bandwidth, priority, tolerance, push_bytes=300, timeout=30)
    found = run_threads(3, settings, stamped, delay=0.004)
    assert max(oldest for oldest, _ in found) <= staleness
    assert bool(bandwidth) == any(early for _, early in found)


@pytest.mark.parametrize(
    "settings",
    [
        StoreSettings(0, timeout=30),
        StoreSettings(2, timeout=30),
        StoreSettings(2, 1e5, "fifo", 1, 300, timeout=30),
    ],
)
def test_tables_do_not_vouch_for_each_other(settings: StoreSettings) -> None:
    """A clock has come when the changes of all tables have, not only those of the first."""

    def work(store: TableStore) -> None:
        tables = [store.table(name, rows, 2) for name, rows in (("a", 7), ("b", 5), ("c", 1))]
        for clock in range(CLOCKS):
            for table in tables:
                seen = table.get()
                assert seen.min() >= (clock - settings.staleness) * store.count, (clock, table.spec)
            for table in tables:
                table.inc(None, 1.0)
            store.clock()
        store.synchronise()
        assert all((table.get() == CLOCKS * store.count).all() for table in tables)

    run_threads(3, settings, work, delay=0.003)


@pytest.mark.slow
def test_staleness_is_used() -> None:
    """A process that is held up lets the others go on, as far as they may and no further."""
    reached = [0, 0]

    def work(store: TableStore) -> None:
        table = store.table("t", 4)
        for clock in range(8):
            table.get()
            reached[store.rank] = clock
            if store.rank == 0 and clock == 2:
                time.sleep(0.4)
                assert reached[1] == 2 + store.settings.staleness
            table.inc(None, np.ones((4, 1)))
            store.clock()

    run_threads(2, StoreSettings(3, timeout=30), work)


def bulk_synchronous(count: int, clocks: int, rows: int, columns: int) -> np.ndarray:
    """What bulk-synchronous processes make of random deltas: added up, and applied in their
    order."""
    values = np.ones((rows, columns), np.float32)
    draws = [np.random.default_rng(rank) for rank in range(count)]
    for _ in range(clocks):
        totals = []
        for draw in draws:
            total = np.zeros_like(values)
            for _ in range(3):
                some = np.unique(draw.integers(0, rows, 6))
                total[some] += draw.normal(size=(len(some), columns)).astype(np.float32)
            totals.append(total)
        for total in totals:
            changed = total.any(axis=1)
            values[changed] += total[changed]
    return values


def test_staleness_0_is_bulk_synchronous_bit_for_bit() -> None:
    def work(store: TableStore) -> list[np.ndarray]:
        table = store.table("t", 13, 3, initial=1.0)
        draw = np.random.default_rng(store.rank)
        seen = []
        for _ in range(5):
            seen.append(table.get())
            for _ in range(3):
                some = np.unique(draw.integers(0, 13, 6))
                table.inc(some, draw.normal(size=(len(some), 3)))
            store.clock()
        store.synchronise()
        return [*seen, table.get()]

    found = run_threads(3, StoreSettings(0, timeout=30), work, delay=0.003)
    for clocks in range(6):
        expected = bulk_synchronous(3, clocks, 13, 3)
        for seen in found:
            assert np.array_equal(seen[clocks], expected)


@pytest.mark.slow
def test_a_budget_holds_early_rows_back() -> None:
    def work(store: TableStore) -> int:
        table = store.table("t", 2000, 8)
        table.get()
        for _ in range(3):
            table.inc(None, np.ones((2000, 8)))
            time.sleep(0.2)
        return store.early_bytes

    early = run_threads(2, StoreSettings(50, 2e5, push_bytes=5000, timeout=30), work)
    assert 20_000 < max(early) < 2e5 * 0.6 * 1.5


# Adaptive revision


def test_adaptive_revision_without_delay_is_adagrad() -> None:
    alpha, gradients = 0.1, np.random.default_rng(0).normal(size=(20, 5, 2)).astype(np.float32)

    def work(store: TableStore) -> np.ndarray:
        table = store.table("t", 5, 2, initial=0.5, adaptive=alpha)
        for gradient in gradients:
            table.get()
            table.inc(None, gradient)
            store.clock()
        store.synchronise()
        return table.get()

    x, squares = np.full((5, 2), 0.5, np.float32), np.ones((5, 2), np.float32)
    for gradient in gradients:
        squares += gradient * gradient
        x -= alpha * gradient / np.sqrt(squares)
    (found,) = run_threads(1, StoreSettings(0, timeout=30), work)
    assert np.allclose(found, x, rtol=1e-6, atol=1e-7)


def test_adaptive_revision_corrects_what_is_late() -> None:
    """Two gradients that were made with the same parameters, the second one after the first has
    landed: the formula by hand."""
    state = first_state(np.zeros((1, 1)))
    read = state[:, 2].copy()
    revise(state, np.array([[2.0]]), read, 0.1)
    x1, z1 = -0.1 * 2 / np.sqrt(5.0), 5.0
    assert state[0, 0, 0] == pytest.approx(x1)
    revise(state, np.array([[1.0]]), read, 0.1)
    z2 = z1 + 1 + 2 * 1 * 2
    rate, old = 0.1 / np.sqrt(z2), 0.1 / np.sqrt(z1)
    assert state[0, 0, 0] == pytest.approx(x1 - rate * 1 + (old - rate) * 2)


def test_adaptive_revision_never_lets_rates_grow() -> None:
    state = first_state(np.zeros((1, 1)))
    revise(state, np.array([[3.0]]), state[:, 2].copy(), 0.1)
    before = state[0, 1, 0]
    revise(state, np.array([[-1.0]]), np.zeros((1, 1)), 0.1)  # z falls: 1 - 2 * 3 < 0
    assert state[0, 3, 0] < before and state[0, 1, 0] == before


@pytest.mark.slow
def test_adaptive_tables_train_though_gradients_are_late() -> None:
    def work(store: TableStore) -> float:
        table = store.table("t", 6, 3, initial=4.0, adaptive=1.0)
        for _ in range(60):
            table.inc(None, 2 * table.get())  # the gradient of x * x
            store.clock()
        store.synchronise()
        return float(np.abs(table.get()).max())

    settings = StoreSettings(2, 1e6, "relative", push_bytes=200, timeout=30)
    assert max(run_threads(3, settings, work, delay=0.002)) < 0.5


# What users get wrong


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"staleness": -1}, "a staleness of -1 clocks makes no sense"),
        ({"bandwidth": 0.0}, "a bandwidth of 0.0 bytes a second sends nothing"),
        (
            {"priority": "oldest"},
            "unknown priority 'oldest'; known: fifo, random, relative, absolute",
        ),
    ],
)
def test_wrong_settings(how: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        StoreSettings(**how)  # type: ignore[arg-type]


def test_wrong_rows() -> None:
    def work(store: TableStore) -> None:
        with pytest.raises(ValueError, match="the table none of 0 x 1 has no elements"):
            store.table("none", 0)
        table = store.table("t", 4, 2)
        with pytest.raises(ValueError, match="has rows 0 to 3, and 2 to 4 were asked for"):
            table.get([2, 4])
        with pytest.raises(ValueError, match="a row of t is added to twice"):
            table.inc([1, 1], 1.0)
        with pytest.raises(ValueError, match="whole numbers, not float64"):
            table.get([0.5])
        with pytest.raises(
            ValueError, match=r"is 4 x 2, and what it is to begin with has the shape"
        ):
            store.table("u", 4, 2, initial=np.zeros(3))

    run_threads(1, StoreSettings(timeout=30), work)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_told() -> None:
    hub = local_hub(2)
    stores = [TableStore(LocalMessages(r, 2, hub), StoreSettings(timeout=0.3)) for r in range(2)]
    tables: list[object] = [None, None]

    def make(rank: int) -> None:
        tables[rank] = stores[rank].table("t", 4)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].clock()
    with pytest.raises(RuntimeError, match=r"waited 0.3 s for rows at clock 1; process 1 is"):
        tables[0].get()  # type: ignore[attr-defined]
    for store in stores:
        store._fail("the test is over")
