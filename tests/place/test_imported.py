"""Imported graphs as placement problems: devices, classes, memory, links; and formats of files."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
from placement_graphs import DATA, DOPPLER_TEXT, FIDDLE_GRAPH, PIPEDREAM_TEXT

from apportion.machine import cluster
from apportion.place.imports.export_graph import fiddle_data
from apportion.place.imports.fiddle import read_fiddle
from apportion.place.imports.imported import imported_problem
from apportion.place.imports.read_graph import guess_format, read_graph
from apportion.place.objective import StepObjective
from apportion.place.objectives.simple_bound import simple_bound
from apportion.place.objectives.step_time import simulate_step
from apportion.place.placement_problem import NEVER


def test_devices_are_those_of_the_file() -> None:
    problem = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"))
    assert [device.name for device in problem.devices] == ["acc0", "acc1", "cpu0"]
    assert [device.memory_bytes for device in problem.devices] == [100, 100, None]
    columns = problem.columns
    assert columns.unit.tolist() == [0, 1, 0]
    assert columns.duration[1].tolist() == [NEVER, NEVER, 2 * problem.tick]
    assert columns.allowed.tolist() == [[True, True, True], [False, False, True]]
    more = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"), accelerators=4)
    assert [device.name for device in more.devices] == ["acc0", "acc1", "acc2", "acc3", "cpu0"]
    free = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"), memory_limit=math.inf)
    assert not any(device.memory_bytes for device in free.devices)


def test_an_output_occupies_the_one_link_of_its_device_once() -> None:
    problem = imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"))
    done = simulate_step(problem, np.array([0, 2]))  # 7 and 9 on acc0, 3 on cpu0
    # 7 ends at 1, arrives at 1.25, 3 ends at 3.25, arrives at 3.75, 9 takes 3
    assert done.ticks / problem.tick == pytest.approx(6.75)
    assert done.peak_bytes.tolist() == [61, 0, 20]


def test_two_outputs_wait_for_each_other_and_readers_do_not() -> None:
    data = copy.deepcopy(FIDDLE_GRAPH)
    row = {**data["nodes"][0], "fpgaLatency": 1.0, "size": 0.0}
    del row["colorClass"]
    data["nodes"] = [{**row, "id": k} for k in range(5)]
    pairs = [(0, 2, 5.0), (0, 3, 5.0), (1, 4, 7.0)]
    data["edges"] = [{"sourceId": a, "destId": b, "cost": c} for a, b, c in pairs]
    problem = imported_problem(read_fiddle(json.dumps(data), "small"), accelerators=3)
    done = simulate_step(problem, np.array([0, 0, 1, 2, 1]))
    # 0 ends at 1, its output takes 1 to 6 to both; 1 ends at 2, its output takes 6 to 13
    assert (done.start / problem.tick).tolist() == [0.0, 1.0, 6.0, 6.0, 13.0]


def test_a_class_that_fits_nowhere_is_named() -> None:
    data = copy.deepcopy(FIDDLE_GRAPH)
    data["nodes"][0]["colorClass"] = data["nodes"][1]["colorClass"] = 8
    data["maxCPUs"] = 0
    with pytest.raises(ValueError, match="no device can run all nodes that move together"):
        imported_problem(read_fiddle(json.dumps(data), "small"))
    data = copy.deepcopy(FIDDLE_GRAPH)
    data["maxCPUs"], data["nodes"][1]["supportedOnFpga"], data["maxSizePerFPGA"] = 0, 1, 50.0
    with pytest.raises(ValueError, match=r"of node '7' needs 61 bytes, and the largest .* 50"):
        imported_problem(read_fiddle(json.dumps(data), "small"))


def test_no_devices_are_refused() -> None:
    data = copy.deepcopy(FIDDLE_GRAPH)
    data["maxCPUs"] = data["maxFPGAs"] = 0
    with pytest.raises(ValueError, match="no device to place"):
        imported_problem(read_fiddle(json.dumps(data), "small"))
    with pytest.raises(ValueError, match="2000 is not a number of accelerators"):
        imported_problem(read_fiddle(json.dumps(FIDDLE_GRAPH), "small"), accelerators=2000)


# Clusters


def test_on_a_cluster_outputs_travel_its_routes_by_bytes(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text(PIPEDREAM_TEXT)
    place = cluster("2xv100")
    problem = imported_problem(read_graph(path), cluster=place)
    assert [d.name for d in problem.devices] == [d.name for d in place.devices]
    assert problem.devices[0].memory_bytes == place.devices[0].memory_bytes
    device = np.zeros(problem.units, np.int64)
    device[problem.columns.unit[problem.node_names.index("node4")]] = 1
    done = simulate_step(problem, device)
    at = [problem.node_names.index(name) for name in ("node3", "node4")]
    took = (done.start[at[1]] - done.end[at[0]]) / problem.tick
    links = [place.links[k] for k in place.routes[0][1]]
    sent = 3_000_000 / min(it.bandwidth for it in links) + sum(it.latency for it in links)
    assert took == pytest.approx(1e3 * sent, rel=1e-6)


def test_cpus_of_a_cluster_take_the_times_for_a_cpu() -> None:
    problem = imported_problem(
        read_fiddle(json.dumps(FIDDLE_GRAPH), "small"), cluster=cluster("local:2")
    )
    assert (problem.columns.duration[0] / problem.tick).tolist() == [10.0, 10.0]


def test_what_a_cluster_cannot_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(DOPPLER_TEXT)
    with pytest.raises(ValueError, match="doppler files are in no known unit"):
        imported_problem(read_graph(path), cluster=cluster("2xv100"))
    data = copy.deepcopy(FIDDLE_GRAPH)
    for edge in data["edges"]:
        edge.pop("size", None)
    with pytest.raises(ValueError, match="does not say how many bytes"):
        imported_problem(read_fiddle(json.dumps(data), "small"), cluster=cluster("local:2"))


def test_the_export_knows_one_kind_of_accelerator() -> None:
    whole = imported_problem(
        read_graph(DATA / "throughput-inputs/LayerGraphs/bert24_inference.json"),
        cluster=cluster("mixed-a100-v100"),
    )
    with pytest.raises(ValueError, match="one kind of accelerator, and here are"):
        fiddle_data(whole)


# Files


@pytest.mark.parametrize(
    ("text", "format"),
    [
        (json.dumps(FIDDLE_GRAPH), "fiddle"),
        (PIPEDREAM_TEXT, "pipedream"),
        (DOPPLER_TEXT, "doppler"),
    ],
    ids=["fiddle", "pipedream", "doppler"],
)
def test_the_format_is_seen_from_the_content(text: str, format: str, tmp_path: Path) -> None:
    assert guess_format(text) == format
    path = tmp_path / "graph.dat"
    path.write_text(text)
    assert read_graph(path).format == read_graph(path, format).format == format
    for other in {"fiddle", "pipedream", "doppler"} - {format}:
        with pytest.raises(ValueError, match=r"graph\.dat: "):
            read_graph(path, other)


def test_what_is_in_no_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.dat"
    path.write_text("digraph { a -> b }")
    with pytest.raises(ValueError, match="none of the formats that are known: fiddle, pipedream"):
        read_graph(path)
    with pytest.raises(ValueError, match="unknown format 'onnx'; known: fiddle"):
        read_graph(path, "onnx")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not text"):
        read_graph(path)


# Bounds


def test_no_placement_beats_the_simple_bound(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    for text in (DOPPLER_TEXT, PIPEDREAM_TEXT):
        path.write_text(text)
        problem = imported_problem(read_graph(path), accelerators=2)
        objective, bound = StepObjective(problem), simple_bound(problem, "step")
        shape = (2,) * problem.units
        best = min(
            objective.score(np.array(np.unravel_index(k, shape), np.int64))
            for k in range(2**problem.units)
        )
        assert 0 < bound <= best
        work = problem.unit_seconds.min(axis=1)
        whole = max(work.sum() / 2, work.max())
        assert simple_bound(problem, "throughput") == pytest.approx(whole, rel=1e-12)
        assert simple_bound(problem, "latency") <= bound


def test_a_slow_device_counts_for_less_in_the_bound() -> None:
    path = DATA / "throughput-inputs/LayerGraphs/bert24_training.json"
    problem = imported_problem(read_graph(path))  # six accelerators, and a CPU that takes 10 times
    assert simple_bound(problem, "throughput") == pytest.approx(217.813 / 6.1, abs=1e-3)
    assert simple_bound(problem, "throughput") < 39.7895  # the proven optimum
