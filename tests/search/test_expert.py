"""expert: which published strategy it takes, seen in the Graph alone, and GNMT's layers over
devices."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from compare_runs import compare
from graphs import captured
from soak import kept
from test_baselines import given, lowered, nameless
from test_fsdp import bytes_by_value
from torch import Tensor, nn

from apportion import zoo
from apportion.capture.capture import capture
from apportion.graph import UPDATE
from apportion.machine.cluster import cluster
from apportion.machine.cost_model import default_cost
from apportion.search.baselines.expert import (
    WeightUses,
    devices_of_layers,
    expert,
    recurrent_layers,
)
from apportion.search.baselines.megatron import megatron
from apportion.search.baselines.owt import owt
from apportion.search.problem import Problem
from apportion.split.space import Space
from apportion.split.strategy import space_of, verify_strategy

RECURRENT = ("rnn", "rnnlm", "rnntc", "nmt", "gnmt", "deepspeech", "enas-ptb")
ATTENTION = ("gpt2", "bert", "llama", "transformer-xl", "transformer-moe")


def told(name: str) -> str:
    if name in RECURRENT:
        return "a recurrent network"
    if name in ATTENTION:
        return "a network with attention"
    return "no expert's kind of network" if name == "mlp" else "a convolutional network"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", kept([known.name for known in zoo.known()], "mlp", "gpt2", "rnnlm", "lenet", "wgan-gp")
)
def test_every_model_is_of_its_kind(name: str) -> None:
    assert expert(given(f"{name}:tiny", "local:4")).notes[0].startswith(told(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECURRENT, "llama", "lenet"])
def test_the_kind_is_seen_without_names(name: str) -> None:
    it = given(f"{name}:tiny", "local:4")
    blind = replace(it, space=Space(nameless(it.space.graph)))
    assert expert(blind) == expert(it)


@pytest.mark.parametrize(
    ("spec", "method"), [("alexnet:tiny", owt), ("llama:tiny", megatron), ("mlp:tiny", owt)]
)
@pytest.mark.parametrize("machine", ["local:4", "2x2xh100"])
def test_it_is_what_was_published(spec: str, method: Any, machine: str) -> None:
    it = given(spec, machine)
    assert expert(it).strategy == method(it).strategy


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(
    "machine",
    [*(f"local:{n}" for n in (1, 3, 4, 6, 16)), "flexflow-p100:6", "flexflow-p100", "16x1xh100"],
)
def test_legal_on_any_number_of_devices(name: str, machine: str) -> None:
    it = given(f"{name}:tiny", machine)
    strategy = expert(it).strategy
    verify_strategy(it.space, strategy, it.devices)
    if it.devices <= 6:
        assert {d for c in strategy.choices for d in c.devices} == set(range(it.devices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "machine"),
    [
        ("rnn:tiny", "local:3"),
        ("nmt:tiny", "2x3xh100"),
        ("nmt:tiny", "local:16"),
        pytest.param("gnmt:tiny", "flexflow-p100:6", marks=pytest.mark.slow),
        ("rnntc:tiny", "4x4xh100"),
    ],
)
def test_it_trains_the_same_model(spec: str, machine: str) -> None:
    program, space = captured(spec)
    where = cluster(machine)
    strategy = expert(Problem(space, where, default_cost(where))).strategy
    found = compare(program, space_of(program.graph, strategy), strategy, len(where.devices))
    assert found.equal, found


# Layers


def layers_by_module(spec: str) -> list[set[str]]:
    """The modules whose Ops use parameters, by layer."""
    graph = given(spec, "local:1").space.graph
    weights = WeightUses(graph)
    found: dict[int, set[str]] = defaultdict(set)
    for op, layer in enumerate(recurrent_layers(weights)):
        if op in weights.uses:
            found[layer].add(graph.ops[op].module)
    return [found[layer] for layer in range(len(found))]


def cell(name: str) -> set[str]:
    return {f"{name}.input", f"{name}.state"}


def test_layers_are_those_of_the_network() -> None:
    cells = [cell(f"cells.{k}") for k in (0, 1)]
    assert layers_by_module("rnnlm:tiny") == [{"tokens"}, *cells, {"head"}]
    assert layers_by_module("nmt:tiny") == [
        *({"source"}, {"target"}),
        *(cell(f"{part}.{k}") for k in (0, 1) for part in ("encoder", "decoder")),
        {"attention.score", "attention.mix"},
        {"head"},
    ]


def test_an_attention_inside_a_loop_is_of_its_layer() -> None:
    attention = {f"decoder.attention.{name}" for name in ("query", "key", "score")}
    assert layers_by_module("gnmt:tiny") == [
        {"source"},
        *(cell(f"encoder.{name}") for name in ("ahead", "back", "second", "deep.0")),
        {"target"},
        attention | cell("decoder.cells.0"),
        *(cell(f"decoder.cells.{k}") for k in (1, 2)),
        {"head"},
    ]


def test_a_cell_that_has_input_and_state_side_by_side() -> None:
    dense = [{f"before.{k}.linear"} for k in range(3)]
    assert layers_by_module("deepspeech:tiny") == [
        *(*dense, {"cell.gates"}, {"after.0.linear"}, {"after.1"})
    ]


# Devices


def test_each_layer_has_one_device_of_every_node_and_a_share_of_the_samples() -> None:
    it = given("nmt:tiny", "2x4xh100")
    graph, strategy = it.space.graph, expert(it).strategy
    uses, layer = WeightUses(graph).uses, recurrent_layers(WeightUses(graph))
    assert max(layer) == 7
    for op, choice in enumerate(strategy.choices):
        assert choice.devices == (layer[op] % 4, 4 + layer[op] % 4)
        if op in uses:
            assert choice.count == 2
        if graph.ops[op].phase == UPDATE:
            assert choice.count == 1
        if graph.ops[op].forward is not None:
            assert choice.devices == strategy.choices[graph.ops[op].forward].devices


def test_on_one_node_nothing_is_cut() -> None:
    strategy = expert(given("nmt:tiny", "local:4")).strategy
    assert all(choice.count == len(choice.devices) == 1 for choice in strategy.choices)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_nodes_reduce_each_gradient_once_and_exchange_nothing_else(nodes: int) -> None:
    """The samples divide by the nodes, so that what a layer hands on stays in its node."""
    it = given("nmt:tiny,batch=8", f"{nodes}x4xh100")
    graph, tasks = it.space.graph, lowered(it, expert)
    moved = bytes_by_value(tasks)
    gradients = {op.inputs[1] for op in graph.ops if op.parameter is not None}
    assert gradients
    for value in gradients:
        assert moved[value] == 2 * (nodes - 1) * graph.values[value].nbytes
    sent = tasks.copy_message >= 0
    source, target = tasks.copy_source[sent], tasks.copy_target[sent]
    far = tasks.slot_device[source] // 4 != tasks.slot_device[target] // 4
    between = {graph.values[v].shape for v in tasks.slot_value[source[far]].tolist()}
    assert between <= {graph.values[value].shape for value in gradients} | {()}


@pytest.mark.slow
def test_few_layers_share_a_node_by_their_operations() -> None:
    it = given("rnnlm:tiny,vocab=200", "local:7")
    graph, choices = it.space.graph, expert(it).strategy.choices
    uses = WeightUses(graph).uses
    counts = {graph.ops[op].module: len(choices[op].devices) for op in uses if graph.ops[op].module}
    assert counts.pop("head") == 4
    assert set(counts.values()) == {1}
    assert {d for choice in choices for d in choice.devices} == set(range(7))


@pytest.mark.parametrize("operations", [(5.0, 1.0, 3.0), (0.0, 7.0), (2.0, 2.0, 2.0, 9.0)])
@pytest.mark.parametrize("devices", [4, 5, 7, 9])
def test_no_other_sharing_has_less_to_do_on_the_busiest(
    operations: tuple[float, ...], devices: int
) -> None:
    found = devices_of_layers([range(devices)], operations)
    assert sorted(d for place in found for d in place) == list(range(devices))
    most = max(n / len(place) for n, place in zip(operations, found, strict=True))
    for ends in combinations(range(1, devices), len(operations) - 1):
        counts = [b - a for a, b in zip((0, *ends), (*ends, devices), strict=True)]
        assert most <= max(n / count for n, count in zip(operations, counts, strict=True))


# Models that are not in the zoo


def problem_of(model: nn.Module, *shape: int) -> Problem:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = cluster("local:2")
    graph = capture(_loss, model, optimizer, torch.randn(*shape)).graph
    return Problem(Space(graph), where, default_cost(where))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    made = model(batch)
    return (made[0] if isinstance(made, tuple) else made).square().mean()


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixed, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).chunk(3, dim=2)
        x = x + self.proj(torch.softmax(q @ k.transpose(1, 2), dim=2) @ v)
        return x + self.down(torch.relu(self.up(x)))


class Repeated(nn.Module):
    def __init__(self, part: nn.Module, times: int) -> None:
        super().__init__()
        self.part, self.times = part, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.part(x)
        return x


class Patched(nn.Module):
    """A convolution, and attention over what it makes."""

    def __init__(self, width: int, window: int, stride: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, window, stride)
        self.block = Attending(width)

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.block(self.patches(image).flatten(2).transpose(1, 2))
        return made


@pytest.mark.slow
def test_a_repeated_block_of_a_transformer_is_no_loop_over_time() -> None:
    it = problem_of(Repeated(Attending(4), 3), 2, 3, 4)
    assert WeightUses(it.space.graph).looped
    assert expert(it).notes[0].startswith("a network with attention")


def test_a_repeated_layer_is_recurrent() -> None:
    it = problem_of(Repeated(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), 3), 2, 4)
    assert expert(it).notes[0].startswith("a recurrent network: 1 layer over")


@pytest.mark.slow
def test_of_convolution_and_attention_what_has_more_operations() -> None:
    few = problem_of(Patched(8, 2, 2), 2, 3, 8, 8)
    many = problem_of(Patched(2, 5, 1), 2, 3, 6, 6)
    assert expert(few).notes[0].startswith("a network with attention")
    assert expert(many).notes[0].startswith("a convolutional network")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_of_one_module_are_told_apart(kind: type[nn.Module]) -> None:
    it = problem_of(kind(4, 6, num_layers=2, batch_first=True), 2, 3, 4)
    graph = it.space.graph
    weights = WeightUses(graph)
    layer = recurrent_layers(weights)
    assert max(layer) == 1
    names = defaultdict(set)
    for op, number in zip(graph.ops, layer, strict=True):
        if op.parameter is not None:
            names[number].add(graph.values[op.parameter].name[-1])
    assert names == {0: {"0"}, 1: {"1"}}


class Dropped(nn.Module):
    """A recurrent layer that learns the state it begins with and drops some of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.zeros(4))
        self.input, self.weight = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, xs: Tensor) -> Tensor:
        state = self.begin.expand(xs.shape[0], 4)
        weight = nn.functional.dropout(self.weight, 0.5)
        for x in xs.unbind(1):
            state = torch.tanh(self.input(x) + state @ weight)
        return state


def test_a_weight_with_dropout_is_a_weight() -> None:
    assert (
        expert(problem_of(Dropped(), 2, 4, 3))
        .notes[0]
        .startswith("a recurrent network: 1 layer over")
    )
