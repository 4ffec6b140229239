"""step_search: moves of units between devices, and walks that accept or undo them.

In: a StepObjective and a placement. Out: better ones. What local_search.py, restarts.py and
annealing.py share; all loops are compiled.

A move takes units to one device:

    single   one unit
    group    a group of coarse/coarsen.py, of one of several sizes, or what the device has of it
    block    a connected block of units of one device
    grown    a connected block, wherever its units are
    stretch  what a device has among the next units in the order of the graph
    taken    all of the next units in the order of the graph
    exchange one unit, and one from there to where it was: what memory limits call for

Mostly it begins with a unit of the critical chain: the nodes back from the last one, each of which
waits for the one before it, be it for its device or for what it reads. Moves of other units change
the time of the step only by changing the order in which devices and links serve.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.columns import Floats, Ints, compiled, compiled_part, offsets
from apportion.place.coarse.coarsen import coarsen
from apportion.place.objectives.step_time import (
    NO_LIMIT,
    StepConstants,
    StepScratch,
    step_score_part,
)
from apportion.place.placement_problem import (
    PlacementColumns,
    PlacementLinks,
    PlacementProblem,
)
from apportion.place.searches.random_draws import draw_below, draw_share, random_state

EVALUATIONS, CHAIN, CHANGED, STAMP, ACCEPTED, FRUITLESS, BETTER = range(7)  # counts
NOW, LOW, BEST = range(3)  # scores; LOW is the best since the last kick
GROUP_SIZES = (3, 8, 20)  # units of a group, on average
MOST_GROUPED = 20_000  # units; grouping more takes longer than it is worth
MOST_AT_ONCE = 20_000  # evaluations before the state is read


class Neighbourhood(NamedTuple):
    """Which units and nodes are next to which."""

    near_start: Ints  # u + 1: offsets into near
    near: Ints  # units that read from a unit or that it reads from
    able_start: Ints  # u + 1: offsets into able
    able: Ints  # devices that a unit may go to
    order: Ints  # units, as their first nodes stand in the graph
    rank: Ints  # u: where a unit stands in the order
    input_start: Ints  # n + 1: offsets into inputs
    inputs: Ints  # nodes that a node reads from
    group: Ints  # sizes x u: the group of a unit
    member_start: Ints  # sizes x (u + 1): offsets into member
    member: Ints  # sizes x u: units by group


class MoveShares(NamedTuple):
    """How often moves are drawn; those that are of no kind named here are single."""

    critical: float  # begin with a unit of the critical chain
    near: float  # go to the device of a neighbour
    group: float
    block: float
    grown: float
    stretch: float
    taken: float
    exchange: float
    largest: float = 0.1  # block or stretch, as a share of all units
    kick: int = 8  # moves at most from the best when a walk makes no progress


class SearchState(NamedTuple):
    """A walk under way."""

    place: Ints  # u
    best: Ints  # u
    scores: Floats
    random: Ints  # random_draws.py
    counts: Ints
    chain: Ints  # n: nodes of the critical chain
    changed: Ints  # u: units of a move that may be undone
    former: Ints  # u: where they were
    mark: Ints  # u: the last move that reached a unit
    stack: Ints  # u: the units of a block
    better_at: Ints  # evaluations at which the best improved since the state was last read
    better: Floats  # and to what


def neighbourhood(problem: PlacementProblem) -> Neighbourhood:
    """The neighbourhood of a problem's units."""
    c, u = problem.columns, problem.units
    groups = _groups(problem)
    pairs, _ = problem.unit_edges
    both = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    first = np.full(u, len(c.unit), np.int64)
    np.minimum.at(first, c.unit, np.arange(len(c.unit)))
    order = np.argsort(first, kind="stable").astype(np.int64)
    rank = np.empty(u, np.int64)
    rank[order] = np.arange(u)
    made = np.repeat(c.source, np.diff(c.reader_start))
    by_reader = np.argsort(c.reader, kind="stable")
    return Neighbourhood(
        near_start=offsets(np.bincount(both[:, 0], minlength=u)),
        near=np.ascontiguousarray(both[:, 1]),
        able_start=offsets(c.allowed.sum(axis=1)),
        able=np.nonzero(c.allowed)[1].astype(np.int64),
        order=order,
        rank=rank,
        input_start=offsets(np.bincount(c.reader, minlength=len(c.unit))),
        inputs=np.ascontiguousarray(made[by_reader]),
        group=groups,
        member_start=np.array([offsets(np.bincount(row, minlength=u)) for row in groups]),
        member=np.argsort(groups, axis=1, kind="stable").astype(np.int64),
    )


