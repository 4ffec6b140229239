"""Routes: which links a message occupies, and for how long. A part of simulate/.

In: the messages of a TaskGraph, and a Cluster. Out: the Hops of every message, for its Network.

A message of `nbytes` over a line (the route between two devices, or an algorithm of a collective)
occupies each of its links for `pace * nbytes`, where pace is nanoseconds per byte, and arrives
`lag + drag * nbytes` after the last of them is done with it:

    pairwise    pace of a link is 1 / its bandwidth, lag the sum of the latencies, no drag
    collective  of all algorithms on this group the one that is cheapest for `nbytes`. Its phases
                may be bound by different links; drag is what the busiest link does not account for
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from apportion.columns import (
    Bools,
    Floats,
    Ints,
    compiled,
    compiled_part,
    offsets,
    plain,
)
from apportion.lower import TaskGraph
from apportion.machine import AlgorithmLine, Cluster, algorithm_lines


class Lines(NamedTuple):  # numba takes no dataclass
    """What messages travel on, in columns."""

    lag: Floats  # r: nanoseconds
    drag: Floats  # r: nanoseconds per byte
    start: Ints  # r + 1: offsets into link and pace
    link: Ints
    pace: Floats  # nanoseconds per byte


class Hops(NamedTuple):
    """What messages occupy, in columns: those of a Network by these names."""

    latency: Ints  # n
    start: Ints  # n + 1: offsets into link and occupancy
    link: Ints
    occupancy: Ints


def hops(tasks: TaskGraph, cluster: Cluster, only: Bools | None = None) -> Hops:
    """The hops of all messages, or only of some; other tasks have none."""
    lines, line = message_lines(tasks, cluster)
    if only is not None:
        line = np.where(only, line, -1)
    return _hops(lines, line, tasks.nbytes)


def no_hops(n: int) -> Hops:
    """Where no message occupies a link."""
    none = np.zeros(0, np.int64)
    return Hops(np.zeros(n, np.int64), np.zeros(n + 1, np.int64), none, none)


@compiled_part
def occupancy(nbytes: int, pace: float) -> int:
    """Nanoseconds that so many bytes occupy a link; at least 1, so that time moves on."""
    return max(int(np.rint(nbytes * pace)), 1)


@compiled_part
def latency(nbytes: int, lag: float, drag: float) -> int:
    """Nanoseconds from the last link to the receivers."""
    return int(np.rint(lag + drag * nbytes))


def _hops(lines: Lines, line: Ints, nbytes: Ints) -> Hops:
    messages = np.flatnonzero(line >= 0)
    own, sizes = line[messages], nbytes[messages]
    late, count = np.zeros(len(line), np.int64), np.zeros(len(line), np.int64)
    late[messages] = np.rint(lines.lag[own] + lines.drag[own] * sizes)
    count[messages] = lines.start[own + 1] - lines.start[own]
    start, each = offsets(count), count[messages]
    hop = np.arange(start[-1]) + np.repeat(lines.start[own] - start[messages], each)
    occupied = np.rint(np.repeat(sizes, each) * lines.pace[hop]).astype(np.int64)
    return Hops(late, start, lines.link[hop], np.maximum(occupied, 1))


# Lines


def message_lines(tasks: TaskGraph, cluster: Cluster) -> tuple[Lines, Ints]:
    """Lines, and which of them each task takes: -1 unless it is a message."""
    line = np.full(len(tasks), -1)
    pairs = _pairs(tasks, len(cluster.devices), line)
    profiles = _choose(tasks, cluster, line, len(pairs))
    return _joined(_route_lines(pairs, cluster), _profile_lines(profiles)), line


def _pairs(tasks: TaskGraph, count: int, line: Ints) -> list[tuple[int, int]]:
    """The (sender, receiver) of transfers; writes to `line` which of these each transfer has."""
    sent = np.flatnonzero(tasks.is_pairwise)
    pair = tasks.device[sent] * count + tasks.peer[sent]
    number = np.zeros(count * count, np.int64)
    number[pair] = 1
    used = np.flatnonzero(number)
    number[used] = np.arange(len(used))
    line[sent] = number[pair]
    return [divmod(each, count) for each in used.tolist()]


def _route_lines(pairs: Sequence[tuple[int, int]], cluster: Cluster) -> Lines:
    routes = [cluster.routes[a][b] for a, b in pairs]
    start = offsets(np.array([len(route) for route in routes], np.int64))
    link = np.fromiter(chain.from_iterable(routes), np.int64, int(start[-1]))
    delay = np.array([each.latency for each in cluster.links])
    pace = 1e9 / np.array([each.bandwidth for each in cluster.links])
    owner = np.repeat(np.arange(len(pairs)), np.diff(start))
    lag: Floats = np.bincount(owner, delay[link], minlength=len(pairs)).astype(np.float64)
    return Lines(lag * 1e9, np.zeros(len(pairs)), start, link, pace[link])


def _choose(tasks: TaskGraph, cluster: Cluster, line: Ints, base: int) -> list[AlgorithmLine]:
    """Algorithms of the collectives, of which `direct` is the first; writes to `line` which of
    them, from `base` on, each takes."""
    found: list[AlgorithmLine] = []
    together = np.flatnonzero(tasks.is_collective)
    if not len(together):
        return found
    key = tasks.pattern[together] * len(tasks.groups) + tasks.group[together]
    keys, which = np.unique(key, return_inverse=True)
    first = [0]
    for each in keys.tolist():
        pattern, group = divmod(each, len(tasks.groups))
        lines = algorithm_lines(pattern, tasks.groups[group], cluster)
        found += lines[:1] if tasks.sends_directly else lines
        first.append(len(found))
    alpha, beta = (np.array([it[k] for it in found], np.float64) for k in (1, 2))
    chosen = _cheapest_lines(
        alpha, beta, np.array(first, np.int64), plain(which), plain(tasks.nbytes[together])
    )
    line[together] = base + chosen
    return found


@compiled_part
def cheapest_line(alpha: Floats, beta: Floats, first: int, end: int, nbytes: int) -> int:
    """Of the lines first:end the one that takes least for so many bytes: alpha + beta * nbytes."""
    best, least = first, np.inf
    for line in range(first, end):
        seconds = alpha[line] + beta[line] * nbytes
        if seconds < least:
            best, least = line, seconds
    return best


@compiled
def _cheapest_lines(alpha: Floats, beta: Floats, first: Ints, which: Ints, nbytes: Ints) -> Ints:
    """For every message the cheapest of the lines first[which]:first[which + 1]."""
    found = np.empty(len(which), np.int64)
    for k in range(len(which)):
        low, high = first[which[k]], first[which[k] + 1]
        found[k] = cheapest_line(alpha, beta, low, high, nbytes[k])
    return found


def _profile_lines(profiles: Sequence[AlgorithmLine]) -> Lines:
    start = offsets(np.array([len(p.links) for p in profiles], np.int64))
    link = np.array([link for p in profiles for link, _ in p.links], np.int64)
    pace = np.array([beta for p in profiles for _, beta in p.links], np.float64)
    lag = np.array([p.alpha for p in profiles], np.float64)
    drag = np.array([p.beta - max(b for _, b in p.links) for p in profiles], np.float64)
    return Lines(lag * 1e9, drag * 1e9, start, link, pace * 1e9)


def _joined(first: Lines, second: Lines) -> Lines:
    lag, drag, _, link, pace = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    start = np.concatenate([first.start, second.start[1:] + first.start[-1]])
    return Lines(lag, drag, start, link, pace)
