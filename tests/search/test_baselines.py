"""owt, megatron, op-placement: legal for every model on any number of devices, and the published
facts of each."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from compare_runs import compare
from graphs import captured, problem
from soak import kept
from test_fsdp import bytes_by_value

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import FORWARD, GRADIENT, PARAMETER, UPDATE, Graph
from apportion.lower.lower import lower
from apportion.lower.task_graph import TaskGraph
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.data import data
from apportion.search.baselines.megatron import megatron
from apportion.search.baselines.op_placement import layers, op_placement
from apportion.search.baselines.owt import owt
from apportion.search.problem import Problem
from apportion.split.space import Space
from apportion.split.strategy import space_of, verify_strategy

METHODS = (owt, megatron, op_placement)
COUNTS = (1, 2, 3, 4, 6, 7, 8, 16)
BATCH, SEQ, WIDTH = 6, 5, 32
GPT = f"gpt2:tiny,batch={BATCH},seq={SEQ},heads=4,width={WIDTH},dropout=0"


@cache
def space(spec: str) -> Space:
    it = zoo.load(spec, meta=True)
    return Space(capture(it.step, it.model, it.optimizer, it.batch, it.clip_norm).graph)


def given(spec: str, machine: str) -> Problem:
    where = cluster(machine)
    return Problem(space(spec), where, default_cost(where))


def lowered(it: Problem, method: Any) -> TaskGraph:
    strategy = method(it).strategy
    return lower(space_of(it.space.source, strategy), strategy, it.devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    kept(
        [known.name for known in zoo.known()],
        "mlp",
        "gpt2",
        "lenet",
        "rnnlm",
        "transformer-moe",
        "bert",
    ),
)
def test_legal_for_every_model_on_any_number_of_devices(name: str) -> None:
    for devices in COUNTS:
        it = given(f"{name}:tiny", f"local:{devices}")
        for method in METHODS:
            strategy = method(it).strategy
            divided = space_of(it.space.source, strategy) if strategy.opening else it.space
            verify_strategy(divided, strategy, devices)
            if devices == 1:
                assert all(choice.devices == (0,) for choice in strategy.choices)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ("mlp:tiny", 4),
        (GPT, 2),
        pytest.param("llama:tiny", 4, marks=pytest.mark.slow),
        pytest.param("rnn:tiny", 3, marks=pytest.mark.slow),
        ("lenet:tiny", 3),
        pytest.param("nmt:tiny", 2, marks=pytest.mark.slow),
        pytest.param("transformer-moe:tiny", 2, marks=pytest.mark.slow),
    ],
)
def test_they_train_the_same_model(method: Any, spec: str, devices: int) -> None:
    program, _ = captured(spec)
    strategy = method(problem(devices, spec)).strategy
    found = compare(program, space_of(program.graph, strategy), strategy, devices)
    assert found.equal, found


def nameless(graph: Graph) -> Graph:
    ops = (
        replace(op, name=f"o{k}", module="", line="", inputs=op.inputs)
        for k, op in enumerate(graph.ops)
    )
    values = (replace(value, name=f"v{k}") for k, value in enumerate(graph.values))
    return replace(graph, ops=tuple(ops), values=tuple(values))


@pytest.mark.slow
@pytest.mark.parametrize("method", [owt, megatron])
@pytest.mark.parametrize("spec", [GPT, "rnn:tiny", "alexnet:tiny"])
def test_structure_is_seen_without_names(method: Any, spec: str) -> None:
    it = given(spec, "local:2")
    blind = replace(it, space=Space(nameless(it.space.graph)))
    assert method(it).strategy == method(blind).strategy


# megatron


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "hosts", "width"), [("local:2", 1, 2), ("local:4", 1, 4), ("2x4xh100", 2, 4)]
)
def test_a_layer_of_a_transformer_costs_four_all_reduces(
    machine: str, hosts: int, width: int
) -> None:
    """Two forward, two backward, each of the activations of all samples. Over hosts each device
    reduces the gradients of what it stores."""
    moved = [lowered(given(f"{GPT},layers={n}", machine), megatron).bytes_moved for n in (1, 2, 3)]
    activations = BATCH * SEQ * WIDTH
    cut = (3 + 1 + 4 + 4) * WIDTH**2 + (3 + 4) * WIDTH
    replicated = (4 + 2) * WIDTH  # norms, and biases of rows
    gradients = cut + width * replicated
    each = 4 * 2 * (width - 1) * activations + 2 * (hosts - 1) * gradients
    assert np.diff(moved).tolist() == [4 * each] * 2


def test_hosts_exchange_gradients_of_parameters_only() -> None:
    it = given(GPT, "2x4xh100")
    strategy = megatron(it).strategy
    divided = space_of(it.space.source, strategy)
    tasks = lower(divided, strategy, 8)
    graph = divided.graph
    sent = np.flatnonzero(tasks.copy_message >= 0)
    source, target = tasks.copy_source[sent], tasks.copy_target[sent]
    far = tasks.slot_device[source] // 4 != tasks.slot_device[target] // 4
    between, within = (set(tasks.slot_value[source[which]].tolist()) for which in (far, ~far))
    shapes = {graph.values[v].shape for v, _ in graph.state if graph.values[v].role == PARAMETER}
    several = [graph.values[v] for v in between]
    assert several and within
    assert {tuple(n for n in v.shape or () if n > 1) for v in several} <= {*shapes, ()}
    assert {v.role for v in several if v.shape} == {GRADIENT}


def cut_atoms(it: Problem, method: Any) -> dict[str, tuple[int, ...]]:
    """For every parameter the parts of its update."""
    strategy = method(it).strategy
    graph = space_of(it.space.source, strategy).graph
    return {
        graph.values[op.parameter].name: choice.parts
        for op, choice in zip(graph.ops, strategy.choices, strict=True)
        if op.parameter is not None
    }


def test_columns_then_rows() -> None:
    parts = cut_atoms(given(f"{GPT},layers=1", "local:4"), megatron)
    assert parts["tokens.weight"] == (4, 1)  # rows of the vocabulary
    assert parts["positions.weight"] == (1, 1)
    assert parts["blocks.0.attn.qkv.weight"] == (1, 4, 1, 1)  # three, heads, width of a head, in
    assert parts["blocks.0.attn.qkv.bias"] == (1, 4, 1)
    assert parts["blocks.0.attn.proj.weight"] == (1, 4, 1)  # out, heads, width of a head
    assert parts["blocks.0.attn.proj.bias"] == (1,)
    assert parts["blocks.0.mlp.up.weight"] == (4, 1)
    assert parts["blocks.0.mlp.proj.weight"] == (1, 4)
    assert parts["blocks.0.norm1.weight"] == (1,)


@pytest.mark.slow
def test_grouped_queries_are_cut_by_heads_of_keys() -> None:
    parts = cut_atoms(given("llama:tiny,layers=1", "local:2"), megatron)
    assert parts["blocks.0.attn.query.weight"] == (2, 1, 1, 1, 1)  # key heads, ...
    assert parts["blocks.0.attn.key.weight"] == (2, 1, 1, 1)
    assert parts["blocks.0.attn.proj.weight"] == (1, 2, 1, 1)


@pytest.mark.slow
def test_gates_are_cut_by_hidden_unit() -> None:
    parts = cut_atoms(given("rnn:tiny,hidden=8", "local:4"), megatron)
    for cell in ("cells.0", "cells.1"):
        assert parts[f"{cell}.input.weight"] == (1, 4, 1)  # gates, hidden units, in
        assert parts[f"{cell}.state.weight"] == (1, 4, 1)


@pytest.mark.parametrize(
    ("machine", "heads", "width", "groups"),
    [
        ("local:7", 4, 32, 1),  # nothing divides: data parallelism
        ("local:6", 4, 32, 2),
        ("local:16", 16, 32, 8),
        ("2x8xh100", 4, 32, 4),
        ("2x4xh100", 8, 32, 4),
        ("flexflow-k80", 8, 32, 4),
    ],
)
def test_a_group_is_within_a_host_and_divides_heads(
    machine: str, heads: int, width: int, groups: int
) -> None:
    it = given(f"gpt2:tiny,layers=1,heads={heads},width={width}", machine)
    parts = cut_atoms(it, megatron)
    assert parts["blocks.0.attn.qkv.weight"][1] == groups
    assert parts["blocks.0.mlp.up.weight"][0] == groups


def test_on_convolutional_networks_the_expert_is_owt() -> None:
    it = given("alexnet:tiny", "local:4")
    assert megatron(it).strategy == owt(it).strategy != data(it).strategy


# owt


@pytest.mark.parametrize("devices", [2, 4])
def test_dense_weights_stay_where_they_are(devices: int) -> None:
    """Neither they nor their gradients move; those of convolutions are reduced."""
    it = given("alexnet:tiny", f"local:{devices}")
    graph, moved = it.space.graph, bytes_by_value(lowered(it, owt))
    dense = convolutions = 0
    for op in graph.ops:
        if op.parameter is not None:
            weight, gradient = (graph.values[v] for v in op.inputs[:2])
            if len(weight.shape or ()) == 2:
                dense += 1
                assert not moved[op.parameter] and not moved[op.inputs[1]]
            elif len(weight.shape or ()) == 4:
                convolutions += 1
                assert moved[op.inputs[1]] == 2 * (devices - 1) * gradient.nbytes
    assert (dense, convolutions) == (3, 5)


@pytest.mark.slow
def test_owt_moves_less_than_data_on_alexnet() -> None:
    """58.6 of 61 million parameters are dense."""
    it = given("alexnet:batch=128", "p2.8xlarge:4")
    one, other = lowered(it, owt).bytes_moved, lowered(it, data).bytes_moved
    assert one < other / 3


# op-placement


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "devices"), [("rnn:tiny,layers=6", 8), ("gpt2:tiny,layers=4", 4), ("vgg16:tiny", 8)]
)
def test_layers_are_whole_and_use_all_devices(spec: str, devices: int) -> None:
    it = given(spec, f"local:{devices}")
    graph, choices = it.space.graph, op_placement(it).strategy.choices
    assert all(choice.count == len(choice.devices) == 1 for choice in choices)
    assert {choice.devices[0] for choice in choices} == set(range(devices))
    for op, choice in zip(graph.ops, choices, strict=True):
        if op.forward is not None:
            assert choice == replace(choices[op.forward], parts=choice.parts)
        if op.phase == UPDATE and op.parameter is not None:
            reader = graph.consumers[op.parameter][0]
            assert choice.devices == choices[reader].devices


@pytest.mark.slow
def test_layers_of_an_rnn_go_round() -> None:
    """Each with all of its steps: neighbours work on different steps at once."""
    it = given("rnn:tiny,layers=5", "local:3")
    choices = op_placement(it).strategy.choices
    where = {
        op.module.split(".")[1]: choice.devices[0]
        for op, choice in zip(it.space.graph.ops, choices, strict=True)
        if op.module.startswith("cells.") and op.phase == FORWARD
    }
    first = where["0"]
    assert where == {str(k): (first + k) % 3 for k in range(5)}


def test_layers_are_as_deep_as_it_takes() -> None:
    graph = space("vgg16:tiny").graph
    assert len(set(layers(graph, 2))) <= len(set(layers(graph, 8)))
    assert len(set(layers(graph, 8))) >= 8
