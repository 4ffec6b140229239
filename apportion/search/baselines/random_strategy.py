"""random: legal choices drawn at random, for tests. Everything that a Strategy can say occurs.

In: a Problem and a seed. Out: a random legal Strategy.

Some composite Ops are opened. Per Op: a few axes cut (reductions too) into even and uneven parts,
on any devices, several parts on one device, replicas. Some Values, state and inputs among them, get
a random Layout.
"""

from __future__ import annotations

from random import Random

from apportion.describe import IllegalCut
from apportion.search.problem import Problem, SearchResult
from apportion.split import Choice, Layout, Space, Strategy, composites, unsplit_choice

UNCUT, LAID_OUT = 0.25, 0.15  # shares of Ops left whole, and of Values with a Layout of their own
OPENED = 0.5  # share of composite Ops that are opened


def random(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """A strategy drawn with the given seed."""
    rng, space = Random(seed), problem.space
    opening = tuple(op for op in composites(space.source) if rng.random() < OPENED)
    if opening:
        space = Space(space.source, (), opening)
    return SearchResult(draw(space, problem.devices, rng))


def draw(space: Space, devices: int, rng: Random) -> Strategy:
    """One random legal strategy."""
    choices = tuple(_choice(space, op, devices, rng) for op in range(len(space.graph.ops)))
    layouts = {
        value: layout
        for value in range(len(space.graph.values))
        if rng.random() < LAID_OUT and (layout := _layout(space, value, devices, rng))
    }
    return Strategy(choices, layouts, opening=space.opening)


def _choice(space: Space, op: int, devices: int, rng: Random) -> Choice:
    axes = space.axes(op)
    able = [k for k, legal in enumerate(space.cuttable(op)) if legal]
    if not able or rng.random() < UNCUT:
        return unsplit_choice(space, op, _some_devices(devices, rng))
    parts = [1] * len(axes)
    for position in rng.sample(able, min(len(able), rng.choice((1, 1, 2, 3)))):
        room = 2 * devices // _parts_of(parts)
        if room >= 2:
            parts[position] = rng.randint(2, max(2, min(axes[position].extent, room, 4)))
    try:
        space.split(op, parts)
    except IllegalCut:
        return unsplit_choice(space, op, _some_devices(devices, rng))
    return Choice(tuple(parts), _devices(_parts_of(parts), devices, rng))


def _layout(space: Space, value: int, devices: int, rng: Random) -> Layout | None:
    factors = space.factors(value)
    if any(f == 0 for f in factors):
        return None
    parts = [1] * len(factors)
    if factors:
        position = rng.randrange(len(factors))
        parts[position] = rng.randint(1, min(factors[position], devices))
    return Layout(tuple(parts), _devices(_parts_of(parts), devices, rng))


def _devices(count: int, devices: int, rng: Random) -> tuple[int, ...]:
    """Devices of `count` parts, sometimes with replicas on others."""
    first = [rng.randrange(devices) for _ in range(count)]
    chosen = list(first)
    if rng.random() < 0.3 and devices > 1:
        shift = rng.randrange(1, devices)
        chosen += [(d + shift) % devices for d in first]
    return tuple(chosen)


def _some_devices(devices: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(devices), rng.randint(1, devices) if rng.random() < 0.4 else 1))


def _parts_of(parts: list[int]) -> int:
    result = 1
    for n in parts:
        result *= n
    return result
