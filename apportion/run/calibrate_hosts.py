"""Measuring the network between hosts: what `apportion calibrate --hosts` does in each rank.

Part of the room run. The ranks of a torchrun job on several hosts come in; out goes, on rank 0, a
cluster file: a host for each, the processes on it, and a link to a switch with the bandwidth and
the latency that were measured. One pair of hosts at a time, the first rank of each: small messages
to and fro for the latency, then large ones for the bandwidth, so large that they take a while.
Messages go through gloo, as those of steps do, over the interface that ranks use.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist

from apportion.checkpoint import told_by_all
from apportion.execute import peer_errors
from apportion.machine import usable_cores

ROUNDS, LARGE_ROUNDS = 25, 5
FIRST_BYTES, MOST_BYTES = 1 << 20, 1 << 28
WHILE_SECONDS = 0.2  # that a large message should take
TAG = 3


@dataclass(frozen=True)
class HostFacts:
    """A host of the job: what it is called, how many processes are on it, and what they share."""

    name: str
    node: int
    processes: int
    cores: int
    memory_bytes: int


@dataclass(frozen=True)
class HostNetwork:
    """What was measured: the seconds of an empty message and the bytes per second between each two
    hosts, by their places."""

    hosts: tuple[HostFacts, ...]
    latency: dict[tuple[int, int], float]
    bandwidth: dict[tuple[int, int], float]


def own_facts() -> HostFacts:
    """What this rank says of its host."""
    return HostFacts(
        name=socket.gethostname(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def measure_hosts() -> HostNetwork:
    """Measures the links between the hosts of the job; all ranks call it, and get the same. Raises
    ValueError if there is one host only."""
    told = [HostFacts(**json.loads(text)) for text in told_by_all(json.dumps(asdict(own_facts())))]
    first: dict[int, int] = {}
    for rank, facts in enumerate(told):
        first.setdefault(facts.node, rank)
    nodes = sorted(first)
    if len(nodes) < 2:
        raise ValueError("all ranks are on one host: there is no network between hosts to measure")
    hosts = tuple(told[first[node]] for node in nodes)
    seconds: dict[tuple[int, int], tuple[float, float]] = {}
    for a, b in itertools.combinations(range(len(hosts)), 2):
        with peer_errors():
            dist.barrier()
        seconds[a, b] = _pair(first[nodes[a]], first[nodes[b]])
    found = told_by_all(json.dumps([[a, b, *pair] for (a, b), pair in seconds.items()]))
    own = {(a, b): json.loads(found[first[nodes[a]]]) for a, b in seconds}
    rows = {pair: next(r for r in rows if (r[0], r[1]) == pair) for pair, rows in own.items()}
    latency = {pair: float(row[2]) for pair, row in rows.items()}
    return HostNetwork(hosts, latency, {pair: float(row[3]) for pair, row in rows.items()})


def _pair(one: int, other: int) -> tuple[float, float]:
    """The latency and the bandwidth between two ranks, as the first of them sees it."""
    me = dist.get_rank()
    if me not in (one, other):
        return 0.0, 0.0
    there = other if me == one else one
    small = torch.zeros(1, dtype=torch.uint8)
    trips = [_round_trip(small, me == one, there) for _ in range(ROUNDS)]
    latency = sorted(trips)[ROUNDS // 4] / 2  # whatever disturbs makes them longer
    nbytes = FIRST_BYTES
    while True:
        large = torch.zeros(nbytes, dtype=torch.uint8)
        times = [_round_trip(large, me == one, there) for _ in range(LARGE_ROUNDS)]
        seconds = torch.tensor([max(min(times) - 2 * latency, 1e-9)], dtype=torch.float64)
        _copy(seconds, one, me, there)  # both go by the same clock
        if float(seconds) > WHILE_SECONDS / 2 or nbytes >= MOST_BYTES:
            return latency, nbytes / float(seconds)
        wanted = int(nbytes * WHILE_SECONDS / float(seconds))
        nbytes = min(MOST_BYTES, max(2 * nbytes, wanted))


def _round_trip(message: torch.Tensor, begins: bool, there: int) -> float:
    """Seconds of a message and of a byte that comes back for it."""
    answer = torch.zeros(1, dtype=torch.uint8)
    began = time.perf_counter()
    with peer_errors():
        if begins:
            dist.send(message, there, tag=TAG)
            dist.recv(answer, there, tag=TAG)
        else:
            dist.recv(message, there, tag=TAG)
            dist.send(answer, there, tag=TAG)
    return time.perf_counter() - began


def _copy(number: torch.Tensor, source: int, me: int, there: int) -> None:
    with peer_errors():
        if me == source:
            dist.send(number, there, tag=TAG)
        else:
            dist.recv(number, there, tag=TAG)


def uplinks(network: HostNetwork) -> list[tuple[float, float]]:
    """The latency and the bandwidth of each host's link to a switch between all of them. A message
    passes two such links: latencies add up, and the slower one's bandwidth counts."""
    count = len(network.hosts)
    pairs = list(network.latency)
    rows = np.zeros((len(pairs), count))
    for row, (a, b) in enumerate(pairs):
        rows[row, [a, b]] = 1.0
    measured = np.array([network.latency[pair] for pair in pairs])
    halves = np.linalg.lstsq(rows, measured, rcond=None)[0]
    widest = [
        max(width for pair, width in network.bandwidth.items() if host in pair)
        for host in range(count)
    ]
    return [(max(float(half), 0.0), width) for half, width in zip(halves, widest, strict=True)]


