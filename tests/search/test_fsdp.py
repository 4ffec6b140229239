"""fsdp and its like: state in shards, parameters gathered, gradients reduced onto the shards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from graphs import problem

from apportion.graph import BACKWARD, FORWARD, OPTIMIZER_STATE, PARAMETER, UPDATE
from apportion.lower.lower import lower
from apportion.lower.task_graph import TaskGraph
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp, fsdp_keep, zero2
from apportion.search.problem import Problem

SPECS = ["mlp:tiny", "rnn:tiny", "gpt2:tiny", "wresnet:tiny"]
SOME = [(spec, devices) for spec in SPECS for devices in (2, 3, 4)]


def lowered(given: Problem, method: Any = fsdp) -> TaskGraph:
    return lower(given.space, method(given).strategy, given.devices)


def bytes_by_value(tasks: TaskGraph) -> Counter[int]:
    """Bytes that leave a device, by the Value they are of."""
    found = Counter[int]()
    sent = np.flatnonzero(tasks.copy_message >= 0)
    for value, n in zip(
        tasks.slot_value[tasks.copy_source[sent]].tolist(),
        tasks.copy_nbytes[sent].tolist(),
        strict=True,
    ):
        found[value] += n
    return found


def trainable(given: Problem) -> dict[int, int]:
    graph = given.space.graph
    return {
        before: graph.values[before].nbytes
        for before, _ in graph.state
        if graph.values[before].role == PARAMETER
    }


def passes(given: Problem, value: int) -> int:
    """In how many of forward and backward a parameter is read."""
    graph = given.space.graph
    return len({graph.ops[op].phase for op in graph.consumers[value]} & {FORWARD, BACKWARD})


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "devices"), SOME)
def test_every_parameter_is_gathered_once_for_each_pass(spec: str, devices: int) -> None:
    """However many Ops read it there; or once for both, if what is gathered is kept."""
    given = problem(devices, spec)
    twice, once = bytes_by_value(lowered(given)), bytes_by_value(lowered(given, fsdp_keep))
    several = 0
    for value, nbytes in trainable(given).items():
        name, times = given.space.graph.values[value].name, passes(given, value)
        assert twice[value] == times * (devices - 1) * nbytes, name
        assert once[value] == (devices - 1) * nbytes, name
        several += times > 1
    assert several


@pytest.mark.parametrize("devices", [2, 3, 4, 5])
@pytest.mark.parametrize(("spec", "scalars"), [("mlp:tiny", 1), ("rnn:tiny", 2)])
@pytest.mark.parametrize("method", [fsdp_keep, zero2])
def test_bytes_are_a_gather_and_a_reduction_of_every_parameter(
    spec: str, scalars: int, devices: int, method: Any
) -> None:
    """And the loss (mlp), or the loss and the weight that it is divided by (rnn), everywhere."""
    given = problem(devices, spec)
    state = sum(trainable(given).values())
    assert lowered(given, method).bytes_moved == 2 * (devices - 1) * (state + 8 * scalars)


@pytest.mark.parametrize(("spec", "devices"), SOME)
def test_parameters_of_zero2_are_on_every_device_and_state_is_not(spec: str, devices: int) -> None:
    given = problem(devices, spec)
    tasks, graph = lowered(given, zero2), given.space.graph
    held = Counter[int]()
    for slot in np.flatnonzero(tasks.slot_first == -1).tolist():
        held[int(tasks.slot_value[slot])] += int(tasks.slot_nbytes[slot])
    for value, nbytes in trainable(given).items():
        assert held[value] == devices * nbytes
    cut = [v for v, n in held.items() if graph.values[v].role == OPTIMIZER_STATE]
    assert all(held[v] == graph.values[v].nbytes for v in cut if graph.values[v].shape)
    assert max(np.bincount(tasks.op[tasks.is_message])) < 50, "not all at the end of the step"


@pytest.mark.parametrize(("spec", "devices"), SOME)
def test_state_lies_in_shards(spec: str, devices: int) -> None:
    """Every piece of parameters and optimizer state is there once (but for its counters of steps),
    and the shares are about equal; 3 devices do not divide the tiny widths."""
    given = problem(devices, spec)
    tasks, graph = lowered(given), given.space.graph
    share, held = Counter[int](), Counter[int]()
    for slot in np.flatnonzero(tasks.slot_first == -1).tolist():
        value = int(tasks.slot_value[slot])
        if graph.values[value].role in (PARAMETER, OPTIMIZER_STATE):
            held[value] += int(tasks.slot_nbytes[slot])
            share[int(tasks.slot_device[slot])] += int(tasks.slot_nbytes[slot])
    copies = {v for v, n in held.items() if n != graph.values[v].nbytes}
    assert all(len(graph.values[v].shape or ()) == 0 for v in copies)
    total = sum(graph.values[v].nbytes for v in held)
    bound = 1.5 if devices == 3 else 1.25
    assert max(share.values()) < bound * total / devices
    assert min(share.values()) > (2 - bound) * total / devices


def test_updates_run_where_the_shards_are() -> None:
    given = problem(4, "gpt2:tiny")
    graph, strategy = given.space.graph, fsdp(given).strategy
    counts = Counter(
        choice.count
        for op, choice in zip(graph.ops, strategy.choices, strict=True)
        if op.phase == UPDATE and (graph.values[op.outputs[0]].shape or ())
    )
    assert counts.keys() == {4}


def test_what_is_too_short_to_cut_is_replicated() -> None:
    given = problem(16)  # widths of 10
    assert fsdp(given).strategy.choices == data(given).strategy.choices
