"""throughput: the largest load of a device, which is the time per sample of a pipeline.

In: a PlacementProblem and a device for every unit. Out: the load of each device, by Tarnawski et
al. 2020: the time of its nodes, and what crosses between it and the host.

    load(accelerator) = sum of node times
                      + for each node elsewhere that it reads from, what the transfer takes, once
                      + for each of its nodes that is read elsewhere, what the transfer takes, once
    load(host CPU)    = sum of node times

A problem with `transfer` says what each node's transfer takes. Of one without, such as a captured
step, each output is a transfer of its own: its bytes over the fastest link of the device.

`device_loads` is the formula, to be read. `load_columns` and the compiled functions below work the
same out in whole ticks, by units; a move of one unit changes loads in proportion to its neighbours.

A placement is contiguous if the devices can be put into an order in which everything in the forward
part reads from the same or an earlier device, as a pipeline needs it. Then no path leaves a device
and comes back to it. A unit without forward nodes counts as if it had some that mirror it: whatever
reads from it would be read by it. (The integer program of the paper asks less: no path leaves a
device and comes back, though two devices may read from each other by different paths.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Floats, Ints, compiled, offsets
from apportion.place.objective import Evaluation
from apportion.place.objective_names import THROUGHPUT
from apportion.place.placement_problem import NEVER, PlacementProblem, check_placement

HOST = "cpu"  # the kind of devices that hold what crosses, and pay nothing for it
NO_LIMIT = 1 << 62  # bytes
FORWARD, BACKWARD = 0, 1


class Transfer(NamedTuple):
    """What crosses as a whole: the node that makes it, those that read it, and the ticks that
    sending or receiving it keeps each device busy."""

    source: int
    readers: Ints
    price: Ints  # k


def transfers(problem: PlacementProblem) -> Iterator[Transfer]:
    """Everything that may cross between devices."""
    c = problem.columns
    if problem.transfer is not None:
        pays = np.array([device.kind != HOST for device in problem.devices], np.int64)
        ticks = np.rint(np.asarray(problem.transfer) * problem.tick).astype(np.int64)
        for node in range(len(c.unit)):
            first, last = c.output_start[node], c.output_start[node + 1]
            readers = c.reader[c.reader_start[first] : c.reader_start[last]]
            if last > first + 1:
                readers = np.unique(readers)
            yield Transfer(node, readers, ticks[node] * pays)
        return
    fixed, pace = _fastest_links(problem)
    for output, node in enumerate(c.source):
        readers = c.reader[c.reader_start[output] : c.reader_start[output + 1]]
        price = np.rint(fixed + pace * c.send[output]).astype(np.int64)
        yield Transfer(int(node), readers, price)


def _fastest_links(problem: PlacementProblem) -> tuple[Floats, Floats]:
    """Of each device the ticks of a message over its fastest link: fixed, and per unit of send."""
    links, k = problem.links, len(problem.devices)
    fixed, pace = np.zeros(k), np.zeros(k)
    for here in range(k):
        routes = []
        for there in range(k):
            if there != here:
                route = here * k + there
                hops = links.hop_pace[links.hop_start[route] : links.hop_start[route + 1]]
                each = float(hops.max(initial=0.0)) + float(links.drag[here, there])
                routes.append((each, float(links.lag[here, there])))
        if routes:
            pace[here], fixed[here] = min(routes)
    return fixed, pace


def device_loads(problem: PlacementProblem, placement: Ints) -> Floats:
    """The formula: k x 2 time units that each device is busy with the forward and with the backward
    part. A transfer belongs to the part of the node that makes it."""
    c = problem.columns
    device = np.asarray(placement)[c.unit]
    loads = np.zeros((len(problem.devices), 2), np.int64)
    for node, at in enumerate(device):
        loads[at, c.backward[node]] += c.duration[node, at]
    for source, readers, price in transfers(problem):
        home, part = device[source], c.backward[source]
        elsewhere = {int(at) for at in device[readers]} - {int(home)}
        for at in elsewhere:
            loads[at, part] += price[at]
        if elsewhere:
            loads[home, part] += price[home]
    return loads / problem.tick


class LoadColumns(NamedTuple):
    """The same by units: u of them on k devices, with s transfers that other units read.

    A transfer is a row: those of one unit and part with the same readers are one.
    """

    work: Ints  # u x k x 2: ticks of the forward and of the backward part
    resident: Ints  # u: bytes
    limit: Ints  # k: bytes, NO_LIMIT without one
    allowed: Bools  # u x k
    source: Ints  # s: unit
    part: Ints  # s: forward or backward
    price: Ints  # s x k: ticks
    reader_start: Ints  # s + 1
    reader: Ints  # units that read the transfer, without the one that makes it
    made_start: Ints  # u + 1
    made: Ints  # transfers by the unit that makes them
    read_start: Ints  # u + 1
    read: Ints  # transfers by the units that read them
    apart: int  # 1: forward and backward have a maximum each; 0: one of the sum


class LoadState(NamedTuple):
    """A placement with its loads, changed in place by `move_unit`."""

    place: Ints  # u
    reading: Ints  # s x k: on each device, the units that read the transfer
    loads: Ints  # k x 2: ticks
    memory: Ints  # k: bytes


def load_columns(problem: PlacementProblem, apart: bool = False) -> LoadColumns:
    """What loads are made of, by units."""
    c, units = problem.columns, problem.units
    k = len(problem.devices)
    work = np.zeros((units, k, 2), np.int64)
    for part in (FORWARD, BACKWARD):
        own = c.backward == part
        np.add.at(work[:, :, part], c.unit[own], c.duration[own])
    work = np.minimum(work, NEVER)
    rows: dict[tuple[int, int, tuple[int, ...]], Ints] = {}
    unit_of = c.unit.tolist()
    for node, readers, price in transfers(problem):
        home = unit_of[node]
        others = tuple(sorted({unit_of[reader] for reader in readers.tolist()} - {home}))
        if others and price.any():
            key = (home, int(c.backward[node]) if apart else FORWARD, others)
            rows[key] = rows.get(key, 0) + price
    source = np.array([home for home, _, _ in rows], np.int64)
    start = offsets(np.array([len(others) for _, _, others in rows], np.int64))
    reader = np.array([unit for _, _, others in rows for unit in others], np.int64)
    by_reader = np.argsort(reader, kind="stable")
    limit = np.where(np.isinf(problem.limit), NO_LIMIT, problem.limit).astype(np.int64)
    return LoadColumns(
        work=work,
        resident=np.bincount(c.unit, c.resident, units).astype(np.int64),
        limit=limit,
        allowed=c.allowed,
        source=source,
        part=np.array([part for _, part, _ in rows], np.int64),
        price=np.array(list(rows.values()), np.int64).reshape(len(rows), k),
        reader_start=start,
        reader=reader,
        made_start=offsets(np.bincount(source, minlength=units)),
        made=np.argsort(source, kind="stable").astype(np.int64),
        read_start=offsets(np.bincount(reader, minlength=units)),
        read=np.repeat(np.arange(len(rows)), np.diff(start))[by_reader].astype(np.int64),
        apart=int(apart),
    )


def load_state(c: LoadColumns, placement: Ints) -> LoadState:
    """A placement with its loads."""
    k = len(c.limit)
    state = LoadState(
        np.array(placement, np.int64),
        np.zeros((len(c.source), k), np.int64),
        np.zeros((k, 2), np.int64),
        np.zeros(k, np.int64),
    )
    fill_state(c, state)
    return state


@compiled
def fill_state(c: LoadColumns, state: LoadState) -> None:
    """Works counts, loads and memory out from the placement."""
    place, reading, loads = state.place, state.reading, state.loads
    reading[:], loads[:], state.memory[:] = 0, 0, 0
    for unit in range(len(place)):
        at = place[unit]
        state.memory[at] += c.resident[unit]
        loads[at, 0] += c.work[unit, at, 0]
        loads[at, 1] += c.work[unit, at, 1]
    for row in range(len(c.source)):
        home, part = place[c.source[row]], c.part[row]
        sent = False
        for at in range(c.reader_start[row], c.reader_start[row + 1]):
            there = place[c.reader[at]]
            reading[row, there] += 1
            if there != home:
                sent = True
                if reading[row, there] == 1:
                    loads[there, part] += c.price[row, there]
        if sent:
            loads[home, part] += c.price[row, home]


@compiled
def move_unit(c: LoadColumns, state: LoadState, unit: int, there: int) -> None:
    """Moves one unit to another device; moving it back restores everything."""
    place, reading, loads = state.place, state.reading, state.loads
    here = place[unit]
    if here == there:
        return
    place[unit] = there
    state.memory[here] -= c.resident[unit]
    state.memory[there] += c.resident[unit]
    for part in range(2):
        loads[here, part] -= c.work[unit, here, part]
        loads[there, part] += c.work[unit, there, part]
    for at in range(c.made_start[unit], c.made_start[unit + 1]):
        row = c.made[at]
        part, readers = c.part[row], c.reader_start[row + 1] - c.reader_start[row]
        if reading[row, here] < readers:
            loads[here, part] -= c.price[row, here]
        if reading[row, there] > 0:
            loads[there, part] -= c.price[row, there]
        if reading[row, there] < readers:
            loads[there, part] += c.price[row, there]
        if reading[row, here] > 0:
            loads[here, part] += c.price[row, here]
    for at in range(c.read_start[unit], c.read_start[unit + 1]):
        row = c.read[at]
        part, home = c.part[row], place[c.source[row]]
        readers = c.reader_start[row + 1] - c.reader_start[row]
        sent = reading[row, home] < readers
        reading[row, here] -= 1
        reading[row, there] += 1
        if reading[row, here] == 0 and here != home:
            loads[here, part] -= c.price[row, here]
        if reading[row, there] == 1 and there != home:
            loads[there, part] += c.price[row, there]
        if sent and reading[row, home] == readers:
            loads[home, part] -= c.price[row, home]
        elif not sent and reading[row, home] < readers:
            loads[home, part] += c.price[row, home]


@compiled
def largest_load(c: LoadColumns, state: LoadState) -> np.int64:
    """Ticks of the objective, whether the placement fits or not."""
    forward = backward = both = np.int64(0)
    for at in range(len(state.memory)):
        forward = max(forward, state.loads[at, 0])
        backward = max(backward, state.loads[at, 1])
        both = max(both, state.loads[at, 0] + state.loads[at, 1])
    if c.apart:
        return forward + backward
    return both


@compiled
def memory_over(c: LoadColumns, state: LoadState) -> float:
    """By what share of its limit a device is over it, at most; 0 if all fit."""
    over = 0.0
    for at in range(len(c.limit)):
        if state.memory[at] > c.limit[at]:
            over = max(over, (state.memory[at] - c.limit[at]) / max(c.limit[at], 1))
    return over


def order_edges(problem: PlacementProblem) -> Ints:
    """Pairs (unit, unit that must not be on an earlier device) that contiguity is about, each once:
    who reads from whom in the forward part, and the mirror image of units without one."""
    c = problem.columns
    source = np.repeat(c.source, np.diff(c.reader_start))
    target = c.reader
    back = c.backward == BACKWARD
    has_forward = np.zeros(problem.units, np.bool_)
    has_forward[c.unit[~back]] = True
    ahead = ~back[source] & ~back[target]
    lone = ~has_forward[c.unit[source]] | ~has_forward[c.unit[target]]
    mirrored = back[source] & back[target] & lone
    pairs = np.concatenate(
        [
            np.stack([c.unit[source[ahead]], c.unit[target[ahead]]], axis=1),
            np.stack([c.unit[target[mirrored]], c.unit[source[mirrored]]], axis=1),
        ]
    )
    found: Ints = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    return found


def is_contiguous(problem: PlacementProblem, placement: Ints, edges: Ints | None = None) -> bool:
    """Whether the devices can be put into an order that the forward part keeps to."""
    edges = order_edges(problem) if edges is None else edges
    place = np.asarray(placement)
    k = len(problem.devices)
    before = np.zeros((k, k), np.bool_)
    before[place[edges[:, 0]], place[edges[:, 1]]] = True
    np.fill_diagonal(before, False)
    left = np.ones(k, np.bool_)
    while left.any():
        first = left & ~before[left].any(axis=0)
        if not first.any():
            return False
        left &= ~first
    return True


class ThroughputObjective:
    """The largest load. With `contiguous` a placement that is not counts as one that does not fit;
    with `apart` the largest forward load and the largest backward load are added."""

    name = THROUGHPUT

    def __init__(
        self, problem: PlacementProblem, contiguous: bool = False, apart: bool = False
    ) -> None:
        self.problem = problem
        self.contiguous = contiguous
        self.apart = apart
        self.evaluations = 0
        self.columns = load_columns(problem, apart)
        self.edges = order_edges(problem)
        self.worst = worst_load(self.columns)

    def score(self, placement: Ints) -> float:
        """The largest load, penalised where the placement does not fit."""
        self.evaluations += 1
        state = load_state(self.columns, placement)
        ticks = int(largest_load(self.columns, state))
        over = float(memory_over(self.columns, state))
        if self.contiguous and not is_contiguous(self.problem, placement, self.edges):
            over += 1.0
        if over > 0:
            return (self.worst * (1.0 + over) + ticks) / self.problem.tick
        return ticks / self.problem.tick

    def evaluate(self, placement: Ints) -> Evaluation:
        """The largest load, all loads and memory."""
        self.evaluations += 1
        check_placement(self.problem, placement)
        state = load_state(self.columns, placement)
        fits = bool((state.memory <= self.columns.limit).all())
        if self.contiguous and fits:
            fits = is_contiguous(self.problem, placement, self.edges)
        ticks = int(largest_load(self.columns, state))
        loads = state.loads.sum(axis=1) / self.problem.tick
        return Evaluation(ticks / self.problem.tick, loads, state.memory, fits)


def worst_load(c: LoadColumns) -> float:
    """More ticks than the load of any device."""
    work = c.work.sum(axis=2)
    slowest = np.where(work < NEVER, work, 0).max(axis=1, initial=0)
    return float(slowest.sum() + 2 * c.price.max(axis=1, initial=0).sum() + 1)


def work_bound(c: LoadColumns, known: float = np.inf) -> float:
    """Ticks that no placement is below, if one with `known` ticks is known: the largest of

    - what the longest unit takes on its fastest device
    - all work, divided evenly: a slow device does less of it
    - of the q m + 1 longest units, m devices being able to run one of them in less than `known`,
      one device has at least q + 1: at least the q + 1 shortest of them
    """
    work = np.where(c.allowed, c.work.sum(axis=2), NEVER).astype(float)
    fastest = work.min(axis=1)
    busy = fastest > 0
    if not busy.any():
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(work > 0, fastest[:, None] / work, 1.0)
    even = float(fastest.sum() / speed[busy].max(axis=0).sum())
    found = max(float(fastest.max()), even, crowded_units(c, known)[1])
    return min(found, known)


def crowded_units(c: LoadColumns, known: float) -> tuple[Ints, float]:
    """The longest units of which one device has so many that the bound above is largest, and that
    bound."""
    work = np.where(c.allowed, c.work.sum(axis=2), NEVER).astype(float)
    fastest = work.min(axis=1)
    order = np.argsort(-fastest, kind="stable")
    able = np.logical_or.accumulate(work[order] < known, axis=0).sum(axis=1)
    best, chosen = 0.0, order[:0]
    for count in range(1, len(order) + 1):
        devices = max(int(able[count - 1]), 1)
        many = -(-count // devices)  # on one device, at least
        bound = float(fastest[order[count - many : count]].sum())
        if bound > best:
            best, chosen = bound, order[:count]
    return chosen, best
