"""Exchanges through relays: the same results, and less between groups of devices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from graphs import captured, problem
from test_coalesce import trained

from apportion.execute.executable import Executable
from apportion.lower.lower import lower, verified_lowering
from apportion.lower.pair_bytes import pair_bytes
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph, verify
from apportion.search import METHODS
from apportion.search.baselines.random_strategy import draw
from apportion.split.communication import HIERARCHICAL, TREE, Communication
from apportion.split.space import Space
from apportion.split.strategy import Strategy, space_of

Levels = tuple[tuple[int, ...], ...]
PAIRS: Levels = ((0, 0, 1, 1),)
UNEVEN: Levels = ((1, 0, 0, 1, 0),)
NESTED: Levels = ((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3))


def through(strategy: Strategy, levels: Levels) -> Strategy:
    algorithm = HIERARCHICAL if len(levels) == 1 else TREE
    return replace(strategy, communication=Communication(algorithm=algorithm, levels=levels))


def method(name: str, spec: str, devices: int) -> tuple[Space, Strategy]:
    given = problem(devices, spec)
    strategy = METHODS[name](given).strategy
    return space_of(given.space.source, strategy), strategy


def crossing(tasks: TaskGraph, level: tuple[int, ...]) -> int:
    """Bytes that go from group to group."""
    group, sent = np.array(level), tasks.copy_message >= 0
    source, target = (
        group[tasks.slot_device[column[sent]]] for column in (tasks.copy_source, tasks.copy_target)
    )
    return int(tasks.copy_nbytes[sent][source != target].sum())


@pytest.mark.slow
@pytest.mark.parametrize("levels", [PAIRS, UNEVEN, NESTED])
def test_any_strategy_trains_the_same(levels: Levels) -> None:
    program, space = captured("mlp:tiny")
    devices, changed = len(levels[0]), 0
    for seed in range(12):
        strategy = draw(space, devices, Random(seed))
        plain = lower(space, strategy, devices)
        relayed = lower(space, through(strategy, levels), devices)
        verify(relayed)
        verify(runnable(space, through(strategy, levels), devices))
        assert crossing(relayed, levels[0]) <= crossing(plain, levels[0])
        changed += crossing(relayed, levels[0]) < crossing(plain, levels[0])
        one, other = (
            trained(program, Executable(space, strategy, tasks), devices)
            for tasks in (plain, runnable(space, through(strategy, levels), devices))
        )
        same_values(plain, relayed, one, other)
    assert changed >= 6


def same_values(
    plain: TaskGraph,
    relayed: TaskGraph,
    one: list[dict[int, torch.Tensor]],
    other: list[dict[int, torch.Tensor]],
) -> None:
    """Every device has the same regions of the same Values at the end, about equal."""
    kept, found = (by_region(*each) for each in ((plain, one), (relayed, other)))
    assert kept.keys() == found.keys()
    for key, tensor in kept.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11)
    whole: dict[tuple[int, object], torch.Tensor] = {}
    for (_, value, region), tensor in found.items():
        assert torch.equal(whole.setdefault((value, region), tensor), tensor), "replicas differ"


def by_region(
    tasks: TaskGraph, ranks: list[dict[int, torch.Tensor]]
) -> dict[tuple[int, int, object], torch.Tensor]:
    return {
        (device, int(tasks.slot_value[slot]), tasks.boxes[tasks.slot_region[slot]]): tensor
        for device, tensors in enumerate(ranks)
        for slot, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", ["data", "zero2", "fsdp"])
@pytest.mark.parametrize("levels", [PAIRS, NESTED])
def test_gradients_and_parameters_cross_once(name: str, levels: Levels) -> None:
    """From each group to each other one no more goes than one copy of every box, or one term."""
    devices = len(levels[0])
    space, strategy = method(name, f"mlp:layers=3,width=64,batch={8 * devices}", devices)
    plain = lower(space, strategy, devices)
    relayed = lower(space, through(strategy, levels), devices)
    each = devices // 2
    assert crossing(plain, levels[0]) >= 0.9 * each * crossing(relayed, levels[0])
    assert pair_bytes(relayed).sum() == relayed.bytes_moved
    lowering = verified_lowering(space, strategy, devices)
    assert np.allclose(lowering.pair_bytes(), pair_bytes(plain))
    assert np.allclose(lowering.relayed(levels).pair_bytes(), pair_bytes(relayed))


def test_hops_follow_one_another() -> None:
    """What a relay sends it has made of what came in an exchange before; trees have more hops."""
    space, strategy = method("data", "mlp:tiny", 8)
    plain, once, twice = (
        lower(space, through(strategy, levels) if levels else strategy, 8)
        for levels in ((), NESTED[:1], NESTED)
    )
    counts = [len(set(tasks.position[tasks.is_message].tolist())) for tasks in (plain, once, twice)]
    assert counts[0] < counts[1] < counts[2]
    for tasks in (once, twice):
        sent = np.flatnonzero(tasks.is_message)
        for task in sent.tolist():
            made = tasks.slot_first[tasks.in_slot[tasks.in_start[task] : tasks.in_start[task + 1]]]
            assert (tasks.position[made[made >= 0]] < tasks.position[task]).all()


@pytest.mark.parametrize("name", ["data", "fsdp", "megatron"])
def test_groups_of_one_change_nothing(name: str) -> None:
    space, strategy = method(name, "mlp:tiny", 4)
    plain = lower(space, strategy, 4)
    for levels in (((0, 1, 2, 3),), ((0, 0, 0, 0),)):
        relayed = lower(space, through(strategy, levels), 4)
        assert str(relayed) == str(plain)


def test_groups_of_other_devices_are_refused() -> None:
    _, space = captured("mlp:tiny")
    with pytest.raises(ValueError, match="groups of 4 devices, and there are 3"):
        lower(space, through(draw(space, 3, Random(0)), PAIRS), 3)
    with pytest.raises(ValueError, match="a group 18446744073709551616; 3 devices have groups"):
        lower(space, through(draw(space, 3, Random(0)), ((0, 0, 2**64),)), 3)