def cluster_text(network: HostNetwork, interface: str | None) -> str:
    """The cluster file of a network. What its devices compute is assumed, not measured."""
    links = uplinks(network)
    where = f" over {interface}" if interface else ""
    parts = [
        f'name = "{len(network.hosts)} hosts"',
        f'description = "links measured by gloo{where} between {len(network.hosts)} hosts"',
        "communication_on_device = true",
        '\n[[switch]]\nname = "network"',
    ]
    for number, (host, link) in enumerate(zip(network.hosts, links, strict=True)):
        parts.append(_HOST.format(number=number, name=_plain(host.name), **_figures(host, link)))
    return "\n".join(parts) + "\n"


_HOST = """
[[switch]]
name = "host{number}"
parent = "network"
uplink = {{bandwidth = {bandwidth:.6g}, latency = {latency:.6g}}}
host = {{memory_bytes = {memory}, bandwidth = "8 GB/s", latency = 0}}
provenance = "host {name}: messages to the other hosts, measured"

[[device]]
name = "process{number}"
kind = "cpu"
on = "host{number}"
count = {processes}
memory_bytes = {share}
memory_bandwidth = {memory_bandwidth:.6g}
launch_seconds = "5 us"
flops = {{float64 = {double:.6g}, float32 = {single:.6g}, float16 = {single:.6g}}}
port = {{bandwidth = "4 GB/s", latency = "30 us"}}
provenance = "assumed: {cores} cores shared by {processes}, 30e9 float32 operations a second each"
"""


def _figures(host: HostFacts, link: tuple[float, float]) -> dict[str, float | int]:
    cores = host.cores / host.processes
    return {
        "latency": link[0],
        "bandwidth": link[1],
        "memory": host.memory_bytes,
        "processes": host.processes,
        "share": host.memory_bytes // host.processes,
        "memory_bandwidth": 8e9 * cores,
        "double": 15e9 * cores,
        "single": 30e9 * cores,
        "cores": host.cores,
    }


def _plain(name: str) -> str:
    """A host's name for a text in a file."""
    return "".join(c for c in name if c.isalnum() or c in ".-_")[:100]


def network_rows(network: HostNetwork) -> Sequence[tuple[str, str, float, float]]:
    """For each pair of hosts: their names, seconds of an empty message, bytes per second."""
    names = [f"{number} ({host.name})" for number, host in enumerate(network.hosts)]
    return [
        (names[a], names[b], network.latency[a, b], network.bandwidth[a, b])
        for a, b in network.latency
    ]
