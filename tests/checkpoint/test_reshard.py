"""Saved by ranks under one plan, gone on with by others under another: always the training that
nobody interrupted. benchmarks/checkpoints.py does it for more models and plans."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from checkpoint_runs import SEED, RanksHere, batches, close, space, wide_program

from apportion.capture.program import Program
from apportion.capture.reference import eager_steps
from apportion.checkpoint.stored import open_checkpoint
from apportion.search.baselines.random_strategy import draw

BEFORE, AFTER = 1, 2


def go_on(program: Program, path: Path, devices: int, expected: list[float], ends: object) -> None:
    """Ranks whose state was lost go on from a checkpoint."""
    ranks = RanksHere(program, draw(space(program), devices, Random(devices)), devices)
    for rank in ranks.ranks:
        for tensor in rank.tensors.values():
            tensor.fill_(7)
    assert ranks.load(open_checkpoint(path)) == ()
    losses = ranks.train(batches(program, BEFORE, AFTER))
    assert losses == pytest.approx(expected[BEFORE:], rel=1e-9)
    last = ranks.whole()
    for value, state in ranks.states[0].values.items():
        assert close(last[state.key], ends[value]), state.key  # type: ignore[index]


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ("mlp:tiny", (2, 3)),
        pytest.param("gpt2:tiny", (3,), marks=pytest.mark.slow),
        pytest.param("resnet50:tiny", (6,), marks=pytest.mark.slow),
    ],
)
def test_any_plan_goes_on_from_any_other(
    spec: str, devices: tuple[int, ...], tmp_path: Path
) -> None:
    program = wide_program(spec)
    data = batches(program, 0, BEFORE + AFTER)
    expected, ends = eager_steps(program, data, SEED, wide=True)
    four = RanksHere(program, draw(space(program), 4, Random(0)), 4)
    four.train(data[:BEFORE])
    path = four.save(tmp_path)
    for count in devices:
        go_on(program, path, count, expected, ends)


def test_every_element_is_written_once(tmp_path: Path) -> None:
    """Of copies one is written, and ranks share the writing."""
    program = wide_program("mlp:tiny")
    ranks = RanksHere(program, draw(space(program), 4, Random(1)), 4)
    parts = [state.part for state in ranks.states]
    sizes = [sum(chunk.nbytes for chunk in part) for part in parts]
    whole = sum(t.numel() * t.element_size() for t in ranks.whole().values())
    assert sum(sizes) == whole
    assert max(sizes) < whole


def test_a_saved_state_is_that_of_the_moment(tmp_path: Path) -> None:
    """What is staged does not change with the next step."""
    program = wide_program("mlp:tiny")
    ranks = RanksHere(program, draw(space(program), 2, Random(2)), 2)
    ranks.train(batches(program, 0, 1))
    before = {key: tensor.clone() for key, tensor in ranks.whole().items()}
    path = ranks.save(tmp_path)
    ranks.train(batches(program, 1, 1))
    after = ranks.whole()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    ranks.load(open_checkpoint(path))
    assert all(torch.equal(before[key], tensor) for key, tensor in ranks.whole().items())
