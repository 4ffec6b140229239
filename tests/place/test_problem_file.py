"""Problems in files come back as they were; other files are refused in a sentence."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from made_placements import made_problem

from apportion.place.placement_problem import PlacementProblem
from apportion.place.problem_file import load_problem, save_problem


def same(a: PlacementProblem, b: PlacementProblem) -> bool:
    for part in ("columns", "links"):
        for x, y in zip(getattr(a, part), getattr(b, part), strict=True):
            if not np.array_equal(x, y) or np.asarray(x).dtype != np.asarray(y).dtype:
                return False
    plain = ("name", "node_names", "node_kinds", "devices", "tick", "time_unit")
    return all(getattr(a, name) == getattr(b, name) for name in plain)


def test_a_problem_comes_back(tmp_path: Path) -> None:
    problem = made_problem(20, 3, seed=1, units=7, memory=1 << 33)
    save_problem(tmp_path / "p.npz", problem)
    found = load_problem(tmp_path / "p.npz")
    assert same(found, problem) and found.transfer is None and found.expert is None


def test_transfer_and_expert_come_back(tmp_path: Path) -> None:
    problem = dataclasses.replace(
        made_problem(), transfer=np.linspace(0, 1, 12), expert=np.arange(12) % 2, time_unit="ms"
    )
    save_problem(tmp_path / "p.npz", problem)
    found = load_problem(tmp_path / "p.npz")
    assert same(found, problem)
    assert found.transfer is not None and np.array_equal(found.transfer, problem.transfer)
    assert found.expert is not None and np.array_equal(found.expert, problem.expert)


def changed(path: Path, **arrays: np.ndarray) -> None:
    with np.load(path) as kept:
        every = dict(kept)
    np.savez(path, **{**every, **{k.replace("__", "."): v for k, v in arrays.items()}})


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("columns__reader", np.full(999, 5), "reader"),
        ("columns__unit", np.full(12, 99), "unit"),
        ("columns__unit", np.zeros(12, np.int64), "a unit has no nodes"),
        ("columns__duration", np.full((12, 2), -1), "duration has numbers that are negative"),
        ("columns__duration", np.ones((12, 2)), "type float64"),
        ("columns__duration", np.ones((12, 3), np.int64), "shape"),
        ("columns__allowed", np.zeros((12, 2), bool), "no device can run"),
        ("links__hop_link", np.array([0, 9]), "hop_link"),
        ("columns__issue", np.ones((3, 2), np.int64), "issue has shape"),
        ("links__receive", np.full((2, 3), -1.0), "receive"),
        ("links__lag", np.full((2, 2), np.nan), "lag"),
        ("expert", np.full(12, 7), "placement"),
        ("header", np.frombuffer(b"{}", np.uint8), "header"),
        ("header", np.frombuffer(b"not JSON", np.uint8), "holds no placement problem"),
    ],
)
def test_wrong_numbers_are_refused(
    tmp_path: Path, column: str, value: np.ndarray, says: str
) -> None:
    path = tmp_path / "p.npz"
    save_problem(path, made_problem())
    changed(path, **{column: value})
    with pytest.raises(ValueError, match=says) as error:
        load_problem(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    save_problem(path, made_problem())
    whole = path.read_bytes()
    lone = io.BytesIO()
    np.save(lone, np.zeros(3))
    pickled = io.BytesIO()
    np.savez(pickled, header=np.array([{}], object))
    for content in (b"", b"hello", whole[: len(whole) // 2], lone.getvalue(), pickled.getvalue()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="holds no placement problem"):
            load_problem(path)
    with pytest.raises(ValueError, match="cannot read"):
        load_problem(tmp_path / "absent.npz")
