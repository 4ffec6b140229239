"""Loops on several ranks equal the serial loop, or the serial run over the schedule's tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from loop_oracle import run_divided, run_plain
from random_loops import function_of, random_loop

import apportion.loops as loops
from apportion.loops import array_uses
from apportion.loops.loop_body import LoopError, read_body
from apportion.loops.plan_loop import analyse_body
from apportion.loops.session import LoopSession, threads


@contextmanager
def here() -> Iterator[LoopSession]:
    """A session of its own in this process."""
    with threads(1) as session:
        yield session


def check_random(seeds: range, interpreted: bool, counts: tuple[int, ...] = (2, 3)) -> int:
    runs = 0
    for seed in seeds:
        loop = random_loop(seed)
        arrays: dict[str, int | None] = {k: len(v) for k, v in loop.arrays.items()}
        found = analyse_body(read_body(loop.function), arrays, len(loop.shape), loop.ordered)
        for scheme in found.schemes:
            for count in counts:
                got, order = run_divided(loop, scheme, threads(count), interpreted)
                if loop.ordered:
                    order = sorted(range(len(loop.keys)), key=lambda each: loop.keys[each])
                for a, b in zip(got, run_plain(loop, order), strict=True):
                    assert np.array_equal(a, b), f"seed {seed}, {scheme} on {count}\n{loop.text}"
                runs += 1
    return runs


@pytest.mark.slow
def test_random_loops_equal_the_order_of_tiles() -> None:
    assert check_random(range(40), interpreted=True) > 50


@pytest.mark.slow
def test_random_loops_whose_rows_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_uses, "SMALL_BYTES", 0)
    assert check_random(range(1000, 1030), interpreted=True) > 30


@pytest.mark.slow
def test_random_loops_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_uses, "CACHE_BYTES", 0)
    monkeypatch.setattr(array_uses, "BLOCK_BYTES", 150)
    assert check_random(range(3000, 3030), interpreted=True) > 30


@pytest.mark.parametrize(("cached", "order"), [(1 << 20, [0, 1, 2, 3]), (0, [1, 3, 0, 2])])
def test_one_process_takes_a_large_array_block_by_block(
    monkeypatch: pytest.MonkeyPatch, cached: int, order: list[int]
) -> None:
    monkeypatch.setattr(array_uses, "CACHE_BYTES", cached)
    monkeypatch.setattr(array_uses, "BLOCK_BYTES", 16)
    over = loops.array.from_coordinates([0, 0, 1, 1], [3, 0, 3, 1], [0.0, 1.0, 2.0, 3.0])
    text = "def body(key, value, A, B, n):\n    i, j = key\n    A[j] += value\n    n[0] += 1\n"
    text += "    B[int(value)] = n[0]\n"
    step = loop_of(text, over)
    step.planner.interpreted = True  # type: ignore[attr-defined]
    A, B, n = (loops.array.zeros((k,), np.float64) for k in (4, 4, 1))
    step(A, B, n)  # type: ignore[operator]
    assert np.argsort(B.numpy()).tolist() == order


@pytest.mark.slow
def test_random_loops_compiled() -> None:
    assert check_random(range(2000, 2006), interpreted=False, counts=(2,)) > 5


# Matrix factorisation, as its user writes it


def ratings(count: int = 3000, users: int = 60, items: int = 25) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(0)
    rows = np.minimum(draw.pareto(1.0, count) * 5, users - 1).astype(np.int32)
    return rows, draw.integers(0, items, count), draw.normal(size=count).astype(np.float32)


MF = """
def body(key, rating, W, H, rate):
    u, i = key
    w = W[:, u]
    error = rating - w @ H[:, i]
    gw = error * H[:, i]
    gh = error * w
    W[:, u] += rate * gw
    H[:, i] += rate * gh
    loops.accumulate("error", error * error)
