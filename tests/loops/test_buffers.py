"""Arrays whose changes are seen late: buffers, functions that apply what was added, tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from random_loops import function_of

import apportion.loops as loops
from apportion.loops import array_uses
from apportion.loops.loop_body import LoopError
from apportion.loops.session import threads

ROWS, FEATURES = 40, 300

ADD = """
def body(i, row, w, rate):
    ids, xs = row
    total = 0.0
    for k in range(len(ids)):
        total += w[ids[k]] * xs[k]
    for k in range(len(ids)):
        w[ids[k]] += rate * (1.0 - total) * xs[k]
"""

GRADIENT = """
def body(i, row, w, g):
    ids, xs = row
    for k in range(len(ids)):
        if xs[k] > 0:
            g[ids[k]] += xs[k] + w[ids[k]]
"""


def samples() -> Any:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 6, ROWS)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    ids = np.concatenate([draw.choice(FEATURES, n, replace=False) for n in lengths])
    return loops.array.from_rows(starts, ids, draw.normal(size=starts[-1]))


def rows_of(over: Any, ranks: int, chunks: int) -> list[list[list[int]]]:
    """The elements of each chunk of each rank: [chunk][rank], rows in the order given."""
    bounds = np.searchsorted(np.arange(ROWS), np.linspace(0, ROWS, ranks + 1))
    parts = [list(range(bounds[r], bounds[r + 1])) for r in range(ranks)]
    cut = lambda part, c: part[len(part) * c // chunks : len(part) * (c + 1) // chunks]  # noqa: E731
    return [[cut(part, chunk) for part in parts] for chunk in range(chunks)]


def by_hand(over: Any, ranks: int, chunks: int, rate: float) -> np.ndarray:
    """What buffered processes should make of ADD: copies, and then what each added."""
    w = np.zeros(FEATURES)
    for chunk in rows_of(over, ranks, chunks):
        added = []
        for part in chunk:
            copy = w.copy()
            for row in part:
                low, high = over.starts[row], over.starts[row + 1]
                ids, xs = over.ragged[0][low:high], over.ragged[1][low:high]
                total = 0.0
                for k in range(len(ids)):
                    total += copy[ids[k]] * xs[k]
                for k in range(len(ids)):
                    copy[ids[k]] += rate * (1.0 - total) * xs[k]
            added.append(copy - w)
        for each in added:
            w += each
    return w


@pytest.fixture(params=["boxed", "keyed"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(array_uses, "SMALL_BYTES", 0 if request.param == "keyed" else 1 << 30)
    return str(request.param)


def add_loop(over: Any, **how: Any) -> Any:
    step = loops.parallel(over=over, **how)(function_of(ADD))
    step.planner.interpreted = True
    return step


@pytest.mark.parametrize("repeated", [False, True])
def test_buffers_are_copies_and_sums(placement: str, repeated: bool) -> None:
    over, w = samples(), loops.array.zeros((FEATURES,), np.float64)
    step = add_loop(over, repeated=repeated)
    with threads(2):
        for _ in range(2):
            step(loops.buffer(w, delay=5), 0.5)
        plan = step.planner.plan(
            loops.session.current_session(), step.planner.bind((loops.buffer(w, delay=5), 0.5)), 0
        )
    assert [use.placement for use in plan.uses] == [placement]
    first = by_hand(over, 2, 4, 0.5)
    w2 = loops.array.zeros((FEATURES,), np.float64)
    with threads(2):
        step(loops.buffer(w2, delay=5), 0.5)
    assert np.array_equal(w2.numpy(), first) and not np.array_equal(w.numpy(), first)


def test_one_process_needs_no_buffer(placement: str) -> None:
    over, w = samples(), loops.array.zeros((FEATURES,), np.float64)
    with threads(1):
        add_loop(over)(loops.buffer(w), 0.5)
    assert np.array_equal(w.numpy(), by_hand(over, 1, 1, 0.5))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_without_staleness_are_buffers(placement: str, ranks: int) -> None:
    """Bulk-synchronous tables and buffers that are sent every chunk do the same, bit for bit."""
    over = samples()
    found = []
    for how in (loops.stale, loops.buffer):
        w = loops.array.zeros((FEATURES,), np.float64)
        settings = {"staleness": 0} if how is loops.stale else {}
        with threads(ranks):
            step = add_loop(over)
            for _ in range(2):
                step(how(w, delay=4, **settings), 0.5)
        found.append(w.numpy())
    assert np.array_equal(*found)


def test_stale_arrays_can_be_used_otherwise_in_between(placement: str) -> None:
    over, w = samples(), loops.array.zeros((FEATURES,), np.float64)
    doubled = loops.parallel(over=loops.array.indices(FEATURES))(
        function_of("def body(i, value, w):\n    w[i] = 2 * w[i]\n")
    )
    doubled.planner.interpreted = True
    step = add_loop(over)
    with threads(2):
        step(loops.stale(w, staleness=0, delay=4), 0.5)
        once = w.numpy()
        doubled(w)
        assert np.array_equal(w.numpy(), 2 * once)
        step(loops.stale(w, staleness=0, delay=4), 0.0)
        assert np.array_equal(w.numpy(), 2 * once)
        w.assign(np.ones(FEATURES))
        step(loops.stale(w, staleness=0, delay=4), 0.0)
        assert np.array_equal(w.numpy(), np.ones(FEATURES))


def halved(x: float, added: float, seen: float) -> tuple[float, float]:
    return x + 0.5 * added, seen + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_applies_what_was_added(placement: str, ranks: int) -> None:
    over = samples()
    w, seen = (loops.array.zeros((FEATURES,), np.float64) for _ in range(2))
    step = loops.parallel(over=over)(function_of(GRADIENT))
    step.planner.interpreted = True
    with threads(ranks):
        step(w, loops.buffer(w, apply=halved, state=[seen]))
    expected, touched = np.zeros(FEATURES), np.zeros(FEATURES)
    for chunk in rows_of(over, ranks, 1):
        for part in chunk:
            sums = np.zeros(FEATURES)
            for row in part:
                for k in range(over.starts[row], over.starts[row + 1]):
                    if over.ragged[1][k] > 0:
                        sums[over.ragged[0][k]] += over.ragged[1][k]
            expected += 0.5 * sums
            touched += sums != 0
    assert np.allclose(w.numpy(), expected, atol=1e-12)
    assert np.array_equal(seen.numpy(), touched)


def test_wrong_buffers() -> None:
    w = loops.array.zeros((4,))
    with pytest.raises(LoopError, match=r"loops.buffer takes an array"):
        loops.buffer(np.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(LoopError, match="a delay of 0 elements makes no sense"):
        loops.buffer(w, delay=0)
    with pytest.raises(LoopError, match="in arrays of the shape of its own"):
        loops.buffer(w, apply=halved, state=[loops.array.zeros((5,))])
    with pytest.raises(LoopError, match="a state only for the function"):
        loops.buffer(w, state=[w])
    step = loops.parallel(over=samples())(function_of(ADD.replace("rate", "g")))
    with (
        threads(2),
        pytest.raises(LoopError, match="is a buffer with a function; the body can only add"),
    ):
        step(loops.buffer(loops.array.zeros((FEATURES,)), apply=halved), 0.5)
