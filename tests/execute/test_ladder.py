"""The ladder: a segment that cannot be compiled, fails or is wrong runs one mode lower."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from compare_runs import batches
from generated_runs import RanksInMode
from graphs import captured, problem

from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.ladder import mode_of, near
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment
from apportion.execute.segment_function import CannotCompile, SegmentFunction, interpreted
from apportion.machine.compile_mode import check_mode
from apportion.search.baselines.data import data


def refusing(executable: Executable, segment: Segment, place: str) -> SegmentFunction:
    raise CannotCompile("there is no compiler")


def failing(executable: Executable, segment: Segment, place: str) -> SegmentFunction:
    """Drops what it reads, then fails."""

    def run(rank: Rank, context: Context) -> None:
        for slot in segment.frees:
            rank.tensors.pop(slot, None)
        raise RuntimeError("an illegal instruction")

    return run


def wrong(executable: Executable, segment: Segment, place: str) -> SegmentFunction:
    def run(rank: Rank, context: Context) -> None:
        interpreted(segment)(rank, context)
        for slot in segment.outs:
            rank.tensors[slot] = rank.tensors[slot] + 1

    return run


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        (refusing, "there is no compiler"),
        (failing, "RuntimeError: an illegal instruction"),
        (wrong, "is not the interpreter's"),
    ],
)
def test_what_does_not_work_runs_generated(
    compiler: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("apportion.execute.ladder"), "inductor", compiler)
    program, space = captured("mlp:tiny")
    strategy = data(problem(2)).strategy
    made = RanksInMode(program, space, strategy, 2, "inductor")
    oracle = RanksInMode(program, space, strategy, 2, "none")
    for number, batch in enumerate(batches(program, 0, 3)):
        meant, found = oracle.step(batch, 0, number), made.step(batch, 0, number)
        assert found == pytest.approx(meant, rel=1e-12)
    assert made.notes
    for note in made.notes:
        assert "of device" in note
        assert "generated: " in note
        assert why in note


def test_generated_code_that_is_wrong_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "apportion.execute.generate.SegmentSource.function"
    monkeypatch.setattr(source, lambda self: wrong(None, self.segment, ""))  # type: ignore[arg-type]
    program, space = captured("mlp:tiny")
    strategy = data(problem(2)).strategy
    made = RanksInMode(program, space, strategy, 2, "generated")
    oracle = RanksInMode(program, space, strategy, 2, "none")
    for number, batch in enumerate(batches(program, 0, 2)):
        assert made.step(batch, 0, number) == oracle.step(batch, 0, number)
    assert all("interpreted" in note for note in made.notes)
    assert len(made.notes) >= 2


def test_modes() -> None:
    assert mode_of("auto", "cpu") == mode_of("graph", "cpu") == "generated"
    assert mode_of("auto", "cuda:0") == "inductor"
    assert mode_of("none", "cuda") == "none"
    with pytest.raises(ValueError, match="no way to compile 'fast'; choose one of none, generated"):
        check_mode("fast")


def test_near() -> None:
    nan = float("nan")
    a = torch.tensor([1.0, nan, 100.0])
    assert near(a, a.clone(), 0.0)
    assert near(torch.tensor([1.0001, nan, 100.0]), a, 1e-5)
    assert not near(torch.tensor([1.01, nan, 100.0]), a, 1e-5)
    assert not near(torch.tensor([1.0, 1.0, 100.0]), a, 1.0)
    assert not near(torch.tensor([1, 2]), torch.tensor([1, 3]), 1.0)


@pytest.mark.parametrize("together", [1 << 21, 7])
def test_tensors_are_compared_in_pieces(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = import_module("apportion.execute.ladder")
    monkeypatch.setattr(ladder, "COMPARED_AT_ONCE", together)
    meant = torch.linspace(-2, 3, 60).view(3, 20)
    meant[1, 4], meant[2, 2] = torch.inf, torch.nan
    for transposed in (False, True):
        right, found = (meant.T, meant.T.clone()) if transposed else (meant, meant.clone())
        assert near(found, right, 0.0)
        found[-1, -1] += 0.01
        assert not near(found, right, 1e-3)  # of 3, the largest finite one
        assert near(found, right, 4e-3)
        found[-1, -1] = torch.nan
        assert not near(found, right, 1.0)
    assert not near(torch.arange(30), torch.arange(30).flip(0), 1.0)
    assert near(torch.arange(30), torch.arange(30), 0.0)
