"""Messages that travel together: the same bytes and boxes, in an order that works, and few."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from compare_runs import batches
from graphs import Watched, captured, problem, step

from apportion.capture.program import Program, state_tensor
from apportion.execute.executable import Executable
from apportion.execute.rank_steps import Post, Wait, rank_steps
from apportion.lower.coalesce import BucketSizes, coalesce
from apportion.lower.lower import lower
from apportion.lower.task_graph import TaskGraph, verify
from apportion.lower.task_kinds import ASSEMBLE, COMPUTE
from apportion.search import METHODS
from apportion.search.baselines.random_strategy import draw
from apportion.split.space import Space
from apportion.split.strategy import Strategy, space_of


def exchanges(tasks: TaskGraph) -> int:
    return len(set(tasks.position[tasks.is_message].tolist()))


def method(name: str, spec: str, devices: int) -> tuple[Space, Strategy]:
    given = problem(devices, spec)
    strategy = METHODS[name](given).strategy
    return space_of(given.space.source, strategy), strategy


SIZES = [BucketSizes(), BucketSizes(0, 1 << 30, 0.0), BucketSizes(64, 256, 0.1)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_same_work_is_done_whatever_travels_together(devices: int, sizes: BucketSizes) -> None:
    _, space = captured("mlp:tiny")
    for seed in range(12):
        plain = lower(space, draw(space, devices, Random(seed)), devices)
        made = coalesce(plain, sizes)
        verify(made)
        assert made.bytes_moved == plain.bytes_moved
        assert exchanges(made) <= plain.is_message.sum()
        work = np.flatnonzero(~plain.is_message)
        became = made.became[work]
        assert len(set(became.tolist())) == len(work) == (~made.is_message).sum()
        for column in ("kind", "part", "device", "nbytes", "flops", "taken"):
            assert (getattr(made, column)[became] == getattr(plain, column)[work]).all(), column
        assert copied(made, np.arange(len(made))) == copied(plain, made.became)
        computes = made.became[plain.kind == COMPUTE]
        assert (np.diff(computes) > 0).all(), "what computes keeps its order"
        assert (np.diff(made.op) >= 0).all()
        inside = np.repeat(np.arange(len(made.op_start) - 1), np.diff(made.op_start))
        assert (inside == made.op).all()


def copied(tasks: TaskGraph, became: np.ndarray) -> set[tuple[int, ...]]:
    """Every copy: from where to where, which term, in which message, for which task."""
    message = np.where(tasks.copy_message < 0, -1, became[tasks.copy_message])
    columns = (
        tasks.copy_source, tasks.copy_target, tasks.copy_source_box, tasks.copy_target_box,
        tasks.copy_term, message, became[tasks.copy_task], tasks.copy_nbytes,
    )  # fmt: skip
    return set(zip(*(column.tolist() for column in columns), strict=True))


def trained(
    program: Program, executable: Executable, devices: int
) -> list[dict[int, torch.Tensor]]:
    """The state of all ranks after two steps."""
    ranks = [Watched(executable, device) for device in range(devices)]
    constants = program.constants
    for rank in ranks:
        rank.load(lambda v: constants[v] if v in constants else state_tensor(program, v))
    for number, batch in enumerate(batches(program, 0)):
        step(program, ranks, batch, 0, number)
    return [rank.tensors for rank in ranks]


@pytest.mark.parametrize("spec", ["mlp:tiny", pytest.param("gpt2:tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["data", "fsdp", "megatron"])
def test_state_is_equal_bit_for_bit(spec: str, name: str) -> None:
    program, _ = captured(spec)
    space, strategy = method(name, spec, 3)
    plain = lower(space, strategy, 3)
    one, other = (
        trained(program, Executable(space, strategy, tasks), 3)
        for tasks in (plain, coalesce(plain))
    )
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[slot], theirs[slot]) for slot in mine)


def test_a_message_that_is_left_out_is_seen() -> None:
    _, space = captured("mlp:tiny")
    made = coalesce(lower(space, draw(space, 3, Random(1)), 3))
    early = made.slot_first.copy()
    sent = made.in_slot[made.in_start[int(np.flatnonzero(made.is_message)[-1])]]
    early[sent] = len(made) - 1  # as if it were posted before what it sends is made
    with pytest.raises(AssertionError, match="before it is made"):
        verify(replace(made, slot_first=early))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "most"), [(2, 3), (4, 6)])
def test_data_parallelism_has_few_exchanges(devices: int, most: int) -> None:
    space, strategy = method("data", "gpt2:tiny", devices)
    plain = lower(space, strategy, devices)
    assert exchanges(plain) > 25 and exchanges(coalesce(plain)) <= most


def test_gradients_are_under_way_while_others_are_computed() -> None:
    space, strategy = method("data", "gpt2:tiny", 2)
    plain = lower(space, strategy, 2)
    made = coalesce(plain, BucketSizes(1, 1 << 30, 1 / 8))
    assert 8 <= exchanges(made) <= 16
    steps = rank_steps(Executable(space, strategy, made), 0)
    posts = [k for k, each in enumerate(steps) if isinstance(each, Post)]
    waits = {each.exchange.position: k for k, each in enumerate(steps) if isinstance(each, Wait)}
    flying = [waits[steps[k].exchange.position] - k for k in posts]  # type: ignore[union-attr]
    assert sum(length > 1 for length in flying) >= 6


def test_parameters_are_gathered_one_bucket_ahead() -> None:
    space, strategy = method("fsdp", "gpt2:tiny", 2)
    plain = lower(space, strategy, 2)
    made = coalesce(plain, BucketSizes(1, 1 << 30, 1 / 8))
    steps = rank_steps(Executable(space, strategy, made), 0)
    first_wait = next(k for k, each in enumerate(steps) if isinstance(each, Wait))
    assert sum(isinstance(each, Post) for each in steps[:first_wait]) == 2
    gathers = made.is_message & (made.op < len(space.graph.ops) // 3)
    assert 2 <= len(set(made.position[gathers].tolist())) <= 12
    whole = coalesce(plain, BucketSizes(1 << 30, 1 << 30, 1.0))
    assert exchanges(whole) < exchanges(made) < exchanges(plain)


def test_a_bucket_holds_about_as_much_as_it_may() -> None:
    space, strategy = method("data", "gpt2:tiny", 2)
    plain = lower(space, strategy, 2)
    largest = int(plain.nbytes[plain.is_message].max())
    for limit in (4 << 10, 16 << 10, 64 << 10):
        made = coalesce(plain, BucketSizes(limit, limit, 0.0))
        sizes = made.nbytes[made.is_message]
        assert sizes.max() <= limit + largest
        assert exchanges(made) <= plain.bytes_moved // 2 // limit + 5


def test_an_assembly_comes_just_before_what_reads_it() -> None:
    """Except those of a bucket that is taken apart."""
    space, strategy = method("megatron", "gpt2:tiny", 3)
    made = coalesce(lower(space, strategy, 3))
    readers = np.full(len(made), len(made))
    owner = np.repeat(np.arange(len(made)), np.diff(made.in_start))
    real = made.in_slot >= 0
    np.minimum.at(readers, made.slot_first[made.in_slot[real]], owner[real])
    assembled = np.flatnonzero(made.kind == ASSEMBLE)
    late = made.op[np.minimum(readers[assembled], len(made) - 1)] - made.op[assembled]
    assert (late <= 1).mean() > 0.8


def test_tasks_without_messages_stay_as_they_are() -> None:
    _, space = captured("mlp:tiny")
    plain = lower(space, METHODS["single"](problem(1)).strategy, 1)
    assert coalesce(plain) is plain
