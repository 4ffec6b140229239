"""Costs of collectives: closed forms, bounds, symmetries, and which algorithm wins where."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from importlib import import_module
from itertools import permutations

import pytest
from make_tasks import ports

from apportion.machine.cluster import cluster
from apportion.machine.collective import (
    ALL_GATHER,
    ALL_TO_ALL,
    PATTERNS,
    REDUCE_SCATTER,
    AlgorithmLine,
    algorithm_lines,
    algorithms,
    all_reduce,
    all_reduce_lines,
    broadcast,
    broadcast_lines,
    collective,
)
from apportion.machine.topology import Cluster

ALPHA = 3e-6
BANDWIDTH = 1e9  # of every port of `ports`
SPECS = ["8xh100", "2x4xa100", "2x4xk80", "flexflow-p100", "flexflow-k80", "mixed-a100-v100"]


module = import_module("apportion.machine.collective")


def everybody(place: Cluster) -> tuple[int, ...]:
    return tuple(range(len(place.devices)))


def by_name(lines: tuple[AlgorithmLine, ...]) -> dict[str, AlgorithmLine]:
    found = {line.algorithm: line for line in lines}
    assert len(found) == len(lines)
    return found


def received(line: AlgorithmLine, place: Cluster, device: int) -> float:
    """Bytes that enter a device, per byte of the collective."""
    name = place.devices[device].name
    return sum(
        beta * place.links[link].bandwidth
        for link, beta in line.links
        if place.links[link].name in (f"in{device}", f"{name}.in", f"{name}.nic.in")
    )


# Closed forms on equal ports, full duplex


@pytest.mark.parametrize("k", [3, 4, 7, 8])
@pytest.mark.parametrize("pattern", [ALL_GATHER, REDUCE_SCATTER])
def test_ring_and_direct_on_equal_ports(k: int, pattern: int) -> None:
    """Of an array of n bytes: (k - 1) / k n / b, and k - 1 or one latencies."""
    place, array = ports(k, latency=ALPHA / 2), 7e6
    found = by_name(algorithm_lines(pattern, everybody(place), place))
    bandwidth_term = (k - 1) / k * array / BANDWIDTH
    ring = found["ring"].cost((k - 1) * array).seconds
    assert ring == pytest.approx(bandwidth_term + (k - 1) * ALPHA, rel=1e-12)
    direct = found["direct"].cost((k - 1) * array).seconds
    assert direct == pytest.approx(bandwidth_term + ALPHA, rel=1e-12)


@pytest.mark.parametrize("k", [4, 8, 16])
def test_doubling_has_a_latency_for_each_bit(k: int) -> None:
    place = ports(k, latency=ALPHA / 2)
    line = by_name(algorithm_lines(ALL_GATHER, everybody(place), place))["doubling"]
    assert line.alpha == pytest.approx((k.bit_length() - 1) * ALPHA)
    assert line.beta * (k - 1) == pytest.approx((k - 1) / k / BANDWIDTH)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_all_to_all_is_direct(k: int) -> None:
    place = ports(k, latency=ALPHA / 2)
    (line,) = algorithm_lines(ALL_TO_ALL, everybody(place), place)
    assert line.algorithm == "direct"
    assert line.alpha == pytest.approx(ALPHA)
    assert line.cost(k * (k - 1) * 1e6).seconds == pytest.approx(ALPHA + (k - 1) * 1e6 / BANDWIDTH)


@pytest.mark.parametrize("k", [4, 8])
def test_all_reduce_reaches_the_bus_bandwidth_of_its_ports(k: int) -> None:
    """As NCCL's tests define it: 2 (k - 1) / k array / time, whatever the number of ranks."""
    place, array = ports(k, latency=ALPHA / 2), 1e9
    for line in all_reduce_lines(everybody(place), place):
        bus = 2 * (k - 1) / k * array / line.cost(array).seconds
        assert bus <= BANDWIDTH * (1 + 1e-12), line.algorithm
        if line.algorithm == "ring":
            assert bus == pytest.approx(BANDWIDTH, rel=1e-4)


