"""Is a loop's scheme right? The schedule of its tiles against everything that iterations touch.

Two iterations that touch one element, which one of them writes, must not be under way at the same
time, and in an ordered loop must come in the order of their keys. When they run follows from the
schedule:

    resident   only one rank has the element
    rotating   only whoever has its part of time touches it, one after the other
    boxed      ranks fetch and put back step by step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from random_loops import RandomLoop, accesses, conflicts

from apportion.loops.array import DenseArray, from_coordinates, from_numpy, zeros
from apportion.loops.array_uses import UsedArray, placement_of
from apportion.loops.elements import DealRequest, Elements, deal, part_of, skewed_time
from apportion.loops.loop_body import read_body
from apportion.loops.loop_plan import RESIDENT, ROTATING
from apportion.loops.parallel_loop import parallel
from apportion.loops.peers import LocalPeers
from apportion.loops.plan_loop import LoopAnalysis, analyse_body
from apportion.loops.schemes import Scheme
from apportion.loops.session import current_session
from apportion.loops.tile_schedule import tile_schedule


@dataclass(frozen=True)
class Verdict:
    """Schemes that were tried, and what is wrong with some of them."""

    analysis: LoopAnalysis
    wrong: list[str]


def judge(loop: RandomLoop, processes: tuple[int, ...] = (2, 3), depth: int = 2) -> Verdict:
    """Holds every permitted scheme of a loop against what its iterations touch."""
    body = read_body(loop.function)
    arrays = {name: len(shape) for name, shape in loop.arrays.items()}
    analysis = analyse_body(body, arrays, len(loop.shape), loop.ordered)
    meetings = list(conflicts(accesses(loop)))
    wrong = _uncovered(loop, analysis, meetings)
    for scheme in analysis.schemes:
        for count in processes:
            wrong += wrong_meetings(loop, analysis, scheme, count, depth, meetings)
    return Verdict(analysis, wrong)


def _uncovered(loop: RandomLoop, analysis: LoopAnalysis, meetings: list[Any]) -> list[str]:
    """Meetings of iterations that no dependence covers."""
    found = []
    for one, other, array, reads in meetings:
        if not loop.ordered and not reads:
            continue
        first, second = sorted((loop.keys[one], loop.keys[other]))
        distance = [b - a for a, b in zip(first, second, strict=True)]
        mine = [each for each in analysis.dependences.vectors if each.array == array]
        if not any(each.holds(distance) for each in mine):
            found.append(f"{array}: {first} and {second} meet, which no vector covers")
    return found


def wrong_meetings(
    loop: RandomLoop,
    analysis: LoopAnalysis,
    scheme: Scheme,
    count: int,
    depth: int,
    meetings: list[Any],
) -> list[str]:
    """What a scheme does wrong to iterations that meet."""
    schedule = tile_schedule(scheme, count, depth)
    request = DealRequest(scheme, loop.shape, count, schedule.time_parts, loop.ordered)
    array = from_coordinates(*np.array(loop.keys).T, np.array(loop.values), shape=loop.shape)
    elements = Elements(array.keys, array.fields, np.arange(len(loop.keys)))
    facts = deal(LocalPeers(), elements, request).facts
    space = part_of(elements.keys[scheme.space], facts.space_bounds)
    time = part_of(skewed_time(elements, scheme), facts.time_bounds)
    step = {(rank, part): at for at, rank, part in schedule.tiles()}
    when = [step[int(s), int(t)] for s, t in zip(space, time, strict=True)]
    placements = {
        name: placement_of(_used(name, shape, analysis), scheme)[0]
        for name, shape in loop.arrays.items()
    }
    found = []
    for one, other, name, reads in meetings:
        same_tile = space[one] == space[other] and time[one] == time[other]
        at_once = when[one] == when[other] and not same_tile
        where = placements[name]
        apart = where == RESIDENT and space[one] != space[other]
        apart |= where == ROTATING and time[one] != time[other]
        earlier, later = sorted((one, other), key=lambda each: loop.keys[each])
        late = loop.ordered and when[earlier] > when[later]
        if apart or late or (at_once and (reads or loop.ordered)):
            found.append(
                f"{scheme} on {count}: {name} is {where}, {loop.keys[one]} at step {when[one]} and "
                f"{loop.keys[other]} at step {when[other]}"
            )
    return found


def _used(name: str, shape: tuple[int, ...], analysis: LoopAnalysis) -> UsedArray:
    array: DenseArray = zeros(shape)
    return UsedArray(name, array, tuple(analysis.references.of(name)))


def run_divided(
    loop: RandomLoop, scheme: Scheme, session: Any, interpreted: bool = True, depth: int = 2
) -> tuple[list[Any], list[int]]:
    """The arrays after a pass under a scheme, and the order of elements that it should equal."""
    over = from_coordinates(*np.array(loop.keys).T, np.array(loop.values), shape=loop.shape)
    found = parallel(over=over, ordered=loop.ordered, depth=depth)(loop.function)
    found.planner.forced, found.planner.interpreted = scheme, interpreted
    arrays = [from_numpy(first_contents(shape)) for shape in loop.arrays.values()]
    with session:
        found(*arrays)
        used = current_session().deals[over.number]
    assert used[0].scheme == scheme, "another scheme was used"
    return [each.numpy() for each in arrays], tile_order(loop, *used)


def first_contents(shape: tuple[int, ...]) -> Any:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) / 8


def tile_order(loop: RandomLoop, request: DealRequest, facts: Any) -> list[int]:
    """The elements in the order of tiles: step by step, rank by rank, block by block."""
    keys = np.array(loop.keys)
    elements = Elements(tuple(keys.T), (), np.arange(len(keys)))
    space = part_of(keys[:, request.scheme.space], facts.space_bounds)
    time = part_of(skewed_time(elements, request.scheme), facts.time_bounds)
    schedule = tile_schedule(
        request.scheme, request.space_parts, request.time_parts // request.space_parts
    )
    place = {(rank, part): at for at, (_, rank, part) in enumerate(schedule.tiles())}
    block = request.block or loop.shape[request.scheme.space]
    blocks = keys[:, request.scheme.space] // block
    inner = (lambda e: loop.keys[e]) if loop.ordered else (lambda e: (int(blocks[e]),))
    return sorted(range(len(keys)), key=lambda e: (place[int(space[e]), int(time[e])], inner(e), e))


def run_plain(loop: RandomLoop, order: list[int]) -> list[Any]:
    """The arrays after all iterations in an order, by plain Python."""
    arrays = [first_contents(shape) for shape in loop.arrays.values()]
    for each in order:
        key = loop.keys[each]
        loop.function(key[0] if len(key) == 1 else key, loop.values[each], *arrays)
    return arrays
