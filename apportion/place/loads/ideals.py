"""ideals: the best contiguous placement, by dynamic programming over ideals.

In: a ThroughputObjective. Out: a contiguous placement with the smallest largest load, if there are
not too many ideals (Tarnawski et al. 2020).

An ideal is a set of blocks that has, with a block, all that it reads from. Devices in the order of
a pipeline hold the differences of a rising chain of ideals. best[I, used] is the smallest largest
load if the blocks of I are on `used`, so many devices of each class of equal ones:

    best[I, used + one of class d] = min over J below I of max(best[J, used], load of I \\ J on d)

All I above a J are visited depth first, so that one block enters or leaves at a time and loads
change in proportion to its neighbours. Work and memory only grow on the way up: a set that is over
the best placement known, or does not fit, on any class, has nothing above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from apportion.columns import Bools, Ints, compiled, hash_table, mixed
from apportion.place.lists.one_device import one_device
from apportion.place.loads.contraction import Contraction, contraction, first_in_order
from apportion.place.objective import PlacementObjective, PlacementResult, Report
from apportion.place.objectives.max_load import (
    LoadColumns,
    ThroughputObjective,
    largest_load,
    load_state,
    work_bound,
    worst_load,
)
from apportion.work_clock import work_seconds

WORD = 60  # blocks in one number of a set
MOST_IDEALS = 120_000
MOST_CHECKS = 400_000_000  # ideals x blocks x words, which is what finding them takes
MOST_STATES = 100_000_000  # ideals x states of the program
SLOW = 3.0  # a device on which everything takes so many times longer is left out of an even cut
NOTHING = 1 << 60  # ticks: no such placement
CHUNK = 200_000  # sets between two looks at the clock; at first fewer
FIRST_CHUNK = 1000


class DeviceClasses(NamedTuple):
    """Devices that are interchangeable, and how many of each are used in each state of the
    program: numbers in a mixed radix."""

    device: Ints  # one of each class
    size: Ints  # of each class
    stride: Ints  # of a device of each class in the number of a state
    states: int


class Ideals(NamedTuple):
    """All ideals by rising size; the first is empty, the last is everything."""

    above_start: Ints
    above: Ints  # ideals with one block more
    entering: Ints  # that block
    complete: int  # whether these are all


def device_classes(c: LoadColumns) -> tuple[DeviceClasses, list[list[int]]]:
    """Classes of devices on which everything takes the same, and their members."""
    members: dict[bytes, list[int]] = {}
    for at in range(c.allowed.shape[1]):
        key = b"".join(
            np.ascontiguousarray(column).tobytes()
            for column in (c.work[:, at], c.price[:, at], c.allowed[:, at], c.limit[at : at + 1])
        )
        members.setdefault(key, []).append(at)
    groups = list(members.values())
    size = np.array([len(group) for group in groups], np.int64)
    stride = np.ones(len(size), np.int64)
    stride[1:] = np.cumprod(size[:-1] + 1)
    first = np.array([group[0] for group in groups], np.int64)
    return DeviceClasses(first, size, stride, int(np.prod(size + 1))), groups


def first_devices(c: LoadColumns) -> Bools:
    """Of interchangeable devices, which ones a block needs to try: the one with most work only
    the first, the next only the first two, and so on."""
    allowed = np.ones(c.allowed.shape, np.bool_)
    order = np.argsort(-c.work.sum(axis=(1, 2)), kind="stable")
    for group in device_classes(c)[1]:
        for rank, unit in enumerate(order[: len(group)].tolist()):
            allowed[unit, group[rank + 1 :]] = False
    return allowed


def all_ideals(count: int, edges: Ints, most: int = MOST_IDEALS) -> Ideals:
    """The ideals of blocks, unless there are more than `most`."""
    words = max(1, -(-count // WORD))
    most = min(most, MOST_CHECKS // max(count * words, 1))
    if most <= count + 1:
        none = np.zeros(0, np.int64)
        return Ideals(none, none, none, 0)
    below = np.zeros((count, words), np.int64)
    for source, target in edges.tolist():
        below[target, source // WORD] |= 1 << (source % WORD)
    start, above, entering, found = _enumerate(below, most)
    return Ideals(start, above, entering, int(found))


def chain_ideals(order: Ints) -> Ideals:
    """The ideals if blocks must be in this order."""
    count = len(order)
    start = np.minimum(np.arange(count + 2), count)
    return Ideals(start.astype(np.int64), np.arange(1, count + 1), order, 1)


@compiled
def _enumerate(below: Ints, most: int) -> tuple[Ints, Ints, Ints, int]:
    count, words = below.shape
    sets = np.zeros((most, words), np.int64)
    table = hash_table(most)
    room = len(table) - 1
    start = np.zeros(most + 1, np.int64)
    above, entering = np.empty(4 * most, np.int64), np.empty(4 * most, np.int64)
    found, links = 1, 0
    row = 0
    grown = np.zeros(words, np.int64)
    while row < found:
        start[row] = links
        for block in range(count):
            at, bit = block // WORD, np.int64(1) << (block % WORD)
            if sets[row, at] & bit:
                continue
            closed = True
            for word in range(words):
                if below[block, word] & ~sets[row, word]:
                    closed = False
                    break
            if not closed:
                continue
            code = np.int64(0)
            for word in range(words):
                grown[word] = sets[row, word]
                if word == at:
                    grown[word] |= bit
                code = mixed(code, grown[word])
            slot = mixed(code, np.int64(1)) & room
            while table[slot] >= 0:
                same = True
                for word in range(words):
                    if sets[table[slot], word] != grown[word]:
                        same = False
                        break
                if same:
                    break
                slot = (slot + 1) & room
            if table[slot] < 0:
                if found == most:
                    return start[:1], above[:0], entering[:0], 0
                table[slot] = found
                sets[found] = grown
                found += 1
            if links == len(above):
                above = np.append(above, np.zeros(links, np.int64))
                entering = np.append(entering, np.zeros(links, np.int64))
            above[links], entering[links] = table[slot], block
            links += 1
        row += 1
    start[found] = links
    return start[: found + 1].copy(), above[:links].copy(), entering[:links].copy(), 1


class SplitTables(NamedTuple):
    """What the dynamic program fills."""

    best: Ints  # ideals x states: ticks
    under: Ints  # ideals x states: the ideal below, and the class of the device between them
    device: Ints
    seen: Ints  # ideals: the last J from which it was reached


def split_tables(ideals: Ideals, classes: DeviceClasses) -> SplitTables:
    """Empty tables."""
    shape = (len(ideals.above_start) - 1, classes.states)
    best = np.full(shape, NOTHING, np.int64)
    best[0, 0] = 0
    return SplitTables(
        best, np.full(shape, -1, np.int32), np.full(shape, -1, np.int8), np.full(shape[0], -1)
    )


@compiled
def fill_tables(
    c: LoadColumns,
    ideals: Ideals,
    classes: DeviceClasses,
    tables: SplitTables,
    limit: int,
    first: int,
    most: int,
) -> int:
    """Goes on with the program at the ideal `first` and for some `most` sets; the ideal at which to
    go on. Loads of `limit` ticks and more are not of interest."""
    many = len(classes.device)
    deep = len(c.resident) + 1
    stack, link = np.zeros(deep, np.int64), np.zeros(deep, np.int64)
    work, cost = np.zeros(many, np.int64), np.zeros(many, np.int64)
    inside, readers = np.zeros(len(c.source), np.int64), np.diff(c.reader_start)
    member = np.zeros(len(c.resident), np.int64)
    low, visited = first, 0
    while low < len(ideals.above_start) - 1 and visited < most:
        useful = False
        for state in range(classes.states):
            useful = useful or tables.best[low, state] < limit
        if not useful:
            low += 1
            continue
        depth, stack[0], link[0] = 0, low, ideals.above_start[low]
        work[:], cost[:], memory = 0, 0, np.int64(0)
        tables.seen[low] = low
        while depth >= 0:
            at = stack[depth]
            if link[depth] == ideals.above_start[at + 1]:
                if depth > 0:  # the block that entered leaves
                    block = ideals.entering[link[depth - 1] - 1]
                    _turn(c, classes, block, -1, work, cost, inside, member, readers)
                    memory -= c.resident[block]
                depth -= 1
                continue
            step = link[depth]
            link[depth] += 1
            high, block = ideals.above[step], ideals.entering[step]
            if tables.seen[high] == low:
                continue
            tables.seen[high] = low
            visited += 1
            _turn(c, classes, block, 1, work, cost, inside, member, readers)
            memory += c.resident[block]
            open_above = False
            for kind in range(many):
                device = classes.device[kind]
                if work[kind] < limit and memory <= c.limit[device]:
                    open_above = True
                    load = work[kind] + cost[kind]
                    if load < limit:
                        _relax(classes, tables, low, high, kind, load)
            depth += 1
            stack[depth], link[depth] = high, ideals.above_start[high]
            if not open_above:
                link[depth] = ideals.above_start[high + 1]
        low += 1
    return low


@compiled
def _turn(
    c: LoadColumns, classes: DeviceClasses, block: int, sign: int, work: Ints, cost: Ints,
    inside: Ints, member: Ints, readers: Ints,
) -> None:  # fmt: skip
    """A block enters the set, or leaves it: what the set takes on each class changes."""
    for kind in range(len(classes.device)):
        device = classes.device[kind]
        work[kind] += sign * (c.work[block, device, 0] + c.work[block, device, 1])
    member[block] += sign
    for at in range(c.made_start[block], c.made_start[block + 1]):
        row = c.made[at]
        change = 0
        if inside[row] > 0:  # it need not be received any more, or must be again
            change -= sign
        if inside[row] < readers[row]:
            change += sign
        if change != 0:
            for kind in range(len(classes.device)):
                cost[kind] += change * c.price[row, classes.device[kind]]
    for at in range(c.read_start[block], c.read_start[block + 1]):
        row = c.read[at]
        before = inside[row]
        inside[row] += sign
        after = inside[row]
        if member[c.source[row]]:
            change = int(after < readers[row]) - int(before < readers[row])
        else:
            change = int(after > 0) - int(before > 0)
        if change != 0:
            for kind in range(len(classes.device)):
                cost[kind] += change * c.price[row, classes.device[kind]]


@compiled
def _relax(
    classes: DeviceClasses, tables: SplitTables, low: int, high: int, kind: int, load: int
) -> None:
    """The set between two ideals goes to one more device of a class, in all states."""
    stride, size = classes.stride[kind], classes.size[kind]
    for state in range(classes.states):
        if state // stride % (size + 1) < size:
            so_far = max(tables.best[low, state], load)
            if so_far < tables.best[high, state + stride]:
                tables.best[high, state + stride] = so_far
                tables.under[high, state + stride] = low
                tables.device[high, state + stride] = kind


def best_chain(
    c: LoadColumns, ideals: Ideals, limit: int, until: float
) -> tuple[Ints | None, bool]:
    """The device of every block in the best chain of ideals with loads below `limit`, None if there
    is none; and whether the program came to its end in time."""
    none = int(worst_load(c)) + 1
    limit = min(limit, none)
    c = c._replace(work=np.where(c.allowed[:, :, None], c.work, none))
    classes, groups = device_classes(c)
    if (len(ideals.above_start) - 1) * classes.states > MOST_STATES:
        return None, False
    tables = split_tables(ideals, classes)
    last, low, chunk = len(ideals.above_start) - 2, 0, FIRST_CHUNK
    while low <= last:
        low = int(fill_tables(c, ideals, classes, tables, limit, low, chunk))
        chunk = min(2 * chunk, CHUNK)
        if low <= last and work_seconds() > until:
            return None, False
    state = int(tables.best[last].argmin())
    if tables.best[last, state] >= limit:
        return None, True
    return _traced(ideals, classes, groups, tables, last, state), True


def _traced(
    ideals: Ideals,
    classes: DeviceClasses,
    groups: list[list[int]],
    tables: SplitTables,
    high: int,
    state: int,
) -> Ints:
    """The devices along the chain that ends at an ideal and state."""
    path: Ints = np.full(len(ideals.above_start) - 1, -1)  # one block below each ideal
    step: Ints = np.full(len(path), -1)
    source = np.repeat(np.arange(len(path)), np.diff(ideals.above_start))
    path[ideals.above], step[ideals.above] = source, ideals.entering
    place = np.full(int(ideals.entering.max(initial=-1)) + 1, -1, np.int64)
    free = [list(group) for group in groups]
    while high != 0:
        low, kind = int(tables.under[high, state]), int(tables.device[high, state])
        device = free[kind].pop(0)
        inner = _members(path, step, high) - _members(path, step, low)
        place[list(inner)] = device
        high, state = low, state - int(classes.stride[kind])
    return place


def _members(path: Ints, step: Ints, ideal: int) -> set[int]:
    found = set()
    while ideal != 0:
        found.add(int(step[ideal]))
        ideal = int(path[ideal])
    return found


def linear_start(it: Contraction, until: float) -> Ints | None:
    """The best placement of blocks along an order: depth first, or as they are numbered."""
    count = len(it.columns.resident)
    orders = first_in_order(count, it.edges, deep=True), np.arange(count)
    best, limit = _even_cut(it.columns, orders[0])
    for order in orders:
        found, _ = best_chain(it.columns, chain_ideals(order), limit, until)
        if found is not None:
            best, limit = found, block_load(it.columns, found)
    return best


def _even_cut(c: LoadColumns, order: Ints) -> tuple[Ints | None, int]:
    """Blocks in an order, cut into stretches of equal work for all devices that are fast, with the
    largest load; none if that does not fit."""
    whole = c.work.sum(axis=(0, 2))
    devices = np.flatnonzero(whole <= SLOW * whole.min())
    work = c.work[order, devices[0]].sum(axis=1).astype(float)
    middle = np.cumsum(work) - work / 2
    share = np.minimum(middle * len(devices) / max(float(work.sum()), 1.0), len(devices) - 1)
    place = np.empty(len(order), np.int64)
    place[order] = devices[share.astype(np.int64)]
    state = load_state(c, place)
    if (state.memory > c.limit).any() or not c.allowed[np.arange(len(place)), place].all():
        return None, NOTHING
    return place, int(largest_load(c, state))


def block_load(c: LoadColumns, place: Ints) -> int:
    """The largest load of a placement of blocks."""
    return int(largest_load(c, load_state(c, place)))


def dp_ideals(
    objective: PlacementObjective,
    *,
    budget: float = 60.0,
    seed: int = 0,
    starts: Sequence[Ints] = (),
    contiguous: bool = False,
    report: Report | None = None,
) -> PlacementResult:
    """The best contiguous placement; what the linear variant finds if there is no time for it."""
    throughput = loads_only(objective, "dp")
    until = work_seconds() + budget
    it = contraction(throughput.columns, throughput.edges)
    place = linear_start(it, until)
    limit = NOTHING if place is None else block_load(it.columns, place)
    figures = {"blocks": float(len(it.columns.resident))}
    proven = interrupted = False
    try:
        ideals = all_ideals(len(it.columns.resident), it.edges)
        better, ended = None, False
        if ideals.complete:
            figures["ideals"] = float(len(ideals.above_start) - 1)
            better, ended = best_chain(it.columns, ideals, limit, until)
        place = place if better is None else better
        proven = ended and it.safe
        notes = () if ended else (_why(bool(ideals.complete)),)
    except KeyboardInterrupt:
        interrupted, notes = True, (_why(True),)
    found = contiguous_result(throughput, it, place, contiguous, proven, notes, figures)
    return replace(found, interrupted=interrupted)


def _why(complete: bool) -> str:
    """Why there is only the result of the linear variant."""
    what = "the time was over" if complete else f"there are too many ideals (over {MOST_IDEALS})"
    return f"{what}: the result is that of the linear variant"


def loads_only(objective: PlacementObjective, name: str) -> ThroughputObjective:
    """The objective, if it is one that the programs over ideals can minimise."""
    if not isinstance(objective, ThroughputObjective) or objective.apart:
        raise ValueError(
            f"{name} minimises the largest load of a device; take --objective throughput, without "
            "separate maxima of forward and backward"
        )
    return objective


def contiguous_result(
    objective: ThroughputObjective,
    it: Contraction,
    place: Ints | None,
    contiguous: bool,
    proven: bool,
    notes: tuple[str, ...],
    figures: dict[str, float],
) -> PlacementResult:
    """A placement of blocks as one of units. What is proven holds among contiguous placements; it
    is a bound where only those are asked for."""
    tick = objective.problem.tick
    if place is None:
        bound = work_bound(objective.columns) / tick
        notes = (*notes, "no contiguous placement fits; this is the nearest on one device")
        return PlacementResult(one_device(objective).placement, bound, notes, figures=figures)
    placement = place[it.block]
    value = objective.evaluate(placement).value
    bound = work_bound(objective.columns, value * tick) / tick
    if proven:
        figures = {**figures, "contiguous_optimum": value}
        if contiguous or objective.contiguous:
            bound = value
    return PlacementResult(placement, bound, notes, figures=figures)
