"""What a collective costs on a Cluster, by algorithm, and which algorithm is cheapest.

A part of machine/ that simulate/ asks for the time of COLLECTIVE tasks, and searches for bounds.

A collective is an exchange among k members in which each sends m bytes to every other one. Its size
is all of that together, `nbytes` = k (k - 1) m. What the blocks are (`shape_pattern`) decides which
algorithms there are: blocks that all receivers want (all-gather) may be passed on, terms of a sum
(reduce-scatter) may be added on the way, blocks that differ for every pair (all-to-all) may not.

    direct        every pair at once
    ring          blocks go round; neighbours in the ring are near each other
    rings         several rings, which leave each node through each of its members in turn
    doubling      log2 k rounds; far partners first, while there is little to send
    hierarchical  each block crosses to every other node once, then spreads inside it
    tree          all-reduce and broadcast: log2 k levels, in a pipeline

An algorithm is a sequence of phases. A phase takes the time of its busiest link, bytes over the
link / bandwidth, and its latencies. Reduce-scatter is all-gather backwards. So the cost of any
algorithm is a straight line: `alpha + beta * nbytes`, on every link and in all; `algorithm_lines`
gives these lines, the cheapest at a size is the cost at that size.

Where communication burns the device (`Cluster.communication_on_device`) members send pair by pair,
so there is only `direct`, and a member's messages follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Floats,
    Ints,
)
from apportion.machine.topology import Cluster

# What the blocks of a COLLECTIVE are: different for every pair, the same for all receivers of one
# sender, or terms that each receiver adds up.
ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = 0, 1, 2
PATTERNS = ("all-to-all", "all-gather", "reduce-scatter")

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of a collective of one size; `links` are (link, seconds that it is occupied)."""

    algorithm: str
    seconds: float
    links: tuple[tuple[int, float], ...]


class AlgorithmLine(NamedTuple):
    """An algorithm takes `alpha + beta * nbytes` seconds; `links` are (link, seconds per byte)."""

    algorithm: str
    alpha: float
    beta: float
    links: tuple[tuple[int, float], ...]

    def cost(self, nbytes: float) -> CollectiveCost:
        """What it costs at one size."""
        links = tuple((link, beta * nbytes) for link, beta in self.links)
        return CollectiveCost(self.algorithm, self.alpha + self.beta * nbytes, links)


def collective(pattern: int, group: Group, nbytes: float, cluster: Cluster) -> CollectiveCost:
    """The cheapest algorithm; of equals the first in the order above."""
    return _cheapest(algorithm_lines(pattern, group, cluster), nbytes)


def algorithms(
    pattern: int, group: Group, nbytes: float, cluster: Cluster
) -> tuple[CollectiveCost, ...]:
    """All algorithms, cheapest first."""
    costs = (line.cost(nbytes) for line in algorithm_lines(pattern, group, cluster))
    return tuple(sorted(costs, key=lambda cost: cost.seconds))


def algorithm_lines(pattern: int, group: Group, cluster: Cluster) -> tuple[AlgorithmLine, ...]:
    """A line for every algorithm; their minimum at `nbytes` is what the collective costs."""
    if not 0 <= pattern < len(PATTERNS):
        raise ValueError(f"collective pattern {pattern} is not one of 0 to {len(PATTERNS) - 1}")
    return _profile(pattern, group, _ClusterByIdentity(cluster))


def all_reduce(group: Group, size: float, cluster: Cluster) -> CollectiveCost:
    """Of arrays of `size` bytes, one on each member: the cheapest algorithm."""
    return _cheapest(all_reduce_lines(group, cluster), size)


