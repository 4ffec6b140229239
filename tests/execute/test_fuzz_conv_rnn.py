"""A share of the fuzz for convolutional and recurrent nets; benchmarks/fuzz.py has the rest."""

from __future__ import annotations

from random import Random

import pytest
import torch
from compare_runs import compare
from graphs import captured, problem
from soak import cases, kept

from apportion.describe.errors import IllegalCut
from apportion.search.baselines.data import data
from apportion.search.baselines.random_strategy import draw
from apportion.search.baselines.single import single
from apportion.split.space import Space
from apportion.split.strategy import Choice, Strategy, unsplit_choice

MODELS = ["wresnet:tiny", "rnn:tiny"]


def unchanged(task: int, message: torch.Tensor) -> torch.Tensor:
    return message


@pytest.mark.slow
@pytest.mark.parametrize("devices", kept([2, 3, 4], 3))
@pytest.mark.parametrize("spec", MODELS)
def test_random_strategies_train_the_same_model(spec: str, devices: int) -> None:
    """Within the tolerance: replicas whose inputs lie differently in memory may differ in bits."""
    program, space = captured(spec)
    for seed in range(cases(4, 2)):
        strategy = draw(space, devices, Random(1000 * devices + seed))
        found = compare(program, space, strategy, devices, seed=seed, corrupt=unchanged)
        assert found.equal, (devices, seed, found)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_every_plane_cut_into_strips(devices: int) -> None:
    """Convolutions with halos on all sides of each other, batch norm with statistics between."""
    program, space = captured("wresnet:tiny")
    choices = tuple(strips(space, op, devices) for op in range(len(program.graph.ops)))
    splits = [space.split(op, choice.parts) for op, choice in enumerate(choices)]
    cut = [
        o.kind for o, split in zip(program.graph.ops, splits, strict=True) if len(split.parts) > 1
    ]
    assert len({kind for kind in cut if "conv" in kind}) == 3 and len(cut) > 50
    assert sum(len(part.pads) for split in splits for part in split.parts) > 10
    assert compare(program, space, Strategy(choices), devices).equal


def strips(space: Space, op: int, devices: int) -> Choice:
    """The Op cut along its first spatial axis, if it can be."""
    axes = space.axes(op)
    for height in ("y0", "i0", "i1", "i2"):
        names = [axis.name for axis in axes]
        if height not in names or ("n" not in names and height in ("y0", "i0")):
            continue  # in other Ops than convolutions the first axis is the sample
        position = names.index(height)
        parts = tuple(min(devices, a.extent) if k == position else 1 for k, a in enumerate(axes))
        try:
            space.split(op, parts)
        except IllegalCut:
            continue
        return Choice(parts, tuple(range(max(parts))))
    return unsplit_choice(space, op, range(devices))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", MODELS)
def test_data_parallelism_equals_the_single_device(spec: str, devices: int) -> None:
    program, space = captured(spec)
    found = compare(program, space, data(problem(devices, spec)).strategy, devices)
    assert found.equal, found


@pytest.mark.parametrize("spec", MODELS)
def test_the_step_as_it_was_written(spec: str) -> None:
    program, space = captured(spec)
    assert compare(program, space, single(problem(2, spec)).strategy, 2).equal
