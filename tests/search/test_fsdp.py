"""fsdp: state in shards, parameters gathered once, gradients reduced onto the shards."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from graphs import problem

from apportion.graph import OPTIMIZER_STATE, PARAMETER, UPDATE
from apportion.lower.lower import lower
from apportion.lower.task_graph import TaskGraph
from apportion.search.baselines.data import data
from apportion.search.baselines.fsdp import fsdp
from apportion.search.problem import Problem

SPECS = ["mlp:tiny", "rnn:tiny", "gpt2:tiny", "wresnet:tiny"]
SOME = [(spec, devices) for spec in SPECS for devices in (2, 3, 4)]


def lowered(given: Problem) -> TaskGraph:
    return lower(given.space, fsdp(given).strategy, given.devices)


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


@pytest.mark.parametrize(("spec", "devices"), SOME)
def test_every_parameter_is_gathered_once(spec: str, devices: int) -> None:
    """However many Ops read it, forward and backward."""
    given = problem(devices, spec)
    moved = bytes_by_value(lowered(given))
    for value, nbytes in trainable(given).items():
        assert moved[value] == (devices - 1) * nbytes, given.space.graph.values[value].name


@pytest.mark.parametrize("devices", [2, 3, 4, 5])
@pytest.mark.parametrize(("spec", "scalars"), [("mlp:tiny", 1), ("rnn:tiny", 2)])
def test_bytes_are_a_gather_and_a_reduction_of_every_parameter(
    spec: str, scalars: int, devices: int
) -> None:
    """And the loss (mlp), or the loss and the weight that it is divided by (rnn), everywhere."""
    given = problem(devices, spec)
    state = sum(trainable(given).values())
    assert lowered(given).bytes_moved == 2 * (devices - 1) * (state + 8 * scalars)


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