def all_reduce_lines(group: Group, cluster: Cluster) -> tuple[AlgorithmLine, ...]:
    """Lines per byte of the array: reduce-scatter then all-gather, or up and down two trees."""
    scatters, gathers = (algorithm_lines(p, group, cluster) for p in (REDUCE_SCATTER, ALL_GATHER))
    pairs = [
        _sum(scatter, gather, len(group) - 1)
        for scatter in scatters
        for gather in gathers
        if scatter.algorithm == gather.algorithm
    ]
    if cluster.communication_on_device:
        return tuple(pairs)
    return (*pairs, _all_reduce_tree(_network(group, _ClusterByIdentity(cluster))))


def broadcast(
    group: Group, size: float, cluster: Cluster, root: int | None = None
) -> CollectiveCost:
    """Of `size` bytes from `root`, the first member unless given, to all others."""
    return _cheapest(broadcast_lines(group, cluster, root), size)


def broadcast_lines(
    group: Group, cluster: Cluster, root: int | None = None
) -> tuple[AlgorithmLine, ...]:
    """Lines per byte."""
    net = _network(group, _ClusterByIdentity(cluster))
    if root is not None and root not in group:
        raise ValueError(f"device {root} is not a member of {group} and cannot be its root")
    source = 0 if root is None else group.index(root)
    copies = _traffic_from(net, source)
    lines = [_line("direct", [_AlgorithmPhase(copies, _longest_latency(net, copies))], net)]
    if not cluster.communication_on_device:
        chain = np.roll(net.order, -int(np.flatnonzero(net.order == source)[0]))
        pairs = list(zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True))
        latency = sum(float(net.latency[pair]) for pair in pairs)
        lines += [
            _line("ring", [_AlgorithmPhase(_traffic_over(pairs, 1.0, net), latency)], net),
            _line("tree", [_tree_phase(_tree(source, chain[1:]), 1.0, net)], net),
        ]
    return tuple(lines)


def is_best_direct(cluster: Cluster) -> bool:
    """Whether no algorithm is cheaper than `direct` for collectives of all devices."""
    if len(cluster.devices) < 3 or cluster.communication_on_device:
        return True
    group = tuple(range(len(cluster.devices)))
    for pattern in (ALL_GATHER, REDUCE_SCATTER):
        first, *others = algorithm_lines(pattern, group, cluster)
        if any(each.alpha < first.alpha or each.beta < first.beta for each in others):
            return False
    return True


def near_groups(cluster: Cluster) -> tuple[Group, ...]:
    """Divisions of all devices into groups between which it is farther than inside them, the
    coarsest first: by device, the group that it is in."""
    if len(cluster.devices) < 3:
        return ()
    net = _network(tuple(range(len(cluster.devices))), _ClusterByIdentity(cluster))
    return tuple(tuple(part.tolist()) for part in net.parts)


