"""tofu: recursive partitioning. Every level cuts everything in two, exactly, for the fewest bytes.

One level is a sum of tables (levels.py) over one variable per Op (which axis is cut, or none), one
per state Value (along which atom it is stored, or replicated) and one per copy (the layout in which
a Value with several readers, or a partial one, is held). Between two of them a Value of S bytes
moves

    rho - phi     rho: bytes that the readers of both halves require, phi: those already there

and over levels both are products, so that the bytes of all levels add up to those of all devices:

    reader                  source cut on the same atom   on another atom   whole       partial
    cut on an atom          rho x 1, phi x 1              x 1, x 1/2        x 1, x 1    x 2, x 1
    whole                   x 2, x 1                      x 2, x 1          x 2, x 2    x 4, x 2
    whole, first half only  x 1, x 1/2                    x 1, x 1/2        x 1, x 1    x 2, x 1

Levels commute because a level that cuts a class of atoms takes a digit of it: an atom of its own
(atoms.divide). Level i decides bit i of the device, the first level the highest: the slowest links
carry the least.

An Op is left whole on both halves only if nothing of it can be cut, if it is a view, or if it
updates state: leaving everything whole would move nothing. Deviations from the paper: any Value may
be stored replicated or held as a copy; a fetched Value is counted once however many Ops read it
(`tofu-paper` counts every reader, as the paper does, and stores every Value cut); graphs are not
coarsened but for Ops of one line and module, such as the steps of an unrolled loop, which are cut
alike.
"""

from __future__ import annotations

from dataclasses import replace

from apportion.lower import lower
from apportion.opening import STATISTICS, composites, open_graph
from apportion.search.data import data
from apportion.search.fsdp import fsdp
from apportion.search.levels import Levels
from apportion.search.problem import Problem, SearchResult, Unsuitable
from apportion.splits import Space
from apportion.strategy import Strategy, space_of
from apportion.termwise import termwise

MARGIN = 0.95  # lowered bytes were at most half a percent above the modelled ones


def tofu(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The strategy that moves the fewest bytes among recursion's, data parallelism and sharded
    state.

    Those two are lowered and counted only if recursion does not move less than they must.
    """
    levels = recurse(problem, shared=True)
    bytes_modelled, found = _opened(problem, levels)
    if bytes_modelled <= MARGIN * _least_of_data(problem):
        return SearchResult(found)
    candidates = [found, data(problem).strategy, fsdp(problem).strategy]
    return SearchResult(min(candidates, key=lambda s: bytes_moved(problem, s)))


def _opened(problem: Problem, closed: Levels) -> tuple[float, Strategy]:
    """The better of recursion on the Graph as it is and on the one with those composites opened
    that are worth it: that recursion cuts inside if all are open."""
    space, best = problem.space, closed
    several = composites(space.source)
    if several and not space.opening:
        levels = _recursed(space, several, problem)
        inside = _cut_inside(levels)
        if inside:
            some = levels if inside == several else _recursed(space, inside, problem)
            best = min((best, some), key=lambda found: found.bytes_modelled)
    return best.bytes_modelled, best.strategy()


def _recursed(space: Space, opening: tuple[int, ...], problem: Problem) -> Levels:
    return recurse(replace(problem, space=Space(space.source, (), opening)), shared=True)


def _cut_inside(levels: Levels) -> tuple[int, ...]:
    """The opened Ops some of whose statistics are partial."""
    strategy = levels.strategy()
    space = levels.space.with_digits(strategy.digits)
    origins = open_graph(space.source, space.opening)[1]
    return tuple(
        sorted(
            {
                origins[index]
                for index, op in enumerate(space.graph.ops)
                if op.kind in STATISTICS
                and max(space.split(index, strategy.choices[index].parts).terms) > 1
            }
        )
    )


def _least_of_data(problem: Problem) -> int:
    """Bytes that data parallelism, its state sharded or not, must move.

    A gradient that is a partial sum on k devices is reduced, and it or its parameter gathered.
    """
    space, strategy = problem.space, data(problem).strategy
    splits = [space.split(o, choice.parts) for o, choice in enumerate(strategy.choices)]
    added = termwise(space, strategy, splits)
    total = 0
    for op in space.graph.ops:
        made = space.graph.producer[op.inputs[1]] if op.parameter is not None else None
        if made is not None:
            terms = len(added[made[0]]) if made[0] in added else splits[made[0]].terms[made[1]]
            total += 2 * (terms - 1) * space.graph.values[op.inputs[1]].nbytes
    return total


def tofu_paper(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Recursion under the paper's counting: every Value stored cut, every reader fetches for
    itself."""
    return SearchResult(recursive(problem, shared=False))


def recursive(problem: Problem, *, shared: bool) -> Strategy:
    """The strategy of a recursion."""
    return recurse(problem, shared=shared).strategy()


def recurse(problem: Problem, *, shared: bool) -> Levels:
    """One exact two-way cut per level; ValueError unless the devices are a power of two."""
    devices = problem.devices
    if devices & (devices - 1):
        raise Unsuitable(
            f"tofu cuts in two at every level and needs 2, 4, 8, ... devices, not {devices}; use "
            "data or fsdp there"
        )
    levels = Levels(problem.space, shared)
    for _ in range(devices.bit_length() - 1):
        levels.solve()
    return levels


def bytes_moved(problem: Problem, strategy: Strategy) -> int:
    """What a step of the strategy really moves."""
    space = problem.space
    if (strategy.digits, strategy.opening) != (space.digits, space.opening):
        space = space_of(space.source, strategy)
    return lower(space, strategy, problem.devices).bytes_moved
