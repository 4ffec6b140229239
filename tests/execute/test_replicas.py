"""Copies of the state are compared bit for bit, and what makes them differ is known before."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
import torch
from graphs import captured

from apportion.capture.optimizer import setting_value
from apportion.capture.program import Program, batch_leaves, state_tensor
from apportion.describe.interval import Box, intersect
from apportion.execute.dry_run import measure_storage
from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank, run_together
from apportion.execute.replica_notes import replica_notes
from apportion.execute.replicas import difference, digests, shared_regions
from apportion.lower.lower import lower
from apportion.lower.task_graph import with_storage
from apportion.machine.cluster import cluster
from apportion.plan.make_plan import make_plan
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space

DEVICES = 3


def executable_of(space: Space, seed: int) -> Executable:
    strategy = draw(space, DEVICES, Random(seed))
    return Executable(space, strategy, lower(space, strategy, DEVICES))


def stepped(program: Program, executable: Executable, steps: int = 2) -> list[Rank]:
    ranks = [Rank(executable, device) for device in range(DEVICES)]
    leaves = batch_leaves(program, program.batch)
    for rank in ranks:
        rank.load(lambda value: state_tensor(program, value))
    for step in range(steps):
        for rank in ranks:
            rank.feed(lambda value: leaves[value])
        bodies = program.graph.bodies
        run_together(ranks, Context(0, step, lambda e: setting_value(program.optimizer, e), bodies))
    return ranks


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_bit_is_seen_wherever_it_is(seed: int) -> None:
    program, space = captured("mlp:tiny")
    executable = executable_of(space, seed)
    regions = shared_regions(executable)
    ranks = stepped(program, executable)
    found = [digests(rank, regions) for rank in ranks]
    assert regions and difference(executable, regions, found) is None
    for region in Random(seed).sample(regions, 5):
        slot = region.slots[-1]
        rank = ranks[executable.slot_device[slot]]
        tensor = rank.tensors[slot]
        flat = tensor.view(-1)
        before = flat[-1].clone()
        flat[-1] = before + torch.finfo(flat.dtype).eps * before.abs().clamp(min=1.0)
        said = difference(executable, regions, [digests(each, regions) for each in ranks])
        name = executable.graph.values[region.value].name
        assert said is not None and repr(name) in said and str(rank.device) in said
        flat[-1] = before


def test_regions_of_the_state_are_the_same_or_have_nothing_in_common() -> None:
    """Which is why comparing equal ones is enough."""
    _, space = captured("mlp:tiny")
    for seed in range(8):
        executable = executable_of(space, seed)
        regions: dict[int, set[Box]] = {}
        for _, slot in executable.carry:
            meant = executable.slots[slot]
            regions.setdefault(meant.value, set()).add(meant.region)
        for boxes in regions.values():
            assert all(intersect(a, b) is None for a, b in combinations(boxes, 2))


@pytest.mark.slow
def test_kernels_that_find_their_operands_in_another_order_are_named() -> None:
    _, space = captured("mlp:tiny")
    found: list[str] = []
    for seed in range(6):
        executable = executable_of(space, seed)
        assert not replica_notes(executable, on_gpu=False)  # nothing is known without a dry run
        tasks = with_storage(executable.tasks, measure_storage(executable, 1))
        found += replica_notes(Executable(space, executable.strategy, tasks), on_gpu=False)
    assert found and all("memory in different orders" in note for note in found)
    assert any("addmm" in note or "mm.default" in note for note in found)


def test_the_plans_of_usual_methods_have_nothing_to_say() -> None:
    program, _ = captured("mlp:tiny")
    for method in ("data", "tofu"):
        made = make_plan(program, cluster("local:2"), method)
        assert not replica_notes(Executable(made.space, made.strategy, made.tasks), on_gpu=True)


@pytest.mark.slow
def test_kernels_of_gpus_that_add_in_any_order_are_named() -> None:
    _, space = captured("gpt2:tiny")
    executable = executable_of(space, 0)
    names = [
        op.kind
        for op, choice in zip(space.graph.ops, executable.strategy.choices, strict=True)
        if choice.replicas > 1 and "embedding_dense_backward" in op.kind
    ]
    notes = replica_notes(executable, on_gpu=True)
    assert not names or any("no fixed order" in note for note in notes)
    assert not replica_notes(executable, on_gpu=False)
