"""Profiles of PipeDream."""

from __future__ import annotations

import numpy as np
import pytest
from placement_graphs import PIPEDREAM_TEXT, layer

from apportion.graph import verify
from apportion.place.imports.imported import imported_problem
from apportion.place.imports.pipedream_profile import read_pipedream
from apportion.place.objectives.step_time import simulate_step


def test_a_small_profile_in_all_its_parts() -> None:
    graph = read_pipedream(PIPEDREAM_TEXT, "small").graph
    verify(graph)
    by_name = {op.name: op for op in graph.ops}
    assert set(by_name) == {
        *("node1", "node2", "node3", "node4"),
        *("node2 backward", "node3 backward", "node4 backward"),  # the input has none
    }
    edges = {
        (op.name, graph.ops[reader].name)
        for op in graph.ops
        for value in op.outputs
        for reader in graph.consumers[value]
    }
    assert edges == {
        *(("node1", "node2"), ("node2", "node3"), ("node1", "node3"), ("node3", "node4")),
        *((f"node{k}", f"node{k} backward") for k in (2, 3, 4)),
        *(("node4 backward", "node3 backward"), ("node3 backward", "node2 backward")),
    }
    conv, back = by_name["node2"], by_name["node2 backward"]
    assert conv.kind == "Conv2d" and conv.module.startswith("Conv2d(3, 64")
    assert conv.imported is not None and back.imported is not None
    assert conv.imported.times == (("acc", 4.0),) and back.imported.times == (("acc", 8.0),)
    assert conv.imported.memory_bytes == back.imported.memory_bytes == 1_500_064
    assert conv.imported.transfer == 1.5  # ms at 1 GB/s
    assert back.imported.transfer == 0.0  # nobody wants the gradient of an input
    assert back.phase == "backward" and graph.ops[back.forward or 0] is conv
    third = by_name["node3 backward"].imported
    assert third is not None and third.transfer == 1.5  # as large as the activation of node2


def test_forward_and_backward_share_a_device() -> None:
    problem = imported_problem(read_pipedream(PIPEDREAM_TEXT, "small"))
    assert problem.units == 4 and len(problem.devices) == 4
    names = np.array(problem.node_names)
    for unit in range(4):
        (first, *rest) = names[problem.columns.unit == unit]
        assert [f"{first} backward"][: len(rest)] == rest
    alone = simulate_step(problem, np.zeros(4, np.int64))
    assert alone.ticks / problem.tick == pytest.approx(0.5 + 4 + 8 + 1 + 2 + 2 + 3)


def test_a_profile_of_inference_has_no_backward_nodes() -> None:
    text = "\n".join([layer("a", "X", 1, 0, "8.0", "0.0"), layer("b", "X", 1, 0, "8.0", "0.0")])
    assert len(read_pipedream(text + "\n\ta -- b\n", "small").graph.ops) == 2


def test_stages_are_the_expert_placement() -> None:
    rows = [layer(f"n{k}", "X()", 1, 1, "8.0", "0.0", k // 2) for k in range(4)]
    edges = [f"\tn{k} -- n{k + 1}" for k in range(3)]
    imported = read_pipedream("\n".join(rows + edges), "small")
    problem = imported_problem(imported, accelerators=2)
    assert problem.expert is not None and problem.expert.tolist() == [0, 0, 1, 1]
    assert imported_problem(imported, accelerators=1).expert is None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("\tnode1 -- node2", "\tnode1 -- node9", "the edge on line 5 names node node9"),
        ("node4 -- Linear", "node1 -- Linear", "two nodes have the id node1 .line 4."),
        ("\tnode1 -- node2", "\tnode4 -- node2", "a cycle through node node"),
        ("=4.000", "=-4.0", "the forward_compute_time of node2 is -4.0"),
        ("=8.000", "=nan", "the backward_compute_time of node2 is nan"),
        ("=8.000", "=fast", "the backward_compute_time of node2 is 'fast'"),
        ("size=64.0", "size=-64.0", "the parameter_size of node2 is -64.0"),
        ("[1000000.0; 5e5]", "[1000000.0; x]", "the activation_size of node2 is 'x'"),
        ("forward_compute_time=4.000, ", "", "line 3 is neither a layer"),
        ("size=64.0", "size=64.0 -- part=3", "line 3 ends in 'part=3'"),
        ("\tnode1 -- node2", "node1 to node2", "line 5 is neither a layer"),
    ],
)
def test_a_bad_profile_is_refused_in_a_sentence(old: str, new: str, complaint: str) -> None:
    assert old in PIPEDREAM_TEXT
    with pytest.raises(ValueError, match=complaint) as error:
        read_pipedream(PIPEDREAM_TEXT.replace(old, new, 1), "bad")
    assert "\n" not in str(error.value)


def test_an_empty_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="no nodes"):
        read_pipedream("\n", "bad")
