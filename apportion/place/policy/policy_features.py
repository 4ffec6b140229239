"""policy features: what the learned placer `policy` sees of a problem before it places anything.

In: a PlacementProblem. Out: a PolicyGraph, its units with what they need and whom they exchange
outputs with, in the order in which they are placed; and a row of features for every unit.

Features depend neither on the unit of time nor on how units are numbered, and there are as many of
them whatever the number of devices: times are relative to those of all units, or of the mean one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, offsets
from apportion.place.placement_problem import NEVER, PlacementColumns, PlacementProblem

FEATURES_VERSION = 1
UNIT_FEATURES = 20


class PolicyGraph(NamedTuple):  # numba reads it
    """The units of a problem, as `policy` places them: u units, k devices.

    order   units as they are placed: by the node order where devices keep to it, else by the
            length of the longest path to them
    before  of each unit those neighbours that are placed before it; `before_flow` is what it reads
            from them in the forward pass, `before_sends` everything that crosses if they are on
            different devices, in either direction, both in the unit of `send`
    twin    units with the same number are alike: same kind, same durations, same bytes
    """

    order: Ints  # u
    forward: Floats  # u x k: ticks of the forward nodes
    whole: Floats  # u x k: ticks of all nodes
    memory: Floats  # u: bytes that placing it takes for the rest of the step, about
    allowed: Bools  # u x k
    twin: Ints  # u
    before_start: Ints  # u + 1
    before: Ints
    before_flow: Floats
    before_sends: Floats
    before_count: Floats  # messages
    after_start: Ints  # u + 1: the same pairs, seen from the other side
    after: Ints
    after_sends: Floats
    after_count: Floats
    lag: Floats  # k x k: ticks of any message
    pace: Floats  # k x k: ticks per unit of send
    limit: Floats  # k: bytes
    mean_ticks: float  # of a unit
    fair_ticks: float  # what each device gets if all units are shared evenly
    twins: int
    alike: Ints  # k: devices with the same number are interchangeable


def policy_graph(problem: PlacementProblem) -> PolicyGraph:
    """What `policy` needs to know about a problem."""
    c, k, u = problem.columns, len(problem.devices), problem.units
    possible = node_ticks(c)
    forward, whole = np.zeros((2, u, k))
    np.add.at(whole, c.unit, possible)
    np.add.at(forward, c.unit[c.backward == 0], possible[c.backward == 0])
    lag, pace = pair_costs(problem)
    first, key = _placing_keys(problem, possible)
    rank = np.empty(u, np.int64)
    rank[np.lexsort((first, path_lengths(c, _mean(possible))[2][first], key))] = np.arange(u)
    pairs, flow, sends, count = _pairs(problem, rank)
    mean = float(whole.mean(axis=1).mean()) if u else 1.0
    twin = _twins(problem, first, whole)
    before = np.lexsort((rank[pairs[:, 0]], pairs[:, 1]))
    after = np.lexsort((rank[pairs[:, 1]], pairs[:, 0]))
    return PolicyGraph(
        order=np.argsort(rank).astype(np.int64),
        forward=forward,
        whole=whole,
        memory=_memory(problem),
        allowed=np.ascontiguousarray(c.allowed),
        twin=twin,
        before_start=offsets(np.bincount(pairs[:, 1], minlength=u)),
        before=np.ascontiguousarray(pairs[before, 0]),
        before_flow=flow[before],
        before_sends=sends[before],
        before_count=count[before],
        after_start=offsets(np.bincount(pairs[:, 0], minlength=u)),
        after=np.ascontiguousarray(pairs[after, 1]),
        after_sends=sends[after],
        after_count=count[after],
        lag=lag,
        pace=pace,
        limit=problem.limit.astype(np.float64),
        mean_ticks=max(mean, 1e-9),
        fair_ticks=max(_fair_ticks(whole, c.allowed), 1e-9),
        twins=int(twin.max(initial=-1)) + 1,
        alike=interchangeable(problem),
    )


def node_ticks(c: PlacementColumns) -> Floats:
    """n x k: how long a node keeps a device or its host busy, whichever is longer; 0 where it
    cannot run."""
    able = c.duration < NEVER
    longer = np.maximum(c.duration, c.issue) if len(c.issue) else c.duration
    found: Floats = np.where(able, longer, 0).astype(np.float64)
    return found


def pair_costs(problem: PlacementProblem) -> tuple[Floats, Floats]:
    """For two devices the ticks of any message between them, and those per unit of send."""
    links, k = problem.links, len(problem.devices)
    lag, pace = np.zeros((2, k, k))
    for a in range(k):
        for b in range(k):
            if a == b:
                continue
            hops = slice(links.hop_start[a * k + b], links.hop_start[a * k + b + 1])
            lag[a, b] = links.lag[a, b] + links.link_hold
            pace[a, b] = links.drag[a, b] + links.hop_pace[hops].max(initial=0.0)
            if len(links.receive):
                lag[a, b] += links.receive[b, 0]
                pace[a, b] += links.receive[b, 1]
    return lag, pace


def interchangeable(problem: PlacementProblem) -> Ints:
    """A number for every device, equal for those that can change names: same durations, same
    memory, and the same links to each other and to all others."""
    k = len(problem.devices)
    lag, pace = pair_costs(problem)
    kind = np.arange(k)
    c = problem.columns
    for b in range(k):
        for a in range(b):
            if kind[a] != a or problem.devices[a].memory_bytes != problem.devices[b].memory_bytes:
                continue
            swap = np.arange(k)
            swap[a], swap[b] = b, a
            if (
                (c.duration[:, a] == c.duration[:, b]).all()
                and (c.allowed[:, a] == c.allowed[:, b]).all()
                and (lag[np.ix_(swap, swap)] == lag).all()
                and (pace[np.ix_(swap, swap)] == pace).all()
            ):
                kind[b] = a
                break
    return kind.astype(np.int64)


def _fair_ticks(whole: Floats, allowed: Bools) -> float:
    """Ticks that all devices take together if each does of everything what its speed is worth."""
    speed = np.where(allowed & (whole > 0), 1 / np.maximum(whole, 1e-9), 0.0).sum(axis=1)
    return float((1 / speed[speed > 0]).sum())


def _placing_keys(problem: PlacementProblem, possible: Floats) -> tuple[Ints, Floats]:
    """The node that stands for each unit, its first of any duration in the forward pass; and what
    the order of placing is by."""
    c, u = problem.columns, problem.units
    n = len(c.unit)
    # Rising: a forward node that takes time, any node that takes time, any node.
    rank_of = np.where(possible.max(axis=1, initial=0) > 0, c.backward, 2) * n + np.arange(n)
    first = np.full(u, 3 * n, np.int64)
    np.minimum.at(first, c.unit, rank_of)
    first %= max(n, 1)
    if problem.links.in_order:
        return first, first.astype(np.float64)
    key: Floats = path_lengths(c, _mean(possible))[0][first]
    return first, key


def _mean(possible: Floats) -> Floats:
    """Ticks of each node on the mean device that can run it."""
    able = np.maximum((possible > 0).sum(axis=1), 1)
    found: Floats = possible.sum(axis=1) / able
    return found


@compiled
def path_lengths(c: PlacementColumns, ticks: Floats) -> tuple[Floats, Floats, Ints]:
    """Ticks of the longest path to each node and from it on, itself included, without any
    transfer; and how many nodes there are on the longest path to it."""
    n = len(c.unit)
    top, bottom = np.zeros(n), np.zeros(n)
    depth = np.zeros(n, np.int64)
    for node in range(n):
        done = top[node] + ticks[node]
        for at in range(
            c.reader_start[c.output_start[node]], c.reader_start[c.output_start[node + 1]]
        ):
            later = c.reader[at]
            top[later] = max(top[later], done)
            depth[later] = max(depth[later], depth[node] + 1)
    for node in range(n - 1, -1, -1):
        longest = 0.0
        for at in range(
            c.reader_start[c.output_start[node]], c.reader_start[c.output_start[node + 1]]
        ):
            longest = max(longest, bottom[c.reader[at]])
        bottom[node] = ticks[node] + longest
    return top, bottom, depth


def _pairs(problem: PlacementProblem, rank: Ints) -> tuple[Ints, Floats, Floats, Floats]:
    """Pairs of units that exchange outputs, the one that is placed first as the first; for each
    what the second reads in the forward pass, what crosses in all, and in how many messages."""
    c, u = problem.columns, problem.units
    outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
    made, read = c.source[outputs], c.reader
    source, target = c.unit[made], c.unit[read]
    apart = source != target
    outputs, made, read = outputs[apart], made[apart], read[apart]
    source, target = source[apart], target[apart]
    # One message for each output and unit that reads it; in the forward pass if any such node is.
    forward = (c.backward[made] == 0) & (c.backward[read] == 0) & (rank[source] < rank[target])
    late = np.lexsort((~forward, outputs * u + target))
    message = (outputs * u + target)[late]
    keep = late[np.append(True, message[1:] != message[:-1])[: len(late)]]
    source, target, forward, outputs = source[keep], target[keep], forward[keep], outputs[keep]
    swap = rank[source] > rank[target]
    low, high = np.where(swap, target, source), np.where(swap, source, target)
    codes, which = np.unique(low * u + high, return_inverse=True)
    which = which.ravel()
    sends = _sums(which, c.send[outputs], len(codes))
    flow = _sums(which, np.where(forward, c.send[outputs], 0.0), len(codes))
    any_flow = np.bincount(which, forward, len(codes)) > 0
    count = np.bincount(which, minlength=len(codes)).astype(np.float64)
    pairs = np.stack([codes // max(u, 1), codes % max(u, 1)], axis=1).astype(np.int64)
    return pairs, np.where(any_flow, flow, -1.0), sends, count


def _sums(which: Ints, numbers: Floats | Ints, count: int) -> Floats:
    """The sum of the numbers of each of `count` groups."""
    found: Floats = np.bincount(which, numbers, count).astype(np.float64)
    return found


def _memory(problem: PlacementProblem) -> Floats:
    """Bytes that a unit occupies for long: what stays, and forward outputs that the backward pass
    reads. Outputs that live for a moment are left out."""
    c = problem.columns
    found = _sums(c.unit, c.resident, problem.units)
    if problem.links.live and len(c.source):
        outputs = np.repeat(np.arange(len(c.source)), np.diff(c.reader_start))
        long = np.bincount(outputs, c.backward[c.reader], len(c.source)) > 0
        long &= c.backward[c.source] == 0
        found = found + _sums(c.unit[c.source], c.nbytes * long, problem.units)
    return found


def _twins(problem: PlacementProblem, first: Ints, whole: Floats) -> Ints:
    """Numbers of units, equal for those that are alike."""
    c = problem.columns
    if not problem.units:
        return np.zeros(0, np.int64)
    _, kinds = np.unique(np.array(problem.node_kinds or [""] * len(c.unit)), return_inverse=True)
    sends = np.bincount(c.unit[c.source], c.send, problem.units)
    rows = np.column_stack([kinds.ravel()[first], whole, sends])
    _, which = np.unique(rows, axis=0, return_inverse=True)
    found: Ints = which.ravel().astype(np.int64)
    return found


def unit_features(problem: PlacementProblem, graph: PolicyGraph) -> Floats:
    """u x UNIT_FEATURES: a row for every unit."""
    c, k, u = problem.columns, len(problem.devices), problem.units
    possible = node_ticks(c)
    ticks = _mean(possible)
    first, key = _placing_keys(problem, possible)
    top, bottom, depth = path_lengths(c, ticks)
    longest = max(float((top + ticks).max(initial=0.0)), 1e-9)
    mean, forward = graph.whole.mean(axis=1), graph.forward.mean(axis=1)
    lag, pace = _typical(graph)
    into = _cost(graph.before_start, graph.before_sends, graph.before_count * lag, pace)
    out = _cost(graph.after_start, graph.after_sends, graph.after_count * lag, pace)
    degree_in, degree_out = np.diff(graph.before_start), np.diff(graph.after_start)
    level = np.bincount(depth[first])
    room = graph.limit.sum()
    total_memory = max(float(graph.memory.sum()), 1.0)
    work = max(float(mean.sum()), 1e-9)
    alike = np.bincount(graph.twin, minlength=max(graph.twins, 1))
    ones = np.ones(u)
    columns = [
        _relative(mean, graph.mean_ticks),
        _relative(into, graph.mean_ticks),
        _relative(out, graph.mean_ticks),
        into / (into + mean + 1e-9),
        out / (out + mean + 1e-9),
        top[first] / longest,
        bottom[first] / longest,
        1 - (top + bottom)[first] / longest,
        np.searchsorted(np.sort(key), key) / max(u, 1),
        depth[first] / max(int(depth.max(initial=1)), 1),
        np.log1p(degree_in) / 2,
        np.log1p(degree_out) / 2,
        np.log1p(level[depth[first]]) / 4,
        _relative(graph.memory, total_memory / max(u, 1)),
        forward / (mean + 1e-9),
        np.log1p(alike[graph.twin]) / 4,
        ones * (longest / work),
        ones * np.log1p(into.sum() / work),
        ones * (2 / k),
        ones * (min(total_memory / room, 1.0) if np.isfinite(room) and room > 0 else 0.0),
    ]
    found: Floats = np.ascontiguousarray(np.column_stack(columns))
    return found


def _relative(column: Floats, unit: float) -> Floats:
    """How large numbers are compared with a unit, from 0 on, large ones drawn together."""
    found: Floats = np.log1p(column / max(unit, 1e-9))
    return found


def _typical(graph: PolicyGraph) -> tuple[float, float]:
    """Lag and pace between two devices, on average."""
    k = len(graph.limit)
    pairs = max(k * (k - 1), 1)
    return float(graph.lag.sum() / pairs), float(graph.pace.sum() / pairs)


def _cost(start: Ints, sends: Floats, lag: Floats, pace: float) -> Floats:
    """Ticks of all messages of each unit with its neighbours on one side."""
    rows = np.repeat(np.arange(len(start) - 1), np.diff(start))
    return _sums(rows, sends * pace + lag, len(start) - 1)
