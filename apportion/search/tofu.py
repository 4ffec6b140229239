"""tofu: recursive partitioning. Every level cuts everything by one factor of the devices, exactly.

The factors of the device count are taken one after the other (levels.py), each level the optimum
given those before it; then level after level is decided anew given all others, until nothing
improves. Orders of factors that follow the cluster's hosts, or not, are tried, as is one cut into
all devices (EqualChop), and the fewest bytes win. What is minimised is what lowering moves: a
Value that is fetched is counted once however many Ops read it, and any Value may be stored
replicated or held as a copy, so that data parallelism and sharded state are among the plans.

An Op is left whole on all devices only if nothing of it can be cut, if it is a view, if it updates
state, or if no sample comes into it and it is little work: leaving everything whole would move
nothing. Graphs are not coarsened, except that Ops of one line and module, such as the steps of an
unrolled loop, are cut alike where elimination is too wide without that.

Composites (softmax, norms, attention) are opened where that moves less (opening.py): all are,
first, and those that were then cut inside stay open.

Deviations from the paper: the levels are revised; `tofu-paper` counts every reader, as the paper
does, and stores every Value cut.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from apportion.cluster import Cluster
from apportion.graph import Graph
from apportion.lower import bytes_moved as count
from apportion.opening import STATISTICS, composites
from apportion.search.data import data
from apportion.search.fsdp import fsdp
from apportion.search.grids import result
from apportion.search.levels import Floats, Ints, Levels, begin, fewest_bytes, polish, recurse
from apportion.search.limit import held, within
from apportion.search.problem import Problem, Progress, SearchResult
from apportion.search.program import Program
from apportion.search.sites import Sites, find_sites, stand_ins, ties
from apportion.search.topology import orders
from apportion.segments import shorten
from apportion.splits import Space
from apportion.strategy import Strategy, space_of
from apportion.termwise import termwise

MARGIN = 0.95  # of uneven parts and cut windows up to 3% more was moved than modelled
UNROLLED = 4  # Ops of one line and call in a module; more are the steps of a loop


def tofu(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """The strategy that moves the fewest bytes among recursion's, data parallelism and sharded
    state.

    Those two are lowered and counted only if recursion does not move less than they must.
    """
    found = partition(problem)
    made = result(found, notes(found))
    margin = 1.0 if _even(found) else MARGIN
    if found.bytes_moved > margin * _least_of_data(problem):
        known = (replace(m(problem), notes=made.notes) for m in (data, fsdp))
        return min((made, *known), key=lambda r: bytes_moved(problem, r.strategy))
    return made


def tofu_paper(problem: Problem, *, budget: float = 0.0, seed: int = 0) -> SearchResult:
    """Recursion under the paper's counting: every Value stored cut, every reader fetches for
    itself. Factors in falling order, no level revised."""
    sites = sites_of(problem.space, shared=False)
    found = recurse(sites, orders(problem.cluster)[0])
    return result(found, notes(found))


def partition(problem: Problem) -> Levels:
    """The best levels found, composites opened where that moves less."""
    space = problem.space
    short = None if space.opening else shorten(space.source, space.alike)
    if short is None:
        return _best(problem, _opened(problem.cluster, space.source, space))
    few = _opened(problem.cluster, short.graph)
    inside = set(few.space.opening)
    opening = tuple(op for op, like in enumerate(short.ops) if like in inside)
    sites = sites_of(Space(space.source, (), opening) if opening else space)
    likes = stand_ins(sites, few, short)
    return _best(problem, sites, few if likes is not None else None, likes)


def _opened(cluster: Cluster, graph: Graph, closed: Space | None = None) -> Sites:
    """The sites of a Graph, those composites opened that are then cut inside."""
    closed = closed or Space(graph)
    several = () if closed.opening else composites(graph)
    if not several:
        return sites_of(closed)
    sites = sites_of(Space(graph, (), several))
    inside = _cut_inside(recurse(sites, orders(cluster)[0]))
    if inside == several:
        return sites
    return sites_of(Space(graph, (), inside) if inside else closed)


def _best(
    problem: Problem, sites: Sites, few: Sites | None = None, likes: Ints | None = None
) -> Levels:
    """The best of several orders of factors, each polished; begun on `few` sites, if given, where
    each site has its like."""
    best: Levels | None = None
    least = (True, math.inf)
    steps: Program | None = None
    for factors in orders(problem.cluster):
        known = best.steps if best and min(best.factors) <= min(factors) else None
        start = None
        if few is not None and likes is not None and len(factors) > 1:
            made = polish(recurse(few, factors, steps=steps if known else None))
            start, steps = begin(sites, made, likes), made.steps
        levels, fits = _levels(problem, sites, factors, known, start)
        cost = (not fits, levels.bytes_moved)
        if best is None or cost < least:
            best, least = levels, cost
            names = " x ".join(map(str, factors))
            problem.tell(Progress(f"levels of {names}", levels.bytes_moved, unit="B"))
    assert best is not None
    return best


def _levels(
    problem: Problem,
    sites: Sites,
    factors: tuple[int, ...],
    steps: Program | None,
    start: Levels | None = None,
) -> tuple[Levels, bool]:
    """The fewest bytes that one order of factors gives, from levels to start with if there are
    any, and whether they are within the memory limit, as far as that can be told here."""

    def search(burden: Floats | None) -> Levels:
        if start is not None and burden is None:
            start.steps = start.steps or steps
            return polish(start)
        objective = replace(fewest_bytes(len(factors)), burden=burden)
        return polish(recurse(sites, factors, objective, steps=steps))

    if problem.memory_limit is None:
        return search(None), True
    return within(min(problem.memory_limit), held(sites), search)


def sites_of(space: Space, *, shared: bool = True, reductions: bool = True) -> Sites:
    """The sites of a Space, the steps of loops tied if elimination is too wide otherwise."""
    if ties(space) <= UNROLLED:
        return find_sites(space, shared=shared, reductions=reductions)
    return find_sites(space, shared=shared, tied=True, reductions=reductions)


def notes(levels: Levels) -> tuple[str, ...]:
    """How a partition was found, for the user."""
    names = " x ".join(map(str, levels.factors))
    bytes_of = ", ".join(f"{n / 1e9:.4g}" for n in levels.bytes_by_level())
    how = "each exact given the others" if levels.exact else "not all exact: tables too wide"
    return (f"levels of {names}, {how}, move {bytes_of} GB",)


def _cut_inside(levels: Levels) -> tuple[int, ...]:
    """The opened Ops some of whose statistics are partial."""
    space = levels.sites.space
    origins = space.origins
    found = set()
    for index, op in enumerate(space.graph.ops):
        if op.kind not in STATISTICS:
            continue
        site = int(levels.sites.op_site[index])
        atoms = levels.sites.atoms[site]
        for chosen in levels.chosen:
            assert chosen is not None
            if chosen[site] < len(atoms):
                cut = atoms[chosen[site]]
                parts = [2 if k == cut else 1 for k in range(len(space.groups(index)))]
                if max(space.split(index, parts).terms) > 1:
                    found.add(origins[index])
    return tuple(sorted(found))


def _even(levels: Levels) -> bool:
    """Whether all parts are equal and no window is cut: then lowering moves what is modelled."""
    divided = np.ones(len(levels.sites.extents), np.int64)
    for level in levels.decided():
        divided[levels.taken(level)] *= levels.factors[level]
    cut = divided > 1
    uneven = levels.sites.extents % divided != 0
    return not (cut & (uneven | levels.sites.rigid)).any()


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


def bytes_moved(problem: Problem, strategy: Strategy) -> int:
    """What a step of the strategy really moves."""
    space = problem.space
    if (strategy.digits, strategy.opening) != (space.digits, space.opening):
        space = space_of(space.source, strategy, space)
    return count(space, strategy, problem.devices)