def test_a_bus_serves_all_messages_one_after_another() -> None:
    place = ports(4, bus=True)
    (line,) = algorithm_lines(ALL_TO_ALL, everybody(place), place)
    assert line.beta == pytest.approx(1 / BANDWIDTH)  # every byte crosses it
    assert dict(line.links)[8] == pytest.approx(1 / BANDWIDTH)


# Which algorithm wins


def test_direct_wins_for_tiny_messages_and_loses_for_large_ones_between_nodes() -> None:
    place = cluster("2x8xa100")
    for pattern in (ALL_GATHER, REDUCE_SCATTER):
        assert collective(pattern, everybody(place), 1e3, place).algorithm == "direct"
        assert collective(pattern, everybody(place), 1e9, place).algorithm != "direct"


@pytest.mark.parametrize("spec", ["2x4xk80", "2x4xp100", "2x8xa100"])
def test_hierarchical_beats_ring_and_direct_across_slow_cards(spec: str) -> None:
    place = cluster(spec)
    found = by_name(algorithm_lines(ALL_GATHER, everybody(place), place))
    for nbytes in (1e8, 1e10):
        costs = {name: line.cost(nbytes).seconds for name, line in found.items()}
        assert costs["hierarchical over 2"] < min(costs["direct"], costs["ring"])


def test_a_block_crosses_to_a_node_once_or_many_times() -> None:
    place = cluster("2x4xk80")
    found = by_name(algorithm_lines(ALL_GATHER, everybody(place), place))
    into = next(k for k, link in enumerate(place.links) if link.name == "node1.in")
    blocks = {
        name: dict(line.links)[into] * place.links[into].bandwidth * 8 * 7
        for name, line in found.items()
    }
    assert blocks["direct"] == pytest.approx(4 * 4)  # four blocks, each for four members
    assert blocks["hierarchical over 2"] == pytest.approx(4)
    assert blocks["doubling"] == pytest.approx(4)
    assert blocks["ring"] == pytest.approx(7)  # all blocks go round


def test_several_rings_use_all_network_cards() -> None:
    place = cluster("2x8xa100")
    found = by_name(algorithm_lines(ALL_GATHER, everybody(place), place))
    cards = {k for k, link in enumerate(place.links) if ".nic." in link.name}
    assert len(cards & dict(found["ring"].links).keys()) == 4  # one out and one in for each node
    assert cards <= dict(found["rings"].links).keys()
    assert found["rings"].beta * 7 < found["ring"].beta


def test_rings_go_from_neighbour_to_neighbour() -> None:
    place = cluster("2x4xp100")
    group = (0, 4, 1, 5, 2, 6, 3, 7)
    line = by_name(algorithm_lines(ALL_GATHER, group, place))["ring"]
    node_out = next(k for k, link in enumerate(place.links) if link.name == "node0.out")
    crossing = dict(line.links)[node_out] * place.links[node_out].bandwidth
    assert crossing == pytest.approx(7 / (8 * 7))  # one of eight steps leaves the node


def test_cheapest_first() -> None:
    place = cluster("flexflow-k80")
    for nbytes in (1e3, 1e6, 1e9):
        costs = algorithms(ALL_GATHER, everybody(place), nbytes, place)
        assert [c.seconds for c in costs] == sorted(c.seconds for c in costs)
        assert costs[0] == collective(ALL_GATHER, everybody(place), nbytes, place)


# What must hold whatever the topology