def _groups(problem: PlacementProblem) -> Ints:
    """The groups of all units at several sizes; each unit by itself where there are too many."""
    own = np.arange(problem.units)
    if problem.units > MOST_GROUPED:
        return own[None]
    rows = [coarsen(problem, max(problem.units // size, 1))[1] for size in GROUP_SIZES]
    return np.array(rows, np.int64)


def search_state(problem: PlacementProblem, seed: int) -> SearchState:
    """A walk that has no placement yet."""
    u, n = problem.units, len(problem.columns.unit)
    return SearchState(
        place=np.zeros(u, np.int64),
        best=np.zeros(u, np.int64),
        scores=np.full(3, np.inf),
        random=random_state(seed),
        counts=np.zeros(7, np.int64),
        chain=np.zeros(n, np.int64),
        changed=np.zeros(u, np.int64),
        former=np.zeros(u, np.int64),
        mark=np.zeros(u, np.int64),
        stack=np.zeros(u, np.int64),
        better_at=np.zeros(MOST_AT_ONCE, np.int64),
        better=np.zeros(MOST_AT_ONCE),
    )


# Moves


@compiled_part
def _put(w: SearchState, unit: int, device: int) -> None:
    """A unit goes to a device, as a part of a move."""
    k = w.counts[CHANGED]
    w.changed[k], w.former[k] = unit, w.place[unit]
    w.place[unit] = device
    w.counts[CHANGED] = k + 1


@compiled_part
def undo(w: SearchState) -> None:
    """The units of the last move go back."""
    for k in range(w.counts[CHANGED] - 1, -1, -1):
        w.place[w.changed[k]] = w.former[k]
    w.counts[CHANGED] = 0


@compiled_part
def _may_go(c: PlacementColumns, w: SearchState, unit: int, device: int) -> bool:
    able: bool = c.allowed[unit, device] and w.place[unit] != device
    return able


@compiled_part
def draw_unit(c: PlacementColumns, w: SearchState, critical: float) -> int:
    """A unit, of the critical chain with some probability."""
    unit: int = draw_below(w.random, len(w.place))
    if w.counts[CHAIN] > 0 and draw_share(w.random) < critical:
        unit = c.unit[w.chain[draw_below(w.random, w.counts[CHAIN])]]
    return unit


@compiled_part
def draw_device(g: Neighbourhood, w: SearchState, unit: int, near: float) -> int:
    """Where a unit may go: mostly where one of its neighbours is."""
    able = g.able_start[unit + 1] - g.able_start[unit]
    device: int = g.able[g.able_start[unit] + draw_below(w.random, able)]
    beside = g.near_start[unit + 1] - g.near_start[unit]
    if beside > 0 and draw_share(w.random) < near:
        device = w.place[g.near[g.near_start[unit] + draw_below(w.random, beside)]]
    return device


@compiled_part
def move_block(
    c: PlacementColumns, g: Neighbourhood, w: SearchState, unit: int, device: int, size: int
) -> None:
    """A connected block of one device, at most so many units, goes to another."""
    own = w.place[unit]
    w.counts[STAMP] += 1
    stamp = w.counts[STAMP]
    w.mark[unit] = stamp
    _put(w, unit, device)
    at = 0
    while at < w.counts[CHANGED] and w.counts[CHANGED] < size:
        for k in range(g.near_start[w.changed[at]], g.near_start[w.changed[at] + 1]):
            other = g.near[k]
            if w.mark[other] != stamp and w.place[other] == own and w.counts[CHANGED] < size:
                w.mark[other] = stamp
                if c.allowed[other, device]:
                    _put(w, other, device)
        at += 1


@compiled_part
def move_stretch(
    c: PlacementColumns, g: Neighbourhood, w: SearchState, unit: int, device: int, size: int
) -> None:
    """What a device has among the next units in the order of the graph goes to another."""
    own, first = w.place[unit], g.rank[unit]
    for k in range(first, min(first + size, len(g.order))):
        if w.place[g.order[k]] == own and c.allowed[g.order[k], device]:
            _put(w, g.order[k], device)


@compiled_part
def grow_block(
    c: PlacementColumns, g: Neighbourhood, w: SearchState, unit: int, device: int, size: int
) -> None:
    """A connected block, wherever its units are, goes to a device."""
    w.counts[STAMP] += 1
    stamp = w.counts[STAMP]
    w.mark[unit] = stamp
    _put(w, unit, device)
    count = 1
    w.stack[0] = unit
    for _ in range(3 * size):
        if count >= size:
            break
        at = w.stack[draw_below(w.random, count)]
        beside = g.near_start[at + 1] - g.near_start[at]
        if beside == 0:
            break
        other = g.near[g.near_start[at] + draw_below(w.random, beside)]
        if w.mark[other] != stamp:
            w.mark[other] = stamp
            if c.allowed[other, device]:
                w.stack[count] = other
                count += 1
                if w.place[other] != device:
                    _put(w, other, device)


@compiled_part
def take_stretch(
    c: PlacementColumns, g: Neighbourhood, w: SearchState, unit: int, device: int, size: int
) -> None:
    """The next units in the order of the graph go to a device."""
    first = g.rank[unit]
    for k in range(first, min(first + size, len(g.order))):
        if _may_go(c, w, g.order[k], device):
            _put(w, g.order[k], device)


@compiled_part
def move_group(
    c: PlacementColumns, g: Neighbourhood, w: SearchState, unit: int, device: int
) -> None:
    """A group goes to a device, or what one device has of it."""
    own, size = w.place[unit], draw_below(w.random, len(g.group))
    group, whole = g.group[size, unit], draw_below(w.random, 2)
    for k in range(g.member_start[size, group], g.member_start[size, group + 1]):
        other = g.member[size, k]
        if _may_go(c, w, other, device) and (whole or w.place[other] == own):
            _put(w, other, device)


@compiled_part
def exchange(c: PlacementColumns, w: SearchState, unit: int, device: int) -> None:
    """A unit goes to a device, and the first that is there from a random one on takes its place."""
    own, first = w.place[unit], draw_below(w.random, len(w.place))
    _put(w, unit, device)
    for k in range(first, first + len(w.place)):
        other = k % len(w.place)
        if other != unit and w.place[other] == device and c.allowed[other, own]:
            _put(w, other, own)
            return


@compiled_part
def propose(c: PlacementColumns, g: Neighbourhood, w: SearchState, shares: MoveShares) -> bool:
    """A random move; whether there is one."""
    w.counts[CHANGED] = 0
    unit = draw_unit(c, w, shares.critical)
    device = draw_device(g, w, unit, shares.near)
    if not _may_go(c, w, unit, device):
        return False
    largest = max(shares.largest * len(w.place), 2.0)
    size = np.int64(2 * largest ** draw_share(w.random))  # small ones are as many as large ones
    kind = draw_share(w.random)
    group = shares.group
    block = group + shares.block
    grown = block + shares.grown
    stretch = grown + shares.stretch
    if kind < group:
        move_group(c, g, w, unit, device)
    elif kind < block:
        move_block(c, g, w, unit, device, size)
    elif kind < grown:
        grow_block(c, g, w, unit, device, size)
    elif kind < stretch:
        move_stretch(c, g, w, unit, device, size)
    elif kind < stretch + shares.taken:
        take_stretch(c, g, w, unit, device, size)
    elif kind < stretch + shares.taken + shares.exchange:
        exchange(c, w, unit, device)
    else:
        _put(w, unit, device)
    return True


# Walks


@compiled_part
def keep_best(w: SearchState, place: Ints, score: float) -> None:
    """Notes a placement that has been evaluated if it is the best."""
    if score < w.scores[BEST]:
        w.scores[BEST] = score
        for unit in range(len(place)):
            w.best[unit] = place[unit]
        w.better_at[w.counts[BETTER]] = w.counts[EVALUATIONS]
        w.better[w.counts[BETTER]] = score
        w.counts[BETTER] += 1


@compiled_part
def trace(
    c: PlacementColumns, links: PlacementLinks, g: Neighbourhood, s: StepScratch, w: SearchState
) -> None:
    """Finds the critical chain of the placement that was evaluated last, to its end."""
    node, latest = 0, np.int64(-1)
    for device in range(len(s.free)):
        if s.latest[device] >= 0 and s.free[device] > latest:
            latest, node = s.free[device], s.latest[device]
    count = 0
    while node >= 0:
        w.chain[count] = node
        count += 1
        before, begin = s.before[node], s.start[node]
        if before >= 0:
            free = s.end[before] + (links.device_hold if s.end[before] > s.start[before] else 0)
            if free >= begin:
                node = before
                continue
        node, latest = -1, np.int64(-1)
        for k in range(g.input_start[w.chain[count - 1]], g.input_start[w.chain[count - 1] + 1]):
            if s.end[g.inputs[k]] > latest:
                node = g.inputs[k]
                latest = s.end[node]
    w.counts[CHAIN] = count


@compiled
def enter(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    g: Neighbourhood,
    w: SearchState,
    start: Ints,
) -> None:
    """Goes to another placement if it is better than the current one."""
    score = step_score_part(c, links, t, s, start, w.scores[NOW])
    w.counts[EVALUATIONS] += 1
    if score < w.scores[NOW]:
        w.scores[NOW] = score
        w.place[:] = start
        trace(c, links, g, s, w)
    keep_best(w, start, score)
    w.scores[LOW] = w.scores[NOW]


@compiled_part
def kick(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    g: Neighbourhood,
    w: SearchState,
    shares: MoveShares,
) -> None:
    """Goes to a placement a few random moves from the best."""
    for unit in range(len(w.place)):
        w.place[unit] = w.best[unit]
    for _ in range(1 + draw_below(w.random, shares.kick)):
        propose(c, g, w, shares)
        unit = draw_below(w.random, len(w.place))
        w.place[unit] = draw_device(g, w, unit, 0.0)
    w.scores[NOW] = step_score_part(c, links, t, s, w.place, float(NO_LIMIT))
    w.scores[LOW] = w.scores[NOW]
    w.counts[EVALUATIONS] += 1
    w.counts[FRUITLESS] = 0
    trace(c, links, g, s, w)
    keep_best(w, w.place, w.scores[NOW])


@compiled
def walk(
    c: PlacementColumns,
    links: PlacementLinks,
    t: StepConstants,
    s: StepScratch,
    g: Neighbourhood,
    w: SearchState,
    shares: MoveShares,
    hot: float,
    last: float,
    patience: int,
    until: int,
    proposals: int,
) -> None:
    """Random moves, until there have been so many evaluations or proposals. One that makes the step
    longer by d is kept with the probability exp(-d / temperature). The temperature falls from
    `hot`, a share of the best score, to nothing at the evaluation `last`. After `patience`
    evaluations without progress there is a kick."""
    for _ in range(proposals):
        if w.counts[EVALUATIONS] >= until:
            return
        if w.counts[FRUITLESS] > patience:
            kick(c, links, t, s, g, w, shares)
            continue
        if not propose(c, g, w, shares):
            continue
        limit = w.scores[NOW]
        temperature = hot * w.scores[BEST] * (1.0 - w.counts[EVALUATIONS] / last)
        if temperature > 0:
            limit -= temperature * np.log(draw_share(w.random))
        score = step_score_part(c, links, t, s, w.place, limit)
        w.counts[EVALUATIONS] += 1
        w.counts[FRUITLESS] += 1
        if score > limit:
            undo(w)
            continue
        w.counts[ACCEPTED] += 1
        w.scores[NOW] = score
        trace(c, links, g, s, w)
        keep_best(w, w.place, score)
        if score < w.scores[LOW]:
            w.scores[LOW] = score
            w.counts[FRUITLESS] = 0
