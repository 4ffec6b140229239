"""Values that the backward fetches again: nothing that the forward has fetched is kept for it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from compare_runs import compare
from graphs import captured, problem

from apportion.graph import BACKWARD, FORWARD, PARAMETER
from apportion.lower.coalesce import BucketSizes, coalesce
from apportion.lower.lower import bytes_moved, lower
from apportion.lower.runnable import runnable
from apportion.lower.task_graph import TaskGraph, verify
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp, fsdp_keep
from apportion.search.baselines.random_strategy import draw
from apportion.search.problem import Problem
from apportion.simulate.delta.delta import Delta
from apportion.split.space import Space
from apportion.split.strategy import Strategy, from_json, to_json


def drawn(space: Space, devices: int, seed: int) -> Strategy:
    """Any strategy, with any third of all Values fetched again."""
    rng = Random(f"{devices} {seed}")
    strategy = draw(space, devices, rng)
    count = len(space.graph.values)
    return replace(strategy, refetched=tuple(sorted(rng.sample(range(count), count // 3))))


def phases(space: Space, tasks: TaskGraph, slot: int) -> set[str]:
    """The phases of the Ops whose tasks read a slot, to compute or to send it on."""
    readers = np.repeat(np.arange(len(tasks)), np.diff(tasks.in_start))[tasks.in_slot == slot]
    ops = space.graph.ops
    return {ops[op].phase for op in tasks.op[readers].tolist() if op < len(ops)}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("spec", ["mlp:tiny", "rnn:tiny"])
def test_any_values_may_be_fetched_again(spec: str, devices: int) -> None:
    program, space = captured(spec)
    for seed in range(6):
        strategy = drawn(space, devices, seed)
        found = compare(program, space, strategy, devices, seed=seed % 2)
        assert found.equal, (devices, seed, found)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:tiny", "wresnet:tiny"])
@pytest.mark.parametrize("devices", [2, 4])
def test_of_larger_models_too(spec: str, devices: int) -> None:
    program, space = captured(spec)
    for seed in range(2):
        found = compare(program, space, drawn(space, devices, seed), devices)
        assert found.equal, (devices, seed, found)


@pytest.mark.parametrize("lowered", [lower, runnable])
@pytest.mark.parametrize("spec", ["mlp:tiny", "gpt2:tiny"])
def test_what_the_forward_has_fetched_is_not_kept(spec: str, lowered: object) -> None:
    given = problem(3, spec)
    strategy = fsdp(given).strategy
    tasks = (lower if lowered is lower else runnable)(given.space, strategy, 3)
    verify(tasks)
    refetched = frozenset(strategy.refetched)
    fetched = [
        slot
        for slot in np.flatnonzero(tasks.slot_first >= 0).tolist()
        if int(tasks.slot_value[slot]) in refetched
    ]
    seen = [phases(given.space, tasks, slot) for slot in fetched]
    assert seen and not any({FORWARD, BACKWARD} <= each for each in seen)
    kept = (lower if lowered is lower else runnable)(
        given.space, replace(strategy, refetched=()), 3
    )
    assert tasks.bytes_moved > kept.bytes_moved


def test_nothing_is_fetched_twice_where_it_lies() -> None:
    """A device that has the whole Value from the beginning does not fetch it, now or later."""
    given = problem(3)
    plain = data(given).strategy
    parameters = [v for v, value in enumerate(given.space.graph.values) if value.role == PARAMETER]
    again = replace(plain, refetched=tuple(parameters))
    assert bytes_moved(given.space, again, 3) == bytes_moved(given.space, plain, 3) > 0


@pytest.mark.slow
def test_delta_knows_it() -> None:
    """One Choice after another changed is what is lowered at once."""
    given = problem(3, "gpt2:tiny")
    strategy = fsdp(given).strategy
    cost = default_cost(given.cluster)
    live = Delta(given.space, strategy, given.cluster, cost)
    other = draw(given.space, 3, Random(1))
    for op in range(0, len(strategy.choices), 7):
        live.change({op: other.choices[op]})
        live.keep()
    assert live.strategy.refetched == strategy.refetched
    anew = Delta(given.space, live.strategy, given.cluster, cost)
    assert live.step_seconds == anew.step_seconds and live.bytes_moved == anew.bytes_moved


def test_it_is_written_and_read() -> None:
    strategy = fsdp(problem(3)).strategy
    assert strategy.refetched and from_json(to_json(strategy)) == strategy
    plain = fsdp_keep(problem(3)).strategy
    assert "refetched" not in to_json(plain) and from_json(to_json(plain)) == plain


def test_a_value_that_is_none_is_refused() -> None:
    given = problem(2)
    with pytest.raises(ValueError, match="fetches value 999 again"):
        lower(given.space, replace(fsdp(given).strategy, refetched=(999,)), 2)


def most_gathered(given: Problem, strategy: Strategy) -> int:
    """Bytes of parameters that are on a device besides those that it has all the time, at most;
    messages travel in small buckets."""
    plain = lower(given.space, strategy, given.devices)
    tasks = coalesce(plain, BucketSizes(64, 4096, 0.1), strategy.refetched)
    at = np.zeros(len(tasks) + 1, np.int64)
    mine = (tasks.slot_first >= 0) & (tasks.slot_device == 0) & (tasks.slot_base < 0)
    for slot in np.flatnonzero(mine & (tasks.slot_last < len(tasks))).tolist():
        if given.space.graph.values[int(tasks.slot_value[slot])].role == PARAMETER:
            at[tasks.slot_first[slot]] += tasks.slot_nbytes[slot]
            at[tasks.slot_last[slot] + 1] -= tasks.slot_nbytes[slot]
    return int(np.cumsum(at).max())


def test_parameters_are_fetched_late() -> None:
    """One bucket ahead of need: all that is gathered is never there at once."""
    given = problem(4, "gpt2:tiny")
    kept = most_gathered(given, fsdp_keep(given).strategy)
    assert most_gathered(given, fsdp(given).strategy) < 0.6 * kept
