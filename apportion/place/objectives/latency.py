"""latency: the time of one sample through the whole graph, if an accelerator runs whole pieces.

In: a PlacementProblem and a device for every unit. Out: when the last node ends, by the model of
Tarnawski et al. 2020. An accelerator receives all that a piece reads, runs it, and sends all that
is read elsewhere, without a break:

    end of a piece     = end of the last node elsewhere that it reads from
                       + what it receives + its nodes + what it sends, each transfer once
    end of a host node = end of the last node that it reads from + its own time

There are as many hosts as nodes need. An accelerator's nodes are `pieces` pieces, one after the
other: 1 for inference, so that they must be contiguous, and 2 for training, one for each pass. A
node is in the second piece if a path to it leaves the first and comes back. A placement with more
pieces, or one in which pieces wait for each other, counts as one that does not fit; its value is
that of finer pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, offsets
from apportion.place.objective import Evaluation
from apportion.place.objective_names import LATENCY
from apportion.place.objectives.max_load import HOST, transfers
from apportion.place.placement_problem import NEVER, PlacementProblem, check_placement

LONG = 1000  # nodes of a path that is bounded without cuts


class LatencyColumns(NamedTuple):
    """What latency is made of: n nodes in their order, k devices, s transfers."""

    unit: Ints  # n
    duration: Ints  # n x k
    host: Ints  # k: 1 for hosts
    source: Ints  # s: node, rising
    price: Ints  # s x k
    made_start: Ints  # n + 1: offsets into the transfers
    reader_start: Ints  # s + 1
    reader: Ints  # nodes
    read_start: Ints  # n + 1
    read: Ints  # the node that each node reads from


def latency_columns(problem: PlacementProblem) -> LatencyColumns:
    """What latency is made of."""
    own = problem.transfer is not None  # else a CPU is a device like any other
    c, rows = problem.columns, [row for row in transfers(problem) if len(row.readers)]
    source = np.array([row.source for row in rows], np.int64)
    reader = np.array([node for row in rows for node in row.readers], np.int64)
    start = offsets(np.array([len(row.readers) for row in rows], np.int64))
    by_reader = np.argsort(reader, kind="stable")
    n = len(c.unit)
    return LatencyColumns(
        unit=c.unit,
        duration=c.duration,
        host=np.array([own and device.kind == HOST for device in problem.devices], np.int64),
        source=source,
        price=np.array([row.price for row in rows], np.int64).reshape(-1, len(problem.devices)),
        made_start=offsets(np.bincount(source, minlength=n)),
        reader_start=start,
        reader=reader,
        read_start=offsets(np.bincount(reader, minlength=n)),
        read=np.repeat(source, np.diff(start))[by_reader],
    )


@compiled
def latency_ticks(
    c: LatencyColumns, place: Ints, piece: Ints, pieces: int, ends: Ints, busy: Ints
) -> np.int64:
    """Ticks of one sample, or minus the number of nodes that wait for each other. Fills the end of
    each node and the ticks that each device is busy."""
    n, k = c.duration.shape
    groups = k * pieces + n  # a piece of an accelerator, or a node of a host
    group, head, after = np.empty(n, np.int64), np.full(groups, -1), np.full(n, -1)
    took, ready = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    pending, marked = np.zeros(groups, np.int64), np.full(groups, -1)
    busy[:] = 0
    for node in range(n):
        at = place[c.unit[node]]
        own = k * pieces + node if c.host[at] else at * pieces + piece[node]
        group[node], after[node], head[own] = own, head[own], node
        took[own] += c.duration[node, at]
        busy[at] += c.duration[node, at]
    for row in range(len(c.source)):
        own = group[c.source[row]]
        for index in range(c.reader_start[row], c.reader_start[row + 1]):
            other = group[c.reader[index]]
            if other == own:
                continue
            pending[other] += 1
            if marked[own] != row and own < k * pieces:
                marked[own] = row
                took[own] += c.price[row, own // pieces]
                busy[own // pieces] += c.price[row, own // pieces]
            if marked[other] != row and other < k * pieces:
                marked[other] = row
                took[other] += c.price[row, other // pieces]
                busy[other // pieces] += c.price[row, other // pieces]
    follower = np.full(groups, -1)
    for at in range(k):
        last = -1
        for number in range(at * pieces, (at + 1) * pieces):
            if head[number] >= 0:
                if last >= 0:
                    follower[last] = number
                    pending[number] += 1
                last = number
    stack, count, done, finish = np.empty(groups, np.int64), 0, 0, np.int64(0)
    for own in range(groups):
        if head[own] >= 0 and pending[own] == 0:
            stack[count] = own
            count += 1
    while count:
        count -= 1
        own = stack[count]
        end = ready[own] + took[own]
        finish = max(finish, end)
        node = head[own]
        while node >= 0:
            ends[node] = end
            done += 1
            for row in range(c.made_start[node], c.made_start[node + 1]):
                for index in range(c.reader_start[row], c.reader_start[row + 1]):
                    other = group[c.reader[index]]
                    if other != own:
                        count = _one_less(other, end, ready, pending, stack, count)
            node = after[node]
        if follower[own] >= 0:
            count = _one_less(follower[own], end, ready, pending, stack, count)
    return finish if done == n else np.int64(done - n)


@compiled
def _one_less(other: int, end: int, ready: Ints, pending: Ints, stack: Ints, count: int) -> int:
    """A group waits for one thing less; how many groups can run."""
    ready[other] = max(ready[other], end)
    pending[other] -= 1
    if pending[other] == 0:
        stack[count] = other
        return count + 1
    return count


@compiled
def fill_pieces(c: LatencyColumns, place: Ints, pieces: int, piece: Ints) -> int:
    """Fills which piece of its accelerator each node is in, the last for all beyond; how many the
    accelerator with most has."""
    n, k = c.duration.shape
    piece[:] = 0
    most = 1
    if pieces == 1:
        return most
    level = np.zeros(n, np.int64)
    for at in range(k):
        if c.host[at]:
            continue
        for node in range(n):
            inside = place[c.unit[node]] == at
            level[node] = 1 if inside else 0
            for index in range(c.read_start[node], c.read_start[node + 1]):
                source = c.read[index]
                so_far = level[source]
                if inside and place[c.unit[source]] != at:
                    so_far += 1
                level[node] = max(level[node], so_far)
            if inside:
                most = max(most, level[node])
                piece[node] = min(level[node], pieces) - 1
    return most


@compiled
def latency_score(
    c: LatencyColumns, place: Ints, resident: Ints, limit: Floats, pieces: int, worst: float,
    piece: Ints, ends: Ints, busy: Ints,
) -> float:  # fmt: skip
    """What searches minimise: ticks, or more than of any placement that fits."""
    fill_pieces(c, place, pieces, piece)
    ticks = latency_ticks(c, place, piece, pieces, ends, busy)
    memory = np.zeros(len(limit))
    for unit in range(len(place)):
        memory[place[unit]] += resident[unit]
    over = 0.0
    for at in range(len(limit)):
        over = max(over, (memory[at] - limit[at]) / max(limit[at], 1.0))
    if ticks < 0:
        return float(worst * (2.0 + max(over, 0.0) - ticks / len(c.unit)))
    if over > 0:
        return float(worst * (1.0 + over) + ticks)
    return float(ticks)


class LatencyObjective:
    """The time of one sample."""

    name = LATENCY

    def __init__(self, problem: PlacementProblem, pieces: int | None = None) -> None:
        self.problem = problem
        self.evaluations = 0
        self.columns = latency_columns(problem)
        self.pieces = pieces or (2 if problem.columns.backward.any() else 1)
        c = problem.columns
        self.resident = np.bincount(c.unit, c.resident, problem.units).astype(np.int64)
        slowest = np.where(c.duration < NEVER, c.duration, 0).max(axis=1).sum()
        sent = self.columns.price.max(axis=1, initial=0).sum()
        self.worst = float(slowest + (len(problem.devices) * self.pieces + 1) * sent + 1)
        n, k = c.duration.shape
        self.work = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(k, np.int64)

    def score(self, placement: Ints) -> float:
        """The time of one sample, penalised where the placement does not fit."""
        self.evaluations += 1
        place = np.ascontiguousarray(placement, np.int64)
        found: float = latency_score(
            self.columns, place, self.resident, self.problem.limit, self.pieces, self.worst,
            *self.work,
        )  # fmt: skip
        return found / self.problem.tick

    def evaluate(self, placement: Ints) -> Evaluation:
        """The time of one sample, how long each device is busy for it, and memory."""
        self.evaluations += 1
        check_placement(self.problem, placement)
        place = np.ascontiguousarray(placement, np.int64)
        c, (piece, ends, busy) = self.columns, self.work
        k = len(self.problem.devices)
        fits = int(fill_pieces(c, place, max(self.pieces, 2), piece)) <= self.pieces
        most = self.pieces
        if fits:
            fill_pieces(c, place, self.pieces, piece)
        else:
            most = int(fill_pieces(c, place, len(c.unit), piece))
        ticks = int(latency_ticks(c, place, piece, most, ends, busy))
        if ticks < 0:  # pieces wait for each other
            fits, stage = False, _stages(c, place)
            ticks = int(latency_ticks(c, place, stage, int(stage.max()) + 1, ends, busy))
        memory = np.bincount(place, self.resident, k).astype(np.int64)
        fits = fits and bool((memory <= self.problem.limit).all())
        tick = self.problem.tick
        return Evaluation(ticks / tick, busy / tick, memory, fits)

    def lower_bound(self) -> float:
        """What no placement is below: what the nodes of some long paths take, by `path_bound`."""
        c, p = self.columns, self.problem
        allowed = p.columns.allowed[c.unit]
        hosts = c.host == 1
        times = [np.where(allowed, c.duration, NEVER).min(axis=1)]
        if hosts.any() and not hosts.all():
            far = np.where(allowed[:, hosts], c.duration[:, hosts], NEVER).min(axis=1)
            times.append(np.where(far < NEVER, far, times[0]))
        sent = np.zeros(len(c.unit), np.int64)
        np.maximum.at(sent, c.source, c.price.max(axis=1, initial=0))
        times.append(times[0] + 2 * sent)
        paths = [_longest(c, time)[0] for time in times]
        return max(path_bound(p, c, path, self.pieces) for path in paths) / p.tick


def path_bound(problem: PlacementProblem, c: LatencyColumns, path: Ints, pieces: int) -> float:
    """The least ticks that the nodes of a path can take one after the other. It is cut into
    stretches for accelerators, each within the largest memory, and nodes on hosts; a stretch
    receives what comes before it and sends what comes after. For long paths, without the cuts."""
    hosts, allowed = c.host == 1, problem.columns.allowed[c.unit[path]]
    time = np.where(allowed, c.duration[path], NEVER)
    fast = time.min(axis=1)
    if len(path) > LONG or hosts.all():
        return float(fast.sum())
    near = np.cumsum([0, *time[:, ~hosts].min(axis=1).tolist()])
    held = np.cumsum([0, *problem.columns.resident[path].tolist()])
    far = time[:, hosts].min(axis=1, initial=NEVER).tolist()
    room = problem.limit[~hosts].max()
    sent = _least_prices(c, path)
    most = int((~hosts).sum()) * pieces
    best = np.full((len(path) + 1, most + 1), float(NEVER))  # up to a node, by stretches used
    best[0, 0] = 0.0
    for end in range(1, len(path) + 1):
        best[end] = best[end - 1] + far[end - 1]
        out = sent[end - 1] if end < len(path) else 0
        start = end - 1
        while start >= 0 and held[end] - held[start] <= room:
            took = near[end] - near[start] + out + (sent[start - 1] if start else 0)
            np.minimum(best[end, 1:], best[start, :-1] + took, out=best[end, 1:])
            start -= 1
    return max(float(fast.sum()), min(float(best[-1].min()), float(NEVER)))


def _least_prices(c: LatencyColumns, path: Ints) -> list[int]:
    """Of each node but the last, what the transfer to the next one takes on an accelerator."""
    found = []
    for node, after in zip(path[:-1].tolist(), path[1:].tolist(), strict=True):
        rows = range(c.made_start[node], c.made_start[node + 1])
        prices = [
            int(c.price[row][c.host == 0].min())
            for row in rows
            if after in c.reader[c.reader_start[row] : c.reader_start[row + 1]]
        ]
        found.append(max(prices, default=0))
    return found


def _longest(c: LatencyColumns, time: Ints) -> tuple[Ints, int]:
    """The nodes of a longest path, and its length."""
    n = len(time)
    length, before = np.array(time, np.int64), np.full(n, -1)
    for node in range(n):
        for source in c.read[c.read_start[node] : c.read_start[node + 1]]:
            if length[source] + time[node] > length[node]:
                length[node], before[node] = length[source] + time[node], source
    at = int(length.argmax())
    path = [at]
    while before[path[-1]] >= 0:
        path.append(int(before[path[-1]]))
    return np.array(path[::-1], np.int64), int(length[at])


def _stages(c: LatencyColumns, place: Ints) -> Ints:
    """Pieces that never wait for each other: a node's is one more than that of a node on another
    device that it reads from."""
    stage = np.zeros(len(c.unit), np.int64)
    host = c.host[place[c.unit]] == 1
    device = np.where(host, -1, place[c.unit])
    for node in range(len(stage)):
        for source in c.read[c.read_start[node] : c.read_start[node + 1]]:
            stage[node] = max(stage[node], stage[source] + int(device[source] != device[node]))
    return stage