def halves(cluster: Cluster) -> tuple[Group, ...]:
    """The same for devices that are halved and halved again, near ones together."""
    count = len(cluster.devices)
    if count < 3:
        return ()
    net = _network(tuple(range(count)), _ClusterByIdentity(cluster))
    place, found, parts = np.argsort(net.order), [], 2
    while parts < count:
        found.append(tuple((place * parts // count).tolist()))
        parts *= 2
    return tuple(found)


def _cheapest(lines: tuple[AlgorithmLine, ...], nbytes: float) -> CollectiveCost:
    return min(lines, key=lambda line: line.alpha + line.beta * nbytes).cost(nbytes)


def _sum(first: AlgorithmLine, second: AlgorithmLine, factor: float) -> AlgorithmLine:
    """One after the other; bytes of the sum are `factor` bytes of each."""
    links = dict(first.links)
    for link, beta in second.links:
        links[link] = links.get(link, 0.0) + beta
    scaled = tuple((link, beta * factor) for link, beta in sorted(links.items()))
    alpha, beta = first.alpha + second.alpha, (first.beta + second.beta) * factor
    return AlgorithmLine(first.algorithm, alpha, beta, scaled)


# The links between the members of a group


class _ClusterByIdentity:
    """A Cluster compared by identity: to hash all its routes takes longer than to use them."""

    __slots__ = ("cluster",)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ClusterByIdentity) and other.cluster is self.cluster


@dataclass(frozen=True, slots=True, eq=False)
class _GroupNetwork:
    """The links between the k members of a group; matrices are k x k, from the row's member to the
    column's."""

    members: Group
    on_device: bool
    links: Ints  # the links between members, numbered from 0 below
    occupied: Ints  # a row for every link of every pair's route: the link,
    pair: Ints  # the pair,
    slowness: Floats  # and the seconds that a byte between the pair occupies the link
    latency: Floats  # of the route
    seconds: Floats  # per byte, on the narrowest link of the route
    order: Ints  # members so that near ones are next to each other
    parts: tuple[Ints, ...]  # ways to divide members by nearness: labels, coarsest division first


@lru_cache(maxsize=1024)
def _network(group: Group, same: _ClusterByIdentity) -> _GroupNetwork:
    cluster, k = same.cluster, len(group)
    if k < 2 or len(set(group)) < k:
        raise ValueError(f"a collective needs two different members at least, not {group}")
    if min(group) < 0 or max(group) >= len(cluster.devices):
        raise ValueError(f"cluster {cluster.name!r} does not have all of the devices {group}")
    routes = [row[b] for row in (cluster.routes[a] for a in group) for b in group]
    hops = np.array([len(route) for route in routes], np.int64)
    flat = np.array([link for route in routes for link in route], np.int64)
    pair = np.repeat(np.arange(k * k), hops)
    links, local = np.unique(flat, return_inverse=True)
    slowness = np.array([1 / cluster.links[link].bandwidth for link in links.tolist()])
    delay = np.array([cluster.links[link].latency for link in links.tolist()])
    latency = np.zeros(k * k)
    np.add.at(latency, pair, delay[local])
    seconds = np.zeros(k * k)
    np.maximum.at(seconds, pair, slowness[local])
    parts = _parts(np.stack([seconds, latency, hops.astype(np.float64)]).reshape(3, k, k))
    return _GroupNetwork(
        members=group,
        on_device=cluster.communication_on_device,
        links=links,
        occupied=local,
        pair=pair,
        slowness=slowness[local],
        latency=latency.reshape(k, k),
        seconds=seconds.reshape(k, k),
        order=np.lexsort((np.arange(k), *reversed(parts))),
        parts=parts,
    )


def _parts(distances: Floats) -> tuple[Ints, ...]:
    """Divisions of the members into parts between which it is farther than inside them.

    Far is narrow, then late, then over many links; both ways count.
    """
    k = distances.shape[1]
    both = np.maximum(distances, distances.transpose(0, 2, 1)).reshape(3, -1)
    ranks = np.zeros(k * k, np.int64)
    for kind in both:
        values, rank = np.unique(kind, return_inverse=True)
        ranks = ranks * len(values) + rank
    ranks = ranks.reshape(k, k)
    found: list[Ints] = []
    for rank in sorted(set(ranks[~np.eye(k, dtype=bool)].tolist()), reverse=True):
        labels = _connected(ranks <= rank)
        if 0 < labels.max() < k - 1 and not any(np.array_equal(labels, known) for known in found):
            found.append(labels)
    return tuple(found)


def _connected(near: npt.NDArray[np.bool_]) -> Ints:
    """For every member the number of the part that it is in, if those that are near each other are
    in one part."""
    near = near | near.T | np.eye(len(near), dtype=bool)
    least = np.arange(len(near))
    while True:
        lower = np.where(near, least, len(near)).min(axis=1)
        if (lower == least).all():
            return np.unique(least, return_inverse=True)[1].astype(np.int64)
        least = lower


# Phases


class _AlgorithmPhase(NamedTuple):
    """Bytes between members, per byte of the collective, and the latencies that add up."""

    traffic: Floats
    latency: float


def _line(algorithm: str, phases: Iterable[_AlgorithmPhase], net: _GroupNetwork) -> AlgorithmLine:
    alpha, beta, total = 0.0, 0.0, np.zeros(len(net.links))
    for phase in phases:
        seconds = net.slowness * phase.traffic.ravel()[net.pair]
        occupied = np.bincount(net.occupied, seconds, len(net.links))
        busiest = float(occupied.max())
        if net.on_device:  # a member's messages, in and out, follow one another
            each, wait = phase.traffic * net.seconds, (phase.traffic > 0) * net.latency
            busiest = max(busiest, float((each.sum(0) + each.sum(1)).max()))
            alpha += float((wait.sum(0) + wait.sum(1)).max())
        else:
            alpha += phase.latency
        beta += busiest
        total += occupied
    used = np.flatnonzero(total)
    links = zip(net.links[used].tolist(), total[used].tolist(), strict=True)
    return AlgorithmLine(algorithm, alpha, beta, tuple(links))


@lru_cache(maxsize=4096)
def _profile(pattern: int, group: Group, same: _ClusterByIdentity) -> tuple[AlgorithmLine, ...]:
    net = _network(group, same)
    k = len(group)
    block = 1 / (k * (k - 1))
    pairs = np.full((k, k), block)
    np.fill_diagonal(pairs, 0.0)
    lines = [_line("direct", [_AlgorithmPhase(pairs, _longest_latency(net, pairs))], net)]
    if pattern == ALL_TO_ALL or net.on_device:
        return tuple(lines)
    # Reduce-scatter sends what all-gather sends, in the other direction.
    back = pattern == REDUCE_SCATTER
    latency = net.latency.T if back else net.latency
    for name, phases in _gather_phases(net, latency, block):
        turned = [_AlgorithmPhase(p.traffic.T, p.latency) for p in phases] if back else phases
        lines.append(_line(name, turned, net))
    return tuple(lines)


def _longest_latency(net: _GroupNetwork, traffic: Floats) -> float:
    return float(net.latency[traffic > 0].max())


def _gather_phases(
    net: _GroupNetwork, latency: Floats, block: float
) -> Iterable[tuple[str, list[_AlgorithmPhase]]]:
    """All-gather of one `block` a member, by the algorithms that pass blocks on."""
    k = len(net.members)
    held = np.ones(k)
    if k > 2:
        yield "ring", [_ring([net.order], held, latency, block)]
    if net.parts and (rotated := _rotations(net.order, net.parts[0])):
        phases = [_ring([order], held, latency, block / len(rotated)) for order in rotated]
        traffic = np.sum([phase.traffic for phase in phases], axis=0)
        yield "rings", [_AlgorithmPhase(traffic, max(phase.latency for phase in phases))]
    if k > 2 and k & (k - 1) == 0:
        yield "doubling", list(_doubling(net.order, latency, block))
    for part in net.parts:
        name = f"hierarchical over {part.max() + 1}"
        nodes = [net.order[part[net.order] == label] for label in range(part.max() + 1)]
        across, held = _across_nodes(nodes, latency, block)
        inner = np.where(part[:, None] == part[None, :], held[:, None] * block, 0.0)
        np.fill_diagonal(inner, 0.0)
        yield name, [across, _AlgorithmPhase(inner, float(latency[inner > 0].max()))]
        if max(map(len, nodes)) > 2:
            yield f"{name}, rings inside", [across, _ring(nodes, held, latency, block)]


def _ring(rings: list[Ints], held: Floats, latency: Floats, block: float) -> _AlgorithmPhase:
    """Rings side by side: an edge carries all blocks of its ring but those its end had at first.

    A block makes all steps but one, so the latencies add up but for the least of them.
    """
    traffic, longest = np.zeros_like(latency), 0.0
    for ring in rings:
        if len(ring) > 1:
            after = np.roll(ring, -1)
            traffic[ring, after] += (held[ring].sum() - held[after]) * block
            steps = latency[ring, after]
            longest = max(longest, float(steps.sum() - steps.min()))
    return _AlgorithmPhase(traffic, longest)


def _rotations(order: Ints, part: Ints) -> list[Ints]:
    """The ring, with the members of every part turned round by one, two, ...; [] if there is
    nothing to turn."""
    nodes = [order[part[order] == label] for label in dict.fromkeys(part[order].tolist())]
    count = max(map(len, nodes))
    return [np.concatenate([np.roll(node, -r) for node in nodes]) for r in range(count)]


def _doubling(order: Ints, latency: Floats, block: float) -> Iterable[_AlgorithmPhase]:
    k = len(order)
    distance, size = k // 2, 1
    while distance:
        partner = order[np.arange(k) ^ distance]
        traffic = np.zeros_like(latency)
        traffic[order, partner] = size * block
        yield _AlgorithmPhase(traffic, float(latency[order, partner].max()))
        distance, size = distance // 2, size * 2


def _across_nodes(
    nodes: list[Ints], latency: Floats, block: float
) -> tuple[_AlgorithmPhase, Floats]:
    """Every block to one member of every other node, spread over them; and how many blocks each
    member then holds."""
    traffic = np.zeros_like(latency)
    members = np.concatenate(nodes)
    places = np.concatenate([np.arange(len(node)) for node in nodes])
    for node in nodes:
        traffic[members, node[places % len(node)]] = block
        traffic[np.ix_(node, node)] = 0.0
    held = 1 + np.count_nonzero(traffic, axis=0)
    return _AlgorithmPhase(traffic, float(latency[traffic > 0].max())), held.astype(np.float64)


# Trees


class _TreeEdge(NamedTuple):
    """A message from a member to one below it in a tree; the root's own have depth 1."""

    parent: int
    child: int
    depth: int


def _tree(root: int, below: Ints, depth: int = 1) -> list[_TreeEdge]:
    """A binary tree in which what hangs together is near in the order of `below`."""
    edges: list[_TreeEdge] = []
    for half in np.array_split(below, 2):
        if len(half):
            middle = len(half) // 2
            child = int(half[middle])
            rest = np.delete(half, middle)
            edges += [_TreeEdge(root, child, depth), *_tree(child, rest, depth + 1)]
    return edges


def _tree_phase(edges: list[_TreeEdge], share: float, net: _GroupNetwork) -> _AlgorithmPhase:
    """From parents to children, in a pipeline."""
    arrival: dict[int, float] = {}
    for parent, child, _ in sorted(edges, key=lambda edge: edge.depth):
        arrival[child] = arrival.get(parent, 0.0) + float(net.latency[parent, child])
    pairs = [(parent, child) for parent, child, _ in edges]
    return _AlgorithmPhase(_traffic_over(pairs, share, net), max(arrival.values()))


def _all_reduce_tree(net: _GroupNetwork) -> AlgorithmLine:
    """Two trees, each for half of the array, so that the leaves of one are inside the other."""
    traffic, latency = np.zeros_like(net.latency), 0.0
    for order in (net.order, net.order[::-1]):
        middle = len(order) // 2
        edges = _tree(int(order[middle]), np.delete(order, middle))
        down = _tree_phase(edges, 0.5, net)
        traffic += down.traffic + down.traffic.T
        latency = max(latency, 2 * down.latency)
    return _line("tree", [_AlgorithmPhase(traffic, latency)], net)


def _traffic_over(pairs: list[tuple[int, int]], share: float, net: _GroupNetwork) -> Floats:
    traffic = np.zeros_like(net.latency)
    for pair in pairs:
        traffic[pair] = share
    return traffic


def _traffic_from(net: _GroupNetwork, source: int) -> Floats:
    others = [k for k in range(len(net.members)) if k != source]
    return _traffic_over([(source, other) for other in others], 1.0, net)
