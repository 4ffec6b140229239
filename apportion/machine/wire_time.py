"""wire_time: how long exchanges occupy the links between hosts.

A part of machine/ that simulate/ adds to measured costs of messages. What was measured between
processes of one machine says what messages cost the processes, and nothing about cables between
machines. All messages of an exchange are posted at once, so that both directions of a link are used
at the same time: an exchange occupies the wire for as long as its busiest link, and arrives the
longest latency later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from apportion.columns import (
    Floats,
    Ints,
)
from apportion.machine.topology import Cluster


def wire_seconds(
    exchange: Ints, sender: Ints, receiver: Ints, nbytes: Ints, cluster: Cluster
) -> Floats:
    """For each message how long the wire needs for all of its `exchange` (any numbers); 0 where the
    exchange stays inside hosts."""
    if not cluster.hosts:
        return np.zeros(len(exchange))
    outside = np.flatnonzero(on_different_hosts(cluster)[sender, receiver])
    numbers, which = np.unique(exchange, return_inverse=True)
    busiest, latest = np.zeros(len(numbers)), np.zeros(len(numbers))
    messages = (which[outside], sender[outside], receiver[outside], nbytes[outside])
    for link, mine in _messages_by_link(*messages[1:3], cluster):
        group, size = messages[0][mine], messages[3][mine] / cluster.links[link].bandwidth
        np.maximum(busiest, np.bincount(group, size, len(numbers)), out=busiest)
    for a, b, mine in _messages_by_pair(*messages[1:3]):
        latency = sum(cluster.links[link].latency for link in cluster.routes[a][b])
        group = messages[0][mine]
        latest[group] = np.maximum(latest[group], latency)
    whole: Floats = (busiest + latest)[which]
    return whole


def wire_lines(groups: Sequence[tuple[int, ...]], cluster: Cluster) -> tuple[Floats, Floats]:
    """For a COLLECTIVE of each group: seconds, and seconds per byte that all pairs send together;
    zeros where a group stays inside a host."""
    lines = [_wire_line(group, cluster) for group in groups]
    latency, pace = np.array(lines, np.float64).reshape(-1, 2).T
    return latency, pace


def _wire_line(group: tuple[int, ...], cluster: Cluster) -> tuple[float, float]:
    sender, receiver = np.array([(a, b) for a in group for b in group if a != b]).T
    together = np.zeros(len(sender), np.int64)
    empty, full = (
        float(wire_seconds(together, sender, receiver, np.full(len(sender), size), cluster)[0])
        for size in (0, 1 << 30)
    )
    return empty, (full - empty) / (len(sender) << 30)


def on_different_hosts(cluster: Cluster) -> npt.NDArray[np.bool_]:
    """Whether two devices have different hosts. Devices without a host are on one machine."""
    host = np.full(len(cluster.devices), -1)
    for number, each in enumerate(cluster.hosts):
        host[list(each.devices)] = number
    apart: npt.NDArray[np.bool_] = host[:, None] != host[None, :]
    return apart


def _messages_by_pair(sender: Ints, receiver: Ints) -> Iterator[tuple[int, int, Ints]]:
    """Every (sender, receiver) and its messages."""
    for a, b in {*zip(sender.tolist(), receiver.tolist(), strict=True)}:
        yield a, b, np.flatnonzero((sender == a) & (receiver == b))


def _messages_by_link(sender: Ints, receiver: Ints, cluster: Cluster) -> Iterator[tuple[int, Ints]]:
    """Every link in use and the messages that cross it."""
    over: dict[int, list[Ints]] = {}
    for a, b, mine in _messages_by_pair(sender, receiver):
        for link in cluster.routes[a][b]:
            over.setdefault(link, []).append(mine)
    for link, found in over.items():
        yield link, np.concatenate(found)
