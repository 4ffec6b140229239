"""Arrays of loops: what they begin with, who has which part, and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_loops import function_of

import apportion.loops as loops
from apportion.loops.array_layout import ArrayLayout
from apportion.loops.balanced_bounds import balanced_bounds, counts_by_group, imbalance
from apportion.loops.loop_body import LoopError
from apportion.loops.session import LoopSession, held_bytes, threads


def layouts(shape: tuple[int, ...], count: int) -> list[ArrayLayout]:
    found = []
    for dim, order in ((0, (0, 1, 2)), (1, (2, 0, 1)), (2, (1, 2, 0))):
        bounds = tuple(sorted({0, 1, shape[dim] // 2, shape[dim]}))
        owners = tuple((dim + part) % count for part in range(len(bounds) - 1))
        found.append(ArrayLayout(dim, bounds, owners, order))
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_arrays_are_the_same_wherever_their_parts_lie(count: int) -> None:
    shape = (5, 4, 6)
    whole = loops.array.normal(shape, 2.0, seed=3).numpy()
    array = loops.array.normal(shape, 2.0, seed=3)
    with threads(count) as session:
        for layout in (*layouts(shape, count), *reversed(layouts(shape, count))):
            session.place(array, layout)
            assert np.array_equal(array.numpy(), whole)
            assert sum(held_bytes()) == array.nbytes
    assert np.array_equal(array.numpy(), whole)


def test_random_arrays_are_what_they_say() -> None:
    values = loops.array.normal((400, 500), 0.5, seed=1, dtype=np.float64).numpy()
    assert abs(values.mean()) < 0.005 and abs(values.std() - 0.5) < 0.005
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.01
    even = loops.array.uniform((400, 500), 2.0, seed=1).numpy()
    assert even.min() >= 0 and even.max() <= 2 and abs(even.mean() - 1) < 0.01
    other = loops.array.normal((400, 500), 0.5, seed=2, dtype=np.float64).numpy()
    assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.01


def test_given_arrays_are_copies() -> None:
    given = np.arange(6.0)
    array = loops.array.from_numpy(given)
    given[:] = 0
    assert array.numpy().sum() == 15
    array.assign(np.ones(6))
    assert array.numpy().sum() == 6
    with pytest.raises(LoopError, match="an array of shape"):
        array.assign(np.ones(5))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: loops.array.zeros((3, 0)), "has no elements"),
        (
            lambda: loops.array.normal((3,), dtype=np.int32),
            "random elements are float32 or float64",
        ),
        (lambda: loops.array.from_numpy(["a"]), "cannot be in an array of loops"),
        (lambda: loops.array.from_coordinates([0, 1]), "columns of indices and then one of values"),
        (lambda: loops.array.from_coordinates([0, -1], [1, 1]), "the index -1 is negative"),
        (lambda: loops.array.from_coordinates([0.5], [1]), "indices are whole numbers"),
        (lambda: loops.array.from_coordinates([0], [1, 2]), "columns of one length"),
        (
            lambda: loops.array.from_coordinates([4], [1], shape=(3,)),
            "the index 4 is outside of dim 0",
        ),
        (lambda: loops.array.from_coordinates([4], [1], shape=(3, 3)), "does not have 1 dims"),
        (lambda: loops.array.from_rows([0, 2], [1]), "rise from 0 to the length of all columns"),
        (lambda: loops.array.from_rows([0, 1], [1], labels=[1, 2]), "1 rows and 2 labels"),
        (lambda: loops.array.from_shards(np.load, [], (3,)), "there are no shards to read"),
    ],
)
def test_wrong_arrays(make: Any, sentence: str) -> None:
    with pytest.raises(LoopError, match=sentence):
        make()


def test_balanced_bounds() -> None:
    counts = np.array([0, 50, 1, 1, 1, 1, 1, 1, 44, 0])
    assert balanced_bounds(counts, 10, 2) == (0, 2, 10)
    assert balanced_bounds(np.zeros(10, np.int64), 10, 2) == (0, 5, 10)
    assert balanced_bounds(counts, 10, 1) == (0, 10)
    for parts in (2, 3, 7, 12):
        bounds = balanced_bounds(np.random.default_rng(parts).integers(0, 9, 10), 10, parts)
        assert len(bounds) == parts + 1 and sorted(bounds) == list(bounds) and bounds[-1] == 10
    draw = np.random.default_rng(0)
    skewed = (1000 * draw.power(0.5, 100_000)).astype(np.int64)
    even = np.histogram(skewed, np.linspace(0, 1000, 9))[0]
    bounds = balanced_bounds(counts_by_group(skewed, 1000), 1000, 8)
    assert imbalance(np.histogram(skewed, bounds)[0]) < 1.1 < imbalance(even)


def read_shard(item: int) -> tuple[np.ndarray, ...]:
    rows = np.arange(item, 40, 4)
    return rows, rows % 7, rows.astype(np.float64)


def test_processes_read_shards() -> None:
    over = loops.array.from_shards(read_shard, [0, 1, 2, 3], (40, 7))
    step = loops.parallel(over=over)(
        function_of(
            "def body(key, value, A, B):\n    i, j = key\n    A[i] += value\n    B[j] += 1.0\n"
        )
    )
    step.planner.interpreted = True
    A, B = loops.array.zeros((40,)), loops.array.zeros((7,))
    with threads(3):
        step(A, B)
    assert np.array_equal(A.numpy(), np.arange(40))
    assert np.array_equal(B.numpy(), np.bincount(np.arange(40) % 7))


# Values that a body returns, and random numbers


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_body_returns_takes_the_place_of_the_value(count: int) -> None:
    keys = np.random.default_rng(0).permutation(30)
    over = loops.array.from_coordinates(keys, np.arange(30.0))
    text = "def body(i, x, A):\n    A[i] += x\n    if x > 20:\n        return\n    return x + i\n"
    step = loops.parallel(over=over)(function_of(text))
    step.planner.interpreted = True
    with threads(count):
        step(loops.array.zeros((30,)))
    assert np.array_equal(
        over.numpy(), np.where(np.arange(30) > 20, np.arange(30), np.arange(30) + keys)
    )


def test_random_numbers_belong_to_elements() -> None:
    found = []
    for count in (1, 2, 3):
        over = loops.array.from_coordinates(np.arange(200) % 20, np.arange(200) % 9, np.zeros(200))
        text = "def body(key, x, A):\n    i, j = key\n    A[i] += 0.0\n    return loops.uniform()\n"
        step = loops.parallel(over=over)(function_of(text, loops=loops))
        step.planner.interpreted = True
        with threads(count):
            step(loops.array.zeros((20,)))
            first = over.numpy()
            step(loops.array.zeros((20,)))
        found.append((first, over.numpy()))
    for first, second in found[1:]:
        assert np.array_equal(first, found[0][0]) and np.array_equal(second, found[0][1])
    first, second = found[0]
    assert len({*first, *second}) == 400 and 0.4 < first.mean() < 0.6 and (first != second).all()


# Checkpoints


def scaled(session: LoopSession, array: Any, by: float) -> None:
    over = loops.array.indices(*array.shape)
    step = loops.parallel(over=over)(
        function_of("def body(key, value, A, by):\n    i, j = key\n    A[i, j] *= by\n")
    )
    step.planner.interpreted = True
    step(array, by)


def test_a_checkpoint_is_read_by_any_number_of_processes(tmp_path: Path) -> None:
    array, values = loops.array.normal((7, 9), seed=5), loops.array.from_coordinates([0, 1], [3, 4])
    with threads(3) as session:
        scaled(session, array, 2.0)
        loops.save(tmp_path, A=array, values=values, passes=1)
        scaled(session, array, 2.0)
        loops.save(tmp_path, A=array, values=values, passes=2, error=0.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "loops.json", "part2-0.safetensors", "part2-1.safetensors", "part2-2.safetensors",
    ]  # fmt: skip
    for count in (1, 2, 4):
        again, numbers = loops.array.zeros((7, 9)), loops.array.from_coordinates([0, 1], [0, 0])
        with threads(count) as session:
            scaled(session, again, 1.0)
            found = loops.load(tmp_path, A=again, values=numbers)
            scaled(session, again, 1.0)
        assert found == {"passes": 2, "error": 0.5}
        assert np.array_equal(again.numpy(), array.numpy()) and numbers.numpy().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "loops.json").unlink(), "has no checkpoint of a loop"),
        (
            lambda folder: (folder / "loops.json").write_text("{"),
            "is not the index of a checkpoint",
        ),
        (
            lambda folder: (folder / "part1-0.safetensors").unlink(),
            "part1-0.safetensors cannot be read",
        ),
        (lambda folder: (folder / "part1-0.safetensors").write_bytes(b"x"), "cannot be read"),
        (lambda folder: _edit(folder, "version", 9), "is of version 9, and this program reads 1"),
        (lambda folder: _edit(folder, "file", "../x"), "names a file that is not in its folder"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(tmp_path: Path, spoil: Any, sentence: str) -> None:
    array = loops.array.zeros((4, 3))
    with threads(1):
        loops.save(tmp_path, A=array)
        spoil(tmp_path)
        with pytest.raises(LoopError, match=sentence):
            loops.load(tmp_path, A=array)
            array.numpy()


def _edit(folder: Path, key: str, value: Any) -> None:
    index = json.loads((folder / "loops.json").read_text())
    where = index["arrays"]["A"]["parts"][0] if key == "file" else index
    where[key] = value
    (folder / "loops.json").write_text(json.dumps(index))


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    with threads(1):
        loops.save(tmp_path, A=loops.array.zeros((4, 3)))
        with pytest.raises(LoopError, match="has no array B; it has A"):
            loops.load(tmp_path, B=loops.array.zeros((4, 3)))
        with pytest.raises(LoopError, match=r"A has the shape \(3, 4\), and the one in"):
            loops.load(tmp_path, A=loops.array.zeros((3, 4)))
        with pytest.raises(LoopError, match="A holds float64, and the one in"):
            loops.load(tmp_path, A=loops.array.zeros((4, 3), np.float64))
        with pytest.raises(LoopError, match="text is a str; arrays and numbers can be saved"):
            loops.save(tmp_path, text="x")
