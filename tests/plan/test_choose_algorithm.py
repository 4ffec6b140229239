"""What exchanges are made of: chosen where links carry less by it, and predicted as it is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graphs import captured

import apportion as ap
from apportion.capture.program import Program
from apportion.lower.pair_bytes import pair_bytes
from apportion.machine.collective import halves, is_best_direct, near_groups
from apportion.machine.topology import Cluster
from apportion.plan.choose_algorithm import link_seconds
from apportion.plan.plan import Plan
from apportion.simulate.simulate import simulate
from apportion.split.communication import (
    DIRECT,
    HIERARCHICAL,
    TREE,
    Communication,
    read_communication,
)
from apportion.split.strategy import Strategy

SPEC = "mlp:layers=4,width=1024,batch=64"


@pytest.fixture(scope="module")
def program() -> Program:
    return captured(SPEC)[0]


@pytest.fixture(scope="module")
def two_nodes() -> Cluster:
    return ap.cluster("2x4xh100")


@pytest.fixture(scope="module")
def chosen(program: Program, two_nodes: Cluster) -> Plan:
    return ap.plan(program, two_nodes, "data", calibrate=False)


def test_nodes_are_groups(two_nodes: Cluster) -> None:
    assert near_groups(two_nodes) == ((0, 0, 0, 0, 1, 1, 1, 1),)
    assert halves(two_nodes) == ((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3))
    assert not is_best_direct(two_nodes)
    flat = ap.cluster("8xh100")
    assert near_groups(flat) == () and is_best_direct(flat)


@pytest.mark.slow
def test_data_parallelism_over_nodes_is_hierarchical(chosen: Plan) -> None:
    how = chosen.strategy.communication
    assert (how.algorithm, how.levels) == (HIERARCHICAL, ((0, 0, 0, 0, 1, 1, 1, 1),))
    assert any(
        note.startswith("exchanges are hierarchical over 2 groups: -") for note in chosen.notes
    )
    assert "hierarchical over 2 groups" in str(how)


def test_a_flat_cluster_has_nothing_to_choose(program: Program) -> None:
    plan = ap.plan(program, "8xh100", "data", calibrate=False)
    assert plan.strategy.communication.algorithm == "" and not plan.strategy.communication.levels


def as_sent(plan: Plan, how: Communication) -> Strategy:
    return replace(plan.strategy, communication=how)


def test_the_step_is_shorter_than_by_direct_messages(chosen: Plan, two_nodes: Cluster) -> None:
    from apportion.lower.runnable import runnable

    direct, relayed = (
        runnable(chosen.space, as_sent(chosen, how), 8)
        for how in (Communication(algorithm=DIRECT), chosen.strategy.communication)
    )
    busiest = [link_seconds(pair_bytes(tasks), two_nodes).max() for tasks in (direct, relayed)]
    assert busiest[1] == pytest.approx(busiest[0] / 4, rel=0.05)
    steps = [simulate(tasks, two_nodes, chosen.cost).step_seconds for tasks in (direct, relayed)]
    assert steps[1] < 0.8 * steps[0]


def test_direct_messages_are_predicted_as_such(chosen: Plan, two_nodes: Cluster) -> None:
    """Before, every collective took what the cheapest algorithm would, which ranks do not do."""
    from apportion.lower.runnable import runnable

    assumed, direct = (
        simulate(runnable(chosen.space, as_sent(chosen, how), 8), two_nodes, chosen.cost)
        for how in (Communication(), Communication(algorithm=DIRECT))
    )
    assert direct.step_seconds > 1.2 * assumed.step_seconds


def test_it_is_saved_and_kept_by_other_policies(chosen: Plan, tmp_path: Path) -> None:
    chosen.save(tmp_path / "p.json")
    again = Plan.load(tmp_path / "p.json")
    assert again.strategy == chosen.strategy
    assert again.timeline.step_seconds == chosen.timeline.step_seconds
    held = again.with_communication("none").strategy.communication
    assert held.held and held.levels == chosen.strategy.communication.levels


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": "ring"}, "is one of direct, hierarchical, tree, not 'ring'"),
        ({"levels": [[0, 0]]}, "has levels where its algorithm is hierarchical or a tree"),
        ({"algorithm": "tree"}, "has levels where its algorithm is hierarchical or a tree"),
        ({"algorithm": "tree", "levels": [[0, "x"]]}, "a group of the communication"),
        ({"algorithm": "tree", "levels": 3}, "the levels of the communication"),
    ],
)
def test_a_file_with_another_algorithm_is_refused(changed: dict[str, object], message: str) -> None:
    data = Communication(algorithm=DIRECT).to_json() | changed
    with pytest.raises(ValueError, match=message):
        read_communication(data)


def test_communications_are_read_as_they_were_written() -> None:
    for how in (Communication(), Communication(algorithm=TREE, levels=((0, 0, 1), (0, 1, 2)))):
        assert read_communication(how.to_json()) == how
    before = Communication().to_json()
    del before["algorithm"], before["levels"]
    assert read_communication(before) == Communication()


def test_links_carry_what_is_sent(chosen: Plan, two_nodes: Cluster) -> None:
    """Against the copies of all messages, one by one; members of a collective send about as much
    as each other, and are taken to send as much."""
    tasks, expected = chosen.tasks, np.zeros(len(two_nodes.links))
    copies = tasks.make_copies()
    for k in np.flatnonzero(copies.message >= 0).tolist():
        sender, receiver = (
            int(tasks.slot_device[side[k]]) for side in (copies.source, copies.target)
        )
        for link in two_nodes.routes[sender][receiver]:
            expected[link] += copies.nbytes[k] / two_nodes.links[link].bandwidth
    np.testing.assert_allclose(link_seconds(pair_bytes(tasks), two_nodes), expected, rtol=0.02)
