"""Graphs of msr-fiddle/dnn-partitioning: the published ones are read, bad ones are refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from placement_graphs import DATA, FIDDLE_GRAPH

from apportion.graph import from_json, to_json, verify
from apportion.place.imports.export_graph import fiddle_data
from apportion.place.imports.fiddle import read_fiddle, read_split
from apportion.place.imports.imported import imported_problem, with_expert
from apportion.place.imports.read_graph import read_graph, read_split_file
from apportion.place.run_placer import place

GRAPHS = sorted(DATA.glob("*-inputs/*/*.json"))

# Nodes, edges, accelerators, CPUs and the time of one accelerator, as published (the last of them
# recomputed by the authors' program).
KNOWN = {
    "throughput-inputs/LayerGraphs/bert24_inference": (32, 55, 6, 1, 92.406),
    "throughput-inputs/LayerGraphs/bert24_training": (64, 110, 6, 1, 217.813),
    "throughput-inputs/LayerGraphs/resnet50_inference": (177, 193, 6, 1, 201.450),
    "throughput-inputs/LayerGraphs/resnet50_training": (354, 386, 6, 1, 462.381),
    "throughput-inputs/OperatorGraphs/bert_l-3_inference": (235, 250, 3, 1, 49.3526),
    "throughput-inputs/OperatorGraphs/bert_l-3_training": (600, 817, 3, 1, 122.987),
    "throughput-inputs/OperatorGraphs/resnet50_inference": (604, 619, 6, 1, 325.132),
    "latency-inputs/LayerGraphs/bert24_inference": (32, 55, 5, 8, 92.406),
    "latency-inputs/OperatorGraphs/bert_l-3_inference": (235, 250, 4, 8, 49.3526),
}

TPS = ("throughput", None)


def name(path: Path) -> str:
    return str(path.relative_to(DATA).with_suffix(""))


@pytest.mark.parametrize("path", GRAPHS, ids=name)
def test_a_published_graph_is_read_as_it_is(path: Path) -> None:
    nodes, edges, accelerators, cpus, alone = KNOWN[name(path)]
    found, data = read_graph(path), json.loads(path.read_text())
    verify(found.graph)
    assert (found.format, found.accelerators, found.cpus) == ("fiddle", accelerators, cpus)
    assert found.memory_bytes == data["maxSizePerFPGA"]
    assert len(found.graph.ops) == nodes
    assert sum(map(len, found.graph.consumers)) == edges
    rows = {str(row["id"]): row for row in data["nodes"]}
    for op in found.graph.ops:
        costs, row = op.imported, rows[op.name]
        assert costs is not None
        assert dict(costs.times) == {"acc": row["fpgaLatency"], "cpu": row["cpuLatency"]}
        assert costs.memory_bytes == row["size"]
        assert (op.phase == "backward") == bool(row["isBackwardNode"])
    times = sum(dict(op.imported.times)["acc"] for op in found.graph.ops if op.imported)
    assert times == pytest.approx(alone, abs=1e-3)


def test_all_published_graphs_are_here() -> None:
    assert {name(path) for path in GRAPHS} == set(KNOWN)
    assert (DATA / "LICENSE.txt").exists()


def test_a_small_graph_in_all_its_parts() -> None:
    found = read_fiddle(json.dumps(FIDDLE_GRAPH), "small")
    by_name = {op.name: op for op in found.graph.ops}
    assert [op.name for op in found.graph.ops] == ["7", "3", "9"]
    assert by_name["3"].imported is not None and by_name["7"].imported is not None
    assert dict(by_name["3"].imported.times) == {"cpu": 2.0}
    assert by_name["7"].imported.memory_bytes == 31  # rounded up
    assert by_name["7"].imported.transfer == 0.25
    assert by_name["7"].imported.colocation == "5"
    assert by_name["3"].imported.colocation is None
    assert [value.nbytes for value in found.graph.values] == [8, 4]


def test_imported_costs_survive_json_and_count_for_identity() -> None:
    graph = read_fiddle(json.dumps(FIDDLE_GRAPH), "small").graph
    again = from_json(json.loads(json.dumps(to_json(graph))))
    assert again == graph and again.fingerprint == graph.fingerprint
    other = copy.deepcopy(FIDDLE_GRAPH)
    other["nodes"][0]["fpgaLatency"] = 1.5
    assert read_fiddle(json.dumps(other), "small").graph.fingerprint != graph.fingerprint


def change(*path: Any) -> Callable[[Any], None]:
    """A function that sets what `path` leads to, its last item being the new value."""

    def apply(data: Any) -> None:
        *way, key, value = path
        for step in way:
            data = data[step]
        data[key] = value

    return apply


def without(*path: Any) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        *way, key = path
        for step in way:
            data = data[step]
        del data[key]

    return apply


BAD = [
    (change("nodes", 0, "fpgaLatency", -1.0), "the fpgaLatency of node 7 is -1.0"),
    (change("nodes", 0, "fpgaLatency", float("nan")), "the fpgaLatency of node 7 is nan"),
    (change("nodes", 1, "cpuLatency", float("inf")), "the cpuLatency of node 3 is inf"),
    (change("nodes", 1, "cpuLatency", "2"), "the cpuLatency of node 3 is '2', not a number"),
    (change("nodes", 1, "cpuLatency", True), "the cpuLatency of node 3 is True, not a number"),
    (change("nodes", 1, "size", -4), "the size of node 3 is -4"),
    (change("nodes", 1, "size", 1e30), "the size of node 3 is 1e.30 bytes"),
    (change("nodes", 1, "id", 7), "two nodes have the id 7"),
    (change("nodes", 1, "id", "x"), "the id of a node is 'x', not a whole number"),
    (change("nodes", 1, "isBackwardNode", 2), "isBackwardNode of node 3 is 2"),
    (change("nodes", 1, "supportedOnFpga", "yes"), "supportedOnFpga of node 3 is 'yes'"),
    (change("nodes", 1, "colorClass", 0.5), "the colorClass of node 3 is 0.5"),
    (change("edges", 0, "destId", 99), "the edge from 7 to 99 names node 99, which is not there"),
    (change("edges", 0, "cost", -0.5), "the cost of the edge from 7 to 3 is -0.5"),
    (change("edges", 0, "cost", 9.0), "the edges from node 7 cost 9 and 0.25"),
    (change("edges", 0, "destId", 7), "the graph has a cycle through node 7"),
    (change("nodes", 1, "cpuLatency", 10**400), "node 3 is a number of hundreds of digits; that"),
    (change("maxFPGAs", 10**9), r"maxFPGAs is 1e\+09; at most 1024 devices"),
    (change("maxFPGAs", -1), "maxFPGAs is -1, not a number of devices"),
    (change("maxCPUs", 1.5), "maxCPUs is 1.5, not a number of devices"),
    (change("maxSizePerFPGA", float("nan")), "maxSizePerFPGA is nan"),
    (change("nodes", []), "the graph has no nodes"),
    (change("nodes", "many"), "nodes is not a list of objects"),
    (change("edges", [1]), "edges is not a list of objects"),
    (without("nodes"), "the file has no nodes"),
    (without("maxCPUs"), "the file has no maxCPUs"),
    (without("nodes", 2, "size"), "node 9 has no size"),
    (without("nodes", 2, "id"), "a node has no id"),
    (without("edges", 2, "cost"), "the edge from 3 to 9 has no cost"),
]


@pytest.mark.parametrize(("damage", "complaint"), BAD, ids=[text for _, text in BAD])
def test_a_bad_graph_is_refused_in_a_sentence(
    damage: Callable[[Any], None], complaint: str
) -> None:
    data = copy.deepcopy(FIDDLE_GRAPH)
    damage(data)
    with pytest.raises(ValueError, match=complaint) as error:
        read_fiddle(json.dumps(data), "bad")
    assert "\n" not in str(error.value)


def test_a_cycle_is_named_by_a_node_on_it() -> None:
    data = copy.deepcopy(FIDDLE_GRAPH)
    rows = [{**data["nodes"][0], "id": number} for number in range(6)]
    pairs = [(0, 1), (1, 2), (2, 3), (3, 1), (3, 4), (4, 5)]
    data["nodes"] = rows
    data["edges"] = [{"sourceId": a, "destId": b, "cost": 1.0} for a, b in pairs]
    with pytest.raises(ValueError, match=r"cycle through node [123]$"):
        read_fiddle(json.dumps(data), "bad")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
        ("7" * 10_000, "too long"),
        ('{"fpgas": [], "cpus": []}', "a split of a graph, and not a graph"),
    ],
)
def test_what_is_no_graph_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_fiddle(text, "bad")


# Splits


def test_splits_by_hand_become_the_expert_placement() -> None:
    path = DATA / "throughput-inputs/LayerGraphs/resnet50_training.json"
    problem = imported_problem(read_graph(path))
    split = read_split_file(DATA / "human-experts/resnet50_inference_expert.json")
    expert = with_expert(problem, split).expert  # backward nodes go with their forward ones
    assert expert is not None
    assert np.bincount(expert, minlength=7).tolist() == [5, 32, 42, 42, 42, 14, 0]


@pytest.mark.parametrize(
    ("graph", "split", "objective", "accelerators", "value"),
    [
        ("throughput-inputs/LayerGraphs/bert24_inference", "bert24_inference", *TPS, 20.084),
        ("throughput-inputs/LayerGraphs/bert24_training", "bert24_training", *TPS, 49.4049),
        ("throughput-inputs/LayerGraphs/bert24_training", "bert24_inference", *TPS, 49.4049),
        ("throughput-inputs/LayerGraphs/resnet50_inference", "resnet50_inference", *TPS, 43.9183),
        ("throughput-inputs/LayerGraphs/resnet50_training", "resnet50_inference", *TPS, 112.108),
        ("latency-inputs/LayerGraphs/bert24_inference", "bert24_inference", "latency", 6, 111.937),
    ],
)
def test_splits_by_hand_are_worth_what_the_authors_programs_say(
    graph: str, split: str, objective: str, accelerators: int | None, value: float
) -> None:
    problem = imported_problem(read_graph(DATA / f"{graph}.json"), accelerators)
    devices = read_split_file(DATA / "human-experts" / f"{split}_expert.json")
    found = place(with_expert(problem, devices), objective, "expert").evaluation
    assert found.feasible and found.value == pytest.approx(value, abs=1e-3)


def test_a_placement_of_our_own_is_a_split_too() -> None:
    assert read_split('{"assignment": {"7": "acc0"}, "value": 1}') == {"7": "acc0"}
    with pytest.raises(ValueError, match="not a name"):
        read_split('{"assignment": {"7": 0}}')


@pytest.mark.parametrize(
    ("split", "complaint"),
    [
        ({"7": "acc0", "3": "cpu0", "8": "acc0"}, "node 8, which the graph has not"),
        ({"7": "acc2", "3": "cpu0"}, "node 7 on acc2; there is no such device"),
        ({"7": "acc0", "9": "acc1", "3": "cpu0"}, "node 9 apart from others of its class"),
        ({"7": "acc0"}, "no device for node 3"),
    ],
)
def test_a_split_that_does_not_match_is_refused(split: dict[str, str], complaint: str) -> None:
    problem = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"))
    with pytest.raises(ValueError, match=complaint):
        with_expert(problem, split)


def test_a_node_twice_in_a_split_is_refused() -> None:
    with pytest.raises(ValueError, match="node 7 twice"):
        read_split('{"fpgas": [{"nodes": [7]}, {"nodes": [7]}], "cpus": []}')


# Export


@pytest.mark.parametrize("path", GRAPHS, ids=name)
def test_what_is_exported_is_read_back_the_same(path: Path) -> None:
    problem = imported_problem(read_graph(path))
    again = imported_problem(read_fiddle(json.dumps(fiddle_data(problem)), path.stem))
    assert again.node_names == problem.node_names
    assert again.devices == problem.devices and again.tick == problem.tick
    assert problem.transfer is not None and again.transfer is not None
    np.testing.assert_allclose(again.transfer, problem.transfer, rtol=1e-12)
    for field, ours, theirs in zip(
        problem.columns._fields, again.columns, problem.columns, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs, err_msg=field)


def test_no_limit_is_exported_as_more_than_any_device_has() -> None:
    free = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"), memory_limit=math.inf)
    again = read_fiddle(json.dumps(fiddle_data(free)), "small")
    assert again.memory_bytes is None
    assert read_fiddle(json.dumps(FIDDLE_GRAPH), "small").memory_bytes == 100


def test_the_small_graph_is_exported_with_what_it_lacks() -> None:
    problem = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"))
    data = fiddle_data(problem)
    assert [node["supportedOnFpga"] for node in data["nodes"]] == [1, 0, 1]
    again = imported_problem(read_fiddle(json.dumps(data), "small"))
    np.testing.assert_array_equal(again.columns.duration, problem.columns.duration)
    np.testing.assert_array_equal(again.columns.allowed, problem.columns.allowed)
    assert data["edges"][0] == {"sourceId": 7, "destId": 3, "cost": 0.25, "size": 8.0}