"""


def factorise(
    data: tuple[np.ndarray, ...], session: object, passes: int = 2, ordered: bool = False
) -> tuple[np.ndarray, np.ndarray, list[float], loops.parallel_loop.ParallelLoop, object]:
    over = loops.array.from_coordinates(*data)
    step = loops.parallel(over=over, ordered=ordered)(function_of(MF, loops=loops))
    W, H = loops.array.normal((8, 60), 0.1, seed=1), loops.array.normal((8, 25), 0.1, seed=2)
    errors = []
    with session as found:  # type: ignore[attr-defined]
        for _ in range(passes):
            step(W, H, 0.05)
            errors.append(loops.accumulated("error"))
        deals = found.deals.get(over.number)
    return W.numpy(), H.numpy(), errors, step, deals


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_matrix_factorisation_equals_the_order_of_tiles(count: int) -> None:
    data = ratings()
    W, H, errors, step, (request, facts) = factorise(data, threads(count))
    rows, columns = data[:2]
    space = np.searchsorted(facts.space_bounds[1:-1], rows, side="right")
    time = np.searchsorted(facts.time_bounds[1:-1], columns, side="right")
    from apportion.loops.tile_schedule import tile_schedule

    schedule = tile_schedule(request.scheme, count, 2)
    place = {(rank, part): at for at, (_, rank, part) in enumerate(schedule.tiles())}
    tiles = [place[int(s), int(t)] for s, t in zip(space, time, strict=True)]
    order = np.argsort(tiles, kind="stable")
    again = factorise(tuple(column[order] for column in data), here())
    assert np.array_equal(W, again[0]) and np.array_equal(H, again[1])
    assert errors == pytest.approx(again[2], rel=1e-12) and errors[1] < errors[0]
    assert sum(report.sent_bytes for report in step.last) == H.nbytes * count


@pytest.mark.slow
def test_ordered_matrix_factorisation_equals_the_serial_loop() -> None:
    data = ratings(800)
    W, H, *_ = factorise(data, threads(3), ordered=True)
    again = factorise(data, here(), ordered=True)
    assert np.array_equal(W, again[0]) and np.array_equal(H, again[1])


# Refusals and faults


def loop_of(text: str, over: object, **names: object) -> object:
    return loops.parallel(over=over)(function_of(text, loops=loops, **names))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
def test_a_subscript_out_of_range_is_told_with_its_line(count: int) -> None:
    over = loops.array.from_coordinates(np.arange(6), np.array([0, 1, 2, 3, 9, 5]))
    step = loop_of("def body(i, value, A):\n    j = int(value)\n    A[j] = 1.0\n", over)
    step.planner.interpreted = True  # type: ignore[attr-defined]
    step.planner.checked.add(((("A", 1),), ()))  # type: ignore[attr-defined]
    with (
        threads(count),
        pytest.raises(LoopError, match=r":3: the subscript 9 of A is out"),
    ):
        step(loops.array.zeros((6,)))  # type: ignore[operator]


def test_an_index_that_leads_outside_is_refused_before_anything_runs() -> None:
    over = loops.array.indices(5)
    step = loop_of("def body(i, value, A):\n    A[i] = A[i - 1]\n", over)
    with threads(1), pytest.raises(LoopError, match=r":2: .* -1 to 3 in dim 0 of A.*do not wrap"):
        step(loops.array.zeros((5,)))  # type: ignore[operator]


def test_a_body_that_fails_is_told_with_its_line() -> None:
    over = loops.array.indices(5)
    step = loop_of("def body(i, value, A):\n    x, y = A[i], 1, 2\n    A[i] = x\n", over)
    with (
        threads(1),
        pytest.raises(LoopError, match=r":2: the body fails in iteration"),
    ):
        step(loops.array.zeros((5,)))  # type: ignore[operator]


@pytest.mark.slow
def test_what_cannot_be_compiled_is_told_with_its_line() -> None:
    over = loops.array.indices(5)
    text = "def body(i, value, A):\n    x = A[i]\n    y = {'a': x, 2: 'b'}\n    A[i] = len(y)\n"
    step = loop_of(text, over)
    with threads(1), pytest.raises(LoopError, match=r":3: this cannot be compiled"):
        step(loops.array.zeros((5,)))  # type: ignore[operator]


def test_no_scheme_says_which_lines_and_what_to_do() -> None:
    over = loops.array.from_coordinates(np.arange(4), np.arange(4))
    step = loop_of("def body(i, value, A):\n    A[int(value)] += 1.0\n", over)
    with (
        threads(2),
        pytest.raises(LoopError, match=r":2: .* of A .* \(\+\) apart; pass"),
    ):
        step(loops.array.zeros((5,)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((), r"takes 1 arguments \(A\), and 0 were given"),
        (("x",), "the argument A is a str; a loop takes"),
    ],
)
def test_wrong_arguments(given: tuple[object, ...], sentence: str) -> None:
    step = loop_of("def body(i, value, A):\n    A[i] += 1.0\n", loops.array.indices(5))
    with pytest.raises(LoopError, match=sentence):
        step(*given)  # type: ignore[operator]


def test_one_array_has_one_name() -> None:
    text = "def body(i, value, A, B):\n    A[i] += B[i]\n"
    step, array = loop_of(text, loops.array.indices(5)), loops.array.zeros((5,))
    with pytest.raises(LoopError, match="A and B are the same array"):
        step(array, array)  # type: ignore[operator]