def groups(place: Cluster, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    whole = everybody(place)
    some = [tuple(rng.sample(whole, rng.randrange(2, min(len(whole), 12) + 1))) for _ in range(8)]
    return [whole, *some]


def cut_bound(pattern: int, group: tuple[int, ...], part: set[int], place: Cluster) -> float:
    """Seconds per byte that any algorithm needs to bring into `part` what it must have, over a
    link that nothing from outside can avoid."""
    outside = [a for a in group if a not in part]
    common = set.intersection(*(set(place.routes[a][b]) for a in outside for b in part))
    blocks = {
        ALL_TO_ALL: len(outside) * len(part), ALL_GATHER: len(outside), REDUCE_SCATTER: len(part)
    }[pattern]  # fmt: skip
    share = blocks / (len(group) * (len(group) - 1))
    return max((share / place.links[link].bandwidth for link in common), default=0.0)


@pytest.mark.parametrize("spec", [*SPECS, "local:4"])
@pytest.mark.parametrize("pattern", range(len(PATTERNS)))
def test_never_faster_than_its_links_allow(spec: str, pattern: int) -> None:
    place = cluster(spec)
    for group in groups(place, seed=pattern):
        net = module._network(group, module._ClusterByIdentity(place))
        parts = [{member} for member in group]
        for labels in net.parts:
            for label in set(labels.tolist()):
                parts.append({m for m, k in zip(group, labels.tolist(), strict=True) if k == label})
        bound = max(cut_bound(pattern, group, part, place) for part in parts)
        farthest = min(net.latency[a].max() for a in range(len(group)))
        for line in algorithm_lines(pattern, group, place):
            assert line.beta >= bound * (1 - 1e-9), (line.algorithm, group)
            assert line.beta >= max(beta for _, beta in line.links) * (1 - 1e-9)
            assert line.alpha >= farthest * (1 - 1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_every_member_receives_every_block_once(spec: str) -> None:
    place = cluster(spec)
    for group in groups(place, seed=3):
        for line in algorithm_lines(ALL_GATHER, group, place):
            for member in group:
                share = received(line, place, member)
                assert share == pytest.approx(1 / len(group)), (line.algorithm, group, member)


@pytest.mark.parametrize("spec", SPECS)
def test_direct_occupies_links_as_the_messages_of_all_pairs_would(spec: str) -> None:
    place = cluster(spec)
    for group in groups(place, seed=5):
        busy: dict[int, float] = {}
        for a, b in permutations(group, 2):
            for link in place.routes[a][b]:
                busy[link] = busy.get(link, 0.0) + 1 / place.links[link].bandwidth
        pairs = len(group) * (len(group) - 1)
        line = algorithm_lines(ALL_TO_ALL, group, place)[0]
        assert dict(line.links) == pytest.approx({k: s / pairs for k, s in busy.items()})


@pytest.mark.parametrize("spec", SPECS)
def test_reduce_scatter_is_all_gather_backwards(spec: str) -> None:
    place = cluster(spec)
    links = tuple(
        replace(link, latency=k * 1e-6, bandwidth=link.bandwidth / (1 + 2 * ("out" in link.name)))
        for k, link in enumerate(place.links)
    )
    place = replace(place, links=links)  # the two directions differ
    turned = replace(place, routes=tuple(zip(*place.routes, strict=True)))
    for group in groups(place, seed=7):
        scatter = by_name(algorithm_lines(REDUCE_SCATTER, group, place))
        gather = by_name(algorithm_lines(ALL_GATHER, group, turned))
        assert scatter.keys() == gather.keys()
        for name, line in scatter.items():
            assert line.alpha == pytest.approx(gather[name].alpha)
            assert line.beta == pytest.approx(gather[name].beta)
            assert dict(line.links) == pytest.approx(dict(gather[name].links))


@pytest.mark.parametrize("spec", ["8xh100", "2x4xa100", "2x4xk80", "4x4xp100"])
def test_the_order_of_members_and_the_node_do_not_matter(spec: str) -> None:
    place, rng = cluster(spec), random.Random(0)
    whole = everybody(place)
    first, last = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    for group, other in ((whole, tuple(rng.sample(whole, len(whole)))), (first, last)):
        for pattern in range(len(PATTERNS)):
            one, two = (by_name(algorithm_lines(pattern, g, place)) for g in (group, other))
            assert one.keys() == two.keys()
            for name, line in one.items():
                assert line.alpha == pytest.approx(two[name].alpha), name
                assert line.beta == pytest.approx(two[name].beta), name


def test_uneven_nodes_are_served_too() -> None:
    place = cluster("3x4xp100")
    group = (0, 1, 2, 3, 4, 8, 9)  # four, one and two members
    found = by_name(algorithm_lines(ALL_GATHER, group, place))
    line = found["hierarchical over 3"]
    into = {link.name: k for k, link in enumerate(place.links)}
    for node, outside in (("node0", 3), ("node1", 6), ("node2", 5)):
        link = into[f"{node}.in"]
        blocks = dict(line.links)[link] * place.links[link].bandwidth * 7 * 6
        assert blocks == pytest.approx(outside)


# Where sending burns the device


def test_processes_send_pair_by_pair() -> None:
    """An exchange of two takes twice a message, as gloo's does on two cores."""
    place = ports(2, on_device=True, latency=31e-6)
    (line,) = algorithm_lines(ALL_GATHER, (0, 1), place)
    assert line.algorithm == "direct"
    assert line.alpha == pytest.approx(2 * 62e-6)
    assert line.cost(2e6).seconds == pytest.approx(2 * (62e-6 + 1e6 / BANDWIDTH))
    (line,) = algorithm_lines(REDUCE_SCATTER, (0, 1, 2, 3), ports(4, on_device=True, latency=31e-6))
    assert line.alpha == pytest.approx(6 * 62e-6)  # three to send and three to receive
    assert [a.algorithm for a in all_reduce_lines((0, 1), place)] == ["direct"]


# All-reduce and broadcast


def test_the_tree_wins_an_all_reduce_of_few_bytes_over_the_ring() -> None:
    place = ports(16, latency=ALPHA / 2)
    found = by_name(all_reduce_lines(everybody(place), place))
    assert found["tree"].alpha < found["ring"].alpha / 2
    assert found["ring"].beta < found["tree"].beta
    sent = sum(beta * BANDWIDTH for _, beta in found["tree"].links)
    assert sent == pytest.approx(2 * (2 * 15))  # an array up and down each edge, two links each


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    place = cluster("2x4xa100")
    group, array = everybody(place), 1e8
    halves = [by_name(algorithm_lines(p, group, place)) for p in (REDUCE_SCATTER, ALL_GATHER)]
    for line in all_reduce_lines(group, place):
        if line.algorithm != "tree":
            parts = [half[line.algorithm].cost(7 * array).seconds for half in halves]
            assert line.cost(array).seconds == pytest.approx(sum(parts))
    assert all_reduce(group, array, place).seconds == min(
        line.cost(array).seconds for line in all_reduce_lines(group, place)
    )


@pytest.mark.parametrize("root", [0, 3, 5])
def test_a_broadcast_reaches_everybody_once(root: int) -> None:
    place = ports(8, latency=ALPHA / 2)
    found = by_name(broadcast_lines(everybody(place), place, root))
    assert found.keys() == {"direct", "ring", "tree"}
    for line in found.values():
        got = [received(line, place, member) for member in range(8)]
        assert got == pytest.approx([float(member != root) for member in range(8)])
    assert broadcast(everybody(place), 1, place, root).algorithm == "direct"
    assert broadcast(everybody(place), 1e9, place, root).algorithm == "ring"
    assert found["tree"].alpha < found["ring"].alpha


# Requests that make no sense, and time


@pytest.mark.parametrize(
    ("pattern", "group", "message"),
    [
        (7, (0, 1), "collective pattern 7 is not one of 0 to 2"),
        (ALL_GATHER, (0,), "two different members"),
        (ALL_GATHER, (1, 1), "two different members"),
        (ALL_GATHER, (0, 9), "does not have all of the devices"),
        (ALL_GATHER, (-1, 0), "does not have all of the devices"),
    ],
)
def test_wrong_groups_are_refused(pattern: int, group: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm_lines(pattern, group, ports(3))


def test_a_root_must_be_a_member() -> None:
    with pytest.raises(ValueError, match="device 2 is not a member"):
        broadcast((0, 1), 1e6, ports(3), root=2)


def test_a_changed_cluster_is_not_mistaken_for_the_old_one() -> None:
    slow = ports(3)
    fast = replace(slow, links=tuple(replace(k, bandwidth=2 * BANDWIDTH) for k in slow.links))
    betas = [algorithm_lines(ALL_GATHER, (0, 1, 2), place)[0].beta for place in (slow, fast)]
    assert betas[0] == pytest.approx(2 * betas[1])


def test_64_members_take_milliseconds() -> None:
    place = cluster("h100-pod")
    taken = []
    for first in range(3):
        group = tuple((first + k) % 64 for k in range(64))  # the cache does not know it
        begin = time.process_time()
        algorithm_lines(ALL_GATHER, group, place)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.03
